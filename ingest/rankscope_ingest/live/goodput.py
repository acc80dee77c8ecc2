"""Read the goodput of all runs from the store while the runs continue.

Goodput is the share of the run time that was spent in steps that were not superseded. The store contains all launches
of a run and survives a restart of the service, so this module need not add up times itself. Rows that are not committed
are not included: the goodput is as old as the last commit and the last read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from rankscope_ingest.base.background import ReadBudget
from rankscope_storage.base.errors import StoreError
from rankscope_storage.connection import connect

WITHOUT_TIME: Final = frozenset({"tensor_stats", "tensors", "samples"})
"""Datasets that do not influence goodput. A commit with only these datasets causes no read of the goodput."""

READ_SECONDS: Final = 20.0
_MAX_INTERVALS: Final = 15
"""Maximum pause between two reads of the goodput, as a multiple of READ_SECONDS.

The goodput of a long run changes slowly, so the pause grows with each read.
"""

log = logging.getLogger(__name__)


class GoodputReader:
    """The latest goodput of each run, as read from the store.

    The goodput is read again after a commit. The pause before the next read grows with the number and the duration of
    the reads.
    """

    def __init__(self, path: str, commits: Callable[[], int]) -> None:
        """`path` is that of the store. `commits` returns the number of commits of rows that influence goodput."""
        self._path = path
        self._commits = commits
        self._commits_seen = -1  # the first read includes data of earlier services
        self._budget = ReadBudget(READ_SECONDS, clock=time.monotonic, max_intervals=_MAX_INTERVALS)
        self.ratios: Mapping[str, float] = {}
        """Goodput by run, from 0 to 1. Runs without a goodput are left out."""

    async def read_if_due(self) -> None:
        """Read the goodput of all runs in a thread if a read is due. A failed read is logged and retried."""
        if self._budget.is_due and self._commits() > self._commits_seen:
            try:
                await asyncio.to_thread(self._read)
            except (StoreError, OSError) as error:
                log.warning("goodput cannot be read, retrying: %s", error)

    def _read(self) -> None:
        commits = self._commits()
        with self._budget.reading(), connect(self._path, single_threaded=True) as connection:
            rows = connection.query("SELECT run, goodput FROM goodput WHERE goodput IS NOT NULL").to_pylist()
        self.ratios, self._commits_seen = {row["run"]: row["goodput"] for row in rows}, commits
