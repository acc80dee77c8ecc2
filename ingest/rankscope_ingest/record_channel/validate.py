"""Check a body of the record channel completely, so that decoding it later cannot fail.

The cursor (the last received sequence number of a rank) moves as soon as a body is checked. The flush thread later
converts the numbers of the body to rows, together with those of hundreds of other bodies (`decode`). Until then the
numbers remain in the received form, which takes half of the memory of the rows. Data that the service needs
immediately, such as steps and events, is taken from the checked body.

A plan lists the tensors and statistics to which the numbers of a record refer. Each plan is converted once and shared
by all ranks that use it.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.schema import NESTED, WIRE_FIELDS, Plan, PlanEntry, arrow_field, plan_hash
from rankscope_ingest.base.errors import DecodeError
from rankscope_ingest.base.tables import cleaned, coded_schema, rows_table

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
    µs, or is None if the clock has not jumped. `tables` caches nested datasets that are already decoded, so that each
    is decoded once.
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
    tables: dict[str, pa.Table] = field(default_factory=dict)

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
    nested = {name: rows for name in NESTED if name in columns and (rows := _nested(columns, name)) is not None}
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


def _nested(of: Mapping[str, pa.Array], dataset: str) -> Nested | None:
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
