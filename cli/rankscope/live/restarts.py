"""When a program that ended is started again: soon, then later and later, and not for ever. Pure, clock injected."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

FIRST_WAIT_SECONDS: Final = 0.5
LONGEST_WAIT_SECONDS: Final = 30.0
MOST_RESTARTS: Final = 5
WITHIN_SECONDS: Final = 600.0


@dataclass(slots=True)
class Restarts:
    """The ends of one program. What ran for long has earned a fresh count."""

    _ends: deque[float] = field(default_factory=deque)

    @property
    def count(self) -> int:
        """Return how often it ended lately."""
        return len(self._ends)

    def wait_after_end(self, now: float) -> float | None:
        """Note an end; return the seconds to wait before the next start, None when it ended too often."""
        while self._ends and now - self._ends[0] >= WITHIN_SECONDS:
            self._ends.popleft()
        if len(self._ends) >= MOST_RESTARTS:
            return None
        self._ends.append(now)
        return float(min(FIRST_WAIT_SECONDS * 2 ** (len(self._ends) - 1), LONGEST_WAIT_SECONDS))
