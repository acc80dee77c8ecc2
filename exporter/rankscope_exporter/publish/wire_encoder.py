"""Encode each record once, as Arrow columns of one row, and join encoded records to one Arrow IPC stream.

Ring, spool and polls use the same columns: joining them converts no value. The columns do not contain the names of
tensors. They are in the plan, and a record contains only the hash of the plan.

The functions perform no I/O. pyarrow copies and compresses columns without the GIL.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, Final

import pyarrow as pa

from rankscope_contract.model.fields import arrow_schema, arrow_type
from rankscope_contract.model.schema import NESTED, WIRE_FIELDS, WIRE_METADATA
from rankscope_exporter.process.threads import no_fork
from rankscope_exporter.records.record import StepRecord

SCHEMA: Final = arrow_schema(pa, WIRE_FIELDS, WIRE_METADATA)

# No Arrow thread pool: the work is done on the thread that answers the request, whose CPU time is measured.
_OPTIONS: Final = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)

_TYPES: Final = {field.name: field.type for field in SCHEMA}
_FIELDS: Final = {dataset: list(_TYPES[dataset].value_type) for dataset in NESTED}
_COLUMN_TYPES: Final = {
    dataset: {field.name: arrow_type(pa, field.type) for field in fields} for dataset, fields in NESTED.items()
}
OPTIONAL: Final = frozenset({*NESTED, "clock_offset"})
"""Columns that a record has only if it has a value for them."""

_HEAD: Final = struct.Struct("<qiq")
_REFUSED: Final = (TypeError, ValueError, OverflowError)  # raised by pyarrow for a value that does not fit its column
_RECORD_BYTES: Final = 256  # fixed columns and the Python objects around them
_ROW_BYTES: Final = 200  # one scalar, event, feature, …: an upper estimate, so that the byte limit of the ring holds

_ATTRIBUTES: Final = {"scalars": {"labels": "labels_text"}, "events": {}}
"""Datasets whose rows are Python objects.

Each dataset has a mapping from the column names to the attribute names of the objects, where the two differ. Rows of
other datasets are mappings.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedRecord:
    """A record, and its lists and datasets as Arrow columns of one row, by name.

    A dataset without rows has no column, because reading sixty empty struct columns takes nearly as long as reading the
    statistics. The offset of the clock has a column only if the clock has jumped.
    """

    record: StepRecord
    columns: Mapping[str, pa.Array]
    size: int
    """Approximate uncompressed size in bytes."""
    unencodable: int
    """Number of omitted rows of nested datasets such as scalars and events: their values do not fit the columns."""


@no_fork()
def encode(record: StepRecord) -> EncodedRecord:
    """Return the columns of `record`. Raises ValueError if the number of statistics does not match the plan.

    Columns of texts and integers that each record has are built for all records of a stream: an array takes 500 bytes.
    A nested row that does not fit its columns is left out and counted, so that it does not block other rows.
    """
    _HEAD.pack(record.step or 0, record.micro_step or 0, record.ts)  # a number that does not fit is an error here
    statistics, columns = record.statistics, {}
    if statistics is not None:
        columns["values"] = _list("values", statistics.values)
        columns["counts"] = _list("counts", statistics.counts)
    if record.clock_offset:
        columns["clock_offset"] = pa.array([record.clock_offset], pa.int64())
    unencodable = 0
    for dataset in NESTED:
        rows = getattr(record, dataset)
        if rows:
            columns[dataset], refused = _nested(dataset, rows)
            unencodable += refused
    return EncodedRecord(record=record, columns=columns, size=_bytes(record), unencodable=unencodable)


@no_fork()
def stream(first_seq: int, records: Sequence[EncodedRecord], columns: Iterable[str] = ()) -> pa.Buffer:
    """Return `records` as an Arrow IPC stream with its end-of-stream mark and one row per record, compressed with lz4.

    Their sequence numbers start at `first_seq`. The stream has the columns of the records, and the `columns`.
    """
    schema = schema_of(OPTIONAL.intersection(set(columns).union(*(item.columns for item in records))))
    made = [item.record for item in records]
    plans = [None if record.statistics is None else record.statistics.plan.hash for record in made]
    flat: dict[str, Sequence[Any]] = {"seq": range(first_seq, first_seq + len(records)), "plan": plans}
    flat |= {name: [getattr(record, name) for record in made] for name in ("step", "micro_step", "ts")}
    arrays = []
    for name in schema.names:
        if name in flat:
            arrays.append(pa.array(flat[name], _TYPES[name]))
        else:
            absent = _absent(name)
            parts = [item.columns.get(name, absent) for item in records]
            arrays.append(parts[0] if len(parts) == 1 else pa.concat_arrays(parts))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=_OPTIONS) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return sink.getvalue()


