"""Check the bodies of the record channel, and convert them into one table per dataset.

The cursor (the last received sequence number of a rank) moves as soon as `check` has accepted a body, so that decoding
it later cannot fail. The flush thread then decodes hundreds of bodies together. Until then the numbers remain in the
received form, which takes half of the memory of the rows. Data that the service needs immediately, such as steps and
events, is taken from the checked body.

A plan lists the tensors and statistics to which the numbers of a record refer. Each plan is converted once and shared
by all ranks that use it. Work is done per batch instead of per body where possible, and never per tensor. The
statistics of all ranks with the same plan are copied into one array, transposed from record order to tensor order. The
rows of a tensor are then adjacent, rank by rank, as in the store. Null, NaN, Inf and 0 remain distinct: a stored
statistic of a tensor is never NaN, so the NumPy arrays of tensor statistics contain NaN instead of null. Values of
scalars and events can be NaN and remain in Arrow arrays, which have null.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.schema import NESTED, WIRE_FIELDS, Plan, PlanEntry, arrow_field, plan_hash
from rankscope_ingest.base.errors import DecodeError
from rankscope_ingest.base.tables import FROM_RANK, cleaned, coded_schema, rows_table

NAME_COLUMNS: Final = ("kind", "tensor", "index", "placement", "shard_group", "call_seq", "vpp_stage", "micro_step")
"""Columns of `tensor_stats` whose values come from the plan and not from the record."""

KEPT_PLANS: Final = 256

MAX_CONCURRENT_REQUESTS: Final = 4
"""Maximum number of concurrent plan requests.

