"""Store the rows of many small logs with few commits, and each log as if it were stored alone.

A commit takes some 50 ms and one file per dataset, far more than a log of a few steps does. The rows, the watermarks
and the import event of a small log are in the same commit, together with those of other logs. A process that is killed
has therefore stored each small log completely or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers.common.branches import StoredScalars, stored_scalars
from rankscope_ingest.importers.common.live_run import live_runs
from rankscope_ingest.importers.common.log_identity import KnownImport, known_imports_of
from rankscope_ingest.importers.common.runner import concatenated
from rankscope_storage.api.store import Batch, Commit, Writer
from rankscope_storage.base.errors import BatchError
from rankscope_storage.base.schema import conform
from rankscope_storage.connection import Connection
from rankscope_storage.writer.writer import newer

GROUP_LOGS: Final = 500
"""Largest number of logs of a group. Their tables of a few rows each take about 50 MB."""

GROUP_ROWS: Final = 50_000
"""Number of held rows from which they are stored, a tenth of the rows that the import of one log holds."""


class LogGroup:
    """Holds the batches of imported logs until they are stored together; the appender of `import_records`.

    The imports of a group see the rows of earlier logs of the group as if they were stored. `on_stored` is called after
    each commit, when all rows of the logs that were imported completely are stored.
    """

    def __init__(self, writer: Writer, connection: Connection, on_stored: Callable[[], None] = lambda: None) -> None:
        self._writer = writer
        self._connection = connection
        self._on_stored = on_stored
        self._known: dict[str, dict[str, KnownImport]] = {}
        self._live: frozenset[str] = frozenset()
        self._held: list[Batch] = []
        self._rows = 0
        self._watermarks: dict[str, int] = {}

    def begin(self, runs: Collection[str]) -> None:
        """Store the held rows, and read the facts about `runs`, the runs of the next logs, from the store."""
        self.flush()
        known = known_imports_of(self._connection, runs)
        self._known = {run: {log.incarnation: log for log in logs} for run, logs in known.items()}
        self._live = live_runs(self._connection, runs)

    @property
    def is_stored(self) -> bool:
        """True if no row waits for `flush`."""
        return not self._held

    def known(self, run: str) -> list[KnownImport]:
        """Return the logs that were imported into `run`, in order of their first import."""
        return list(self._known[run].values())

    def is_live(self, run: str) -> bool:
        """Return whether ranks of `run` have reported data."""
        return run in self._live

    def stored(self, run: str) -> StoredScalars:
        """Return a function that returns the stored and the held scalars of an incarnation of `run`."""
        in_store = stored_scalars(self._connection, run)

        def scalars(incarnation: str) -> pa.Table:
            found = in_store(incarnation)
            held = [
                batch.tables["scalars"].filter(pc.field("incarnation") == incarnation).select(found.column_names)
                for batch in self._held
                if incarnation in batch.watermarks and "scalars" in batch.tables
            ]
            return pa.concat_tables([found, *(table.cast(found.schema) for table in held)])

        return scalars

    def append(self, batch: Batch) -> Commit:
        """Hold the new rows of `batch`, whose number is in the result; store all held rows if they are many.

        Raises IngestError for rows that the store would refuse, so that they do not prevent the storage of other logs.
        """
        stored = {incarnation: self.watermark(incarnation) for incarnation in batch.watermarks}
        try:
            tables = {name: newer(conform(table, name), stored) for name, table in batch.tables.items()}
        except BatchError as error:
            raise IngestError(str(error)) from error
        rows = {name: table.num_rows for name, table in tables.items() if table.num_rows}
        forward = {incarnation: seq for incarnation, seq in batch.watermarks.items() if seq > stored[incarnation]}
        self._note_imports(batch)
        if rows or forward:
            self._held.append(Batch(tables={name: tables[name] for name in rows}, watermarks=forward))
            self._rows += sum(rows.values())
            self._watermarks |= forward
        if self._rows >= GROUP_ROWS:
            self.flush()
        return Commit(version=0, rows=rows, files=0, seconds=0.0)

    def watermark(self, incarnation: str) -> int:
        """Return the last stored or held sequence number of `incarnation`, or -1 without one."""
        if incarnation not in self._watermarks:  # a refresh takes 2 ms: once for a group suffices
            self._watermarks[incarnation] = self._writer.watermark(incarnation, refresh=not self._watermarks)
        return self._watermarks[incarnation]

    def flush(self) -> None:
        """Store the held rows with one commit. After a StoreError, they are not held any more."""
        held, self._held, self._rows, self._watermarks = self._held, [], 0, {}
        if not held:
            return
        tables: dict[str, list[pa.Table]] = {}
        watermarks: dict[str, int] = {}
        for batch in held:
            watermarks |= batch.watermarks
            for name, table in batch.tables.items():
                tables.setdefault(name, []).append(table)
        whole = {name: concatenated(name, parts) for name, parts in tables.items()}
        self._writer.append(Batch(tables=whole, watermarks=watermarks))
        self._on_stored()

    def _note_imports(self, batch: Batch) -> None:
        """Add the import event of a log, which is in a batch without watermarks, to the known imports of its run."""
        events = batch.tables.get("events")
        if batch.watermarks or events is None:
            return
        for run, details in zip(events["run"].to_pylist(), events["details"].to_pylist(), strict=True):
            log = KnownImport.from_json(details)
            self._known[run][log.incarnation] = log
