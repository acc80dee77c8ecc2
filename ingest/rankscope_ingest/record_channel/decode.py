"""Convert checked bodies of the record channel into one table per dataset.

The module performs no I/O. Hundreds of bodies are decoded together. Work is done per batch instead of per body where
possible, and never per tensor. The statistics of all ranks with the same plan are copied into one array, transposed
from record order to tensor order. The rows of a tensor are then adjacent, rank by rank, as in the store. Null, NaN, Inf
and 0 remain distinct. A stored statistic of a tensor is never NaN, so the NumPy arrays of tensor statistics contain NaN
instead of null. Values of scalars and events can be NaN and remain in Arrow arrays, which have null.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.schema import NESTED
from rankscope_ingest.base.tables import FROM_RANK, coded_schema
from rankscope_ingest.record_channel.validate import Measured, PlanColumns, Positions, ValidBody, absent_counts

Number = TypeVar("Number", bound=np.generic)


def decode(bodies: Sequence[ValidBody]) -> dict[str, pa.Table]:
    """Return the rows in `bodies`, the checked poll responses of a batch, as tables by dataset.

    Columns with repeated text are dictionary-encoded.
    """
    records = _Records.of(bodies)
    tables = {}
    grids = [_grid(cells, records) for cells in _by_plan(bodies, records)]
    if grids := [table for table in grids if table.num_rows]:
        tables["tensor_stats"] = pa.concat_tables(grids)
    for dataset in NESTED:
        parts = [body.tables[dataset] for body in bodies if dataset in body.tables]
        if any(dataset in body.nested and dataset not in body.tables for body in bodies):
            parts.append(_nested(bodies, dataset, records))
        if parts:
            tables[dataset] = pa.concat_tables(parts)
    return tables


def decode_one(body: ValidBody, dataset: str) -> pa.Table | None:
    """Return the rows of one nested dataset, such as events, of one body; None if the body has none.

    Text is not dictionary-encoded. The decoded rows are cached in `body`, so that `decode` does not decode them again.
    """
    if dataset not in body.nested:
        return None
    if dataset not in body.tables:
        body.tables[dataset] = _nested([body], dataset, _Records.of([body]))
    return plain_text(body.tables[dataset])


def plain_text(table: pa.Table) -> pa.Table:
    """Return `table` with its dictionary-encoded text columns converted to plain text columns."""
    for number, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            plain = field.with_type(field.type.value_type)
            table = table.set_column(number, plain, table.column(number).cast(plain.type))
    return table


@dataclass(frozen=True, slots=True)
class _Records:
    """All records of a batch of bodies.

    `columns` has one value per record for each column that is equal in all rows of a record, such as run and step.
    `starts` has, for each body, the index of its first record in the batch.
    """

    columns: Mapping[str, pa.Array]
    starts: Positions

    @classmethod
    def of(cls, bodies: Sequence[ValidBody]) -> _Records:
        sizes = np.array([body.records for body in bodies], np.int64)
        starts = np.concatenate(([0], np.cumsum(sizes)))
        within = np.arange(starts[-1]) - np.repeat(starts[:-1], sizes)
        contexts = [body.context for body in bodies]
        columns = {
            "run": _coded([context.run for context in contexts], sizes),
            "attempt": pa.array(np.repeat(np.array([context.attempt for context in contexts], np.int32), sizes)),
            "rank": pa.array(np.repeat(np.array([context.rank for context in contexts], np.int32), sizes)),
            "incarnation": _coded([context.incarnation for context in contexts], sizes),
            "ts_origin": _coded([FROM_RANK] * len(bodies), sizes),
            "seq": pa.array(np.concatenate([body.seqs for body in bodies])),
            "ordinal": pa.array(np.repeat([body.first_ordinal for body in bodies], sizes) + within),
        }
        for name in ("step", "micro_step", "ts"):
            columns[name] = pa.concat_arrays([body.columns[name] for body in bodies])
        return cls(columns, starts)


def _coded(texts: Sequence[str], repeats: Positions) -> pa.DictionaryArray:
    encoded = pa.array(texts, pa.string()).dictionary_encode()
    codes = np.repeat(encoded.indices.to_numpy(), repeats)
    return pa.DictionaryArray.from_arrays(pa.array(codes), encoded.dictionary)


@dataclass(frozen=True, slots=True)
class _Cells:
    """The tensor statistics of all records of a batch with the same run and plan.

    `parts` has the statistics by body, and `records` the position of each record in the batch.
    """

    plan: PlanColumns
    parts: Sequence[Measured]
    records: Positions


def _by_plan(bodies: Sequence[ValidBody], records: _Records) -> Iterator[_Cells]:
    """Yield the tensor statistics by run and plan; the records are sorted by rank and then by arrival."""
    found: dict[tuple[str, str], list[tuple[int, int, Measured]]] = defaultdict(list)
    for number, body in enumerate(bodies):
        for part in body.statistics:
            if len(part.plan):
                found[body.context.run, part.plan_id].append((body.context.rank, number, part))
    for key in sorted(found):
        ordered = sorted(found[key], key=lambda cell: cell[:2])
        places = np.concatenate([records.starts[number] + part.records for _, number, part in ordered])
        parts = [part for _, _, part in ordered]
        yield _Cells(parts[0].plan, parts, places)


def _grid(cells: _Cells, records: _Records) -> pa.Table:
    """Return the rows of `tensor_stats` for all records with the same run and plan.

    If all counts of a tensor, such as its number of NaN, are null, the tensor was absent at the step and has no row.
    """
    plan, height = cells.plan, len(cells.records)
    chosen = pa.array(cells.records)
    columns = {name: _spread(column.take(chosen), len(plan), np.tile) for name, column in records.columns.items()}
    for name, names in plan.sorted_columns.items():
        columns[name] = _over(_spread(names, height, np.repeat), columns.get(name))
    columns |= dict(zip(plan.value_ops, _values(cells), strict=True))
    present = _counts(cells, columns)
    schema = coded_schema("tensor_stats")
    rows = height * len(plan)
    arrays = [columns[field.name] if field.name in columns else pa.nulls(rows, field.type) for field in schema]
    table = pa.Table.from_arrays(arrays, schema=schema)
    return table if present is None else table.filter(present)


def _values(cells: _Cells) -> Iterator[pa.Array]:
    """Yield one column for each floating-point statistic. Its rows are ordered by tensor and then by record."""
    shape = (len(cells.plan.value_ops), len(cells.plan))
    parts = [part.values.to_numpy(zero_copy_only=False).reshape(-1, *shape) for part in cells.parts]
    for number in range(len(cells.plan.value_ops)):
        if all(np.isnan(part[:, number]).all() for part in parts):  # such as baselines without rules
            yield pa.nulls(len(cells.records) * len(cells.plan), pa.float32())
            continue
        column = _transposed(parts, cells.plan, number)
        absent = np.isnan(column)
        yield pa.array(column, mask=absent if absent.any() else None)


def _counts(cells: _Cells, columns: dict[str, pa.Array]) -> pa.Array | None:
    """Add a column to `columns` for each count of a tensor, such as its number of NaN.

    Return a boolean array that is true for the rows of tensors that were present at the step, or None if all were
    present.
    """
    ops = cells.plan.count_ops
    shape = (len(ops), len(cells.plan))
    counts = [part.counts.fill_null(0) if part.counts.null_count else part.counts for part in cells.parts]
    parts = [numbers.to_numpy().reshape(-1, *shape) for numbers in counts]
    absent: list[npt.NDArray[np.bool_] | None] = [None] * len(ops)
    if any(part.counts.null_count for part in cells.parts):
        masks_of_parts = [absent_counts(part) for part in cells.parts]
        absent = [_transposed(masks_of_parts, cells.plan, number) for number in range(len(ops))]
    for number, (op, mask) in enumerate(zip(ops, absent, strict=True)):
        columns[op] = pa.array(_transposed_counts(parts, cells.plan, number), mask=mask)
    masks = [mask for mask in absent if mask is not None]
    return pa.array(~np.logical_and.reduce(masks)) if masks else None


def _transposed(parts: Sequence[npt.NDArray[Number]], plan: PlanColumns, number: int) -> npt.NDArray[Number]:
    """Return one statistic as a flat array ordered by tensor and then by record, as in the store."""
    by_record = np.concatenate([part[:, number] for part in parts])
    return by_record.T.take(plan.order, axis=0).reshape(-1)


def _transposed_counts(parts: Sequence[npt.NDArray[np.int64]], plan: PlanColumns, number: int) -> npt.NDArray[np.int64]:
    """Return one count (such as the number of NaN) as a flat array, ordered by tensor and then by record.

    Most counts are equal in all records. For such a count, this function is faster than the general function
    `_transposed`.
    """
    first = parts[0][0, number]
    if any((part[:, number] != first).any() for part in parts):
        return _transposed(parts, plan, number)
    height = sum(map(len, parts))
    return np.repeat(first[plan.order], height) if first.any() else np.zeros(height * len(plan), np.int64)


def _spread(column: pa.Array, times: int, repeat: Callable[..., npt.NDArray[Any]]) -> pa.Array:
    """Return `column` repeated `times` times.

    `repeat` is `np.tile`, which repeats the whole column, or `np.repeat`, which repeats each value.
    """
    if pa.types.is_dictionary(column.type):
        return pa.DictionaryArray.from_arrays(_spread(column.indices, times, repeat), column.dictionary)
    if column.null_count == len(column):
        return pa.nulls(len(column) * times, column.type)
    if column.null_count:
        return column.take(pa.array(repeat(np.arange(len(column)), times)))
    return pa.array(repeat(_integers(column), times)).view(column.type)


def _integers(column: pa.Array) -> npt.NDArray[np.integer]:
    plain = column.view(pa.int64()) if pa.types.is_timestamp(column.type) else column
    integers: npt.NDArray[np.integer] = plain.to_numpy()
    return integers


def _over(own: pa.Array, of_record: pa.Array | None) -> pa.Array:
    """Return the column `own` with each null replaced by the value in `of_record`.

    `own` has the values of the rows, and `of_record` the value of the record to which each row belongs.
    """
    if of_record is None or own.null_count == 0:
        return own
    return of_record if own.null_count == len(own) else pc.coalesce(own, of_record)


def _nested(bodies: Sequence[ValidBody], dataset: str, records: _Records) -> pa.Table:
    """Return the rows of a nested dataset, such as events, from all bodies whose rows are not decoded yet.

    At least one body must have such rows.
    """
    placed = zip(records.starts, bodies, strict=False)  # `starts` also has the end of the last body
    found = [
        (start, body.nested[dataset]) for start, body in placed if dataset in body.nested and dataset not in body.tables
    ]
    parents = pa.array(np.concatenate([start + nested.records for start, nested in found]))
    columns = {name: column.take(parents) for name, column in records.columns.items()}
    for field in NESTED[dataset]:
        own = pa.concat_arrays([nested.columns[field.name] for _, nested in found])
        columns[field.name] = _over(own, columns.get(field.name))
    schema = pa.schema([_as_held(field, columns) for field in coded_schema(dataset)])
    arrays = [columns[field.name] if field.name in columns else pa.nulls(len(parents), field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _as_held(field: pa.Field, columns: Mapping[str, pa.Array]) -> pa.Field:
    """Return the Arrow field `field` with the type of the column that has the same name in `columns`.

    Text columns with a separate value for each row are plain text in `columns`, not dictionary-encoded.
    """
    return field.with_type(columns[field.name].type) if field.name in columns else field
