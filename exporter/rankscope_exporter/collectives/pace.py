"""When the flight record is read again: at steps that all ranks agree on without a word, and seldom enough. Pure.

A reading holds the interpreter lock, and so the step of this rank, and of all that wait for it. Ranks that read at the
same step are late together, once; so a reading is due at steps that a power of two divides, the same on ranks whose
readings cost about the same.
"""

from __future__ import annotations

import math
from typing import Final

MOST_APART: Final = 8192
"""Steps: a reading that may come comes at the latest then, on all ranks."""


class Pace:
    """Keeps readings at `share` of the time, by what the last one took. Times are monotonic seconds."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._apart = 1
        self._not_before = -math.inf

    def is_due(self, step: int | None, now: float) -> bool:
        """Return whether the end of `step` is the moment to read."""
        return self._share > 0 and (step or 0) % self._apart == 0 and now >= self._not_before

    def took(self, seconds: float, step_seconds: float, now: float) -> None:
        """Note what a reading took that ended now, and how long a step lasts."""
        pause = seconds / self._share
        self._not_before = now + pause
        steps = max(1.0, pause / step_seconds) if step_seconds > 0 else 1.0
        self._apart = min(MOST_APART, 1 << math.ceil(math.log2(steps)))
