"""Encode step records as one Arrow IPC stream with one row per record, compressed with lz4.

The stream does not contain the names of tensors. They are in the plan, and a record contains only the hash of the plan.

The functions perform no I/O. Columns are built from complete lists, and pyarrow copies and compresses them without the
GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter
from typing import Any, Final

import pyarrow as pa

from rankscope_contract.model.fields import arrow_schema, arrow_type
from rankscope_contract.model.schema import NESTED, WIRE_FIELDS, WIRE_METADATA
from rankscope_exporter.process.threads import no_fork
from rankscope_exporter.records.step_record import StepRecord

SCHEMA: Final = arrow_schema(pa, WIRE_FIELDS, WIRE_METADATA)

# No Arrow thread pool: the work is done on the thread that answers the request, whose CPU time is measured.
_OPTIONS: Final = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)

_COLUMN_TYPES: Final = {
    dataset: {field.name: arrow_type(pa, field.type) for field in fields} for dataset, fields in NESTED.items()
}
_OFFSET: Final = "clock_offset"
_REFUSED: Final = (TypeError, ValueError, OverflowError)  # raised by pyarrow for a value that does not fit its column

_ATTRIBUTES: Final = {"scalars": {"labels": "labels_text"}, "events": {}}
"""Datasets whose rows are Python objects.

Each dataset has a mapping from the column names to the attribute names of the objects, where the two differ. Rows of
other datasets are mappings.
"""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A complete Arrow IPC stream, and the number of omitted rows of nested datasets such as scalars and events.

    A row is omitted if its values do not fit the columns.
    """

    body: pa.Buffer
    unencodable: int


@no_fork()
def encode(first_seq: int, records: Sequence[StepRecord], *, whole: bool = False) -> Encoded:
    """Return `records` as a stream with its end-of-stream mark; their sequence numbers start at `first_seq`.

    A dataset without rows has no column, because reading sixty empty struct columns takes nearly as long as reading the
    statistics. Offsets of the clock have a column only if the clock has jumped. With `whole`, there are all columns, so
    that streams can be concatenated. A nested row that does not fit its columns is left out and counted, so that it
    does not block the records after it.
    """
    arrays = [
        pa.array(range(first_seq, first_seq + len(records)), pa.int64()),
        pa.array([record.step for record in records], pa.int64()),
        pa.array([record.micro_step for record in records], pa.int32()),
        pa.array([record.ts for record in records], SCHEMA.field("ts").type),
        pa.array([record.statistics.plan.hash if record.statistics else None for record in records], pa.string()),
        _numbers([record.statistics.values if record.statistics else None for record in records], pa.float32()),
        _numbers([record.statistics.counts if record.statistics else None for record in records], pa.int64()),
    ]
    jumped = whole or any(record.clock_offset for record in records)
    if jumped:
        arrays.append(pa.array([record.clock_offset or None for record in records], pa.int64()))
    unencodable = 0
    nested = {dataset: [getattr(record, dataset) for record in records] for dataset in NESTED}
    present = tuple(dataset for dataset, rows in nested.items() if whole or any(rows))
    for dataset in present:
        column, refused = _nested(dataset, nested[dataset])
        arrays.append(column)
        unencodable += refused
    schema = _schema_with((*present, _OFFSET) if jumped else present)
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=_OPTIONS) as writer:
        writer.write_batch(batch)
    return Encoded(sink.getvalue(), unencodable)


@lru_cache
def _schema_with(names: Sequence[str]) -> Any:
    """Return the Arrow schema of a stream that has, of the columns that may be absent, only `names`."""
    absent = {*NESTED, _OFFSET}.difference(names)
    return pa.schema([field for field in SCHEMA if field.name not in absent], SCHEMA.metadata)


def _numbers(parts: Sequence[Any], item: Any) -> Any:
    """Return an Arrow list column with one array per record. A missing array becomes null."""
    present = [part for part in parts if part is not None]
    if not present:
        return pa.nulls(len(parts), pa.list_(pa.field("item", item)))
    flat = present[0] if len(present) == 1 else pa.concat_arrays(present)
    offsets = _offsets(0 if part is None else len(part) for part in parts)
    absent = None if len(present) == len(parts) else pa.array([part is None for part in parts])
    return pa.ListArray.from_arrays(offsets, flat, type=pa.list_(pa.field("item", item)), mask=absent)


def _nested(dataset: str, rows_of_records: Sequence[Sequence[Any]]) -> tuple[Any, int]:
    """Return the list-of-struct column of a dataset, and the number of omitted rows.

    A row that does not fit the columns is omitted.
    """
    if not any(rows_of_records):
        return _empty(dataset, len(rows_of_records)), 0
    rows = [row for rows in rows_of_records for row in rows]
    try:
        return _list_of_structs(dataset, rows, map(len, rows_of_records)), 0
    except _REFUSED:
        kept = [[row for row in rows if _fits(dataset, row)] for rows in rows_of_records]
        good = [row for rows in kept for row in rows]
        return _list_of_structs(dataset, good, map(len, kept)), len(rows) - len(good)


def _list_of_structs(dataset: str, rows: Sequence[Any], lengths: Iterable[int]) -> Any:
    columns = [
        pa.array(list(map(getter, rows)), type_)
        for getter, type_ in zip(_getters(dataset), _COLUMN_TYPES[dataset].values(), strict=True)
    ]
    column_type = SCHEMA.field(dataset).type
    fields = list(column_type.value_type)
    for field, column in zip(fields, columns, strict=True):
        if not field.nullable and column.null_count:
            raise ValueError(f"the field {field.name} of the dataset {dataset} must not be null")
    structs = pa.StructArray.from_arrays(columns, fields=fields)
    return pa.ListArray.from_arrays(_offsets(lengths), structs, type=column_type)


def _fits(dataset: str, row: Any) -> bool:
    try:
        _list_of_structs(dataset, [row], [1])
    except _REFUSED:
        return False
    return True


@lru_cache
def _getters(dataset: str) -> tuple[Callable[[Any], Any], ...]:
    if dataset in _ATTRIBUTES:
        renamed = _ATTRIBUTES[dataset]
        return tuple(attrgetter(renamed.get(name, name)) for name in _COLUMN_TYPES[dataset])
    return tuple(_key_getter(name) for name in _COLUMN_TYPES[dataset])


def _key_getter(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda row: row.get(name)  # half the time of operator.methodcaller


@lru_cache(maxsize=256)
def _empty(dataset: str, length: int) -> Any:
    """Return a column of `length` empty lists. Cached, because most columns of a record are empty."""
    column_type = SCHEMA.field(dataset).type
    return pa.ListArray.from_arrays(_offsets([0] * length), pa.array([], column_type.value_type), type=column_type)


def _offsets(lengths: Iterable[int]) -> Any:
    return pa.array(accumulate(lengths, initial=0), pa.int32())
