"""The store's upkeep beside the flushes: compaction by number of commits, clean-up and retention by the clock.

All of it runs in one other thread, one work after the other, and shares no lock with the appends. Where processors are
short that thread gets fewer of them than whatever brings records in: upkeep that lasts longer delays nothing. A merge
holds some hundred megabytes, which are not asked for again until the next one: they go back to the system after each.
What took little gives nothing back: the flushes would only have to ask for it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Protocol

from rankscope_ingest.base.config import ServiceConfig
from rankscope_ingest.base.memory import MUCH_BYTES, resident_bytes, trim
from rankscope_storage.base.errors import StoreError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.maintenance.compaction import CompactionReport
from rankscope_storage.maintenance.retention import RetentionReport, retain

log = logging.getLogger(__name__)

COMPACT_EVERY_COMMITS: Final = 50
MAINTAIN_SECONDS: Final = 1800.0
FIRST_RETENTION_SECONDS: Final = 60.0
"""Between the start, when ranks are read that had nobody for a while, and the first time, whatever the interval."""
_CHECK_SECONDS: Final = 1.0
_NICER: Final = 10
"""Steps of niceness: a tenth of a processor that others want too. Not the most there are: it holds the GIL at times."""

Retain = Callable[[], RetentionReport]
"""Does one piece of what is due, and says how many are left."""


class MaintainableStore(Protocol):
    """The store as its upkeep sees it; both block, and appends go on meanwhile."""

    def compact(self) -> CompactionReport:
        """Merge small files."""
        ...

    def maintain(self) -> Any:
        """Write a checkpoint and remove what nobody needs any more."""
        ...


class MaintenanceSchedule:
    """What is due, in turn. The clock, in seconds, is an argument."""

    def __init__(
        self, store: MaintainableStore, now: float, *, retain: Retain | None = None, retain_seconds: float = 0
    ) -> None:
        self._store = store
        self._retain = retain
        self._retain_seconds = retain_seconds
        self._compacted_at = 0
        self._maintained_at = now
        self._retain_at = now + FIRST_RETENTION_SECONDS

    def due(self, now: float, commits: int) -> Iterator[Callable[[], object]]:
        """Yield the works that are due at `now` after `commits`; whatever becomes of one, it is not due again soon."""
        maintained = now - self._maintained_at >= MAINTAIN_SECONDS
        # Also by the clock: a run that is through and a day that is past make no more commits, but have files to merge.
        if maintained or commits - self._compacted_at >= COMPACT_EVERY_COMMITS:
            self._compacted_at = commits
            yield self._compact
        if maintained:
            self._maintained_at = now
            yield self._store.maintain
        if self._retain is not None and now >= self._retain_at:
            self._retain_at = now + self._retain_seconds
            yield self._retain_some

    def _compact(self) -> None:
        """Merge what is to be merged, unless somebody else is at it."""
        if self._store.compact().refused:
            log.info("another compaction is at work on the store: what is left to merge is left to it")

    def _retain_some(self) -> None:
        """Do one commit of retention; what is left of it comes after the others had their turn."""
        assert self._retain is not None
        report = self._retain()
        for text in report.failed:
            log.warning("something that is too old stays, the next one tries again: %s", text)
        if report.left:
            self._retain_at = 0.0
        if report.files:
            log.info(
                "%d rows in %d files were too old: %d rows of rollups stay of them",
                *(report.rows, report.files, report.added_rows),
            )


def retention_job(config: ServiceConfig) -> Retain | None:
    """Return what carries out [retention]; None when nothing ever goes, or another service of the store does it."""
    policy = config.retention.policy
    if not policy.is_on or not config.store.shard.startswith("0/"):
        return None
    root = Path(config.store.path)
    return lambda: retain(root, policy, sync_to_disk, now=dt.datetime.now(dt.UTC), works=1)


async def run_maintenance(
    store: MaintainableStore, commits: Callable[[], int], *, retain: Retain | None = None, retain_seconds: float = 0
) -> None:
    """Do whatever is due to `store` until cancelled; `commits` counts the commits so far."""
    turns = MaintenanceSchedule(store, time.monotonic(), retain=retain, retain_seconds=retain_seconds)
    loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, "rankscope-upkeep", initializer=_stand_back)
    try:
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            for work in turns.due(time.monotonic(), commits()):
                before = resident_bytes()
                try:
                    await loop.run_in_executor(thread, work)
                except StoreError as error:
                    log.warning("upkeep of the store failed, the next one tries again: %s", error)
                except Exception:  # of a library: rows are stored all the same
                    log.exception("upkeep of the store failed in a way nobody thought of, the next one tries again")
                if resident_bytes() - before > MUCH_BYTES:
                    # Not in that thread: the allocator is locked meanwhile, and who stands back may hold it for long.
                    await asyncio.to_thread(trim)
    finally:
        thread.shutdown(wait=False)


def _stand_back() -> None:
    """Let other threads go first, where a thread has a niceness of its own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + _NICER)