A low limit is sufficient, because a thousand ranks that start together mostly use the same plan.
"""


class PlanColumns:
    """One plan as Arrow columns.

    `order` has the indices that sort the entries of the plan by tensor and then by kind, as in the store.
    `sorted_columns` has the columns of the plan in this order.
    """

    def __init__(self, plan: Plan) -> None:
        self.entries: tuple[PlanEntry, ...] = plan.entries
        self.value_ops, self.count_ops = plan.value_ops, plan.count_ops
        ordered = sorted(
            range(len(plan.entries)), key=lambda number: (plan.entries[number].tensor, plan.entries[number].kind)
        )
        self.order: npt.NDArray[np.intp] = np.array(ordered, np.intp)
        schema = coded_schema("tensor_stats")
        self.sorted_columns: dict[str, pa.Array] = {
            name: _column([getattr(plan.entries[number], name) for number in ordered], schema.field(name).type)
            for name in NAME_COLUMNS
        }
        self._dimensions = rows_table("tensors", map(_dimension, plan.entries))  # here: a wrong plan is refused
        for name in ("kind", "tensor"):
            if self._dimensions.column(name).null_count:
                raise ValueError(f"an entry has no {name}")

    def __len__(self) -> int:
        return len(self.entries)

    def dimension_rows(self, common: Callable[[], dict[str, Any]]) -> pa.Table:
        """Return the entries of the plan as rows of `tensors`.

        `common` is called for each row and returns the values of the columns that are not from the plan, such as the
        run.
        """
        rows, table = [common() for _ in self.entries], self._dimensions
        for name in rows[0] if rows else ():
            place, field = table.column_names.index(name), table.schema.field(name)
            table = table.set_column(place, field, pa.array([row[name] for row in rows], field.type))
        return table


def _column(values: list[Any], arrow_type: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(arrow_type):
        return pa.array(values, arrow_type.value_type).dictionary_encode()
    return pa.array(values, arrow_type)


def _dimension(entry: PlanEntry) -> dict[str, Any]:
    has_shape = bool(entry.dtype) and not entry.shape_varies  # without a dtype, a plan has no shape either
    return {
        "kind": entry.kind,
        "tensor": entry.tensor,
        "index": entry.index,
        "vpp_stage": entry.vpp_stage,
        "shape": None if entry.shape_varies else list(entry.shape),
        "dtype": entry.dtype or None,
        "numel": math.prod(entry.shape) if has_shape else None,
        "module": entry.module,
        "aliases": list(entry.aliases),
    }


class PlanCache:
    """A cache of plans by hash. If it is full, the least recently used plan is evicted.

    A plan with a given hash never changes, so cached plans remain valid.
    """

    def __init__(self, size: int = KEPT_PLANS) -> None:
        self._size = size
        self._plans: OrderedDict[str, PlanColumns] = OrderedDict()
        self.requests = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

    def get(self, plan_id: str) -> PlanColumns | None:
        """Return the plan with the hash `plan_id`, or None if it is not cached and must be requested."""
        if plan_id in self._plans:
            self._plans.move_to_end(plan_id)
        return self._plans.get(plan_id)

    def add(self, plan_id: str, text: str) -> PlanColumns:
        """Add the plan in `text` to the cache and return it.

        Raises DecodeError if the hash of the text is not `plan_id`, or if the text is not a plan.
        """
        if plan_hash(text) != plan_id:
            raise DecodeError(f"plan {plan_id}: the received text has another hash than the plan id")
        try:
            columns = PlanColumns(Plan.from_json(text))
        except (ValueError, pa.ArrowException, OverflowError, TypeError) as error:
            raise DecodeError(f"plan {plan_id} cannot be parsed: {error}") from error
        self._plans[plan_id] = columns
        while len(self._plans) > self._size:
            self._plans.popitem(last=False)
        return columns


_FLAT: Final[Mapping[str, pa.Field]] = {
    field.name: arrow_field(pa, field) for field in WIRE_FIELDS if field.name not in NESTED
}
"""The non-nested columns of the record stream."""
_MEMBERS: Final[Mapping[str, Sequence[pa.Field]]] = {
    dataset: [arrow_field(pa, field) for field in fields] for dataset, fields in NESTED.items()
}
_PER_RECORD: Final = ("step", "micro_step", "ts")

Positions = npt.NDArray[np.int64]
Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowContext:
    """Column values that are equal in all rows of one process of a rank, such as the run and the rank."""

    run: str
    attempt: int
    rank: int
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The tensor statistics of all records of a body that have the same plan.

    `records` has the positions of these records in the body. `values` and `counts` are flat arrays, ordered by record,
    then by statistic, then by tensor.
    """

    plan_id: str
    plan: PlanColumns
    records: Positions
    values: pa.FloatArray
    counts: pa.Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Nested:
    """The rows of one dataset that are nested in the records of a body.

    `columns` has the columns of the rows, and `records` the position of the record of each row.
    """

    columns: Mapping[str, pa.Array]
    records: Positions

    def __len__(self) -> int:
        return len(self.records)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidBody:
    """One checked body of the record channel.

    `missing` has the ranges of sequence numbers (first, last) that were no longer in the ring of the rank. `last_step`
    is the highest step, or None if no record has a step. The times in `columns`, and `last_ts`, the latest of them in
    UTC µs, are by the clock of the rank without its jumps. `offsets` has the sum of these jumps up to each record in
    µs, or is None if the clock has not jumped.
    """

    context: RowContext
    first_ordinal: int
    seqs: Positions
    columns: Mapping[str, pa.Array]
    statistics: tuple[Measured, ...]
    nested: Mapping[str, Nested]
    rows: int
    missing: tuple[tuple[int, int], ...]
    last_step: int | None
    last_ts: int
    offsets: Positions | None = None

    @property
    def records(self) -> int:
        """Return the number of records in this body."""
        return len(self.seqs)

    @property
    def first(self) -> int:
        """Return the sequence number of the first record."""
        return int(self.seqs[0])

    @property
    def last(self) -> int:
        """Return the sequence number of the last record."""
        return int(self.seqs[-1])

    def rows_of(self, dataset: str) -> list[dict[str, Any]]:
        """Return the rows of one nested dataset, such as events; their times are integers in UTC µs."""
        if (nested := self.nested.get(dataset)) is None:
            return []
        records = pa.array(nested.records)
        columns = {name: column.take(records) for name, column in self.columns.items()}
        columns["ts"] = columns["ts"].view(pa.int64())
        columns |= {name: _over(own, columns.get(name)) for name, own in nested.columns.items()}
        common, lists = asdict(self.context), [column.to_pylist() for column in columns.values()]
        return [common | dict(zip(columns, values, strict=True)) for values in zip(*lists, strict=True)]


def plan_ids(wire: pa.Table) -> tuple[str, ...]:
    """Return the distinct plan ids (hashes) of the records in `wire`, the table of a poll response."""
    if "plan" not in wire.column_names:
        return ()
    return _distinct(wire.column("plan").to_pylist())


def _distinct(names: Sequence[str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if name is not None))


