"""The interface of importers: detection of a format, blocks of records, unreadable lines, and the report."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa

from rankscope_ingest.base.tables import rows_table, table_schema
from rankscope_ingest.importers.common.decisions import Choices, Options
from rankscope_ingest.importers.common.row_layout import Rows, Series

KEPT_FAULTS: Final = 20
MAX_NAMES: Final = 1_000
OTHER_NAMES: Final = "other names"
FROM_LOG: Final = "log"
FROM_FILE: Final = "file"
BLOCK_ROWS: Final = 240_000
SETTLED_SECONDS: Final = 600.0
"""Time after the last change of a file, after which it is assumed that no process writes it."""

RECORD_COLUMN: Final = "record"
"""Name of a column in the tables of a block of records.

For each row, the column contains the number of the record to which the row belongs, from 0 within the block.
"""

_RECORD_COLUMNS: Final = ("step", "rank", "ts", "ts_origin", "attempt")
_SCALAR_COLUMNS: Final = ("name", "unit", "labels")
_EVENT_COLUMNS: Final = ("type", "severity", "message", "details", "op", "value")


@dataclass(frozen=True, slots=True)
class Detection:
    """The confidence of an importer that it can read a file, and the reason as a text for users.

    The confidence is from 0 (another format) to 1.
    """

    confidence: float
    because: str


NOT_MINE: Final = Detection(0.0, "the log contains nothing in this format")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedBlock:
    """Records as Arrow tables.

    All records are from one source, such as a file or a rank of a log folder. Records are numbered within their source,
    because one source may grow and must not change the numbers of another one. A log that is a single file has one
    source, named "". Each table has columns of its dataset and
    the column `record` (int32). For each row, `record` is the number of the record to which the row belongs, from 0
    within the block. The columns step, rank, ts, attempt, micro_step, vpp_stage and ts_origin are optional; null means
    that the row has no such value.
    """

    records: int
    tables: Mapping[str, pa.Table]
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRun:
    """Facts about the whole run that a log contains, such as its state.

    An importer may yield several such objects. For each field, the last value that is not None is stored.
    """

    state: str | None = None  # a RunState
    reason: str | None = None
    planned_steps: int | None = None
    last_step: int | None = None  # of a log without records
    world_size: int | None = None
    config: str | None = None  # JSON
    started_at: int | None = None  # UTC µs
    ended_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A place in a log from which the next import can read on: all records of the lines before it were yielded."""

    reader: Any
    """The object that has read these lines. Its attributes are all of its state; see `resume`."""
    offset: int
    lines: int
    is_final: bool
    """True if all decisions about the log are made. Otherwise, a log that grows is read from its beginning."""


Imported = ImportedBlock | ImportedRun | Checkpoint


def block_of(dataset: str, rows: Sequence[Mapping[str, Any]], source: str = "") -> ImportedBlock:
    """Return a block in which each of `rows`, which have columns of `dataset`, is a record."""
    table = rows_table(dataset, rows)
    return ImportedBlock(
        records=len(rows),
        tables={dataset: table.append_column(RECORD_COLUMN, pa.array(range(len(rows)), pa.int32()))},
        source=source,
    )


class NameCounts(Counter[str]):
    """Counts by name of at most 1,000 names. Further names are counted as `other names`."""

    def __setitem__(self, name: str, count: int) -> None:
        """Set the count of `name`; for a further name, add `count` to the count of `other names`."""
        if len(self) >= MAX_NAMES and name not in self:
            name, count = OTHER_NAMES, self[OTHER_NAMES] + count
        super().__setitem__(name, count)


@dataclass(frozen=True, slots=True)
class Fault:
    """A line of a log that could not be read: its number, from 1, and the reason."""

    line: int
    text: str


@dataclass(slots=True)
class Faults:
    """The unreadable lines of a log, and the progress of reading.

    `count` is the number of unreadable lines; `first` has the first 20 of them with their reasons, to show them to the
    user.
    """

    count: int = 0
    first: list[Fault] = field(default_factory=list)
    passed_over: int = 0
    """The number of lines that contain no record but other output of the training program.

    Such lines are not errors.
    """
    notes: list[str] = field(default_factory=list)
    """Messages to the user that concern the whole log and not a single line."""
    unkept: Counter[str] = field(default_factory=NameCounts)
    """For each name in lines that are read, the number of its values that are not stored.

    The values of further names than 1,000 are counted together as `other names`.
    """
    choices: Choices | None = None
    """The decision about step and loss of the log, for the import event.

    The caller sets the decision of an earlier import of the same log; without one, the function that reads the log sets
    it.
    """
    revised: Choices | None = None
    """The decision that all records of the log suggest, if they contradict `choices`. --reimport uses it."""
    options: Options = field(default_factory=Options)
    """The options of the user."""
    read_bytes: int = 0
    """The number of bytes of the log that were read so far.

    The function that reads the file updates this number.
    """
    lines: int = 0
    """The number of lines of the file that were read so far, also by an earlier import."""
    reader: Any = None
    """The object that has read the first `read_bytes` bytes of the log for an earlier import; it reads the others."""
    line_start: int = 0
    """Offset of the line that was read last."""
    is_torn: bool = False
    """True if the line that was read last has no line end, and may therefore be incomplete."""
    around: tuple[str, str] = ("", "")
    """Texts before and after each reason, such as the name of the file if a log has several."""

    def add(self, line: int, text: str) -> None:
        """Record that the line with the number `line`, from 1, could not be read. `text` is the reason."""
        self.count += 1
        if len(self.first) < KEPT_FAULTS:
            before, after = self.around
            self.first.append(Fault(line, f"{before}{text}{after}"))


