"""The interface of an importer: detection, records, blocks of records, and lines that could not be read."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import pyarrow as pa

from rankscope_ingest.base.tables import table_schema

KEPT_FAULTS: Final = 20
FROM_LOG: Final = "log"
FROM_FILE: Final = "file"
BLOCK_ROWS: Final = 200_000

RECORD_COLUMN: Final = "record"
"""Column of a block's tables: the number of the record that a row belongs to, from 0 within the block."""

_RECORD_COLUMNS: Final = ("step", "rank", "ts", "ts_origin", "attempt")
_SCALAR_COLUMNS: Final = ("name", "unit", "labels")
_EVENT_COLUMNS: Final = ("type", "severity", "message", "details")


@dataclass(frozen=True, slots=True)
class Detection:
    """The confidence of an importer that it can read a file, from 0 (another format) to 1, and the reason for users."""

    confidence: float
    because: str


NOT_MINE: Final = Detection(0.0, "nothing of this format in it")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRecord:
    """The data of one step in a log. `rows` holds rows by dataset, without the columns that all rows have.

    `source` names one stream of a folder, such as a file or a rank. Records are numbered within their source, because
    one stream may grow and must not change the numbers of another stream. A plain file has one source, named "".
    """

    rows: Mapping[str, Sequence[Mapping[str, Any]]]
    step: int | None = None
    rank: int | None = None
    ts: int | None = None  # UTC µs, from the log
    attempt: int = 0  # within this log, from 0
    micro_step: int | None = None
    ts_origin: str = FROM_LOG
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedBlock:
    """Many records of one source as columns: the fast path.

    Each table holds columns of its dataset and `record` (int32, from 0 within the block). The columns step, rank, ts,
    attempt, micro_step, vpp_stage and ts_origin are optional; null means that a row has no such value.
    """

    records: int
    tables: Mapping[str, pa.Table]
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRun:
    """Facts of a log about the whole run. An importer may yield several; the last value of each field counts."""

    state: str | None = None  # a RunState
    reason: str | None = None
    planned_steps: int | None = None
    world_size: int | None = None
    config: str | None = None  # JSON
    started_at: int | None = None  # UTC µs
    ended_at: int | None = None


Imported = ImportedRecord | ImportedBlock | ImportedRun


@dataclass(frozen=True, slots=True)
class Fault:
    """A line that could not be read."""

    line: int
    text: str


@dataclass(slots=True)
class Faults:
    """The count of unreadable lines of a log, the first few of them for the user, and the reading progress."""

    count: int = 0
    first: list[Fault] = field(default_factory=list)
    passed_over: int = 0
    """Lines of other output between the records. They are not errors."""
    read_bytes: int = 0
    """Bytes read so far, for the progress bar. The code that reads the file sets it."""

    def add(self, line: int, text: str) -> None:
        """Record that `line` (from 1) could not be read, with the reason."""
        self.count += 1
        if len(self.first) < KEPT_FAULTS:
            self.first.append(Fault(line, text))


class Importer(Protocol):
    """The reader of one log format."""

    name: str
    """Stored as `source_kind` of the run."""

    def detect(self, path: Path, head: bytes) -> Detection:
        """Return how likely the format of `path` is this one. `head` is the beginning of a file, empty for a folder."""

    def read(self, path: Path, faults: Faults) -> Iterator[Imported]:
        """Yield the records of the log in its order, without holding all of them in memory.

        A log that has grown must yield the same records first: a record is identified by its number in its source.
        """


@runtime_checkable
class KnownByContent(Protocol):
    """An importer of files that are rewritten as they grow: the first bytes change, the first record does not."""

    def identity(self, path: Path) -> str | None:
        """Return a text that all versions and copies of the log at `path` share; None while it has no record."""


class BlockBuilder:
    """A block under construction: scalars and events of the records of one source, in their order.

    Columns cost the store a tenth of the time of single records.
    """

    def __init__(self, source: str = "") -> None:
        self._source = source
        self._begin()

    def _begin(self) -> None:
        self._records: list[tuple[Any, ...]] = []
        self._values = array("d")
        self._value_records = array("i")
        self._value_names = array("i")
        self._names: dict[tuple[str, str | None, str | None], int] = {}
        self._events: list[tuple[str, str, str, str | None]] = []
        self._event_records = array("i")

    @property
    def is_full(self) -> bool:
        """True if the block has enough rows or records to be stored."""
        return len(self._values) >= BLOCK_ROWS or len(self._records) >= BLOCK_ROWS

    def record(
        self, *, step: int | None = None, rank: int | None = None, ts: int | None = None, origin: str, attempt: int = 0
    ) -> None:
        """Begin the next record. Scalars and events that are added afterwards belong to it."""
        self._records.append((step, rank, ts, None if ts is None else origin, attempt))

    def scalar(self, name: str, value: float, unit: str | None = None, labels: str | None = None) -> None:
        """Add a number to the current record."""
        self._values.append(value)
        self._value_records.append(len(self._records) - 1)
        # A log repeats few names for many numbers: each combination is stored once.
        self._value_names.append(self._names.setdefault((name, unit, labels), len(self._names)))

    def event(self, type: str, severity: str, message: str, details: str | None = None) -> None:  # noqa: A002 - column
        """Add an event to the current record; `details` is JSON."""
        self._events.append((type, severity, message, details))
        self._event_records.append(len(self._records) - 1)

    def take(self) -> ImportedBlock | None:
        """Return the collected records as a block and begin an empty one; None without records."""
        if not self._records:
            return None
        tables = {}
        if self._values:
            places = pa.array(self._value_names)
            names = [
                column.take(places).dictionary_encode() for column in _columns("scalars", _SCALAR_COLUMNS, self._names)
            ]
            columns = [pa.array(self._values), *names]
            tables["scalars"] = self._table(self._value_records, ("value", *_SCALAR_COLUMNS), columns)
        if self._events:
            columns = _columns("events", _EVENT_COLUMNS, self._events)
            tables["events"] = self._table(self._event_records, _EVENT_COLUMNS, columns)
        block = ImportedBlock(records=len(self._records), tables=tables, source=self._source)
        self._begin()
        return block

    def _table(self, row_records: array[int], names: Sequence[str], columns: Sequence[Any]) -> pa.Table:
        places = pa.array(row_records, pa.int32())
        common = [column.take(places) for column in _columns("scalars", _RECORD_COLUMNS, self._records)]
        return pa.table([places, *common, *columns], names=[RECORD_COLUMN, *_RECORD_COLUMNS, *names])


def _columns(dataset: str, names: Sequence[str], rows: Any) -> list[pa.Array]:
    schema = table_schema(dataset)
    return [
        pa.array(values, schema.field(name).type) for name, values in zip(names, zip(*rows, strict=True), strict=True)
    ]
