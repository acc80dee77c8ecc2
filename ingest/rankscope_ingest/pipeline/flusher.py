"""Batches to the store, one at a time, in a thread. What cannot be committed is kept and tried again.

A commit that failed may have been stored all the same. The store finds that out when the very same batch comes again,
so a batch that failed is never merged with what came since: rows without a seq would be stored twice. Rows that the
store refuses for what they are would be refused for ever: they are set aside, and all others go on (`quarantine`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa

from rankscope_ingest.base.background import WakeUp
from rankscope_ingest.pipeline.batcher import PendingBatch
from rankscope_ingest.pipeline.quarantine import halves
from rankscope_storage.api.store import Batch
from rankscope_storage.base.errors import BatchError, ShardLostError, StoreError

log = logging.getLogger(__name__)

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


class Gathered(Protocol):
    """What is gathered for the next commit, as `Batcher` does it."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is gathered."""
        ...

    def tell(self, flusher: Callable[[], None]) -> None:
        """Call `flusher` from now on when something may be due sooner than `rest_seconds` said."""
        ...

    def want_flush(self) -> None:
        """Make the batch due at once."""
        ...

    def due(self, now: float) -> str | None:
        """Return why the batch should be flushed now, or None."""
        ...

    def rest_seconds(self, now: float) -> float:
        """Return for how long nothing will be due if nothing is told by then, whatever was told before."""
        ...

    def take(self) -> PendingBatch:
        """Return everything gathered; it stays counted until `settled`."""
        ...

    def release(self, batch: PendingBatch) -> None:
        """Forget `batch`: it is committed."""
        ...


class QuarantineSink(Protocol):
    """Where rows go that no store takes, as `Quarantine` does it."""

    def keep(self, batch: PendingBatch, why: str) -> Path:
        """Write the rows durably; return where they are. Blocks, and may raise OSError."""
        ...

    def told(self, batch: PendingBatch, why: str, folder: Path) -> Mapping[str, pa.Table]:
        """Tell of it; return the rows that say so in the store."""
        ...


@dataclass(slots=True, kw_only=True)
class _PendingCommit:
    """A batch on its way, with those who wait for it. `batch` is made once: the store knows it again by identity."""

    pending: PendingBatch
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    batch: Batch | None = None
    is_aside: bool = False


