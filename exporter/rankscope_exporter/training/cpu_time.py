"""CPU time of the monitor in calls by the training: on the training thread, and on torch's threads that help it.

Torch divides a CPU operation among threads that the clock of the calling thread does not include. These threads are
found by the CPU time that one operation adds to them. Their clocks are read before and after each measurement. If torch
uses one thread, or the tensors are on another device, there are none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.records.step_events import StepObserver

_ELEMENTS_PER_THREAD: Final = 1 << 16
"""torch gives each thread at least 2**15 elements of an operation (at::internal::GRAIN_SIZE)."""

_ROUNDS: Final = 2
_TASKS: Final = Path("/proc/self/task")


def _seconds(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


_CLOCK_READ_SECONDS: Final = min(_seconds(lambda: None) for _ in range(50))
"""CPU time of one clock read. Half of each of two reads falls outside of the interval between them."""


class IntraOpThreads(StepObserver):
    """The threads of torch's pool that work for the training thread. `seconds` is their CPU time for the monitor."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._clocks: tuple[int, ...] = ()
        self._depth = 0
        self._began = 0.0

    def find(self) -> None:
        """Find the threads. Called on the training thread, which owns the pool."""
        self._clocks = _pool() if torch.get_num_threads() > 1 and _TASKS.is_dir() else ()

    def on_measurement_begin(self) -> None:
        """Read the clocks: operations follow that torch may divide. Calls can be nested."""
        if self._clocks:
            if self._depth == 0:
                self._began = self._now()
            self._depth += 1

    def on_measurement_end(self) -> None:
        """Add the CPU time since the outermost `on_measurement_begin`."""
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
    """Calls functions of the monitor for the training, through the error boundary, and adds up their CPU time."""

    def __init__(self, boundary: ErrorBoundary, *, on_cpu: bool) -> None:
        self.cpu_seconds = 0.0
        """CPU time on the training thread of calls that read a tensor, begin or end a step, or come from the script.
        The few other hooks of each step are not included: to time them would cost more than the hooks themselves."""
        self.team = IntraOpThreads()
        self._boundary = boundary
        self._on_cpu = on_cpu

    def start(self) -> None:
        """Find the threads that help the training thread, which calls this."""
        if self._on_cpu:
            self._boundary.call("threads of torch", self.team.find)

    def timed(self, where: str, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)`, or None if it raised."""
        began = time.thread_time()
        result = self._boundary.call(where, function, *args)
        self.cpu_seconds += time.thread_time() - began + _CLOCK_READ_SECONDS
        return result

    def timed_reading(self, where: str, function: Callable[..., Any], *args: Any) -> None:
        """Call a function that reads tensors outside of `on_measurement_begin` and `on_measurement_end`."""
        self.team.on_measurement_begin()
        self.timed(where, function, *args)
        self.team.on_measurement_end()


def _pool() -> tuple[int, ...]:
    """Return the clocks of the threads to which one divided operation adds CPU time, each time it runs."""
    source = torch.ones(_ELEMENTS_PER_THREAD * torch.get_num_threads(), device="cpu")
    source.add(source)  # creates the pool
    ours = {thread.native_id for thread in threading.enumerate()}
    clocks = {_clock(int(task.name)) for task in _TASKS.iterdir() if int(task.name) not in ours}
    for _ in range(_ROUNDS):
        before = {clock: time.clock_gettime(clock) for clock in clocks}
        source.add(source)
        clocks = {clock for clock, seconds in before.items() if time.clock_gettime(clock) > seconds}
    return tuple(sorted(clocks))


def _clock(thread: int) -> int:
    """Return the number of Linux's CPU time clock of a thread, by its native id."""
    return (~thread << 3) | 6