class Importer(Protocol):
    """An importer: detects and reads one log format.

    It may have further members. `options` has the names of the fields of `Options` that apply to the format.
    `identity(path)` returns a text that all versions and copies of the log share, or None if the log has no record yet:
    for files that are rewritten completely when the log grows, so that only the first record remains. An importer
    that leaves out more than the last line of a file while another process may still write it has `is_settled(path)`,
    which returns whether the file has not changed for a long time.
    """

    name: str
    """The name of the format; it is stored as `source_kind` of the run."""

    def detect(self, path: Path, head: bytes) -> Detection:
        """Return the confidence that `path` has the format of this importer.

        `head` is the beginning of the file, at most 64 KiB; it is empty for a folder.
        """

    def read(self, path: Path, faults: Faults) -> Iterator[Imported]:
        """Yield the records of the log in the order of the log, without holding all of them in memory.

        Unreadable lines are added to `faults`. A record is identified by its number within its source, such as a file
        or a rank of a log folder. A log that has grown must therefore yield the previous records first, in the same
        order.
        """


class BlockBuilder:
    """Collects the scalars and events of records, in the order of the log, and returns them as columns.

    All records are from one source, such as a file or a rank of a log folder. Storing records as columns takes a tenth
    of the time of storing single records.
    """

    def __init__(self, source: str = "") -> None:
        self._source = source
        self._last: tuple[Any, ...] = (None, None, None, None, 0)  # the last record of the previous block
        self._begin()

    def _begin(self) -> None:
        self._records: tuple[list[Any], ...] = tuple([] for _ in _RECORD_COLUMNS)
        self._values = array("d")
        self._value_records = array("i")
        self._value_names = array("i")
        self._names: dict[tuple[str, str | None, str | None], int] = {}
        self._events: list[tuple[str | float | None, ...]] = []
        self._event_records = array("i")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state between two blocks."""
        return {"_source": self._source, "_last": self._last}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._source, self._last = state["_source"], state["_last"]
        self._begin()

    @property
    def is_full(self) -> bool:
        """True if at least 240,000 scalars or 240,000 records are collected, so that they should be stored now."""
        return len(self._values) >= BLOCK_ROWS or self._count >= BLOCK_ROWS

    @property
    def _count(self) -> int:
        return len(self._records[0])

    @property
    def last_ts(self) -> int | None:
        """Time of the last record, which events after it without a time have; None if it has none."""
        ts: int | None = self._last_record()[2]
        return ts

    def _last_record(self) -> tuple[Any, ...]:
        return tuple(column[-1] for column in self._records) if self._count else self._last

    def record(
        self, *, step: int | None = None, rank: int | None = None, ts: int | None = None, origin: str, attempt: int = 0
    ) -> None:
        """Begin the next record. Scalars and events that are added later belong to this record."""
        record = (step, rank, ts, None if ts is None else origin, attempt)
        for column, value in zip(self._records, record, strict=True):
            column.append(value)

    def record_of_event(self, *, rank: int | None, ts: int | None, origin: str) -> None:
        """Begin a record for events of a line without a step, which is at the place and time of the last record."""
        step, *_, attempt = self._last_record()
        self.record(step=step, rank=rank, ts=self.last_ts if ts is None else ts, origin=origin, attempt=attempt)

    def scalar(self, name: str, value: float, unit: str | None = None, labels: str | None = None) -> None:
        """Add a scalar with this name, value, unit and labels (JSON) to the current record."""
        self._values.append(value)
        self._value_records.append(self._count - 1)
        # A log repeats few names for many numbers: each combination is stored once.
        self._value_names.append(self._names.setdefault((name, unit, labels), len(self._names)))

    def rows(self, rows: Rows, attempts: Sequence[int], series: Sequence[Series], records: Sequence[int] = ()) -> None:
        """Add a record with its scalars for each of `rows`, which have values of the same series.

        With `records`, further records with the step and the attempt of the row, but without rank and time, follow
        each record of a row: `records` has the number of series of each of them, the row included.
        """
        size, count, first = len(records) or 1, len(rows), self._count
        origins = [None if ts is None else FROM_LOG for ts in rows.times]
        columns = (rows.steps, rows.ranks, rows.times, origins, attempts)
        for name, column, more in zip(_RECORD_COLUMNS, self._records, columns, strict=True):
            if size == 1:
                column.extend(more)
            else:
                others = more if name in {"step", "attempt"} else [None] * count
                column.extend(itertools.chain.from_iterable(zip(more, *[others] * (size - 1), strict=True)))
        for place, number in enumerate(records or (len(series),)):
            self._value_records.extend(array("i", range(first + place, first + count * size, size)) * number)
        self._values.extend(rows.numbers)
        for each in series:
            self._value_names.extend(array("i", [self._names.setdefault(each, len(self._names))]) * count)

    def event(
        self,
        type: str,  # noqa: A002 - column
        severity: str,
        message: str,
        details: str | None = None,
        op: str | None = None,
        *,
        value: float | None = None,
    ) -> None:
        """Add an event to the current record. `details` is JSON, and `op` the class of an error."""
        self._events.append((type, severity, message, details, op, value))
        self._event_records.append(self._count - 1)

    def take(self) -> ImportedBlock | None:
        """Return the collected records as a block, and begin an empty block. Return None if no record was collected."""
        if not self._count:
            return None
        tables = {}
        if self._values:
            series = pa.array(np.frombuffer(self._value_names, np.int32))
            texts = _columns("scalars", _SCALAR_COLUMNS, zip(*self._names, strict=True))
            columns = [pa.array(np.frombuffer(self._values)), *(_encoded(each).take(series) for each in texts)]
            tables["scalars"] = self._table(self._value_records, ("value", *_SCALAR_COLUMNS), columns)
        if self._events:
            columns = _columns("events", _EVENT_COLUMNS, zip(*self._events, strict=True))
            tables["events"] = self._table(self._event_records, _EVENT_COLUMNS, columns)
        block = ImportedBlock(records=self._count, tables=tables, source=self._source)
        self._last = self._last_record()
        self._begin()
        return block

    def _table(self, row_records: array[int], names: Sequence[str], columns: Sequence[Any]) -> pa.Table:
        places = pa.array(np.frombuffer(row_records, np.int32))
        common = [_encoded(column).take(places) for column in _columns("scalars", _RECORD_COLUMNS, self._records)]
        return pa.table([places, *common, *columns], names=[RECORD_COLUMN, *_RECORD_COLUMNS, *names])


def _columns(dataset: str, names: Sequence[str], columns: Iterable[Sequence[Any]]) -> list[pa.Array]:
    schema = table_schema(dataset)
    return [pa.array(values, schema.field(name).type) for name, values in zip(names, columns, strict=True)]


def _encoded(column: pa.Array) -> pa.Array:
    return column.dictionary_encode() if pa.types.is_string(column.type) else column


_SHOWN_NAMES: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """The result of an import. `rows_stored` counts only rows that were not stored before."""

    run: str
    source_kind: str
    records: int
    rows_stored: int
    last_step: int | None
    malformed: int
    faults: tuple[Fault, ...]
    notes: tuple[str, ...] = ()
    """Messages to the user that concern the whole log and not a single line."""
    passed_over: int = 0
    anomalies: int = 0
    attempts: int = 0
    state: str | None = None
    reason: str | None = None
    is_known: bool = False
    """True if an earlier import has read the log, even if the log has grown since then."""
    imported_from: str | None = None
    """Value of the label that distinguishes the scalars of the log from those that ranks of the run reported.

    None if no rank of the run has reported.
    """
    left_out: int = 0
    """Number of rows of the log that are not stored, because they could not be distinguished from rows of ranks."""
    has_numbers: bool = True
    """True if a record that this import has read contains a number."""
    attempt: int = 0
    """The rows of attempt 0 of the log are stored with this attempt number of the run."""
    branches_from: str | None = None
    """Path of an earlier imported log that has the same beginning as this log, but differs from it later.

    None if there is no such earlier log.
    """
    first_step: int | None = None
    """Step of the first record in which this log differs from the log at `branches_from`, if that path is set."""
    is_unchanged: bool = False
    """True if the log was not read, because it has not changed since its last import."""
    unkept: tuple[str, ...] = ()
    """Names of the numbers that are not stored."""
    is_replacement: bool = False
    """True if the last import from this path read another log. That log was rotated or truncated since then."""


def unkept_notes(names: Sequence[str]) -> list[str]:
    """Return a message with the first 20 of `names`, the numbers that are not stored; an empty list without names."""
    more = len(names) - _SHOWN_NAMES
    shown = ", ".join(names[:_SHOWN_NAMES])
    return [f"not kept: {shown}{f' and {more:,} more' if more > 0 else ''}"] if names else []
