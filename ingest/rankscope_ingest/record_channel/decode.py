"""Bodies of the record channel -> one table per dataset. Pure: they were fetched and checked, and cannot fail any more.

Hundreds of bodies are decoded at once, so that nothing is done per body that can be done per batch, and nothing per
tensor at all. The statistics of ranks that share a plan become one grid, turned over while it is filled: the rows of a
tensor lie together, rank by rank, in the order of the store. Null, NaN, Inf and 0 stay four things: in the statistics
a NaN is never a value, so there it stands for null on the way through numpy; scalars and events never leave Arrow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.schema import NESTED
from rankscope_ingest.base.tables import FROM_RANK, coded_schema
from rankscope_ingest.record_channel.plans import PlanColumns
from rankscope_ingest.record_channel.validate import Measured, Positions, ValidBody, absent_counts

Number = TypeVar("Number", bound=np.generic)


def decode(bodies: Sequence[ValidBody]) -> dict[str, pa.Table]:
    """Return the rows in `bodies` by dataset; text that repeats is coded."""
    records = _Records.of(bodies)
    tables = {}
    grids = [_grid(cells, records) for cells in _by_plan(bodies, records)]
    if grids := [table for table in grids if table.num_rows]:
        tables["tensor_stats"] = pa.concat_tables(grids)
    for dataset in NESTED:
        if (table := _nested(bodies, dataset, records)) is not None:
            tables[dataset] = table
    return tables


def decode_one(body: ValidBody, dataset: str) -> pa.Table | None:
    """Return the rows of one dataset that travel inside the records of one body, with text as text; None without."""
    if dataset not in body.nested:
        return None
    table = _nested([body], dataset, _Records.of([body]))
    return None if table is None else plain_text(table)


def plain_text(table: pa.Table) -> pa.Table:
    """Return `table` with no text coded, as the tables are that the service makes itself."""
    for number, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            plain = field.with_type(field.type.value_type)
            table = table.set_column(number, plain, table.column(number).cast(plain.type))
    return table


@dataclass(frozen=True, slots=True)
class _Records:
    """All records of a batch, one after another: what each says of all rows in it. `starts` is where a body begins."""

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
    """What a run has of one plan: statistics by body, and where each record of them stands among all records."""

    plan: PlanColumns
    parts: Sequence[Measured]
    records: Positions


def _by_plan(bodies: Sequence[ValidBody], records: _Records) -> Iterator[_Cells]:
    """Yield the statistics by run and plan, rank by rank: a series lies together, in the order it came."""
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
    """Return the rows of all records that use the plan; a tensor with null counts was absent and gets no row."""
    plan, height = cells.plan, len(cells.records)
    chosen = pa.array(cells.records)
    columns = {name: _of_record(column.take(chosen), len(plan)) for name, column in records.columns.items()}
    for name, names in plan.sorted_columns.items():
        columns[name] = _over(_of_tensor(names, height), columns.get(name))
    columns |= dict(zip(plan.value_ops, _values(cells), strict=True))
    present = _counts(cells, columns)
    schema = coded_schema("tensor_stats")
    rows = height * len(plan)
    arrays = [columns[field.name] if field.name in columns else pa.nulls(rows, field.type) for field in schema]
    table = pa.Table.from_arrays(arrays, schema=schema)
    return table if present is None else table.filter(present)


def _values(cells: _Cells) -> Iterator[pa.Array]:
    """Yield the columns of floats, tensor by tensor, in each of them record by record."""
    shape = (len(cells.plan.value_ops), len(cells.plan))
    parts = [part.values.to_numpy(zero_copy_only=False).reshape(-1, *shape) for part in cells.parts]
    for number in range(len(cells.plan.value_ops)):
        if all(np.isnan(part[:, number]).all() for part in parts):  # as baselines are where no rule judges
            yield pa.nulls(len(cells.records) * len(cells.plan), pa.float32())
            continue
        column = _turned(parts, cells.plan, number)
        absent = np.isnan(column)
        yield pa.array(column, mask=absent if absent.any() else None)


def _counts(cells: _Cells, columns: dict[str, pa.Array]) -> pa.Array | None:
    """Put the count columns into `columns`; return which rows exist, or None when all do."""
    ops = cells.plan.count_ops
    shape = (len(ops), len(cells.plan))
    counts = [part.counts.fill_null(0) if part.counts.null_count else part.counts for part in cells.parts]
    parts = [numbers.to_numpy().reshape(-1, *shape) for numbers in counts]
    absent: list[npt.NDArray[np.bool_] | None] = [None] * len(ops)
    if any(part.counts.null_count for part in cells.parts):
        masks_of_parts = [absent_counts(part) for part in cells.parts]
        absent = [_turned(masks_of_parts, cells.plan, number) for number in range(len(ops))]
    for number, (op, mask) in enumerate(zip(ops, absent, strict=True)):
        columns[op] = pa.array(_turned_counts(parts, cells.plan, number), mask=mask)
    masks = [mask for mask in absent if mask is not None]
    return pa.array(~np.logical_and.reduce(masks)) if masks else None


def _turned(parts: Sequence[npt.NDArray[Number]], plan: PlanColumns, number: int) -> npt.NDArray[Number]:
    """Return a statistic that stood record by record as it stands tensor by tensor, in the order of the store."""
    by_record = np.concatenate([part[:, number] for part in parts])
    return by_record.T.take(plan.order, axis=0).reshape(-1)


def _turned_counts(parts: Sequence[npt.NDArray[np.int64]], plan: PlanColumns, number: int) -> npt.NDArray[np.int64]:
    """Return a count as `_turned` does: most are the same in all records, of elements, of NaN and of Inf."""
    first = parts[0][0, number]
    if any((part[:, number] != first).any() for part in parts):
        return _turned(parts, plan, number)
    height = sum(map(len, parts))
    return np.repeat(first[plan.order], height) if first.any() else np.zeros(height * len(plan), np.int64)


def _of_record(column: pa.Array, tensors: int) -> pa.Array:
    """Return a value per record for all tensors: the whole column again and again."""
    if pa.types.is_dictionary(column.type):
        return pa.DictionaryArray.from_arrays(_of_record(column.indices, tensors), column.dictionary)
    if column.null_count == len(column):
        return pa.nulls(len(column) * tensors, column.type)
    if column.null_count:
        return column.take(pa.array(np.tile(np.arange(len(column)), tensors)))
    return pa.array(np.tile(_integers(column), tensors)).view(column.type)


def _of_tensor(column: pa.Array, records: int) -> pa.Array:
    """Return a value per tensor for all records: each value again and again."""
    if pa.types.is_dictionary(column.type):
        return pa.DictionaryArray.from_arrays(_of_tensor(column.indices, records), column.dictionary)
    if column.null_count == len(column):
        return pa.nulls(len(column) * records, column.type)
    if column.null_count:
        return column.take(pa.array(np.repeat(np.arange(len(column)), records)))
    return pa.array(np.repeat(_integers(column), records)).view(column.type)


def _integers(column: pa.Array) -> npt.NDArray[np.integer]:
    plain = column.view(pa.int64()) if pa.types.is_timestamp(column.type) else column
    integers: npt.NDArray[np.integer] = plain.to_numpy()
    return integers


def _over(own: pa.Array, of_record: pa.Array | None) -> pa.Array:
    """Return what a row says itself, and where it says nothing what its record does."""
    if of_record is None or own.null_count == 0:
        return own
    return of_record if own.null_count == len(own) else pc.coalesce(own, of_record)


def _nested(bodies: Sequence[ValidBody], dataset: str, records: _Records) -> pa.Table | None:
    """Return the rows of a dataset that travels inside the records, or None when there are none."""
    placed = zip(records.starts, bodies, strict=False)  # where the last one ends is no body's start
    found = [(start, body.nested[dataset]) for start, body in placed if dataset in body.nested]
    if not found:
        return None
    parents = pa.array(np.concatenate([start + nested.records for start, nested in found]))
    columns = {name: column.take(parents) for name, column in records.columns.items()}
    for field in NESTED[dataset]:
        own = _joined(nested.columns[field.name] for _, nested in found)
        columns[field.name] = _over(own, columns.get(field.name))
    schema = pa.schema([_as_held(field, columns) for field in coded_schema(dataset)])
    arrays = [columns[field.name] if field.name in columns else pa.nulls(len(parents), field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _as_held(field: pa.Field, columns: Mapping[str, pa.Array]) -> pa.Field:
    """Return `field` with the type of its column: text of the rows themselves is not coded."""
    return field.with_type(columns[field.name].type) if field.name in columns else field


def _joined(arrays: Iterable[pa.Array]) -> pa.Array:
    return pa.concat_arrays(list(arrays))