class Flusher:
    """Commits what the batcher gathers. Runs on the event loop; only the append itself is in a thread."""

    def __init__(
        self,
        appender: Appender,
        batcher: Gathered,
        *,
        on_commit: Callable[[PendingBatch, Committed], None],
        clock: Callable[[], float],
        retry_seconds: tuple[float, ...] = RETRY_SECONDS,
        aside: QuarantineSink | None = None,
        halves: Callable[[Any], tuple[PendingBatch, PendingBatch] | None] = halves,
    ) -> None:
        self._aside = aside
        self._halves = halves
        self._appender = appender
        self._batcher = batcher
        self._on_commit = on_commit
        self._clock = clock
        self._retry_seconds = retry_seconds
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rankscope-flush")
        self._alarm = WakeUp()
        batcher.tell(self._alarm.set)
        self._waiters: list[asyncio.Future[None]] = []  # for what is gathered
        self._pending_commits: deque[_PendingCommit] = (
            deque()
        )  # taken and not committed yet; several where one had to be divided
        self._failures = 0
        self._retry_at = 0.0
        self.trouble: str | None = None

    async def watermark(self, incarnation: str) -> int:
        """Return the last seq stored of a process; asked in the flush thread, behind which it would wait anyway."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._appender.watermark, incarnation)

    async def commit_now(self) -> None:
        """Return when everything gathered so far is committed, however often that has to be tried."""
        if self._batcher.is_empty and not self._pending_commits:
            return
        waiter = asyncio.get_running_loop().create_future()
        waiters = self._pending_commits[-1].waiters if self._batcher.is_empty else self._waiters
        waiters.append(waiter)
        self._batcher.want_flush()
        await waiter

    async def run(self) -> None:
        """Flush whenever a batch is due, until cancelled. Raises ShardLostError when the store is no longer ours."""
        try:
            while True:
                await self._alarm.wait(self._rest_seconds(self._clock()))
                await self._look()
        finally:
            # Not waited for: on an orderly stop nothing is in flight, and on any other the store protects itself.
            self._thread.shutdown(wait=False)

    def _rest_seconds(self, now: float) -> float:
        return self._retry_at - now if self._pending_commits else self._batcher.rest_seconds(now)

    async def _look(self) -> None:
        """Do what is due now: what failed first, then what was gathered."""
        now = self._clock()
        if self._pending_commits:
            if now >= self._retry_at:
                await self._flush(self._pending_commits[0])
        elif self._batcher.due(now) is not None:
            self._pending_commits.append(_PendingCommit(pending=self._batcher.take(), waiters=self._waiters))
            self._waiters = []
            await self._flush(self._pending_commits[0])

    async def _flush(self, flight: _PendingCommit) -> None:
        try:
            commit = await asyncio.get_running_loop().run_in_executor(self._thread, self._append, flight)
        except ShardLostError:
            raise
        except BatchError as error:
            await self._split_or_quarantine(flight, str(error))
            return
        except StoreError as error:
            self._retry_later(flight.pending, str(error))
            return
        except Exception as error:  # a fault of ours or of a library must end neither the service nor other runs' rows
            log.exception("the store failed in a way nobody thought of")
            self._retry_later(flight.pending, f"{type(error).__name__}: {error}")
            return
        self._batcher.release(flight.pending)
        self._pending_commits.popleft()
        self._failures, self.trouble = 0, None
        self._on_commit(flight.pending, commit)
        _release(flight.waiters)

    def _append(self, flight: _PendingCommit) -> Committed:
        if flight.batch is None:
            pending = flight.pending
            flight.batch = Batch(tables=_tables(pending), watermarks=pending.watermarks, info=pending.info)
        return self._appender.append(flight.batch)

    async def _split_or_quarantine(self, flight: _PendingCommit, why: str) -> None:
        """Divide a batch that does not fit; set aside what does not fit alone, and store that this was done."""
        if self._aside is None or flight.is_aside:
            self._retry_later(flight.pending, why)
            return
        pair = self._halves(flight.pending)
        if pair is not None:
            first, second = pair
            self._pending_commits.popleft()
            self._pending_commits.extendleft(
                [_PendingCommit(pending=second, waiters=flight.waiters), _PendingCommit(pending=first)]
            )
            return
        try:
            loop = asyncio.get_running_loop()
            folder = await loop.run_in_executor(self._thread, self._aside.keep, flight.pending, why)
        except Exception as error:  # noqa: BLE001 - no room there either, or worse: nothing is given up before it is kept
            self._retry_later(flight.pending, f"{why}; and it cannot be set aside: {error}")
            return
        tables = self._aside.told(flight.pending, why, folder)
        flight.batch = Batch(tables=tables, watermarks=flight.pending.watermarks, info=flight.pending.info)
        flight.is_aside = True

    def _retry_later(self, batch: PendingBatch, why: str) -> None:
        self._retry_at = self._clock() + self._retry_seconds[min(self._failures, len(self._retry_seconds) - 1)]
        self._failures += 1
        self.trouble = f"the store takes nothing: {why}"
        log.error("flush failed, rows are kept and tried again: %s", why, extra={"rows": batch.rows})


def _tables(pending: PendingBatch) -> dict[str, pa.Table]:
    """Make the rows. That depends on nothing else, so what fails once fails always."""
    try:
        return pending.tables()
    except MemoryError:
        raise
    except Exception as error:
        log.exception("rows cannot be made of what came")
        raise BatchError(f"rows cannot be made of what came: {type(error).__name__}: {error}") from error


def _release(waiters: list[asyncio.Future[None]]) -> None:
    while waiters:
        waiter = waiters.pop()
        if not waiter.done():
            waiter.set_result(None)
