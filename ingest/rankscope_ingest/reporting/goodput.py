"""Read the goodput of all runs from the store while runs continue: the share of the time spent in steps that count.

The store contains all launches of a run and survives a restart of the service, so that no sums are kept here. Rows that
are not committed are not included: the ratio is as old as the last commit, and as the last read.
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
"""Datasets that goodput is not computed from. A commit of these only changes no ratio."""

READ_SECONDS: Final = 20.0
_MAX_INTERVALS: Final = 15
"""The ratio of a long run changes slowly: the pause between reads grows up to this many intervals."""

log = logging.getLogger(__name__)

Ratios = Mapping[str, float]


def read_goodput(path: str) -> Ratios:
    """Return the goodput of each run in the store at `path` that has one."""
    with connect(path, single_threaded=True) as connection:
        rows = connection.query("SELECT run, goodput FROM goodput WHERE goodput IS NOT NULL").to_pylist()
    return {row["run"]: row["goodput"] for row in rows}


class GoodputReader:
    """The latest goodput of each run. It is read again after a commit, within the limits of a `ReadBudget`."""

    def __init__(
        self,
        read: Callable[[], Ratios],
        commits: Callable[[], int],
        *,
        read_seconds: float = READ_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._commits = commits
        self._commits_seen = -1  # the first read includes data of earlier services
        self._budget = ReadBudget(read_seconds, clock=clock, max_intervals=_MAX_INTERVALS)
        self.ratios: Ratios = {}

    async def read_if_due(self) -> None:
        """Read in a thread if a read is due. A failed read is logged and retried."""
        if self.is_due:
            try:
                await asyncio.to_thread(self.read)
            except (StoreError, OSError) as error:
                log.warning("goodput cannot be read, retrying: %s", error)

    @property
    def is_due(self) -> bool:
        """Return whether the budget allows a read and rows were committed since the last one."""
        return self._budget.is_due and self._commits() > self._commits_seen

    def read(self) -> None:
        """Read the ratios. Blocks until the store has answered."""
        commits = self._commits()
        with self._budget.reading():
            self.ratios = self._read()
            self._commits_seen = commits
