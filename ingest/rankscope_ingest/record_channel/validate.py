"""One body of the record channel, opened and checked: every promise holds, so that nothing in it can fail later.

The cursor moves when a body was checked; its numbers become rows in the flush thread, with those of hundreds of other
bodies at once (`decode`). Until then they stand here as they came, which is half of the memory of the rows. What the
service itself must know at once (a step, an event) is read from here, record by record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.fields import Field, arrow_field
from rankscope_contract.model.schema import NESTED, WIRE_FIELDS
from rankscope_ingest.base.errors import DecodeError
from rankscope_ingest.record_channel.plans import PlanColumns

_FLAT: Final[Mapping[str, tuple[pa.DataType, bool]]] = {
    field.name: (arrow_field(pa, field).type, field.nullable) for field in WIRE_FIELDS if field.name not in NESTED
}
"""By column: its type, and whether it may be null."""
_MEMBERS: Final[dict[str, list[tuple[Field, pa.Field]]]] = {
    dataset: [(field, arrow_field(pa, field)) for field in fields] for dataset, fields in NESTED.items()
}
_PER_RECORD: Final = ("step", "micro_step", "ts")

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowContext:
    """What is the same in every row of one incarnation."""

    run: str
    attempt: int
    rank: int
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The statistics of those records of a body that share a plan: flat, statistic-major within each record."""

    plan_id: str
    plan: PlanColumns
    records: Positions
    values: pa.FloatArray
    counts: pa.Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Nested:
    """The rows of one dataset that travel inside the records: their columns, and the record of each."""

    columns: Mapping[str, pa.Array]
    records: Positions

    def __len__(self) -> int:
        return len(self.records)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidBody:
    """What one body holds. `missing` are the ranges of seq that the rank no longer had, each with both ends.

    `last_step` is the highest step, None where no record is of one; `last_ts` the latest time, in UTC µs by the rank's
    clock.
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

    @property
    def records(self) -> int:
        """Return how many records there are."""
        return len(self.seqs)

    @property
    def first(self) -> int:
        """Return the seq of the first record."""
        return int(self.seqs[0])

    @property
    def last(self) -> int:
        """Return the seq of the last record."""
        return int(self.seqs[-1])


def plan_ids(wire: pa.Table) -> tuple[str, ...]:
    """Return the hashes of the plans that `wire` needs, each once."""
    if "plan" not in wire.column_names:
        return ()
    return _each_once(wire.column("plan").to_pylist())


def _each_once(names: Sequence[str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if name is not None))


def check(
    wire: pa.Table, plans: Mapping[str, PlanColumns], context: RowContext, *, after: int, first_ordinal: int
) -> ValidBody:
    """Return what `wire` holds, whose records must all be newer than `after` and in order.

    Record i gets `first_ordinal + i`. Raises DecodeError when the stream breaks its own promises.
    """
    if wire.num_rows == 0:
        raise DecodeError("the stream holds no record; nothing new is said with status 204")
    # Asking the table for each of them takes longer than all that is done with most.
    columns = dict(zip(wire.column_names, wire.itercolumns(), strict=True))
    flat = {name: _known(columns, name, wire.num_rows) for name in _FLAT}
    seqs = flat["seq"].to_numpy()
    missing = _missing_ranges(seqs, after)
    used = flat["plan"].to_pylist()
    statistics = tuple(_measured(flat, used, plan_id, plans[plan_id]) for plan_id in _each_once(used))
    nested = {name: rows for name in NESTED if name in columns and (rows := _nested(columns, name)) is not None}
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
        last_ts=int(flat["ts"].view(pa.int64()).to_numpy().max()),
    )


def _highest(steps: pa.Array) -> int | None:
    if not steps.null_count:
        return int(steps.to_numpy().max())  # a kernel of Arrow takes ten times as long to be called
    highest: int | None = pc.max(steps).as_py()
    return highest


def _known(columns: Mapping[str, pa.ChunkedArray], name: str, rows: int) -> pa.Array:
    """Return a column as we know it. A newer sender may have more, an older one may lack what is nullable."""
    type_, nullable = _FLAT[name]
    if name not in columns:
        if not nullable:
            raise DecodeError(f"the stream lacks the column {name}")
        return pa.nulls(rows, type_)
    column = _one(columns[name])
    if column.type != type_:
        raise DecodeError(f"column {name} has type {column.type}, this service reads {type_}")
    if not nullable and column.null_count:
        raise DecodeError(f"column {name} holds a null")
    return column


def _one(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _missing_ranges(seqs: Positions, after: int) -> tuple[tuple[int, int], ...]:
    if len(seqs) == 1 and seqs[0] == after + 1:
        return ()
    before = np.concatenate(([after], seqs[:-1]))
    steps = seqs - before
    if (steps <= 0).any():
        raise DecodeError(f"seq does not rise from {after} on: the body repeats records or is out of order")
    holes = np.flatnonzero(steps > 1)
    return tuple((int(before[hole]) + 1, int(seqs[hole]) - 1) for hole in holes)


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
    """Return the flat numbers of the chosen records, after checking that each has `ops` for every tensor."""
    if len(records) != len(lists):
        lists = lists.take(pa.array(records))
    offsets = lists.offsets.to_numpy()
    if lists.null_count or (offsets[1:] - offsets[:-1] != ops * tensors).any():
        raise DecodeError(f"{name} does not hold {ops} numbers for each of the {tensors} tensors of its plan")
    return lists.values.slice(offsets[0], offsets[-1] - offsets[0])


def _present(measured: Measured) -> int:
    """Return how many rows there are: a tensor with null counts was absent and gets none."""
    rows = len(measured.records) * len(measured.plan)
    return rows - int(absent_counts(measured).all(axis=1).sum()) if measured.counts.null_count else rows


def absent_counts(measured: Measured) -> npt.NDArray[np.bool_]:
    """Return which counts are null, by record, statistic and tensor."""
    shape = (len(measured.records), len(measured.plan.count_ops), len(measured.plan))
    absent: npt.NDArray[np.bool_] = measured.counts.is_null().to_numpy(zero_copy_only=False).reshape(shape)
    return absent


def _nested(of: Mapping[str, pa.ChunkedArray], dataset: str) -> Nested | None:
    """Return the rows that travel inside the records as a list of structs, or None when there are none."""
    lists = _one(of[dataset])
    if not pa.types.is_list(lists.type) or not pa.types.is_struct(lists.type.value_type):
        raise DecodeError(f"column {dataset} has type {lists.type}, this service reads a list of structs")
    if len(lists.values) == 0:  # as it is in most bodies
        return None
    structs = lists.flatten()
    if len(structs) == 0:
        return None
    members = dict(zip((field.name for field in structs.type), structs.flatten(), strict=True))
    columns = {
        field.name: _member(members.get(field.name), len(structs), dataset, field, wanted)
        for field, wanted in _MEMBERS[dataset]
    }
    return Nested(columns=columns, records=pc.list_parent_indices(lists).to_numpy())


def _member(member: Any, rows: int, dataset: str, field: Field, wanted: pa.Field) -> pa.Array:
    if member is None and field.nullable:
        return pa.nulls(rows, wanted.type)
    if member is None:
        raise DecodeError(f"{dataset} lacks the field {field.name}")
    if member.type != wanted.type:
        raise DecodeError(f"{dataset}.{field.name} has type {member.type}, this service reads {wanted.type}")
    if not field.nullable and member.null_count:
        raise DecodeError(f"{dataset}.{field.name} holds a null")
    return member
