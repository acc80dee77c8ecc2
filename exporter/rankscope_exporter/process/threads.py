"""Threads of the monitor inside the training process: their use of CPU threads of torch, and their CPU time.

torch divides a CPU operation among an OpenMP team, and each thread that runs such an operation has a separate team.
With a second team, the process has more OpenMP threads than cores. libgomp then lets the workers of every team sleep
between two operations, including those of the training thread. Each operation of training has to wake the workers up,
and a step takes up to 1.6 times as long.

Threads of the monitor therefore compute with numpy. torch may still compute on these threads: in functions of torch
that are called for another purpose, and in code of the user such as `on_anomaly`. `OwnThread` limits torch to one CPU
thread, only on the thread itself. `torch.set_num_threads` is not used for this, because it sets the default of every
thread that the process starts later.

Forks of the process while threads of the monitor use libraries with locks of their own, such as pyarrow.

A child that is forked while another thread holds such a lock can never take it. A fork therefore waits until no thread
of the monitor is inside a section of `no_fork`, and at most FORK_WAITS_SECONDS, because such a thread may hang.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

from rankscope_exporter.base.errors import ErrorBoundary

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


_is_child = False


def _after_in_child() -> None:
    global _is_child  # noqa: PLW0603 - a process becomes a child once
    _is_child = True
    openmp_parallel.cache_clear()
    _sections.changed = threading.Condition()  # other threads waited at the old one
    _sections.inside = getattr(_own, "depth", 0)


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


_TORCH_LIBRARIES: Final = ("libtorch_cpu.so", "libtorch_cpu.dylib")
_TASKS: Final = Path("/proc/self/task")
_OPENMP: Final = "ATen parallel backend: OpenMP"
_NATIVE_POOL: Final = "PTThreadPool"
"""Name of the threads of torch's pool if torch was built without OpenMP (aten/src/ATen/PTThreadPool.h)."""

RESTART_SECONDS: Final = 1.0
_MOST_STARTS: Final = 10

_NAMING_SECONDS: Final = 0.1
"""Maximum seconds until the threads of a new pool have their name, which each thread sets when it begins to run."""

_ELEMENTS_PER_THREAD: Final = 1 << 15
"""Minimum number of elements per thread of an operation that torch divides (at::internal::GRAIN_SIZE)."""


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
        limit_this_thread()
        if hasattr(time, "pthread_getcpuclockid"):  # not on macOS
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            for _ in range(_MOST_STARTS):
                if self._attempt():
                    break
                time.sleep(RESTART_SECONDS)
        finally:
            self._spent = time.thread_time()
            del self._work  # it can refer to the thread

    def _attempt(self) -> bool:
        """Call the target; return False if its error was reported."""
        if self._on_fault is None:
            self._work()
            return True
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - thread boundary: no thread of the monitor ends unseen
            self._on_fault(f"the thread {self.name}", error)
            return False
        return True

    @property
    def cpu_seconds(self) -> float:
        """Return the CPU seconds so far; without thread clocks (macOS), 0 until the thread ends."""
        if self._spent is None and self._clock is not None:
            with contextlib.suppress(OSError):  # the thread has ended meanwhile
                return time.clock_gettime(self._clock)
        return self._spent or 0.0


def limit_this_thread() -> bool:
    """Limit torch to one CPU thread, only on the calling thread. Return whether this succeeded.

    It fails if the OpenMP library of torch cannot be found.
    """
    # torch sets the number of OpenMP threads of a new thread at its first operation that may be divided. This call
    # causes that now, so that torch does not replace the number that is set below.
    if torch.get_num_threads() > 1:
        for library in _libraries():
            library.omp_set_num_threads(1)
            if torch.get_num_threads() == 1:
                break
        else:
            return False
    for library in _libraries():
        # After a call of torch.set_num_threads(), torch sets the number of MKL threads separately on each thread.
        # This number takes precedence over the number of OpenMP threads.
        if (set_mkl := getattr(library, "MKL_Set_Num_Threads_Local", None)) is not None:
            set_mkl(1)
            break
    return True


