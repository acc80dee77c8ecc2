"""Imported records into the store, in batches, exactly once: a record is known by its number in its file."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from rankscope_contract.events import RunState
from rankscope_ingest.errors import IngestError
from rankscope_ingest.importers.base import Fault, Faults, ImportedRecord, Importer
from rankscope_ingest.tables import FROM_INGEST, rows_table
from rankscope_storage.store import Batch, Commit

BATCH_RECORDS: Final = 20_000
FROM_LOG: Final = "log"

_IDENTITY_BYTES: Final = 4096


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


def import_records(path: Path, appender: Appender, importer: Importer, *, run: str) -> ImportReport:
    """Bring the file at `path` into the store as `run`. Raises IngestError when it cannot be read."""
    faults = Faults()
    intake = _Intake(run=run, incarnation=incarnation_of(path, run), source_kind=importer.name)
    stored = 0
    try:
        for records in _chunks(importer.read(path, faults), BATCH_RECORDS):
            stored += sum(appender.append(intake.batch(records)).rows.values())
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


def incarnation_of(path: Path, run: str) -> str:
    """Return the identity of a log: its name and first line, which stay when it grows or is moved."""
    try:
        with path.open("rb") as file:
            first_line = file.readline(_IDENTITY_BYTES)
    except OSError as error:
        raise IngestError(f"{path} cannot be read: {error.strerror or error}") from error
    digest = hashlib.sha256(b"\0".join((run.encode(), path.name.encode("utf-8", "surrogateescape"), first_line)))
    return f"import-{digest.hexdigest()[:32]}"


class _Intake:
    """Numbers the records of one file and turns them into tables."""

    def __init__(self, *, run: str, incarnation: str, source_kind: str) -> None:
        self.records = 0
        self.last_step: int | None = None
        self._run = run
        self._incarnation = incarnation
        self._source_kind = source_kind
        self._attempt = 0
        self._first_ts: int | None = None
        self._last_ts: int | None = None

    def batch(self, records: Sequence[ImportedRecord]) -> Batch:
        rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        arrived = time.time_ns() // 1000
        for seq, record in enumerate(records, self.records):
            common = {
                "run": self._run,
                "attempt": record.attempt,
                "rank": record.rank,
                "incarnation": self._incarnation,
                "seq": seq,
                "ordinal": arrived + seq,
                "step": record.step,
                "ts": record.ts,
                "ts_origin": None if record.ts is None else FROM_LOG,
            }
            for dataset, own in record.rows.items():
                rows[dataset] += [{**common, **row} for row in own]
            self._note(record)
        self.records += len(records)
        tables = {dataset: rows_table(dataset, listed) for dataset, listed in rows.items()}
        return Batch(tables=tables, watermarks={self._incarnation: self.records - 1})

    def dimensions(self) -> Batch:
        """Return the run and its attempt; a log does not say how the run ended."""
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
        }
        return Batch(tables={name: rows_table(name, [row]) for name in ("runs", "attempts")}, watermarks={})

    def _note(self, record: ImportedRecord) -> None:
        self._attempt = max(self._attempt, record.attempt)
        if record.step is not None:
            self.last_step = record.step if self.last_step is None else max(self.last_step, record.step)
        if record.ts is not None:
            self._first_ts = record.ts if self._first_ts is None else min(self._first_ts, record.ts)
            self._last_ts = record.ts if self._last_ts is None else max(self._last_ts, record.ts)


def _chunks(records: Iterable[ImportedRecord], size: int) -> Iterator[list[ImportedRecord]]:
    iterator = iter(records)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
