"""The schedule of one quantity: it decides at which steps the quantity is sampled.

`ActiveQuantities.decide_sampling` combines the schedules of all quantities into the decision about a step.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The steps to sample: every n-th step from `start_step` on, until `times` steps were sampled.

    If `start_step` is None, sampling begins with the first step. If `times` is None, it does not end.
    """

    start_step: int | None = None
    every: int = 1
    times: int | None = None


class Schedule:
    """Decides at which steps one quantity is sampled. `begins` must be called once for each step, in order.

    The first sampled step is the first one with a number of at least `start_step`. After it, every n-th step is
    sampled.
    """

    def __init__(self, timing: Timing) -> None:
        self.stretch = 1
        """Factor by which the sampling interval is multiplied.

        It does not change the number of sampled steps, `times`.
        """
        self._timing = timing
        self._seen = 0
        self._sampled = 0
        self._is_due = False  # the present step is selected
        self.is_over = timing.times == 0
        """True if no further step will be sampled."""

    @property
    def period(self) -> int:
        """The number of steps from one sampled step to the next."""
        return self._timing.every * self.stretch

    def begins(self, step: int) -> bool:
        """Count step number `step`, which begins; return whether it is selected for sampling.

        Step numbers may have gaps.
        """
        timing = self._timing
        if self.is_over or (timing.start_step is not None and not self._seen and step < timing.start_step):
            self._is_due = False
        else:
            self._is_due = self._seen % (timing.every * self.stretch) == 0
            self._seen += 1
        return self._is_due

    def sampled(self) -> None:
        """Count the present step, at which the quantity was measured, if it is selected."""
        if self._is_due:
            self._sampled += 1
            self.is_over = self._timing.times is not None and self._sampled >= self._timing.times
