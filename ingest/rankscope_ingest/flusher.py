"""Batches to the store, one at a time, in a thread. What cannot be committed is kept and tried again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

from rankscope_ingest.batch import Batcher, PendingBatch
from rankscope_storage.errors import ShardLostError, StoreError
from rankscope_storage.store import Batch

log = logging.getLogger(__name__)

CHECK_SECONDS: Final = 0.25
RETRY_SECONDS: Final = (0.5, 1.0, 2.0, 5.0, 10.0)


class Committed(Protocol):
    """What an append tells about itself."""

    @property
    def rows(self) -> Mapping[str, int]:
        """Rows stored, by dataset."""
        ...

    @property
    def seconds(self) -> float:
        """How long it took."""
        ...


class Appender(Protocol):
    """The store as the service sees it; every method blocks and may raise StoreError."""

    def append(self, batch: Batch) -> Committed:
        """Store the batch durably, dropping what is stored already."""
        ...

    def watermark(self, incarnation: str) -> int:
        """Return the last seq stored of a process, -1 when there is none."""
        ...


class Flusher:
    """Commits what the batcher gathers. Runs on the event loop; only the append itself is in a thread."""

    def __init__(
        self,
        appender: Appender,
        batcher: Batcher,
        *,
        on_commit: Callable[[PendingBatch, Committed], None],
        clock: Callable[[], float],
        retry_seconds: tuple[float, ...] = RETRY_SECONDS,
    ) -> None:
        self._appender = appender
        self._batcher = batcher
        self._on_commit = on_commit
        self._clock = clock
        self._retry_seconds = retry_seconds
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rankscope-flush")
        self._wake = asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []
        self._failures = 0
        self._retry_at = 0.0
        self.trouble: str | None = None

    def wake(self) -> None:
        """Look at once whether a batch is due."""
        self._wake.set()

    async def watermark(self, incarnation: str) -> int:
        """Return the last seq stored of a process; asked in the flush thread, behind which it would wait anyway."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._appender.watermark, incarnation)

    async def commit_now(self) -> None:
        """Return when everything gathered so far is committed, however often that has to be tried."""
        if self._batcher.is_empty and self._batcher.pending_rows == 0:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._batcher.want_flush()
        self.wake()
        await waiter

    async def run(self) -> None:
        """Flush whenever a batch is due, until cancelled. Raises ShardLostError when the store is no longer ours."""
        try:
            while True:
                try:
                    async with asyncio.timeout(CHECK_SECONDS):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()
                now = self._clock()
                if self._batcher.is_empty:
                    _release(self._waiters)  # what they waited for was in flight, and is committed by now
                elif now >= self._retry_at and self._batcher.due(now) is not None:
                    await self._flush()
        finally:
            # Not waited for: on an orderly stop nothing is in flight, and on any other the store protects itself.
            self._thread.shutdown(wait=False)

    async def _flush(self) -> None:
        batch = self._batcher.take()
        waiters, self._waiters = self._waiters, []
        try:
            commit = await asyncio.get_running_loop().run_in_executor(self._thread, self._append, batch)
        except ShardLostError:
            raise
        except StoreError as error:
            self._keep(batch, waiters, str(error))
            return
        self._batcher.settled(batch)
        self._failures, self.trouble = 0, None
        self._on_commit(batch, commit)
        _release(waiters)

    def _append(self, batch: PendingBatch) -> Committed:
        return self._appender.append(Batch(tables=batch.tables(), watermarks=batch.watermarks))

    def _keep(self, batch: PendingBatch, waiters: list[asyncio.Future[None]], why: str) -> None:
        now = self._clock()
        self._batcher.put_back(batch, now)
        self._batcher.want_flush()
        self._waiters = [*waiters, *self._waiters]
        self._retry_at = now + self._retry_seconds[min(self._failures, len(self._retry_seconds) - 1)]
        self._failures += 1
        self.trouble = f"the store takes nothing: {why}"
        log.error("flush failed, rows are kept and tried again: %s", why, extra={"rows": batch.rows})


def _release(waiters: list[asyncio.Future[None]]) -> None:
    while waiters:
        waiter = waiters.pop()
        if not waiter.done():
            waiter.set_result(None)