def check(
    wire: pa.Table, plans: Mapping[str, PlanColumns], context: RowContext, *, after: int, first_ordinal: int
) -> ValidBody:
    """Check `wire`, the table of a poll response, completely, and return it as a body that can be decoded.

    The sequence numbers of the records must increase and be above `after`. Record i gets the ordinal `first_ordinal +
    i`. `plans` has the plans by id, and `context` the values of the columns that are equal in all rows. Raises
    DecodeError if the body violates the protocol.
    """
    if wire.num_rows == 0:
        raise DecodeError("the stream has no records; a response without records must have status 204")
    # A lookup of each column in the table takes longer than the checks of most columns.
    columns = {name: _one(column) for name, column in zip(wire.column_names, wire.itercolumns(), strict=True)}
    flat = {
        name: _checked(columns.get(name), wire.num_rows, wanted, f"column {name}") for name, wanted in _FLAT.items()
    }
    seqs = flat["seq"].to_numpy()
    missing = _missing_ranges(seqs, after)
    used = flat["plan"].to_pylist()
    statistics = tuple(_measured(flat, used, plan_id, plans[plan_id]) for plan_id in _distinct(used))
    nested = {name: rows for name in NESTED if name in columns and (rows := _nested_rows(columns, name)) is not None}
    times = flat["ts"].view(pa.int64()).to_numpy()
    offsets = flat["clock_offset"]
    jumps = None if offsets.null_count == len(offsets) else offsets.fill_null(0).to_numpy()
    if jumps is not None:
        times = times - jumps
        flat["ts"] = pa.array(times).view(flat["ts"].type)
    return ValidBody(
        context=context,
        first_ordinal=first_ordinal,
        seqs=seqs,
        columns={name: flat[name] for name in _PER_RECORD},
        statistics=statistics,
        nested=nested,
        rows=sum(map(_present, statistics)) + sum(map(len, nested.values())),
        missing=missing,
        last_step=_highest(flat["step"]),
        last_ts=int(times.max()),
        offsets=jumps,
    )


def _highest(steps: pa.Array) -> int | None:
    if not steps.null_count:
        return int(steps.to_numpy().max())  # calling an Arrow kernel takes ten times as long
    highest: int | None = pc.max(steps).as_py()
    return highest


def _checked(column: pa.Array | None, rows: int, wanted: pa.Field, name: str) -> pa.Array:
    """Return `column` after checking its type.

    A nullable column that is absent, because the sender is older, is returned as nulls. Raises DecodeError if the
    column is invalid.
    """
    if column is None:
        if not wanted.nullable:
            raise DecodeError(f"the record stream lacks the {name}")
        return pa.nulls(rows, wanted.type)
    if column.type != wanted.type:
        raise DecodeError(f"{name} has type {column.type} instead of {wanted.type}")
    if not wanted.nullable and column.null_count:
        raise DecodeError(f"{name} has a null, which is not allowed")
    return column


