"""Imported records into the store, in batches, exactly once: a record is known by its number in its source."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.events import RunState
from rankscope_ingest.errors import IngestError
from rankscope_ingest.importers.base import (
    Fault,
    Faults,
    Imported,
    ImportedBlock,
    ImportedRecord,
    ImportedRun,
    Importer,
)
from rankscope_ingest.importers.stamping import Stamp
from rankscope_ingest.tables import FROM_INGEST, rows_table
from rankscope_storage.store import Batch, Commit

BATCH_RECORDS: Final = 20_000
BATCH_ROWS: Final = 500_000

_IDENTITY_BYTES: Final = 4096

Progress = Callable[[int], None]
"""Is told how many bytes have been read so far."""


class Appender(Protocol):
    """The store as an import sees it."""

    def append(self, batch: Batch) -> Commit:
        """Store the batch durably, dropping what is stored already."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """What became of a file. `rows_stored` counts what was new."""

    run: str
    source_kind: str
    records: int
    rows_stored: int
    last_step: int | None
    malformed: int
    faults: tuple[Fault, ...]


def import_records(
    path: Path, appender: Appender, importer: Importer, *, run: str, progress: Progress | None = None
) -> ImportReport:
    """Bring the log at `path` into the store as `run`. Raises IngestError when it cannot be read."""
    faults = Faults()
    intake = _Intake(path=path, run=run, source_kind=importer.name)
    stored = 0
    try:
        for batch in intake.batches(importer.read(path, faults)):
            stored += sum(appender.append(batch).rows.values())
            if progress:
                progress(faults.read_bytes)
    except OSError as error:
        raise IngestError(f"{path} cannot be read: {error.strerror or error}") from error
    if intake.records:
        appender.append(intake.dimensions())
    return ImportReport(
        run=run,
        source_kind=importer.name,
        records=intake.records,
        rows_stored=stored,
        last_step=intake.last_step,
        malformed=faults.count,
        faults=tuple(faults.first),
    )


def incarnation_of(path: Path, run: str, source: str = "") -> str:
    """Return the identity of a log: its name and first line, which stay when it grows or is moved."""
    first_line = b""
    try:
        if path.is_file():
            with path.open("rb") as file:
                first_line = file.readline(_IDENTITY_BYTES)
    except OSError as error:
        raise IngestError(f"{path} cannot be read: {error.strerror or error}") from error
    name = path.name.encode("utf-8", "surrogateescape")
    parts = [run.encode(), name, first_line, *([source.encode("utf-8", "surrogateescape")] if source else [])]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()
    return f"import-{digest[:32]}"


class _Intake:
    """Numbers the records of one log and turns them into batches."""

    def __init__(self, *, path: Path, run: str, source_kind: str) -> None:
        self.last_step: int | None = None
        self._path = path
        self._run = run
        self._source_kind = source_kind
        self._stamps: dict[str, Stamp] = {}
        self._attempt = 0
        self._first_ts: int | None = None
        self._last_ts: int | None = None
        self._facts: dict[str, Any] = {}

    @property
    def records(self) -> int:
        return sum(stamp.records for stamp in self._stamps.values())

    def batches(self, imported: Iterator[Imported]) -> Iterator[Batch]:
        waiting: list[ImportedRecord] = []
        rows = 0
        for item in imported:
            if isinstance(item, ImportedRun):
                self._facts |= {
                    field.name: value for field in fields(item) if (value := getattr(item, field.name)) is not None
                }
                continue
            if waiting and (isinstance(item, ImportedBlock) or waiting[0].source != item.source):
                yield self._records_batch(waiting)
                waiting, rows = [], 0
            if isinstance(item, ImportedBlock):
                yield self._block_batch(item)
                continue
            waiting.append(item)
            rows += sum(map(len, item.rows.values()))
            if len(waiting) >= BATCH_RECORDS or rows >= BATCH_ROWS:
                yield self._records_batch(waiting)
                waiting, rows = [], 0
        if waiting:
            yield self._records_batch(waiting)

    def dimensions(self) -> Batch:
        """Return the run and its attempt; what the log does not say of the end is "stopped"."""
        now = time.time_ns() // 1000
        row = {
            "run": self._run,
            "attempt": self._attempt,
            "ordinal": now,
            "ts": now,
            "ts_origin": FROM_INGEST,
            "state": RunState.STOPPED,
            "started_at": self._first_ts,
            "ended_at": self._last_ts,
            "last_step": self.last_step,
            "source_kind": self._source_kind,
            "reason": "imported from a log",
            **self._facts,
        }
        return Batch(tables={name: rows_table(name, [row]) for name in ("runs", "attempts")}, watermarks={})

    def _stamp(self, source: str) -> Stamp:
        if source not in self._stamps:
            incarnation = incarnation_of(self._path, self._run, source)
            self._stamps[source] = Stamp(run=self._run, incarnation=incarnation)
        return self._stamps[source]

    def _records_batch(self, records: list[ImportedRecord]) -> Batch:
        stamp = self._stamp(records[0].source)
        for record in records:
            self._attempt = max(self._attempt, record.attempt)
            self._note(record.step, record.step, record.ts, record.ts)
        return Batch(tables=stamp.rows(records), watermarks={stamp.incarnation: stamp.records - 1})

    def _block_batch(self, block: ImportedBlock) -> Batch:
        stamp = self._stamp(block.source)
        for table in block.tables.values():
            lowest_step, highest_step = _range(table, "step")
            first, last = _range(table, "ts")
            self._note(highest_step, lowest_step, first, last)
            self._attempt = max(self._attempt, _range(table, "attempt")[1] or 0)
        return Batch(tables=stamp.block(block), watermarks={stamp.incarnation: stamp.records - 1})

    def _note(self, step: int | None, _lowest: int | None, first: int | None, last: int | None) -> None:
        if step is not None:
            self.last_step = step if self.last_step is None else max(self.last_step, step)
        if first is not None:
            self._first_ts = first if self._first_ts is None else min(self._first_ts, first)
        if last is not None:
            self._last_ts = last if self._last_ts is None else max(self._last_ts, last)


def _range(table: pa.Table, column: str) -> tuple[int | None, int | None]:
    if column not in table.column_names:
        return None, None
    values = table.column(column)
    if pa.types.is_timestamp(values.type):
        values = pc.cast(values, pa.int64())
    found = pc.min_max(values).as_py()
    return found["min"], found["max"]
