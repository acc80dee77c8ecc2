"""Clocks that return the time of an event of a training step, either on the host or on a device.

The clock of the host returns seconds. For a device to which the host queues work, the clock returns a device event in
the current stream of the device. The device reaches this event long after the host has queued it. The publisher thread
computes durations only after the device event reports that it was reached, so no thread blocks in the driver.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from rankscope_exporter.adapters.graph_capture import is_capturing

TIMEOUT_SECONDS: Final = 30.0
"""Maximum seconds that the publisher thread waits until a slow device has reached an event of a step.

After this time, the step is published without phases, because the computed phases would be wrong.
"""

_FIRST_SLEEP_SECONDS: Final = 0.0005
_LONGEST_SLEEP_SECONDS: Final = 0.02


Time = Any
"""A time that a clock of this module returned: seconds of the host's clock, or an event in the stream of a device."""


class HostClock:
    """The monotonic clock of the host, for devices whose work runs on the host.

    Base class of `DeviceClock`. The training thread calls `now` and `at`, which return a time and do not block. The
    publisher thread calls `reached`, which returns whether the device has reached a time, and `seconds`, which returns
    the duration between two times.
    """

    now: Callable[..., Time] = staticmethod(time.monotonic)
    """Function that returns the current time. It is a C function, because it runs at each event of each step."""

    at: Callable[..., Time] = staticmethod(float)
    """Function that returns the time for the moment, in the recent past, at which the host's clock was at `seconds`."""

    def reached(self, time: Time) -> bool:  # noqa: ARG002 - the signature of DeviceClock
        """Return whether the device has reached `time`, a result of `now` or `at`.

        The call may wait for a limited time.
        """
        return True

    def seconds(self, begin: Time, end: Time) -> float:
        """Return the seconds from the time `begin` to the time `end`. The device must have reached both times."""
        seconds: float = end - begin
        return seconds

    def release(self, time: Time) -> None:
        """Release the device event `time`, which the caller no longer needs. The host clock has no device events."""


@dataclass(eq=False)
class DeviceClock(HostClock):
    """Clock whose times are events in the current stream of a device.

    Events are kept in a pool, because creating an event costs more than recording it.
    """

    make: Callable[[], Any]
    """Function that creates a device event with timing enabled."""
    record: Callable[[Any], None] = lambda event: event.record()
    """Function that queues an event in the current stream of the device."""
    is_capturing: Callable[[], bool] = lambda: False
    """Function that returns whether the current stream captures a CUDA graph."""
    sleep: Callable[[float], None] = time.sleep
    pool: deque[Any] = field(default_factory=deque, init=False)  # the publisher appends, the training thread pops

    def now(self) -> Time:
        """Queue an event in the current stream of the device, and return the event.

        Return None while a CUDA graph is captured, because the event would become part of the graph.
        """
        if self.is_capturing():
            return None
        try:
            event = self.pool.pop()
        except IndexError:
            event = self.make()
        self.record(event)
        return event

    def at(self, seconds: float) -> Time:  # noqa: ARG002 - no event can be queued in the past
        """Queue an event now and return the event, because no event can be queued for `seconds`, a time in the past."""
        return self.now()

    def reached(self, time: Time) -> bool:
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
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3

    def release(self, time: Time) -> None:
        if time is not None:
            self.pool.append(time)


def clock_of(device: torch.device) -> HostClock:
    """Return the clock that measures work on `device`."""
    if device.type != "cuda":
        return HostClock()
    return DeviceClock(
        lambda: torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]  # untyped in torch
        record=lambda event: event.record(torch.cuda.current_stream(device)),  # not of the thread's current device
        is_capturing=is_capturing,
    )
