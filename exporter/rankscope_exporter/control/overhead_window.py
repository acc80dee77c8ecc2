"""Measures the overhead of the monitor over windows of steps, and computes the factor for the sampling interval.

A window consists of whole sampling cycles, so that consecutive windows are comparable. It is long enough that a few
scrapes per minute do not change its result. The module is pure: the caller passes the time and the CPU time of the
monitor.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final

MOST_STRETCH: Final = 1024
"""Largest factor of the sampling interval.

Beyond this factor almost nothing is measured, so an overhead above `max_overhead` does not come from sampling.
"""

LEAST_STEPS: Final = 20
LEAST_SECONDS: Final = 10.0
SETTLING_STEPS: Final = 5
"""Number of steps that are not evaluated after the start and after each restart of the overhead measurement.

Memory allocations that happen only once occur in these steps.
"""

LOW_SHARE: Final = 0.8
"""Largest expected overhead after halving the sampling interval, as a share of the limit `max_overhead`.

If the expected overhead is higher, the interval is not halved, because the next window would revert the change.
"""

PATIENCE: Final = 5
"""Number of consecutive windows with low overhead before the sampling interval is halved."""


class Verdict(enum.Enum):
    """The decision about the sampling interval after the overhead in a window was evaluated."""

    KEEPS = "keeps"  # the interval remains
    OVER = "over"  # the interval must become longer
    LOW = "low"  # the overhead was low for `PATIENCE` windows


@dataclass(frozen=True, slots=True)
class WindowResult:
    """The result of one overhead window.

    It contains the decision about the sampling interval, the overhead as a share of the elapsed time, and the required
    factor of the sampling interval.
    """

    verdict: Verdict
    share: float
    stretch: int


class OverheadWindow:
    """Divides the training into windows of steps, and measures the overhead of the monitor in each window.

    `stretch` is the present factor of the sampling interval.
    """

    def __init__(
        self, max_overhead: float, *, least_steps: int = LEAST_STEPS, least_seconds: float = LEAST_SECONDS
    ) -> None:
        self.max_overhead = max_overhead
        self.stretch = 1
        self.share: float | None = None
        """Overhead in the last window, as a share of the elapsed time; None before the end of the first window."""
        self._least_steps = least_steps
        self._least_seconds = least_seconds
        self._steps = -SETTLING_STEPS
        self._began: tuple[float, float] | None = None  # time and cost
        self._low_windows = 0

    def restart(self, stretch: int | None = None) -> None:
        """Start a new overhead window; `stretch`, if given, becomes the factor of the sampling interval."""
        if stretch is not None and stretch != self.stretch:
            self.stretch, self._low_windows = stretch, 0
        self._steps, self._began = -SETTLING_STEPS, None

    def may_end(self, period: int) -> bool:
        """Count a step. Return whether a window may begin or end before it, once in `period` steps (a cycle)."""
        self._steps += 1
        return self._steps == 0 or (self._steps >= self._least_steps and self._steps % max(1, period) == 0)

    def is_long_enough(self, now: float) -> bool:
        """Return whether no window has begun, or it can be evaluated: only then does the caller take the cost."""
        return self._began is None or now - self._began[0] >= self._least_seconds

    def evaluate(self, now: float, cost: float) -> WindowResult | None:
        """Return the result of the overhead window that ends at time `now`, in seconds.

        The next window begins at `now` as well. Return None if no window has begun, or if the window is too short.
        `cost` is the CPU time of the monitor so far, in seconds.
        """
        if self._began is None:
            self._began, self._steps = (now, cost), 0
            return None
        seconds, spent = now - self._began[0], cost - self._began[1]
        if seconds < self._least_seconds:
            return None
        self._began, self._steps = (now, cost), 0
        self.share = share = max(0.0, spent) / seconds
        if share > self.max_overhead:
            self._low_windows = 0
            required = self.stretch * 2 ** math.ceil(math.log2(share / self.max_overhead))
            required = min(MOST_STRETCH, max(2 * self.stretch, required))
            return WindowResult(Verdict.OVER if required > self.stretch else Verdict.KEEPS, share, required)
        is_low = self.stretch > 1 and 2 * share <= LOW_SHARE * self.max_overhead
        self._low_windows = self._low_windows + 1 if is_low else 0
        if self._low_windows >= PATIENCE:
            return WindowResult(Verdict.LOW, share, self.stretch // 2)
        return WindowResult(Verdict.KEEPS, share, self.stretch)
