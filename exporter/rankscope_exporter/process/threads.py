"""Threads of the monitor inside the training process: their start and end, and their CPU time.

Forks of the process while threads of the monitor use libraries with locks of their own, such as pyarrow.

A child that is forked while another thread holds such a lock can never take it. A fork therefore waits until no thread
of the monitor is inside a section of `no_fork`, and at most FORK_WAITS_SECONDS, because such a thread may hang.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

from rankscope_exporter.process.errors import ErrorBoundary

FORK_WAITS_SECONDS: Final = 1.0

_own = threading.local()


class _Sections:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.inside = 0


_sections = _Sections()


@contextlib.contextmanager
def no_fork() -> Iterator[None]:
    """Let forks of other threads wait for the end of the `with` block, which may contain further sections."""
    _change(1)
    try:
        yield
    finally:
        _change(-1)


def _change(by: int) -> None:
    with _sections.changed:
        _own.depth = getattr(_own, "depth", 0) + by
        _sections.inside += by
        _sections.changed.notify_all()


def _before_fork() -> None:
    _sections.changed.acquire()
    own = getattr(_own, "depth", 0)
    _sections.changed.wait_for(lambda: _sections.inside <= own, FORK_WAITS_SECONDS)


def _after_in_parent() -> None:
    _sections.changed.release()


def _after_in_child() -> None:
    _sections.changed = threading.Condition()  # other threads waited at the old one
    _sections.inside = getattr(_own, "depth", 0)


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


RESTART_SECONDS: Final = 1.0
_MOST_STARTS: Final = 10

EXIT_SECONDS: Final = 5.0
"""Maximum seconds for which the exit of the interpreter waits for threads of the monitor that are ending."""

_running: weakref.WeakSet[OwnThread] = weakref.WeakSet()


def _join_at_exit() -> None:
    """Wait for the threads of the monitor, which were all asked to end."""
    # A daemon thread that returns from native code while the interpreter ends aborts the process.
    deadline = time.monotonic() + EXIT_SECONDS
    for thread in tuple(_running):
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(_join_at_exit)  # runs after the functions that end the monitors, because they are registered later


class OwnThread(threading.Thread):
    """A thread of the monitor, in which torch uses one CPU thread. It is a daemon unless `daemon` is False.

    The exit of the interpreter waits for its end, unless `ends` is False: such a thread waits forever.

    A thread that works until the training ends has `on_fault`: an error of `target` is passed to it with the name of
    the thread, and `target` is called again after `RESTART_SECONDS`, at most `_MOST_STARTS` times in all.
    """

    def __init__(
        self,
        *,
        target: Callable[..., object],
        name: str,
        args: tuple[Any, ...] = (),
        daemon: bool = True,
        ends: bool = True,
        on_fault: Callable[[str, BaseException], object] | None = None,
    ) -> None:
        super().__init__(name=name, daemon=daemon)
        self._work = functools.partial(target, *args)
        self._on_fault = on_fault
        if ends:
            _running.add(self)
        self._clock: int | None = None
        self._spent: float | None = None  # after the end of the thread

    def run(self) -> None:
        """Limit torch to one CPU thread on this thread, then call the target of the thread."""
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            for _ in range(_MOST_STARTS):
                try:
                    if "torch" in sys.modules:
                        from rankscope_exporter.process.openmp import limit_this_thread  # noqa: PLC0415 - imports torch

                        limit_this_thread()
                    self._work()
                    break
                except Exception as error:
                    if self._on_fault is None:
                        raise
                    self._on_fault(f"the thread {self.name}", error)
                time.sleep(RESTART_SECONDS)
        finally:
            self._spent = time.thread_time()
            del self._work  # it can refer to the thread

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds that the thread has used so far."""
        if self._spent is None and self._clock is not None:
            with contextlib.suppress(OSError):  # the thread has ended meanwhile
                return time.clock_gettime(self._clock)
        return self._spent or 0.0


class CpuMeter:
    """Counters of CPU seconds, each with a name. Several short-lived threads may add CPU time to the same counter."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._thread = threading.local()

    def lap(self, name: str) -> None:
        """Add CPU time of the calling thread to the counter `name`.

        It is the time since this thread last called this method, or since the thread started.
        """
        now = time.thread_time()
        spent = now - getattr(self._thread, "last", 0.0)
        self._thread.last = now
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + spent

    def totals(self) -> dict[str, float]:
        """Return the CPU seconds so far by the name of the counter."""
        with self._lock:
            return dict(self._seconds)


MOST_WAITING: Final = 64


class BackgroundWorker:
    """Runs functions on one thread, one after another, in the order in which `put` queued them.

    The thread starts when the first function is queued.
    """

    def __init__(self, name: str, boundary: ErrorBoundary) -> None:
        self.dropped = 0
        """Number of functions that were dropped because the queue was full."""
        self._name = name
        self._boundary = boundary
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue(MOST_WAITING)
        own_name = f"rankscope-{name.replace('_', '-')}"
        self._thread = OwnThread(target=self._run, name=own_name, on_fault=boundary.report)
        self._lock = threading.Lock()

    def put(self, chore: Callable[[], object]) -> None:
        """Queue the function `chore` to run on the thread. Never waits. Any thread may call it."""
        with self._lock:
            if self._thread.ident is None:
                self._thread.start()
        try:
            self._queue.put_nowait(chore)
        except queue.Full:
            self.dropped += 1

    def stop(self, timeout_seconds: float) -> bool:
        """Let the thread run all queued functions and end.

        Return whether the thread has ended. If the queue is full, wait at most `timeout_seconds` until the stop request
        can be queued. Then wait at most `timeout_seconds` again for the end of the thread. If this method is called on
        the thread itself, it returns True immediately.
        """
        thread = self._thread
        if thread.ident is None or thread is threading.current_thread():
            return True
        try:
            self._queue.put(None, timeout=timeout_seconds)
        except queue.Full:
            return False
        thread.join(timeout_seconds)
        return not thread.is_alive()

    def _run(self) -> None:
        while (chore := self._queue.get()) is not None:
            self._boundary.call(self._name, chore)
