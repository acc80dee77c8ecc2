"""Measures the overhead of the monitor over windows, and computes the factor of the sampling interval. Pure.

A window consists of whole sampling cycles, so that consecutive windows are comparable. It is long enough that a few
scrapes per minute do not change its result. The caller passes the time and the cost.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final

MOST_STRETCH: Final = 1024
"""Beyond this factor almost nothing is measured: a remaining overhead does not come from sampling."""

LEAST_STEPS: Final = 20
LEAST_SECONDS: Final = 10.0
SETTLING_STEPS: Final = 5
"""Steps before a window, in which one-time allocations happen."""

LOW_SHARE: Final = 0.8
"""Sampling twice as often must cost less than this share of the limit. Otherwise the next window would revert it."""

PATIENCE: Final = 5
"""Number of consecutive windows with low overhead before the sampling interval is halved."""


class Verdict(enum.Enum):
    """The result of a window."""

    KEEPS = "keeps"  # the interval remains
    OVER = "over"  # the interval must become longer
    LOW = "low"  # the overhead was low for `PATIENCE` windows


@dataclass(frozen=True, slots=True)
class WindowResult:
    """The verdict on one window, its overhead as a share of the time, and the factor that it requires."""

    verdict: Verdict
    share: float
    stretch: int


class OverheadWindow:
    """Counts the steps and the cost of a window. `stretch` is the present factor of the sampling interval."""

    def __init__(
        self, max_overhead: float, *, least_steps: int = LEAST_STEPS, least_seconds: float = LEAST_SECONDS
    ) -> None:
        self.max_overhead = max_overhead
        self.stretch = 1
        self.share: float | None = None
        """Overhead of the last window; None before the end of the first."""
        self._least_steps = least_steps
        self._least_seconds = least_seconds
        self._steps = -SETTLING_STEPS
        self._began: tuple[float, float] | None = None  # time and cost
        self._low_windows = 0

    def restart(self, stretch: int | None = None) -> None:
        """Start a new window and discard the present one. If `stretch` is given, it is the factor from now on."""
        if stretch is not None and stretch != self.stretch:
            self.stretch, self._low_windows = stretch, 0
        self._steps, self._began = -SETTLING_STEPS, None

    def may_end(self, period: int) -> bool:
        """Count a step that begins; return whether a window may begin or end here. `period`: steps of a cycle."""
        self._steps += 1
        return self._steps == 0 or (self._steps >= self._least_steps and self._steps % max(1, period) == 0)

    def is_long_enough(self, now: float) -> bool:
        """Return whether the window has not begun or is long enough, so that the cost is worth computing."""
        return self._began is None or now - self._began[0] >= self._least_seconds

    def evaluate(self, now: float, cost: float) -> WindowResult | None:
        """Return the result of the window that ends at `now`, in seconds; None if it begins now or is too short.

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