@lru_cache
def schema_of(optional: frozenset[str]) -> Any:
    """Return the Arrow schema of a stream that has, of the columns that may be absent, only `optional`."""
    absent = OPTIONAL - optional
    return pa.schema([field for field in SCHEMA if field.name not in absent], SCHEMA.metadata)


@cache
def _absent(name: str) -> Any:
    """Return the column of a record without a value in it: an empty list for a dataset, else null."""
    if name not in NESTED:
        return pa.nulls(1, _TYPES[name])
    return _list(name, pa.array([], _TYPES[name].value_type))


def _list(name: str, items: Any) -> Any:
    return pa.ListArray.from_arrays(_offsets(len(items)), items, type=_TYPES[name])


@lru_cache(maxsize=64)
def _offsets(length: int) -> Any:
    return pa.array([0, length], pa.int32())


def _nested(dataset: str, rows: Sequence[Any]) -> tuple[Any, int]:
    """Return the column of a dataset for one record, and the number of omitted rows."""
    try:
        return _list(dataset, _structs(dataset, rows)), 0
    except _REFUSED:
        kept = [row for row in rows if _fits(dataset, row)]
        return _list(dataset, _structs(dataset, kept)), len(rows) - len(kept)


def _structs(dataset: str, rows: Sequence[Any]) -> Any:
    # Most records have the scalars of the record before them, with other values.
    array = _array if dataset == "scalars" else pa.array
    columns = [
        array(tuple(map(getter, rows)), type_)
        for getter, type_ in zip(_getters(dataset), _COLUMN_TYPES[dataset].values(), strict=True)
    ]
    fields = _FIELDS[dataset]
    for field, column in zip(fields, columns, strict=True):
        if not field.nullable and column.null_count:
            raise ValueError(f"the field {field.name} of the dataset {dataset} must not be null")
    return pa.StructArray.from_arrays(columns, fields=fields)


def _array(items: Sequence[Any], type_: Any) -> Any:
    return _texts(items) if type_ == pa.string() else pa.array(items, type_)


@lru_cache(maxsize=64)
def _texts(items: Sequence[Any]) -> Any:
    return pa.array(items, pa.string())


def _fits(dataset: str, row: Any) -> bool:
    try:
        _structs(dataset, [row])
    except _REFUSED:
        return False
    return True


@cache
def _getters(dataset: str) -> tuple[Callable[[Any], Any], ...]:
    if dataset in _ATTRIBUTES:
        renamed = _ATTRIBUTES[dataset]
        return tuple(attrgetter(renamed.get(name, name)) for name in _COLUMN_TYPES[dataset])
    return tuple(_key_getter(name) for name in _COLUMN_TYPES[dataset])


def _key_getter(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda row: row.get(name)  # half the time of operator.methodcaller


def _bytes(record: StepRecord) -> int:
    """Return the approximate uncompressed size of `record`.

    Raises ValueError if the number of statistics does not match the plan.
    """
    size = _RECORD_BYTES + sum(len(getattr(record, dataset)) for dataset in NESTED) * _ROW_BYTES
    size += sum(len(event.message) + len(event.details or "") for event in record.events)
    size += sum(len(row.get("stack") or "") for row in record.modules)
    size += sum(8 * len(row.get("counts") or ()) for row in record.histograms)
    statistics = record.statistics
    if statistics is None:
        return size
    plan = statistics.plan.plan
    entries = len(plan.entries)
    wanted = (len(plan.value_ops) * entries, len(plan.count_ops) * entries)
    if (len(statistics.values), len(statistics.counts)) != wanted:
        raise ValueError(
            f"statistics of step {record.step}: {len(statistics.values)} values and {len(statistics.counts)} counts,"
            f" but the plan of {entries} entries needs {wanted[0]} and {wanted[1]}"
        )
    return size + 4 * wanted[0] + 8 * wanted[1]
