"""One body of the record channel -> one table per dataset. Pure: the caller fetched the bytes and the plans.

Names come from cached plan columns, numbers go through numpy once, nothing is done per tensor in Python. Null, NaN,
Inf and 0 stay four things: in the statistics a NaN is never a value, so there it stands for null on the way through
numpy; scalars and events never leave Arrow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.fields import Field, arrow_field
from rankscope_contract.records import NESTED, WIRE_COUNT_OPS, WIRE_FIELDS, WIRE_VALUE_OPS
from rankscope_ingest.channel.plans import PlanColumns
from rankscope_ingest.errors import DecodeError
from rankscope_ingest.tables import FROM_RANK, GrowingColumn, coded_schema, constant_column, table_schema

_PER_RECORD: Final = ("seq", "ordinal", "step", "micro_step", "ts")
_CONSTANT: Final = ("run", "attempt", "rank", "incarnation", "ts_origin")


class RowContext:
    """What is the same in every row of one incarnation, as columns that are built once."""

    def __init__(self, *, run: str, attempt: int, rank: int, incarnation: str) -> None:
        schema = table_schema("tensor_stats")
        values = (run, attempt, rank, incarnation, FROM_RANK)
        self.run = run
        self.attempt = attempt
        self.rank = rank
        self.incarnation = incarnation
        self._columns: dict[str, GrowingColumn] = {
            name: constant_column(value, schema.field(name).type) for name, value in zip(_CONSTANT, values, strict=True)
        }

    def columns(self, rows: int) -> dict[str, pa.Array]:
        """Return the constant columns at a length of `rows`."""
        return {name: column.head(rows) for name, column in self._columns.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What one body held. `missing` are the ranges of seq that the rank no longer had, each with both ends."""

    tables: Mapping[str, pa.Table]
    records: int
    rows: int
    first: int
    last: int
    missing: tuple[tuple[int, int], ...]
    last_step: int | None
    last_ts: int
    plan_ids: tuple[str, ...]


def plan_ids(wire: pa.Table) -> tuple[str, ...]:
    """Return the hashes of the plans that `wire` needs, each once."""
    if "plan" not in wire.column_names:
        return ()
    return tuple(name for name in pc.unique(_column(wire, "plan")).to_pylist() if name is not None)


def decode(
    wire: pa.Table, plans: Mapping[str, PlanColumns], context: RowContext, *, after: int, first_ordinal: int
) -> Decoded:
    """Return the rows in `wire`, whose records must all be newer than `after` and in order.

    Record i gets `first_ordinal + i`. Raises DecodeError when the stream breaks its own promises.
    """
    wire = _conform(wire)
    if wire.num_rows == 0:
        raise DecodeError("the stream holds no record; nothing new is said with status 204")
    seqs = _column(wire, "seq").to_numpy()
    missing = _missing_ranges(seqs, after)
    ordinals = pa.array(np.arange(first_ordinal, first_ordinal + wire.num_rows, dtype=np.int64))
    records = {name: _column(wire, name) for name in _PER_RECORD if name != "ordinal"} | {"ordinal": ordinals}

    tables: dict[str, pa.Table] = {}
    needed = plan_ids(wire)
    statistics = [_statistics(wire, plan_id, plans, records, context) for plan_id in needed]
    if statistics := [table for table in statistics if table.num_rows]:
        tables["tensor_stats"] = pa.concat_tables(statistics)
    for dataset in NESTED:
        table = _nested(wire, dataset, records, context)
        if table is not None:
            tables[dataset] = table
    steps = records["step"]
    return Decoded(
        tables=tables,
        records=wire.num_rows,
        rows=sum(table.num_rows for table in tables.values()),
        first=int(seqs[0]),
        last=int(seqs[-1]),
        missing=missing,
        last_step=pc.max(steps).as_py(),
        last_ts=pc.max(records["ts"]).cast(pa.int64()).as_py(),
        plan_ids=needed,
    )


def _conform(wire: pa.Table) -> pa.Table:
    """Return the columns we know. A newer sender may have more, an older one may lack what is nullable."""
    schema = pa.schema([arrow_field(pa, field) for field in WIRE_FIELDS if field.name not in NESTED])
    columns = [_known(wire.num_rows, wire, field) for field in schema]
    known = pa.Table.from_arrays(columns, schema=schema)
    for dataset in NESTED:
        if dataset in wire.column_names:
            known = known.append_column(dataset, wire.column(dataset))
    return known


def _known(rows: int, wire: pa.Table, field: pa.Field) -> pa.ChunkedArray:
    if field.name not in wire.column_names:
        if not field.nullable:
            raise DecodeError(f"the stream lacks the column {field.name}")
        return pa.chunked_array([pa.nulls(rows, field.type)])
    column = wire.column(field.name)
    if column.type != field.type:
        raise DecodeError(f"column {field.name} has type {column.type}, this service reads {field.type}")
    if not field.nullable and column.null_count:
        raise DecodeError(f"column {field.name} holds a null")
    return column


def _column(wire: pa.Table, name: str) -> pa.Array:
    column = wire.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _missing_ranges(seqs: npt.NDArray[np.int64], after: int) -> tuple[tuple[int, int], ...]:
    before = np.concatenate(([after], seqs[:-1]))
    steps = seqs - before
    if (steps <= 0).any():
        raise DecodeError(f"seq does not rise from {after} on: the body repeats records or is out of order")
    holes = np.flatnonzero(steps > 1)
    return tuple((int(before[hole]) + 1, int(seqs[hole]) - 1) for hole in holes)


