"""Restarts, told from the steps alone: a stream whose step goes back has been started again."""

from __future__ import annotations


class AttemptCounter:
    """Counts restarts per rank, so that interleaved ranks never look like one.

    A step that does not increase opens the next attempt; with `repeats`, the same step may come again (a log that
    writes several lines a step) and only a smaller one does.
    """

    def __init__(self, *, repeats: bool = False) -> None:
        self._repeats = repeats
        self._last: dict[int | None, int] = {}
        self._attempts: dict[int | None, int] = {}

    def attempt(self, rank: int | None, step: int | None) -> int:
        """Return the attempt, from 0, that `step` of `rank` belongs to; without a step, the one that is going on."""
        current = self._attempts.get(rank, 0)
        if step is None:
            return current
        last = self._last.get(rank)
        self._last[rank] = step
        if last is None or step > last or (self._repeats and step == last):
            return current
        self._attempts[rank] = current + 1
        return current + 1
