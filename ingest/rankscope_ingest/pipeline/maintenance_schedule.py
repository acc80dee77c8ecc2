"""Schedule maintenance of the store while the service flushes batches.

Compaction runs after a number of commits and also at an interval; vacuum and retention run only at intervals. All jobs
run one after another in one thread, and need no lock that a flush holds. The thread has a lower priority, so that
maintenance does not delay the receiving of records on a busy machine. Compaction uses hundreds of megabytes, which are
returned to the system after each job. After a job that used little memory, no memory is returned, because the next
flush would request it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from rankscope_ingest.base.config import ServiceConfig
from rankscope_ingest.base.memory import MUCH_BYTES, resident_bytes, trim
from rankscope_storage.api.store import Writer
from rankscope_storage.base.errors import StoreError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.location import located
from rankscope_storage.maintenance.compaction import CompactionReport
from rankscope_storage.maintenance.retention import RetentionReport, retain

log = logging.getLogger(__name__)

COMPACT_EVERY_COMMITS: Final = 50
MAINTAIN_SECONDS: Final = 1800.0
FIRST_RETENTION_SECONDS: Final = 60.0
"""Delay in seconds of the first retention after the start.

The delay exists because the service reads the backlog of all ranks directly after its start.
"""
CHECK_SECONDS: Final = 1.0
_NICER: Final = 10
"""Nice value of the maintenance thread, with which the thread gets about a tenth of a busy processor.

A higher value is not used, because the thread sometimes holds the GIL, for which other threads then wait.
"""

Retain = Callable[[], RetentionReport]
"""Callable that deletes expired rows in one commit, and reports how many commits for other expired rows remain."""


class MaintenanceSchedule:
    """Runs the maintenance jobs of `store` when they are due. Times are in monotonic seconds.

    `on_compaction` receives the result of each compaction, in the maintenance thread. No job is due while
    `is_maintaining` returns false, because another service maintains the store.
    """

    def __init__(
        self,
        store: Writer,
        now: float,
        *,
        retain: Retain | None = None,
        retain_seconds: float = 0,
        first_retention_seconds: float = FIRST_RETENTION_SECONDS,
        on_compaction: Callable[[CompactionReport], None] = lambda _: None,
        is_maintaining: Callable[[], bool] = lambda: True,
    ) -> None:
        self._is_maintaining = is_maintaining
        self._store = store
        self._on_compaction = on_compaction
        self._retain = retain
        self._retain_seconds = retain_seconds
        self._compacted_at = 0
        self._maintained_at = now
        self._retain_at = now + first_retention_seconds

    def due(self, now: float, commits: int) -> Iterator[Callable[[], object]]:
        """Yield the jobs that are due at `now` after `commits` commits.

        A failed job is due again at its next regular time.
        """
        if not self._is_maintaining():
            return
        maintained = now - self._maintained_at >= MAINTAIN_SECONDS
        # Also by the clock: a completed run and a past day cause no more commits, but have files to compact.
        if maintained or commits - self._compacted_at >= COMPACT_EVERY_COMMITS:
            self._compacted_at = commits
            yield self._compact
        if maintained:
            self._maintained_at = now
            yield self._store.maintain
        if self._retain is not None and now >= self._retain_at:
            self._retain_at = now + self._retain_seconds
            yield functools.partial(self._retain_some, self._retain)

    def _compact(self) -> None:
        """Run compaction, unless another process compacts the store."""
        report = self._store.compact()
        if report.refused:
            log.info("compaction skipped: another process compacts the store")
        self._on_compaction(report)

    def _retain_some(self, retain: Retain) -> None:
        """Delete expired rows in one commit.

        If further commits are necessary, the next one follows after the other due jobs.
        """
        report = retain()
        for text in report.failed:
            log.warning("retention failed for some files, retrying in the next retention run: %s", text)
        if report.left:
            self._retain_at = 0.0
        if report.files:
            log.info(
                "retention deleted %d rows in %d files and stored %d rows of rollups for them",
                *(report.rows, report.files, report.added_rows),
            )

    async def run(self, commits: Callable[[], int], *, check_seconds: float = CHECK_SECONDS) -> None:
        """Run due jobs until this coroutine is cancelled. `commits` returns the number of commits so far."""
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, "rankscope-maintenance", initializer=_lower_priority)
        try:
            while True:
                await asyncio.sleep(check_seconds)
                for job in self.due(time.monotonic(), commits()):
                    before = resident_bytes()
                    try:
                        await loop.run_in_executor(thread, job)
                    except StoreError as error:
                        log.warning("maintenance of the store failed, retrying at its next time: %s", error)
                    except Exception:  # a defect in a library must not stop the storing of rows
                        log.exception("unexpected error in maintenance of the store, retrying at its next time")
                    if resident_bytes() - before > MUCH_BYTES:
                        # Not in the maintenance thread: malloc_trim holds the allocator's locks, and a thread of low
                        # priority could hold them for a long time and block allocations of all threads.
                        await asyncio.to_thread(trim)
        finally:
            thread.shutdown(wait=False)


def retention_job(config: ServiceConfig) -> Retain | None:
    """Return the retention job that the configuration section [retention] defines.

    The result is None if retention is off.
    """
    policy = config.retention.policy
    if not policy.is_on:
        return None
    root = located(config.store.path)
    return lambda: retain(root, policy, sync_to_disk, now=dt.datetime.now(dt.UTC), works=1)


def _lower_priority() -> None:
    """Raise the nice value of the present thread, on systems where each thread has a nice value."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + _NICER)
