"""Times of events: by the clock of the host, or by events of the device if work is only queued there.

A time on a device is an event in its stream, which the device reaches long after the host has queued it. Another thread
reads it, and only after the event reports that it was reached, so no thread blocks in the driver.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

TIMEOUT_SECONDS: Final = 30.0
"""Longest wait of the publisher for a slow device; after it, the step has no phases instead of wrong ones."""

_FIRST_SLEEP_SECONDS: Final = 0.0005
_LONGEST_SLEEP_SECONDS: Final = 0.02


Time = Any
"""A time as the clock represents it: seconds of the host's clock, or an event of the device."""


class HostClock:
    """The monotonic clock of the host, for devices on which the host does the work. Base class of `DeviceClock`.

    The training thread calls `now` and `at`, which do not block. Another thread calls `reached` and `seconds`.
    """

    now: Callable[..., Time] = staticmethod(time.monotonic)
    """Returns the current time. No Python call: it runs at each event of each step."""

    def at(self, seconds: float) -> Time:
        """Return the time `seconds` of the host's monotonic clock, which is in the recent past."""
        return seconds

    def reached(self, time: Time) -> bool:  # noqa: ARG002 - the signature of DeviceClock
        """Return whether `time` was reached; may wait for it, but not indefinitely."""
        return True

    def seconds(self, begin: Time, end: Time) -> float:
        """Return the seconds between two times that were reached."""
        seconds: float = end - begin
        return seconds

    def release(self, time: Time) -> None:
        """Release `time`, which is no longer needed. The host clock has nothing to release."""


@dataclass(eq=False)
class DeviceClock(HostClock):
    """Events in the current stream of a device, kept in a pool because creating one costs more than recording it."""

    make: Callable[[], Any]
    """Creates an event with timing."""
    is_capturing: Callable[[], bool] = lambda: False
    """Returns whether the current stream captures a graph."""
    sleep: Callable[[float], None] = time.sleep
    pool: deque[Any] = field(default_factory=deque, init=False)  # the publisher appends, the training thread pops

    def now(self) -> Time:
        """Queue an event and return it; None while a graph is captured, since the event would become part of it."""
        if self.is_capturing():
            return None
        try:
            event = self.pool.pop()
        except IndexError:
            event = self.make()
        event.record()
        return event

    def at(self, seconds: float) -> Time:  # noqa: ARG002 - no event can be queued in the past
        """Queue an event now, the nearest possible time."""
        return self.now()

    def reached(self, time: Time) -> bool:
        """Return whether the device has reached `time`; False after TIMEOUT_SECONDS, and for None."""
        if time is None:
            return False
        waited, pause = 0.0, _FIRST_SLEEP_SECONDS
        while not time.query():
            if waited >= TIMEOUT_SECONDS:
                return False
            self.sleep(pause)
            waited, pause = waited + pause, min(2 * pause, _LONGEST_SLEEP_SECONDS)
        return True

    def seconds(self, begin: Time, end: Time) -> float:
        """Return the seconds that the device took from `begin` to `end`."""
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3

    def release(self, time: Time) -> None:
        """Return the event to the pool."""
        if time is not None:
            self.pool.append(time)


def clock_of(device: torch.device) -> HostClock:
    """Return the clock that measures work on `device`."""
    if device.type != "cuda":
        return HostClock()
    return DeviceClock(
        lambda: torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]  # untyped in torch
        is_capturing=torch.cuda.is_current_stream_capturing,
    )
