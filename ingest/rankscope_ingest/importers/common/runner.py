"""Imported records into the store, in batches, exactly once: a record is known by its number in its source."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.events import EventType, RunState, Severity
from rankscope_contract.rules import AnomalyRule
from rankscope_contract.security.redaction import redacted_json
from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.base.tables import FROM_INGEST, rows_table, table_schema
from rankscope_ingest.importers.common.importer import (
    Fault,
    Faults,
    Imported,
    ImportedBlock,
    ImportedRecord,
    ImportedRun,
    Importer,
    KnownByContent,
)
from rankscope_ingest.importers.common.log_identity import (
    Extents,
    KnownImport,
    Source,
    first_attempt,
    identify,
    marks,
    stream_of,
)
from rankscope_ingest.importers.common.row_numbers import Stamp
from rankscope_ingest.importers.common.rules import IMPORT_RULES, Judge
from rankscope_storage.api.store import Batch, Commit

BATCH_RECORDS: Final = 20_000
BATCH_ROWS: Final = 500_000

Progress = Callable[[int], None]
"""Is told how many bytes have been read so far."""


class Appender(Protocol):
    """The store as an import sees it."""

    def append(self, batch: Batch) -> Commit:
        """Store the batch durably, dropping what is stored already."""
        ...

    def watermark(self, incarnation: str) -> int:
        """Return the last seq stored of `incarnation`, -1 when it is unknown."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """What became of a log. `rows_stored` counts what was new."""

    run: str
    source_kind: str
    records: int
    rows_stored: int
    last_step: int | None
    malformed: int
    faults: tuple[Fault, ...]
    passed_over: int = 0
    anomalies: int = 0
    attempts: int = 0
    state: str | None = None
    is_known: bool = False
    """The log had been imported before, whether or not it has grown since."""
    is_replacement: bool = False
    """Another log stood in its place when it was last imported: it was rotated or truncated."""


def import_records(
    path: Path,
    appender: Appender,
    importer: Importer,
    *,
    run: str,
    progress: Progress | None = None,
    known: Sequence[KnownImport] | None = None,
    rules: Sequence[AnomalyRule] = IMPORT_RULES,
) -> ImportReport:
    """Bring the log at `path` into the store as `run`. Raises IngestError when it cannot be read.

    With `known`, the imports that the store already holds of this run, a log is recognised after a rotation, a restart
    in another file counts as another attempt, and the import itself is noted in the store.
    """
    faults = Faults()
    try:
        identity = importer.identity(path) if isinstance(importer, KnownByContent) else None
    except OSError as error:
        raise IngestError(f"{path} cannot be read: {error.strerror or error}") from error
    source = identify(path, run, known or (), identity)
    alike = tuple(one for one in known or () if one.kind == importer.name and one.incarnation != source.incarnation)
    log = _Log(path=path, run=run, kind=importer.name, source=source, alike=alike)
    intake = _Intake(log, Judge(rules), appender)
    stored = 0
    try:
        for batch in intake.batches(importer.read(path, faults), faults, progress):
            stored += sum(appender.append(batch).rows.values())
        if progress:
            progress(faults.read_bytes)
        note = None if known is None else _note(log, intake, faults)
    except OSError as error:
        raise IngestError(f"{path} cannot be read: {error.strerror or error}") from error
    if (intake.records or intake.knows_the_run) and (stored or note is None or note != source.before):
        appender.append(intake.dimensions(note))
    return ImportReport(
        run=run,
        source_kind=importer.name,
        records=intake.records,
        rows_stored=stored,
        last_step=intake.extents.last_step,
        malformed=faults.count,
        faults=tuple(faults.first),
        passed_over=faults.passed_over,
        anomalies=intake.anomalies,
        attempts=len(intake.extents.by_attempt),
        state=intake.state,
        is_known=source.before is not None,
        is_replacement=source.replaced is not None,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Log:
    """What is imported, as which run, beside which other logs of its kind."""

    path: Path
    run: str
    kind: str
    source: Source
    alike: Sequence[KnownImport]


class _Intake:
    """Numbers the records of one log, judges them, and turns them into batches."""

    def __init__(self, log: _Log, judge: Judge, appender: Appender) -> None:
        self.extents = Extents()
        self.anomalies = 0
        self.attempt = None if log.source.before is None else log.source.before.attempt
        self._log = log
        self._judge = judge
        self._appender = appender
        self._stamps: dict[str, Stamp] = {}
        self._touched: dict[str, Stamp] = {}
        self._facts: dict[str, Any] = {}
        self._waiting: dict[str, list[pa.Table]] = defaultdict(list)

    @property
    def records(self) -> int:
        """How many records have been read."""
        return sum(stamp.records for stamp in self._stamps.values())

    @property
    def knows_the_run(self) -> bool:
        """Whether the log says anything of the run as a whole; it may before its first record."""
        return bool(self._facts)

    @property
    def state(self) -> str | None:
        """How the run ended, as far as the log says."""
        return self._facts.get("state")

    def batches(self, imported: Iterator[Imported], faults: Faults, progress: Progress | None) -> Iterator[Batch]:
        """Yield what is read in batches of a sane size."""
        rows = 0
        for item in _grouped(imported):
            if isinstance(item, ImportedRun):
                self._facts |= _facts(item)
                continue
            for dataset, table in self._tables(item).items():
                self._waiting[dataset].append(table)
                rows += table.num_rows
            if progress:
                progress(faults.read_bytes)
            if rows >= BATCH_ROWS:
                yield self._batch()
                rows = 0
        if self._stamps:
            yield self._batch()

    def dimensions(self, note: KnownImport | None) -> Batch:
        """Return the run, its attempts, and the import as an event; an end that the log does not tell is "stopped"."""
        now = time.time_ns() // 1000
        common = {"run": self._log.run, "ordinal": now, "ts": now, "ts_origin": FROM_INGEST}
        rows = [self._attempt_row(attempt) | common for attempt in sorted(self.extents.by_attempt) or [0]]
        before = [end.attempt for one in self._log.alike for end in one.ends.values()]
        tables = {"attempts": rows_table("attempts", rows)}
        if rows[-1]["attempt"] >= max(before, default=0):
            whole = {"last_step": self.extents.last_step, "started_at": rows[0].get("started_at")}
            tables["runs"] = rows_table("runs", [rows[-1] | whole])
        if note is not None:
            event = {
                "attempt": self.attempt,
                "incarnation": note.incarnation,
                "type": EventType.IMPORT,
                "severity": Severity.INFO,
                "message": f"{note.records} records of {self._log.path.name}",
                "details": note.to_json(),
            }
            tables["events"] = rows_table("events", [common | event])
        return Batch(tables=tables, watermarks={})

    def _attempt_row(self, attempt: int) -> dict[str, Any]:
        extent = self.extents.by_attempt.get(attempt)
        is_last = attempt == max(self.extents.by_attempt, default=0)
        row: dict[str, Any] = {
            "attempt": attempt,
            "state": RunState.STOPPED,
            "source_kind": self._log.kind,
            "reason": "imported from a log" if is_last else "the log goes back to an earlier step",
        }
        if extent is not None:
            row |= {"started_at": extent.first_ts, "ended_at": extent.last_ts, "last_step": extent.last_step}
        shared = ("planned_steps", "world_size", "config")
        return row | {name: value for name, value in self._facts.items() if is_last or name in shared}

    def _tables(self, item: list[ImportedRecord] | ImportedBlock) -> dict[str, pa.Table]:
        """Return what `item` adds to the store."""
        source = item.source if isinstance(item, ImportedBlock) else item[0].source
        stamp = self._stamp(source)
        count = item.records if isinstance(item, ImportedBlock) else len(item)
        watermark = self._appender.watermark(stamp.incarnation)
        is_stored = stamp.records + count - 1 <= watermark
        self._touched[stamp.incarnation] = stamp
        tables = stamp.block(item) if isinstance(item, ImportedBlock) else stamp.rows(item)
        if self.attempt is None and tables:
            self.attempt = first_attempt(tables, self._log.alike)
        tables = {name: _moved(table, self.attempt or 0) for name, table in tables.items()}
        self.extents.add(tables)
        if is_stored and "tensor_stats" not in tables:
            return {}  # rows without a baseline to follow
        judged = self._judge.judge(tables)
        if is_stored:
            return {}
        self.anomalies += _anomalies(judged.get("events"), watermark)
        return judged

    def _stamp(self, source: str) -> Stamp:
        if source not in self._stamps:
            incarnation = self._log.source.incarnation
            if source:
                incarnation = stream_of(incarnation, source)
            self._stamps[source] = Stamp(run=self._log.run, incarnation=incarnation)
        return self._stamps[source]

    def _batch(self) -> Batch:
        waiting, self._waiting = self._waiting, defaultdict(list)
        touched, self._touched = self._touched, {}  # of a folder of many files, only those read since
        watermarks = {incarnation: stamp.records - 1 for incarnation, stamp in touched.items() if stamp.records}
        return Batch(tables={name: _concat(name, tables) for name, tables in waiting.items()}, watermarks=watermarks)


def _note(log: _Log, intake: _Intake, faults: Faults) -> KnownImport:
    return KnownImport(
        incarnation=log.source.incarnation,
        path=str(log.path.absolute()),
        kind=log.kind,
        marks=() if log.path.is_dir() else marks(log.path, faults.read_bytes),
        records=intake.records,
        malformed=faults.count,
        attempt=intake.attempt or 0,
        ends=intake.extents.ends,
    )


def _grouped(imported: Iterator[Imported]) -> Iterator[list[ImportedRecord] | ImportedBlock | ImportedRun]:
    """Yield single records of one source together, everything else as it comes."""
    waiting: list[ImportedRecord] = []
    rows = 0
    for item in imported:
        goes_on = isinstance(item, ImportedRecord) and waiting and waiting[0].source == item.source
        if waiting and (not goes_on or rows >= BATCH_RECORDS):
            yield waiting
            waiting, rows = [], 0
        if isinstance(item, ImportedRecord):
            waiting.append(item)
            rows += 1 + sum(map(len, item.rows.values()))
        else:
            yield item
    if waiting:
        yield waiting


def _facts(run: ImportedRun) -> dict[str, Any]:
    named = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    named["config"] = redacted_json(run.config)  # logs repeat command lines and settings as they were given
    return {name: value for name, value in named.items() if value is not None}


def _moved(table: pa.Table, attempt: int) -> pa.Table:
    """Return `table` with its attempts counted from `attempt`."""
    if not attempt:
        return table
    position = table.column_names.index("attempt")
    moved = pc.add(table.column("attempt"), pa.scalar(attempt, pa.int32()))
    return table.set_column(position, table.schema.field(position), moved)


def _concat(dataset: str, tables: Sequence[pa.Table]) -> pa.Table:
    if any(table.schema != tables[0].schema for table in tables):
        tables = [table.cast(table_schema(dataset)) for table in tables]
    return pa.concat_tables(tables).unify_dictionaries()


def _anomalies(events: pa.Table | None, watermark: int) -> int:
    """Return how many anomalies there are of records that are not stored yet."""
    if events is None:
        return 0
    is_anomaly = pc.equal(events.column("type").cast(pa.string()), EventType.ANOMALY.value)
    is_new = pc.greater(events.column("seq"), watermark)
    return pc.sum(pc.and_(is_anomaly, is_new)).as_py() or 0