def _statistics(
    wire: pa.Table,
    plan_id: str,
    plans: Mapping[str, PlanColumns],
    records: Mapping[str, pa.Array],
    context: RowContext,
) -> pa.Table:
    """Return the rows of all records that use the plan; a tensor with null counts was absent and gets no row."""
    plan = plans[plan_id]
    users = pc.fill_null(pc.equal(_column(wire, "plan"), plan_id), pa.scalar(value=False))
    chosen = np.flatnonzero(users.to_numpy(zero_copy_only=False))
    values = _matrix(wire, "values", chosen, len(WIRE_VALUE_OPS), len(plan))
    counts = _matrix(wire, "counts", chosen, len(WIRE_COUNT_OPS), len(plan))
    rows = len(chosen) * len(plan)
    parents = np.repeat(chosen, len(plan))

    columns = plan.repeated(len(chosen)) | context.columns(rows)
    for name, array in records.items():
        columns[name] = _over(columns.get(name), _spread(array, parents))
    floats = values.to_numpy(zero_copy_only=False).reshape(len(chosen), len(WIRE_VALUE_OPS), len(plan))
    for position, op in enumerate(WIRE_VALUE_OPS):
        columns[op] = pa.array(np.ascontiguousarray(floats[:, position]).ravel(), from_pandas=True)
    present = _count_columns(counts, len(chosen), len(plan), columns)

    schema = coded_schema("tensor_stats")
    table = pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)
    return table if present is None else table.filter(present)


def _matrix(wire: pa.Table, name: str, chosen: npt.NDArray[np.intp], ops: int, tensors: int) -> pa.Array:
    """Return the flat numbers of the chosen records, after checking that each has `ops` for every tensor."""
    lists = _column(wire, name)
    if len(chosen) != len(lists):
        lists = lists.take(pa.array(chosen))
    lengths = pc.list_value_length(lists)
    if lists.null_count or not pc.all(pc.equal(lengths, ops * tensors), min_count=0).as_py():
        raise DecodeError(f"{name} does not hold {ops} numbers for each of the {tensors} tensors of its plan")
    return lists.flatten()


def _count_columns(counts: pa.Array, records: int, tensors: int, columns: dict[str, pa.Array]) -> pa.Array | None:
    """Put the count columns into `columns`; return which rows exist, or None when all do."""
    shape = (records, len(WIRE_COUNT_OPS), tensors)
    absent = None
    if counts.null_count:
        absent = counts.is_null().to_numpy(zero_copy_only=False).reshape(shape)
        counts = counts.fill_null(0)
    integers = counts.to_numpy().reshape(shape)
    for position, op in enumerate(WIRE_COUNT_OPS):
        mask = None if absent is None else np.ascontiguousarray(absent[:, position]).ravel()
        columns[op] = pa.array(np.ascontiguousarray(integers[:, position]).ravel(), mask=mask)
    return None if absent is None else pa.array(~absent.all(axis=1).ravel())


def _spread(array: pa.Array, parents: npt.NDArray[np.intp]) -> pa.Array:
    """Return the value of each row's record."""
    if array.null_count == len(array):
        return pa.nulls(len(parents), array.type)
    if array.null_count:
        return array.take(pa.array(parents))
    plain = array.view(pa.int64()) if pa.types.is_timestamp(array.type) else array
    return pa.array(plain.to_numpy()[parents]).view(array.type)


def _over(own: pa.Array | None, of_record: pa.Array | None) -> pa.Array:
    """Return what a row says itself, and where it says nothing what its record does."""
    if own is None or of_record is None:
        return of_record if own is None else own
    if own.null_count == len(own):
        return of_record
    return own if own.null_count == 0 else pc.coalesce(own, of_record)


def _nested(wire: pa.Table, dataset: str, records: Mapping[str, pa.Array], context: RowContext) -> pa.Table | None:
    """Return the rows that travel inside the records as a list of structs, or None when there are none."""
    if dataset not in wire.column_names:
        return None
    lists = _column(wire, dataset)
    if not pa.types.is_list(lists.type) or not pa.types.is_struct(lists.type.value_type):
        raise DecodeError(f"column {dataset} has type {lists.type}, this service reads a list of structs")
    structs = lists.flatten()
    if len(structs) == 0:
        return None
    parents = pc.list_parent_indices(lists).to_numpy()
    columns = {name: _plain(column) for name, column in context.columns(len(structs)).items()}
    for name, array in records.items():
        columns[name] = _spread(array, parents)
    for field in NESTED[dataset]:
        columns[field.name] = _over(_member(structs, dataset, field), columns.get(field.name))
    schema = table_schema(dataset)
    arrays = [columns[field.name] if field.name in columns else pa.nulls(len(structs), field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _plain(column: pa.Array) -> pa.Array:
    """Return text as text: rows that the service adds itself stand in the same table."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _member(structs: pa.StructArray, dataset: str, field: Field) -> pa.Array:
    wanted: Any = arrow_field(pa, field)
    position = structs.type.get_field_index(field.name)
    if position < 0 and field.nullable:
        return pa.nulls(len(structs), wanted.type)
    if position < 0:
        raise DecodeError(f"{dataset} lacks the field {field.name}")
    member = structs.flatten()[position]
    if member.type != wanted.type:
        raise DecodeError(f"{dataset}.{field.name} has type {member.type}, this service reads {wanted.type}")
    if not field.nullable and member.null_count:
        raise DecodeError(f"{dataset}.{field.name} holds a null")
    return member