def intra_op_threads() -> tuple[int, ...]:
    """Return the native ids of torch's threads that compute for the calling thread; missing ones are started."""
    if torch.get_num_threads() == 1 or not _TASKS.is_dir():
        return ()
    found = _openmp_team() if _OPENMP in torch.__config__.parallel_info() else _native_pool()
    return tuple(sorted(found - {threading.get_native_id()}))


def _openmp_team() -> set[int]:
    """Return the native ids of the OpenMP team of the calling thread: each thread of the team reports its own id."""
    found: list[int] = []
    region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    report = region(lambda _: found.append(threading.get_native_id()))
    if address := _gomp_parallel():
        parallel = ctypes.CFUNCTYPE(None, region, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(address)
        parallel(report, None, 0, 0)  # 0: as many threads as torch uses
    return set(found)


@functools.cache
def openmp_parallel() -> int:
    """Return the address of `GOMP_parallel`, which runs a function on torch's OpenMP team; 0 without a team."""
    # The threads of a team are not forked, and a call in a child would wait for them.
    return 0 if _is_child else _gomp_parallel()


@functools.cache
def _gomp_parallel() -> int:
    if _OPENMP not in torch.__config__.parallel_info():
        return 0
    for library in reversed(_libraries()):  # torch uses a preloaded OpenMP library instead of its own
        if hasattr(library, "GOMP_parallel"):  # libgomp, libomp and libiomp5 have it
            return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    return 0


def _native_pool() -> set[int]:
    """Return the native ids of the threads of torch's own pools.

    Threads for operations that run in parallel (`torch.jit.fork`) have the same name, and are included.
    """
    expected = torch.get_num_threads() - 1
    torch.ones(_ELEMENTS_PER_THREAD * (expected + 1), device="cpu").add_(1)  # creates the pool
    deadline = time.monotonic() + _NAMING_SECONDS
    while len(found := _threads_with_name(_NATIVE_POOL)) < expected and time.monotonic() < deadline:
        time.sleep(0.001)
    return found


def _threads_with_name(name: str) -> set[int]:
    found = set()
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            if (task / "comm").read_text().strip() == name:
                found.add(int(task.name))
    return found


@functools.cache
def _libraries() -> tuple[Any, ...]:
    """Return the loaded libraries that may contain the OpenMP functions of torch.

    The first is the library of torch itself; preloaded libraries follow in the result.

    A library handle also finds symbols of linked libraries, so the name of the OpenMP library (libgomp, libomp,
    libiomp5) does not matter.
    """
    found = []
    for path in (*_torch_libraries(), None):
        try:
            library = ctypes.CDLL(path, mode=ctypes.DEFAULT_MODE if path is None else os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:  # not loaded from there
            continue
        if hasattr(library, "omp_set_num_threads"):
            library.omp_set_num_threads.argtypes = [ctypes.c_int]
            library.omp_set_num_threads.restype = None
            found.append(library)
    return tuple(found)


def _torch_libraries() -> Iterator[str]:
    folder = Path(torch.__file__).parent / "lib"
    yield from (str(folder / name) for name in _TORCH_LIBRARIES)
    try:  # a build of torch for a distribution keeps it elsewhere
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    yield from sorted({line.split(maxsplit=5)[-1] for line in maps if line.endswith(_TORCH_LIBRARIES)})


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
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def put(self, chore: Callable[[], object]) -> None:
        """Queue the function `chore` to run on the thread. Never waits. Any thread may call it."""
        with self._lock:
            if self._thread is None:
                self._thread = OwnThread(
                    target=self._run, name=f"rankscope-{self._name.replace('_', '-')}", on_fault=self._boundary.report
                )
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
        if thread is None or thread is threading.current_thread():
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
