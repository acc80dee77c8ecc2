"""Numbering of attempts: each new launch of a known run is its next attempt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable


class AttemptBook:
    """launch_id -> 0, 1, … within each run; filled from the store when the service starts."""

    def __init__(self, known: Iterable[tuple[str, str, int]] = ()) -> None:
        """Take (run, launch_id, attempt) triples of the past, in order of attempts."""
        self._numbers: dict[str, dict[str, int]] = defaultdict(dict)
        self._highest: dict[str, int] = {}
        for run, launch_id, attempt in known:
            self._note(run, launch_id, attempt)

    def number(self, run: str, launch_id: str, is_over: Callable[[int], bool] | None = None) -> tuple[int, bool]:
        """Return the attempt of this launch, and whether it is new: unknown, or the known one is over."""
        known = self._numbers[run].get(launch_id)
        if known is not None and not (is_over and is_over(known)):
            return known, False
        return self._note(run, launch_id, self._highest.get(run, -1) + 1), True

    def latest(self, run: str) -> int | None:
        """Return the highest attempt of `run`; None for an unknown run."""
        return self._highest.get(run)

    def _note(self, run: str, launch_id: str, number: int) -> int:
        self._numbers[run][launch_id] = number
        self._highest[run] = max(number, self._highest.get(run, 0))
        return number
