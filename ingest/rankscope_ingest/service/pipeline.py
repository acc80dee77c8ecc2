"""The path of received rows to the store: batcher, flusher, remote write and quarantine, with counts of commits."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from rankscope_ingest.base.config import ServiceConfig
from rankscope_ingest.live.goodput import WITHOUT_TIME
from rankscope_ingest.live.service_metrics import ServiceMetrics
from rankscope_ingest.pipeline.batcher import Batcher, PendingBatch
from rankscope_ingest.pipeline.flusher import Flusher, Quarantine
from rankscope_ingest.pipeline.maintenance_schedule import retention_job, run_maintenance
from rankscope_ingest.pipeline.rows import Stamp
from rankscope_ingest.remote_write.handler import RemoteWrite
from rankscope_storage.api.store import Commit, Writer
from rankscope_storage.base.errors import StoreError
from rankscope_storage.base.service_catalogue import ROWS_SET_ASIDE

log = logging.getLogger(__name__)

_RETRY_SECONDS: Final = 1.0


def make_batcher(config: ServiceConfig) -> Batcher:
    """Return a batcher that uses the limits of the configuration section [ingest]."""
    return Batcher(
        flush_rows=config.ingest.flush_rows,
        flush_after_seconds=config.ingest.flush_after_seconds,
        max_pending_rows=config.ingest.max_pending_rows,
    )


class Pipeline:
    """The component that writes to the store, and the components that pass rows to it.

    Other components add rows to `batcher`.
    """

    def __init__(
        self,
        config: ServiceConfig,
        writer: Writer,
        batcher: Batcher,
        metrics: ServiceMetrics,
        *,
        stamp: Callable[[], Stamp],
        on_commit: Callable[[PendingBatch, Commit], None],
    ) -> None:
        """Create the flusher and the remote-write receiver.

        `on_commit` is called after each commit of a batch. `stamp` returns the time and arrival number of a row that
        the pipeline itself creates, such as a quarantine event.
        """
        self._config = config
        self._writer = writer
        self._metrics = metrics
        self._on_commit = on_commit
        self.batcher = batcher
        self.commits = 0
        self.commits_of_time = 0
        self.rows_stored = 0
        aside = Quarantine(Path(config.store.path), stamp=stamp, count=lambda rows: metrics.count(ROWS_SET_ASIDE, rows))
        self.flusher = Flusher(writer, batcher, on_commit=self._on_batch, clock=time.monotonic, aside=aside)
        self.remote_write = RemoteWrite(
            config.remote_write, writer, metrics, on_commit=self._on_remote_write, clock=time.monotonic, aside=aside
        )

    @property
    def rows_pending(self) -> int:
        """Return the number of rows that are not committed yet."""
        return self.batcher.pending_rows + self.remote_write.pending_rows

    @property
    def degraded(self) -> str | None:
        """Return the reason why the store accepts rows more slowly than they arrive.

        Return None if the store is fast enough.
        """
        is_full = "rows arrive faster than the store commits them: polling waits for commits"
        return self.flusher.trouble or self.remote_write.trouble or (is_full if self.batcher.is_full else None)

    async def watermark(self, incarnation: str) -> int:
        """Return the sequence number of the last committed record of a process. Retry until the store can be read."""
        while True:
            try:
                return await self.flusher.watermark(incarnation)
            except StoreError as error:
                # A failed read of the store must not cause a rank to be read from the beginning.
                log.warning("watermark cannot be read from the store, retrying: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)

    def maintain(self) -> Coroutine[Any, Any, None]:
        """Run compaction, vacuum and retention of the store until the coroutine is cancelled."""
        seconds = self._config.retention.every_seconds
        return run_maintenance(
            self._writer,
            lambda: self.commits,
            retain=retention_job(self._config),
            retain_seconds=seconds,
            on_compaction=self._metrics.compacted,
        )

    def _on_batch(self, batch: PendingBatch, commit: Commit) -> None:
        self._count(commit)
        self._on_commit(batch, commit)

    def _on_remote_write(self, _: PendingBatch, commit: Commit) -> None:
        self._count(commit)
        if commit.rows:
            self._metrics.committed(commit.rows, commit.seconds, time.time_ns() // 1000)

    def _count(self, commit: Commit) -> None:
        self.commits += 1
        self.commits_of_time += bool(commit.rows.keys() - WITHOUT_TIME)
        self.rows_stored += sum(commit.rows.values())
