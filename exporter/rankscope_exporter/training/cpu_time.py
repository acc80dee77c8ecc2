"""CPU time of what training calls of ours: on its own thread, and on torch's threads that help with it.

Torch divides an operation on the CPU among threads that no clock of the calling thread sees. They are found by what one
operation moves, and their clocks are read around what is measured; with one thread, or where tensors are on another
device, there are none.
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
"""torch gives a thread at least 2**15 elements of an operation (at::internal::GRAIN_SIZE)."""

_ROUNDS: Final = 2
_TASKS: Final = Path("/proc/self/task")


def _least(call: Callable[[], object], rounds: int = 50) -> float:
    """Return the CPU seconds of one call, the least of some."""
    return min(_seconds(call) for _ in range(rounds))


def _seconds(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


_READING_SECONDS: Final = _least(lambda: None)
"""Of one reading of the clock: half of each of the two falls outside of what they enclose."""


class IntraOpThreads(StepObserver):
    """The threads of torch's pool that work for the training thread; `seconds` is what they worked for us."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._clocks: tuple[int, ...] = ()
        self._depth = 0
        self._began = 0.0

    def find(self) -> None:
        """Look for them; on the training thread, whose pool it is."""
        self._clocks = _pool() if torch.get_num_threads() > 1 and _TASKS.is_dir() else ()

    def reading_begins(self) -> None:
        """Something of ours begins that torch may divide."""
        if self._clocks:
            if self._depth == 0:
                self._began = self._now()
            self._depth += 1

    def reading_ended(self) -> None:
        """It is over."""
        if self._clocks:
            self._depth -= 1
            if self._depth == 0:
                self.seconds += self._now() - self._began

    def _now(self) -> float:
        try:
            return sum(map(time.clock_gettime, self._clocks))
        except OSError:  # the pool was made anew
            self._clocks = ()
            return self._began


class HookClock:
    """Calls what training calls of ours, through the error boundary, and adds up what that costs."""

    def __init__(self, boundary: ErrorBoundary, *, on_cpu: bool) -> None:
        self.cpu_seconds = 0.0
        """Of the training thread: everything that reads a tensor, begins or ends a step, or comes from the script. The
        bare calls, of a few hooks in each step, are not in it: timing them would cost more than they do."""
        self.team = IntraOpThreads()
        self._boundary = boundary
        self._on_cpu = on_cpu

    def start(self) -> None:
        """Find out who works for the training thread, which calls this."""
        if self._on_cpu:
            self._boundary.call("threads of torch", self.team.find)

    def timed(self, where: str, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)`, or None when it raised."""
        began = time.thread_time()
        result = self._boundary.call(where, function, *args)
        self.cpu_seconds += time.thread_time() - began + _READING_SECONDS
        return result

    def timed_reading(self, where: str, function: Callable[..., Any], *args: Any) -> None:
        """Call what reads tensors by itself, outside of the moments that the team follows."""
        self.team.reading_begins()
        self.timed(where, function, *args)
        self.team.reading_ended()


def _pool() -> tuple[int, ...]:
    """Return the clocks of the threads that one divided operation moves, each time it is made."""
    source = torch.ones(_ELEMENTS_PER_THREAD * torch.get_num_threads(), device="cpu")
    source.add(source)  # the pool is there from now on
    ours = {thread.native_id for thread in threading.enumerate()}
    moved = {_clock(int(task.name)) for task in _TASKS.iterdir() if int(task.name) not in ours}
    for _ in range(_ROUNDS):
        before = {clock: time.clock_gettime(clock) for clock in moved}
        source.add(source)
        moved = {clock for clock, seconds in before.items() if time.clock_gettime(clock) > seconds}
    return tuple(sorted(moved))


def _clock(thread: int) -> int:
    """Return the clock of a thread's CPU time by its number, as Linux has them."""
    return (~thread << 3) | 6
