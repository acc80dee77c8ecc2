"""Find jumps of the wall clock of the service, by a comparison with a clock that is never set."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from rankscope_contract.model.events import JUMP_MICROSECONDS

_STEADY_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def steady_microseconds() -> int:
    """Return the time in µs of a clock that is never set and that also runs while the host sleeps."""
    return time.clock_gettime_ns(_STEADY_CLOCK) // 1000


class ServiceClock:
    """Wall clock of the service. `jumped` is the sum of its jumps since the first check, in µs."""

    def __init__(self, wall: Callable[[], int], steady: Callable[[], int]) -> None:
        """`wall` returns UTC µs, and `steady` µs of a clock that is never set."""
        self._wall = wall
        self._steady = steady
        self._apart: int | None = None
        self.jumped = 0

    def check(self) -> int:
        """Return the jump of the clock since the last check in µs, negative if it was set back, or 0 for no jump."""
        apart = self._wall() - self._steady()
        jump = 0 if self._apart is None else apart - self._apart
        self._apart = apart
        if abs(jump) <= JUMP_MICROSECONDS:
            return 0
        self.jumped += jump
        return jump
