"""Import the file of a followed log into the store, and keep the state of its run in the store up to date.

The rows are those of a single import of the complete log: each import reads on from the state of the last one. The row
about the state of the run and the event about the import are stored when the state changes, and otherwise every few
minutes, because a followed log is imported many thousand times.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from rankscope_contract.model.events import RunState
from rankscope_ingest.base.config import WatchSection
from rankscope_ingest.base.tables import rows_table, table_schema
from rankscope_ingest.detect.history import stored_incidents
from rankscope_ingest.importers import (
    NO_END,
    Importer,
    ImportReport,
    KnownImport,
    Options,
    find_importer,
    import_records,
    importers,
    is_live,
    known_imports,
    stored_scalars,
)
from rankscope_ingest.importers.common.log_identity import stored_path
from rankscope_ingest.pipeline.rows import Stamp, incident_row
from rankscope_ingest.runs.incident import Incident
from rankscope_ingest.watch.judge import ENDS, KEPT_ROWS
from rankscope_storage.api.store import Batch, Commit, Writer
from rankscope_storage.base.location import Location
from rankscope_storage.connection import Connection, connect
from rankscope_storage.maintenance.compaction import TARGET_ROWS

FOLLOWED: Final = "the log is followed"
UNFOLLOWED: Final = "the log is no longer followed"
_OPEN: Final = frozenset({NO_END, FOLLOWED, UNFOLLOWED})
"""Reasons of a state which is not an end of the run that the log contains."""

_LATEST: Final = "SELECT * FROM {} WHERE run = $run AND source_kind <> 'live' ORDER BY attempt DESC LIMIT 1"
_BEHIND: Final = "SELECT {} FROM {} WHERE run = $run AND incarnation = $stream AND seq > $seq"
_EVENTS: Final = f"{_BEHIND.format('*', 'events')} AND (seq > $recent OR type = 'anomaly')"
_SCALARS: Final = "seq, attempt, rank, step, ts, name, value"

Row = dict[str, Any]
OnCommit = Callable[[Commit, Collection[str]], object]


class WatchStore:
    """The store as the followed logs use it. Most methods run in its one thread, in which `run` calls a function.

    `known` has the imported logs of each run, which all logs of the run share. `commits` is the number of commits.
    """

    def __init__(self, folder: Location, writer: Writer, on_commit: OnCommit = lambda *_: None) -> None:
        """`on_commit` is called in the thread of the store with each commit and its runs."""
        self.folder = folder
        self.watermark = writer.watermark
        self._writer = writer
        self._on_commit = on_commit
        self.commits = 0
        self.known: dict[str, list[KnownImport]] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rankscope-watch")
        self._last_ordinal = 0
        self._incidents: deque[Row] = deque()  # that no commit contains
        self._failed: Batch | None = None

    async def run(self, function: Callable[[], Any]) -> Any:
        """Call `function` in the thread of the store, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def append(self, batch: Batch) -> Commit:
        """Store the rows of `batch`."""
        commit = self._writer.append(batch)
        self._on_commit(commit, {run for table in batch.tables.values() for run in table["run"].unique().to_pylist()})
        self.commits += 1
        return commit

    def record(self, incident: Incident, state: str) -> None:
        """Add an event which reports that `incident` reached `state` to those of the next `flush`, in any thread."""
        self._incidents.append(incident_row(incident, state, self.stamp()))

    def flush(self) -> None:
        """Store the events of incidents. Raises StoreError if this fails; the next call then stores them."""
        while self._incidents or self._failed is not None:
            if self._failed is None:
                rows = [self._incidents.popleft() for _ in range(len(self._incidents))]
                self._failed = Batch(tables={"events": rows_table("events", rows)}, watermarks={})
            self.append(self._failed)  # the store recognizes a batch that is appended again by its identity
            self._failed = None

    @functools.cached_property
    def connection(self) -> Connection:
        """Return the connection for queries."""
        return connect(self.folder, single_threaded=True)

    def known_of(self, run: str) -> list[KnownImport]:
        """Return the imported logs of `run`."""
        if run not in self.known:
            self.known[run] = known_imports(self.connection, run)
        return self.known[run]

    def incidents_of(self, run: str) -> list[tuple[Incident, list[str]]]:
        """Return the incidents of `run` that were found in logs, each with its states in order."""
        stored = stored_incidents(self.connection, time.monotonic())
        return [(incident, states) for incident, states in stored if incident.first.run == run and incident.log]

    def recent(self, run: str, stream: str, seq: int) -> tuple[pa.Table, pa.Table]:
        """Return the scalars and events behind the record `seq` of a log.

        Except for anomalies, they are those of at most the last KEPT_ROWS records.
        """
        recent = max(seq, self.watermark(stream) - KEPT_ROWS)
        values = {"run": run, "stream": stream, "seq": recent}
        scalars = self.connection.query(_BEHIND.format(_SCALARS, "scalars"), values)
        return scalars, self.connection.query(_EVENTS, values | {"seq": seq, "recent": recent})

    def latest(self, dataset: str, run: str) -> list[Row]:
        """Return the latest row of `runs` or `attempts` that an import has stored for `run`, if any."""
        names = table_schema(dataset).names
        rows: list[Row] = self.connection.query(_LATEST.format(dataset), {"run": run}).select(names).to_pylist()
        return rows

    def stamp(self) -> Stamp:
        """Return the time and the arrival number of a new row."""
        self._last_ordinal = max(time.time_ns() // 1000, self._last_ordinal + 1)
        return Stamp(self._last_ordinal, self._last_ordinal)

    async def close(self) -> None:
        """Close the connection and end the thread."""
        await self.run(self.connection.close)
        self._thread.shutdown()


class LogIntake:
    """Imports one log repeatedly, and stores the state of its run. All methods run in the thread of the store."""

    def __init__(self, store: WatchStore, run: str, section: WatchSection) -> None:
        self._store = store
        self.run = run
        self._kind = "textlog" if section.pattern and section.format == "auto" else section.format
        self._options = Options(loss=section.loss, pattern=section.pattern)
        self._store_seconds = section.store_seconds
        self._importer: Importer | None = None
        self._rows: dict[str, list[Row]] = {}  # of `attempts` and `runs`, and the import event if it is not stored yet
        self._written_at = self._ranks_read_at = -math.inf
        self._has_ranks = False
        self._state = ("", "")  # that is stored, and its reason
        self.ending: tuple[str, str] | None = None
        """State and reason of the end of the run, according to the log; None if the log contains no end."""
        self.failed_before: Row | None = None
        """Row of the attempt before the last one, if it failed."""
        self.planned_steps: int | None = None
        self.incarnation: str | None = None
        self.stream: str | None = None
        """Incarnation of the rows of the log, which differs from that of the log in files with several streams."""
        self.watermark = store.watermark

    def restore(self) -> None:
        """Read the state of the run that an earlier process has stored."""
        self._store.known_of(self.run)
        self._learn({dataset: self._store.latest(dataset, self.run) for dataset in ("attempts", "runs")})

    def import_file(self, path: Path) -> ImportReport:
        """Import the log at `path`. Raises IngestError if it has an unknown format or cannot be read."""
        if self._importer is None:
            self._importer = find_importer(path) if self._kind == "auto" else importers()[self._kind]
        known, now = self._store.known_of(self.run), time.monotonic()
        if now - self._ranks_read_at >= self._store_seconds:
            self._has_ranks, self._ranks_read_at = is_live(self._store.connection, self.run), now
        report = import_records(
            path,
            self,
            self._importer,
            run=self.run,
            known=known,
            is_live=self._has_ranks,
            stored=stored_scalars(self._store.connection, self.run),
            options=self._options,
            batch_rows=TARGET_ROWS,  # the next compaction would merge smaller files
        )
        if self.incarnation is None:  # nothing is new: the log is the one that was imported from this path
            before = [log.incarnation for log in known if log.path == stored_path(path)]
            self.incarnation = self.stream = before[-1] if before else None
        if report.state in ENDS and self.ending is None and report.imported_from is not None:
            self.ending = (report.state, "according to the log")
        return report

    def append(self, batch: Batch) -> Commit:
        """Store the rows of an import. Rows about the run and the import are held until `write_state`."""
        if batch.watermarks:
            scalars = batch.tables.get("scalars")
            self.stream = next(iter(batch.watermarks)) if scalars is None else scalars["incarnation"][0].as_py()
            return self._store.append(batch)
        self._learn({dataset: table.to_pylist() for dataset, table in batch.tables.items()})
        return Commit(version=0, rows={}, files=0, seconds=0.0)

    def _learn(self, rows: dict[str, list[Row]]) -> None:
        """Hold rows about the run and the import, and read the facts in them."""
        self._rows |= rows
        for event in rows.get("events", ()):
            log, known = KnownImport.from_json(event["details"]), self._store.known_of(self.run)
            known[:] = [other for other in known if other.incarnation != log.incarnation] + [log]
            if log.incarnation != self.incarnation:
                self.incarnation, self.stream = log.incarnation, self.stream or log.incarnation
                self._state = ("", "")
        if rows.get("attempts"):
            *earlier, row = rows["attempts"]
            self.failed_before = next((one for one in earlier[-1:] if one["state"] == RunState.FAILED), None)
            self.planned_steps = row["planned_steps"]
            is_end = row["state"] in ENDS and row["reason"] not in _OPEN
            self.ending = (row["state"], row["reason"] or "") if is_end else None

    def write_state(self, state: str, reason: str, *, at_once: bool = False) -> None:
        """Store the state of the run if it has changed or if the last stored state is old, and the import event.

        If the log contains the end of the run, that end is stored instead. With `at_once`, pending rows are stored now.
        """
        wanted, now = self.ending or (state, reason), time.monotonic()
        is_old = at_once or now - self._written_at >= self._store_seconds
        if wanted[0] == self._state[0] and not is_old:
            return
        held = {name: rows for name, rows in self._rows.items() if rows and (name == "events" or not self._has_ranks)}
        if not held or (wanted == self._state and "events" not in held):
            return
        tables = {
            name: rows_table(name, rows if name == "events" else self._stamped(rows, *wanted))
            for name, rows in held.items()
        }
        self._store.append(Batch(tables=tables, watermarks={}))
        self._rows.pop("events", None)
        self._written_at, self._state = now, wanted

    def _stamped(self, rows: Sequence[Row], state: str, reason: str) -> list[Row]:
        stamp = self._store.stamp().columns()
        *earlier, last = rows
        changed = last | {"state": state, "reason": reason, "ended_at": last["ended_at"] if state in ENDS else None}
        return [row | stamp for row in (*earlier, changed)]
