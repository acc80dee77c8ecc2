"""The last records of this rank, each encoded once as Arrow columns of one row, in a ring buffer.

Ring, spool and polls use the same columns: `stream` joins them to one Arrow IPC stream and converts no value. The
columns do not contain the names of tensors. They are in the plan, and a record contains only the hash of the plan.

The ring is limited in number and bytes. A record that is overwritten before a store has committed it is lost, unless
the spool has it. The ring counts lost records and reports them to each reader with a cursor before them.

The functions perform no I/O. pyarrow copies and compresses columns without the GIL.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, islice
from operator import attrgetter
from typing import Any, Final

import pyarrow as pa

from rankscope_contract.model.schema import NESTED, WIRE_FIELDS, WIRE_METADATA, arrow_schema
from rankscope_contract.wire.channel import NOTHING
from rankscope_exporter.process.threads import no_fork
from rankscope_exporter.publish.serving_config import MIN_RING_RECORDS
from rankscope_exporter.records.plan import NamedPlan
from rankscope_exporter.records.record import Statistics, StepRecord

SCHEMA: Final = arrow_schema(pa, WIRE_FIELDS, WIRE_METADATA)

# No Arrow thread pool: the work is done on the thread that answers the request, whose CPU time is measured.
_OPTIONS: Final = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)

_TYPES: Final = {field.name: field.type for field in SCHEMA}
_FIELDS: Final = {dataset: list(_TYPES[dataset].value_type) for dataset in NESTED}
OPTIONAL: Final = frozenset({*NESTED, "clock_offset"})
"""Columns that a record has only if it has a value for them."""

_FLAT: Final = {name: attrgetter(f"record.{name}") for name in ("step", "micro_step", "ts")} | {
    "plan": attrgetter("plan_hash")
}
"""Columns that are built for all records of a stream, in addition to their sequence numbers."""

_HEAD: Final = struct.Struct("<qiq")
_REFUSED: Final = (TypeError, ValueError, OverflowError)  # raised by pyarrow for a value that does not fit its column
_RECORD_BYTES: Final = 256  # fixed columns and the Python objects around them
_ROW_BYTES: Final = 200  # the Python object of one scalar, event, feature, …: an upper estimate

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
    plan_hash: str | None
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
        _check_length(record, statistics)
        columns["values"] = _list("values", statistics.values)
        columns["counts"] = _list("counts", statistics.counts)
    if record.clock_offset:
        columns["clock_offset"] = pa.array([record.clock_offset], pa.int64())
    unencodable, size = 0, _RECORD_BYTES
    for dataset in NESTED:
        rows = getattr(record, dataset)
        if rows:
            columns[dataset], refused = _nested(dataset, rows)
            unencodable += refused
            size += len(rows) * _ROW_BYTES
    size += sum(map(pa.Array.get_total_buffer_size, columns.values()))
    plan_hash = None if statistics is None else statistics.plan.hash
    return EncodedRecord(record=record, columns=columns, plan_hash=plan_hash, size=size, unencodable=unencodable)


@no_fork()
def stream(first_seq: int, records: Sequence[EncodedRecord], columns: Iterable[str] = ()) -> pa.Buffer:
    """Return `records` as an Arrow IPC stream with its end-of-stream mark and one row per record, compressed with lz4.

    Their sequence numbers start at `first_seq`. The stream has the columns of the records, and the `columns`.
    """
    schema = schema_of(OPTIONAL.intersection({*columns}.union(*map(attrgetter("columns"), records))))
    arrays = []
    for name in schema.names:
        if name == "seq":
            arrays.append(pa.array(range(first_seq, first_seq + len(records)), _TYPES[name]))
        elif name in _FLAT:
            arrays.append(pa.array(list(map(_FLAT[name], records)), _TYPES[name]))
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
    is_cached = dataset == "scalars"
    columns, fields = [], _FIELDS[dataset]
    for getter, field in zip(_getters(dataset), fields, strict=True):
        items = tuple(map(getter, rows))
        column = _texts(items) if is_cached and field.type == pa.string() else pa.array(items, field.type)
        if not field.nullable and column.null_count:
            raise ValueError(f"the field {field.name} of the dataset {dataset} must not be null")
        columns.append(column)
    return pa.StructArray.from_arrays(columns, fields=fields)


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
        return tuple(attrgetter(renamed.get(field.name, field.name)) for field in NESTED[dataset])
    return tuple(_key_getter(field.name) for field in NESTED[dataset])


def _key_getter(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda row: row.get(name)  # half the time of operator.methodcaller


def _check_length(record: StepRecord, statistics: Statistics) -> None:
    """Raise ValueError if the number of statistics does not match the plan."""
    plan = statistics.plan.plan
    entries = len(plan.entries)
    wanted = (len(plan.value_ops) * entries, len(plan.count_ops) * entries)
    if (len(statistics.values), len(statistics.counts)) != wanted:
        raise ValueError(
            f"statistics of step {record.step}: {len(statistics.values)} values and {len(statistics.counts)} counts,"
            f" but the plan of {entries} entries needs {wanted[0]} and {wanted[1]}"
        )


_PLANS_KEPT: Final = 64


class CursorError(ValueError):
    """Error: the cursor of a request is above the sequence number of the newest record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Consecutive records of the ring, from sequence number `first` on: requested ones before it are lost."""

    first: int
    encoded: tuple[EncodedRecord, ...]

    @property
    def records(self) -> tuple[StepRecord, ...]:
        return tuple(item.record for item in self.encoded)

    @property
    def last(self) -> int:
        return self.first + len(self.encoded) - 1


class Ring:
    """Ring of records with sequence numbers from 0 on.

    One thread writes and many threads read; any thread may call any method.
    """

    def __init__(self, max_records: int, max_bytes: int, is_kept: Callable[[int], bool] | None = None) -> None:
        """`is_kept(seq)` returns whether the record with the sequence number `seq` is on disk.

        An overwritten record that is on disk does not count as lost.
        """
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._is_kept = is_kept or (lambda _seq: False)
        self._changed = threading.Condition()
        self._records: deque[EncodedRecord] = deque()
        self.head = NOTHING
        """Sequence number of the newest record. Only `append` changes it."""
        self.committed = NOTHING
        """Sequence number up to which a store has committed the records. Only `commit` changes it."""
        self._bytes = 0
        self._dropped_plans: dict[str, NamedPlan] = {}  # of dropped records: the service requests a plan after a poll
        self.overrun = 0
        """Number of lost records: overwritten before the commit, and not on disk."""

    def append(self, record: EncodedRecord) -> int:
        """Store `record` and return its sequence number."""
        with self._changed:
            self.head += 1
            self._records.append(record)
            self._bytes += record.size
            while len(self._records) > self._max_records or (
                self._bytes > self._max_bytes and len(self._records) > MIN_RING_RECORDS
            ):
                self._drop_oldest()
            return self.head

    def after(self, cursor: int, max_bytes: int) -> Window:
        """Return the records after `cursor`, oldest first. Raises CursorError if `cursor` is above the newest record.

        The records have up to `max_bytes` bytes before compression. At least one record is returned if there is any
        after the cursor.
        """
        with self._changed:
            if cursor > self.head:
                raise CursorError(f"after={cursor} is above the sequence number of the newest record: {self.head}")
            first = self.first
            start = max(cursor + 1, first)
            # Copy references under the lock and join outside of it, so that a slow reader does not block `append`.
            records = tuple(islice(self._records, start - first, None))
        count = sum(total <= max_bytes for total in accumulate(record.size for record in records))
        return Window(first=start, encoded=records[: max(count, 1)])

    def commit(self, seq: int) -> None:
        """Mark records up to `seq` as committed; a lower `seq` than in an earlier call has no effect.

        Raises CursorError if `seq` is above the newest record.
        """
        with self._changed:
            if seq > self.head:
                raise CursorError(f"committed={seq} is above the sequence number of the newest record: {self.head}")
            self.committed = max(seq, self.committed)
            self._changed.notify_all()

    def wait_committed(self, timeout_seconds: float, stop: Callable[[], bool] = lambda: False) -> int:
        """Wait until a store has committed all records, `stop()` returns true, or `timeout_seconds` have passed.

        Return the number of uncommitted records.
        """
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while self.uncommitted and not stop() and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, 0.1))  # polls, since `stop` does not notify the condition
            return self.uncommitted

    def plan(self, plan_hash: str) -> NamedPlan | None:
        """Return the plan if a record of the ring, or one that it has dropped recently, uses it."""
        with self._changed:
            plans = (item.record.statistics.plan for item in self._records if item.record.statistics is not None)
            return next((plan for plan in plans if plan.hash == plan_hash), self._dropped_plans.get(plan_hash))

    def __len__(self) -> int:
        return len(self._records)

    @property
    def first(self) -> int:
        """Return the oldest sequence number in the ring; head + 1 if the ring is empty."""
        with self._changed:
            return self.head + 1 - len(self._records)

    @property
    def uncommitted(self) -> int:
        """Return the number of records in the ring that no store has committed."""
        with self._changed:
            return self.head - max(self.committed, self.first - 1)

    @property
    def fill(self) -> float:
        """Return the share of the ring that uncommitted records occupy; at 1, the next record overwrites one."""
        with self._changed:
            waiting = self.uncommitted
            size = sum(record.size for record in islice(self._records, len(self._records) - waiting, None))
            by_bytes = min(size / self._max_bytes, waiting / MIN_RING_RECORDS)
            return min(1.0, max(waiting / self._max_records, by_bytes))

    def _drop_oldest(self) -> None:
        if self.first > self.committed:
            self.overrun += not self._is_kept(self.first)
        dropped = self._records.popleft()
        self._bytes -= dropped.size
        if dropped.record.statistics is not None:
            plan = dropped.record.statistics.plan
            self._dropped_plans.pop(plan.hash, None)
            self._dropped_plans[plan.hash] = plan  # the newest one is last
            if len(self._dropped_plans) > _PLANS_KEPT:
                del self._dropped_plans[next(iter(self._dropped_plans))]
