"""How much of a run's time went into steps that count, asked of the store now and then while runs go on.

The store knows all launches of a run and survives the service, so nothing is added up here. What was not committed yet
is not in it: the ratio is as old as the last commit, and as the last look.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from rankscope_storage.base.errors import StoreError
from rankscope_storage.connection import connect

WITHOUT_TIME: Final = frozenset({"tensor_stats", "tensors", "samples"})
"""Datasets of which no row says what time went into. A commit of these alone leaves every ratio as it was."""

LOOK_SECONDS: Final = 20.0
_LONGEST: Final = 15
"""What goes on for long changes its ratio slowly: each pause is longer by the first, until it is so many of them."""
_SHARE: Final = 0.02
"""Of the time of one core, at most this much goes into looking, however long the history is."""

log = logging.getLogger(__name__)

Ratios = Mapping[str, float]


def read_goodput(path: str) -> Ratios:
    """Return the goodput of every run in the store that has one."""
    with connect(path, single_threaded=True) as connection:
        rows = connection.query("SELECT run, goodput FROM goodput WHERE goodput IS NOT NULL").to_pylist()
    return {row["run"]: row["goodput"] for row in rows}


class GoodputReader:
    """Looks again when something was committed since, and never for a larger share of the time than allowed."""

    def __init__(
        self,
        read: Callable[[], Ratios],
        commits: Callable[[], int],
        *,
        look_seconds: float = LOOK_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._commits = commits
        self._look_seconds = look_seconds
        self._clock = clock
        self._commits_seen = -1  # what a former service stored is asked for as well
        self._next_at = float("-inf")
        self._looks = 0
        self.ratios: Ratios = {}

    async def run(self) -> None:
        """Look whenever that is due, until cancelled."""
        while True:
            if self.due():
                try:
                    await asyncio.to_thread(self.look)
                except (StoreError, OSError) as error:
                    log.warning("goodput cannot be read, it is tried again: %s", error)
            await asyncio.sleep(min(1.0, self._look_seconds))

    def due(self) -> bool:
        """Return whether it is time, and there is something new."""
        return self._clock() >= self._next_at and self._commits() > self._commits_seen

    def look(self) -> None:
        """Read; blocks as long as that takes."""
        began, commits = self._clock(), self._commits()
        self._next_at = began + self._look_seconds
        self.ratios = self._read()
        self._commits_seen = commits
        self._looks = min(self._looks + 1, _LONGEST)
        self._next_at = began + max(self._looks * self._look_seconds, (self._clock() - began) / _SHARE)
