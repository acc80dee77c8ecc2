"""When something happened: by the host's clock, or by the device's own where work is only queued there.

A mark on a device is an event in its stream, which passes long after the host went on. Its time is asked for later, on
another thread, and only once the event says that it has passed: nobody waits inside the driver.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch

PATIENCE_SECONDS: Final = 30.0
"""How long the publisher waits for a device that is behind; then a step has no phases rather than wrong ones."""

_FIRST_NAP_SECONDS: Final = 0.0005
_LONGEST_NAP_SECONDS: Final = 0.02


Time = Any
"""One moment: seconds of the host's clock or an event of the device, as the clock has it that was asked."""


class Clock(Protocol):
    """Marks moments on the training thread, and tells what lay between them on another one."""

    def now(self) -> Time:
        """Return this moment. Waits for nothing."""
        ...

    def at(self, seconds: float) -> Time:
        """Return the moment `seconds`, by the host's clock a moment ago, or the nearest to it."""
        ...

    def reached(self, time: Time) -> bool:
        """Return whether `time` has come; waits for it, yet not for ever."""
        ...

    def seconds(self, begin: Time, end: Time) -> float:
        """Return the seconds between two moments that were reached."""
        ...

    def give_back(self, time: Time) -> None:
        """Say that nobody asks for `time` any more."""
        ...


class HostClock:
    """The monotonic clock of the host: right where the host itself does the work."""

    now = staticmethod(time.monotonic)

    def at(self, seconds: float) -> Time:
        """Return just that."""
        return seconds

    def reached(self, time: Time) -> bool:  # noqa: ARG002 - the host is where it is
        """Return True."""
        return True

    def seconds(self, begin: Time, end: Time) -> float:
        """Return the seconds from `begin` to `end`."""
        seconds: float = end - begin
        return seconds

    def give_back(self, time: Time) -> None:
        """Do nothing."""


class DeviceClock:
    """Events in the current stream. They are kept in a pool, since making one costs more than recording it."""

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        is_capturing: Callable[[], bool] = lambda: False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._make = make
        self._is_capturing = is_capturing
        self._sleep = sleep
        self._pool: deque[Any] = deque()  # appended to by the publisher, popped by training

    def now(self) -> Time:
        """Queue an event. In a graph that is being captured it would become part of the graph: there it is none."""
        if self._is_capturing():
            return None
        try:
            event = self._pool.pop()
        except IndexError:
            event = self._make()
        event.record()
        return event

    def at(self, seconds: float) -> Time:  # noqa: ARG002 - nothing can be queued into the past
        """Queue an event."""
        return self.now()

    def reached(self, time: Time) -> bool:
        """Return whether the device came by; False where it never will, or not within the patience for it."""
        if time is None:
            return False
        waited, nap = 0.0, _FIRST_NAP_SECONDS
        while not time.query():
            if waited >= PATIENCE_SECONDS:
                return False
            self._sleep(nap)
            waited, nap = waited + nap, min(2 * nap, _LONGEST_NAP_SECONDS)
        return True

    def seconds(self, begin: Time, end: Time) -> float:
        """Return the seconds that the device took from `begin` to `end`."""
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3

    def give_back(self, time: Time) -> None:
        """Use its event again."""
        if time is not None:
            self._pool.append(time)


def clock_of(device: torch.device) -> Clock:
    """Return the clock by which work on `device` is timed."""
    if device.type != "cuda":
        return HostClock()
    return DeviceClock(
        lambda: torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]  # untyped in torch
        is_capturing=torch.cuda.is_current_stream_capturing,
    )
