"""Which steps a quantity is measured at. Pure: told of each step once, in order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """From `start_step` on every n-th step, `times` times; without them from the first step, and without end."""

    start_step: int | None = None
    every: int = 1
    times: int | None = None


class Schedule:
    """Counts the steps of one quantity. The first step at or behind `start_step` is measured, then every n-th."""

    def __init__(self, timing: Timing) -> None:
        self.stretch = 1
        """Of the steps that are due every so many-th is measured; times are counted as ever."""
        self._timing = timing
        self._seen = 0
        self._taken = 0

    @property
    def is_over(self) -> bool:
        """Return whether no further step will be measured."""
        return self._timing.times is not None and self._taken >= self._timing.times

    @property
    def period(self) -> int:
        """Return how many steps lie between two that are measured."""
        return self._timing.every * self.stretch

    def begins(self, step: int) -> bool:
        """Note that step number `step` begins; return whether it is due. Numbers may jump, steps are counted."""
        timing = self._timing
        if self.is_over or (timing.start_step is not None and not self._seen and step < timing.start_step):
            return False
        due = self._seen % self.period == 0
        self._seen += 1
        return due

    def taken(self) -> None:
        """Note that a step that was due has been measured."""
        self._taken += 1
