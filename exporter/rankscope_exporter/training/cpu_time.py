"""CPU time that the monitor uses while the training calls it: on the training thread, and on torch's threads.

Torch divides a CPU operation among the threads of its pool. The CPU clock of the calling thread does not include these
threads. Their clocks are read before and after each measurement. If torch uses one thread, or if the tensors are on
another device, no such threads exist.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.process.threads import intra_op_threads
from rankscope_exporter.records.pending_step import StepObserver


def _seconds(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


_CLOCK_READ_SECONDS: Final = min(_seconds(lambda: None) for _ in range(50))
"""CPU seconds that one read of the clock takes. This time is added to each interval between two reads.

About half of the first read and half of the second read are outside of the interval that the two reads measure.
"""


class IntraOpThreads(StepObserver):
    """The threads of torch's pool that compute parts of operations which the training thread starts.

    `seconds` is the CPU time that these threads have used for the monitor.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._clocks: tuple[int, ...] = ()
        self._depth = 0
        self._began = 0.0

    def find(self) -> None:
        """Find the threads of torch's pool. Called on the training thread, which owns the pool."""
        self._clocks = tuple(map(_clock, intra_op_threads()))

    def on_measurement_begin(self) -> None:
        """Start to measure the CPU time of torch's threads before operations that torch may divide among them.

        Calls can be nested.
        """
        if self._clocks:
            if self._depth == 0:
                self._began = self._now()
            self._depth += 1

    def on_measurement_end(self) -> None:
        """Add up the CPU time that torch's threads have used since the outermost call of `on_measurement_begin`."""
        if self._clocks:
            self._depth -= 1
            if self._depth == 0:
                self.seconds += self._now() - self._began

    def _now(self) -> float:
        try:
            return sum(map(time.clock_gettime, self._clocks))
        except OSError:  # torch has replaced the pool
            self._clocks = ()
            return self._began


class HookClock:
    """Calls functions of the monitor from hooks and for the script, and adds up their CPU time.

    Errors of these functions are caught, counted and logged.
    """

    def __init__(self, boundary: ErrorBoundary, *, on_cpu: bool) -> None:
        self.cpu_seconds = 0.0
        """CPU seconds on the training thread of calls that read a tensor, begin or end a step, or come from the script.

        In each step, a few other hooks are called. Their time is not included, because measuring it would take longer
        than the hooks themselves.
        """
        self.team = IntraOpThreads()
        self._boundary = boundary
        self._on_cpu = on_cpu

    def start(self) -> None:
        """Find the threads of torch that compute for the training thread. Called on the training thread."""
        if self._on_cpu:
            self._boundary.call("threads of torch", self.team.find)

    def timed(self, where: str, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)`, or None if it raised an error.

        `where` names the operation in the error's log message.
        """
        began = time.thread_time()
        result = self._boundary.call(where, function, *args)
        self.cpu_seconds += time.thread_time() - began + _CLOCK_READ_SECONDS
        return result

    def timed_reading(self, where: str, function: Callable[..., Any], *args: Any) -> None:
        """Call a function that reads tensors, and add the CPU time of torch's threads during the call.

        Used for calls that are not between `on_measurement_begin` and `on_measurement_end`.
        """
        self.team.on_measurement_begin()
        self.timed(where, function, *args)
        self.team.on_measurement_end()


def _clock(thread: int) -> int:
    """Return the id of Linux's CPU time clock for a thread, given the native id of the thread."""
    return (~thread << 3) | 6