def _one(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _missing_ranges(seqs: Positions, after: int) -> tuple[tuple[int, int], ...]:
    if len(seqs) == 1 and seqs[0] == after + 1:
        return ()
    before = np.concatenate(([after], seqs[:-1]))
    steps = seqs - before
    if (steps <= 0).any():
        raise DecodeError(f"seq does not increase after {after}: the body repeats records or has them out of order")
    gaps = np.flatnonzero(steps > 1)
    return tuple((int(before[gap]) + 1, int(seqs[gap]) - 1) for gap in gaps)


def _measured(flat: Mapping[str, pa.Array], used: Sequence[str | None], plan_id: str, plan: PlanColumns) -> Measured:
    records = np.array([number for number, one in enumerate(used) if one == plan_id], np.int64)
    return Measured(
        plan_id=plan_id,
        plan=plan,
        records=records,
        values=_numbers(flat["values"], "values", records, len(plan.value_ops), len(plan)),
        counts=_numbers(flat["counts"], "counts", records, len(plan.count_ops), len(plan)),
    )


def _numbers(lists: pa.ListArray, name: str, records: Positions, ops: int, tensors: int) -> pa.Array:
    """Return the numbers of the records at the positions `records` as one flat array.

    Each record must have `ops` numbers, one per statistic, for each of its `tensors` tensors. Raises DecodeError if a
    record has more or fewer numbers.
    """
    if len(records) != len(lists):
        lists = lists.take(pa.array(records))
    offsets = lists.offsets.to_numpy()
    if lists.null_count or (offsets[1:] - offsets[:-1] != ops * tensors).any():
        raise DecodeError(f"column {name} does not have {ops} numbers for each of the {tensors} tensors of its plan")
    return lists.values.slice(offsets[0], offsets[-1] - offsets[0])


def _present(measured: Measured) -> int:
    """Return the number of rows of these tensor statistics.

    If all counts of a tensor in a record, such as its number of NaN, are null, the tensor was absent and has no row.
    """
    rows = len(measured.records) * len(measured.plan)
    return rows - int(absent_counts(measured).all(axis=1).sum()) if measured.counts.null_count else rows


def absent_counts(measured: Measured) -> npt.NDArray[np.bool_]:
    """Return a boolean array that is true for each null count of a tensor. Its shape is (records, counts, tensors)."""
    shape = (len(measured.records), len(measured.plan.count_ops), len(measured.plan))
    absent: npt.NDArray[np.bool_] = measured.counts.is_null().to_numpy(zero_copy_only=False).reshape(shape)
    return absent


def _nested_rows(of: Mapping[str, pa.Array], dataset: str) -> Nested | None:
    """Return the rows of `dataset`, which are nested in the records as lists of structs; None if there are no rows.

    Raises DecodeError if the type of the column of `dataset` is not a list of structs.
    """
    lists = of[dataset]
    if not pa.types.is_list(lists.type) or not pa.types.is_struct(lists.type.value_type):
        raise DecodeError(f"column {dataset} has type {lists.type} instead of a list of structs")
    if len(lists.values) == 0:  # true for most bodies
        return None
    structs = lists.flatten()
    if len(structs) == 0:
        return None
    members = [*structs.flatten(), None]  # the index of an absent field is -1
    columns = {}
    for wanted in _MEMBERS[dataset]:
        member = members[structs.type.get_field_index(wanted.name)]
        column = _checked(member, len(structs), wanted, f"field {dataset}.{wanted.name}")
        is_text = wanted.type == pa.string() and column.null_count < len(structs)
        columns[wanted.name] = cleaned(column, wanted.name) if is_text else column
    return Nested(columns=columns, records=pc.list_parent_indices(lists).to_numpy())


def decode(bodies: Sequence[ValidBody]) -> dict[str, pa.Table]:
    """Return the rows in `bodies`, the checked poll responses of a batch, as tables by dataset.

    Columns with repeated text are dictionary-encoded.
    """
    records = _Records.of(bodies)
    tables = {}
    grids = [_grid(cells, records) for cells in _by_plan(bodies, records)]
    if grids := [table for table in grids if table.num_rows]:
        tables["tensor_stats"] = pa.concat_tables(grids)
    for dataset in dict.fromkeys(dataset for body in bodies for dataset in body.nested):
        tables[dataset] = _nested(bodies, dataset, records)
    return tables


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
    plan, tensors = cells.plan, len(cells.plan)
    chosen = pa.array(cells.records)
    columns = {name: _spread(column.take(chosen), tensors, np.tile) for name, column in records.columns.items()}
    for name, names in plan.sorted_columns.items():
        columns[name] = _over(_spread(names, len(chosen), np.repeat), columns.get(name))
    columns |= dict(zip(plan.value_ops, _values(cells), strict=True))
    present = _counts(cells, columns)
    table = _table("tensor_stats", columns, len(chosen) * tensors)
    return table if present is None else table.filter(present)


def _values(cells: _Cells) -> Iterator[pa.Array]:
    """Yield one column for each floating-point statistic. Its rows are ordered by tensor and then by record."""
    ops, tensors = len(cells.plan.value_ops), len(cells.plan)
    parts = [part.values.to_numpy(zero_copy_only=False).reshape(-1, ops, tensors) for part in cells.parts]
    for number in range(ops):
        if all(np.isnan(part[:, number]).all() for part in parts):  # such as baselines without rules
            yield pa.nulls(len(cells.records) * tensors, pa.float32())
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
    """Return `column` repeated `times` times, which takes less time than `take` of Arrow.

    `repeat` is `np.tile`, which repeats the whole column, or `np.repeat`, which repeats each value.
    """
    if pa.types.is_dictionary(column.type):
        return pa.DictionaryArray.from_arrays(_spread(column.indices, times, repeat), column.dictionary)
    if column.null_count == len(column):
        return pa.nulls(len(column) * times, column.type)
    if column.null_count:
        return column.take(pa.array(repeat(np.arange(len(column)), times)))
    plain = column.view(pa.int64()) if pa.types.is_timestamp(column.type) else column
    return pa.array(repeat(plain.to_numpy(), times)).view(column.type)


def _over(own: pa.Array, of_record: pa.Array | None) -> pa.Array:
    """Return the column `own` with each null replaced by the value in `of_record`.

    `own` has the values of the rows, and `of_record` the value of the record to which each row belongs.
    """
    if of_record is None or own.null_count == 0:
        return own
    return of_record if own.null_count == len(own) else pc.coalesce(own, of_record)


def _nested(bodies: Sequence[ValidBody], dataset: str, records: _Records) -> pa.Table:
    """Return the rows of a nested dataset, such as events. At least one body must have such rows."""
    placed = zip(records.starts, bodies, strict=False)  # `starts` also has the end of the last body
    found = [(start, body.nested[dataset]) for start, body in placed if dataset in body.nested]
    parents = pa.array(np.concatenate([start + nested.records for start, nested in found]))
    columns = {name: column.take(parents) for name, column in records.columns.items()}
    for field in NESTED[dataset]:
        own = pa.concat_arrays([nested.columns[field.name] for _, nested in found])
        columns[field.name] = _over(own, columns.get(field.name))
    return _table(dataset, columns, len(parents))


def _table(dataset: str, columns: Mapping[str, pa.Array], rows: int) -> pa.Table:
    """Return a table of `dataset`. Text with a separate value for each row is plain, and not dictionary-encoded."""
    schema = coded_schema(dataset)
    arrays = [columns[field.name] if field.name in columns else pa.nulls(rows, field.type) for field in schema]
    fields = [field.with_type(array.type) for field, array in zip(schema, arrays, strict=True)]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))
