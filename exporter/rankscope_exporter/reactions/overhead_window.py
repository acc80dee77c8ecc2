"""Whether the monitor keeps within its share of the time of training, and how far sampling must be stretched. Pure.

Judged over windows: each has whole cycles of sampling, so that one of them is like the next, and is long enough that a
scrape of the page, a few times a minute, is no surprise in it. The clock and the cost are arguments.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final

MOST_STRETCH: Final = 1024
"""Beyond this next to nothing is measured, and what is left does not come from sampling."""

LEAST_STEPS: Final = 20
LEAST_SECONDS: Final = 10.0
SETTLING_STEPS: Final = 5
"""The first steps of anything make what is made once."""

ROOM: Final = 0.8
"""Sampling twice as often must stay below this much of what is allowed: else the next window would take it back."""

PATIENCE: Final = 5
"""So many windows in a row must have room before sampling is tightened."""


class Verdict(enum.Enum):
    """What a window says."""

    KEEPS = "keeps"
    OVER = "over"  # sampling must be stretched
    ROOM = "room"  # for long there was room for twice as much


@dataclass(frozen=True, slots=True)
class Judged:
    """One window: its share, what it says, and the stretch that it asks for."""

    verdict: Verdict
    share: float
    wanted: int


class OverheadWindow:
    """Told of every step that begins; holds the stretch that is in force."""

    def __init__(
        self, max_overhead: float, *, least_steps: int = LEAST_STEPS, least_seconds: float = LEAST_SECONDS
    ) -> None:
        self.max_overhead = max_overhead
        self.stretch = 1
        self.share: float | None = None
        """Of the last window; None before the first."""
        self._least_steps = least_steps
        self._least_seconds = least_seconds
        self._steps = -SETTLING_STEPS
        self._began: tuple[float, float] | None = None  # clock and cost
        self._roomy = 0

    def restart(self, stretch: int | None = None) -> None:
        """Begin a new window behind something that is not to be judged, at `stretch` from now on if one is given."""
        if stretch is not None and stretch != self.stretch:
            self.stretch, self._roomy = stretch, 0
        self._steps, self._began = -SETTLING_STEPS, None

    def may_end(self, period: int) -> bool:
        """Note that a step begins; return whether a window may end here, `period` being the steps of a cycle."""
        self._steps += 1
        return self._steps == 0 or (self._steps >= self._least_steps and self._steps % max(1, period) == 0)

    def may_judge(self, now: float) -> bool:
        """Return whether the window is long enough, or is to begin: only then it is worth to ask for the cost."""
        return self._began is None or now - self._began[0] >= self._least_seconds

    def look(self, now: float, cost: float) -> Judged | None:
        """Judge the window that ends now, in seconds, `cost` being CPU seconds so far; None while it is too short."""
        if self._began is None:
            self._began, self._steps = (now, cost), 0
            return None
        seconds, spent = now - self._began[0], cost - self._began[1]
        if seconds < self._least_seconds:
            return None
        self._began, self._steps = (now, cost), 0
        self.share = max(0.0, spent) / seconds
        return self._judged(self.share)

    def _judged(self, share: float) -> Judged:
        if share > self.max_overhead:
            self._roomy = 0
            wanted = self.stretch * 2 ** math.ceil(math.log2(share / self.max_overhead))
            wanted = min(MOST_STRETCH, max(2 * self.stretch, wanted))
            return Judged(Verdict.OVER if wanted > self.stretch else Verdict.KEEPS, share, wanted)
        has_room = self.stretch > 1 and 2 * share <= ROOM * self.max_overhead
        self._roomy = self._roomy + 1 if has_room else 0
        if self._roomy >= PATIENCE:
            return Judged(Verdict.ROOM, share, self.stretch // 2)
        return Judged(Verdict.KEEPS, share, self.stretch)
