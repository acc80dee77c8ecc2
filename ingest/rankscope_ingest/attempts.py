"""Numbering of attempts: each new launch of a known run is its next attempt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable


class AttemptBook:
    """launch_id -> 0, 1, … within each run; filled from the store when the service starts."""

    def __init__(self, known: Iterable[tuple[str, str, int]] = ()) -> None:
        """Take (run, launch_id, attempt) triples of the past."""
        self._numbers: dict[str, dict[str, int]] = defaultdict(dict)
        for run, launch_id, attempt in known:
            self._numbers[run][launch_id] = attempt

    def number(self, run: str, launch_id: str) -> tuple[int, bool]:
        """Return the attempt of this launch, and whether it was heard of for the first time."""
        launches = self._numbers[run]
        if launch_id in launches:
            return launches[launch_id], False
        launches[launch_id] = max(launches.values(), default=-1) + 1
        return launches[launch_id], True

    def latest(self, run: str) -> int | None:
        """Return the highest attempt of `run`; None for an unknown run."""
        return max(self._numbers[run].values(), default=None) if run in self._numbers else None
