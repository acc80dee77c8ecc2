"""Handles the signals in the setting `stop_signals`: the rank writes its exit record before a signal takes effect.

A handler of the script decides whether the process ends. If training continues, the monitor continues too, and stores
that the signal arrived.

Python runs a handler when its main thread returns to the interpreter. The main thread of a rank may wait in C code for
a collective, and never return. The interpreter also writes the number of each signal to a pipe, immediately. If the
main thread does not run the handler, a thread that reads this pipe reports the exit and ends the process by the signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Final, Protocol

from rankscope_exporter.process.errors import ConfigError
from rankscope_exporter.process.threads import OwnThread

log = logging.getLogger("rankscope")

STOP_WAIT_SECONDS: Final = 5.0
"""Maximum, in seconds, of the setting `exit_wait_seconds` if a signal ends the process.

The sender of a signal usually kills the process some seconds later.
"""

DEFAULT_SIGNALS: Final = ("SIGTERM",)
"""Names of the signals that are handled by default, if a handler can be installed.

Schedulers send SIGTERM to stop a job.
"""

STUCK_SECONDS: Final = 1.0
"""Time in seconds after which the main thread counts as stuck in C code if it has not run the handler of a signal."""

_GIVE_UP_SECONDS: Final = 9.0
_AGAIN_SECONDS: Final = 0.01
_INSIDE_SECONDS: Final = 2.0
_OWN_CODE: Final = __name__.partition(".")[0] + "."

FinalWait = Callable[[], None]


class Stoppable(Protocol):
    """Interface of a monitor: the methods that are called when a stop signal arrives."""

    def stop_asked(self, name: str) -> None:
        """Store the name of the signal that arrived, for the exit reason. Training may continue."""

    def last_records(self, name: str, *, is_stuck: bool = False) -> FinalWait:
        """Write the exit record, because the signal `name` ends this process.

        Return a function that waits until the service has committed the exit record.

        This method is called at most once. `is_stuck` is true if the training thread does not return from C code. In
        this case, another thread calls this method, and the method must wait neither for the training thread nor for
        the device.
        """


@dataclass(slots=True)
class _Installed:
    former: Callable[[int, FrameType | None], object] | int
    monitors: set[Stoppable] = field(default_factory=set)
    came_at: float | None = None
    ending: threading.Lock = field(default_factory=threading.Lock)
    """Lock that a thread holds while it ends the process, so that no other thread does the same."""


_taken: dict[int, _Installed] = {}
_work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
_worker: threading.Thread | None = None
_pipe: tuple[int, int] | None = None  # its read end and its write end


def install(monitor: Stoppable, names: Iterable[str]) -> None:
    """Install handlers that notify `monitor` of the signals `names`, until `uninstall` is called.

    Raises ConfigError, without any change, if a signal has a handler in C code or the caller is not the main thread. In
    both cases, if `names` are the default signals, no error is raised and no handler is installed.
    """
    names = tuple(names)
    numbers = [signal.Signals[name] for name in names]
    refusal = _refusal(numbers)
    if refusal is not None and names == DEFAULT_SIGNALS:
        log.info("%s; without it, the run fails if SIGTERM ends this process", refusal)
        return
    if refusal is not None:
        raise ConfigError(refusal)
    for number in numbers:
        former = signal.getsignal(number)
        # With nohup, the former handler is SIG_IGN, and this signal does not end the process.
        if number not in _taken and former is not None and former != signal.SIG_IGN:
            _taken[number] = _Installed(former)
            signal.signal(number, _on_signal)
        if number in _taken:
            _taken[number].monitors.add(monitor)
    if numbers:
        _start_threads()


def _refusal(numbers: Iterable[signal.Signals]) -> str | None:
    """Return the reason why the signals `numbers` cannot be handled, or None if they can."""
    for number in numbers:
        if threading.current_thread() is not threading.main_thread():
            return "stop_signals: only the main thread can handle signals: call attach() on the main thread"
        if number not in _taken and signal.getsignal(number) is None:
            return f"stop_signals: {number.name} already has a handler in C code; remove it from stop_signals"
    return None


def uninstall(monitor: Stoppable) -> None:
    """Stop notifying `monitor` and restore the handlers; off the main thread, ours only call the previous ones."""
    for number, taken in list(_taken.items()):
        taken.monitors.discard(monitor)
        if not taken.monitors:
            _restore(number)


def forget_after_fork() -> None:
    """Restore the signal handlers that existed before `install` was called. Called in a forked child."""
    global _work, _worker, _pipe
    _leave_pipe()
    for descriptor in _pipe or ():
        os.close(descriptor)
    _work, _worker, _pipe = queue.SimpleQueue(), None, None
    for number, taken in list(_taken.items()):
        taken.monitors.clear()
        _restore(number)


def _restore(number: int) -> None:
    if signal.getsignal(number) is not _on_signal:
        return  # the script installed a later handler, which may still call this one
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(number, _taken[number].former)
        del _taken[number]
        if not _taken:
            _leave_pipe()


def _on_signal(number: int, frame: FrameType | None) -> None:
    taken = _taken.get(number)
    if taken is None:  # uninstalled, but still called by a handler of the script
        return
    # A later handler of the script may call this one, but it decides whether the process ends.
    if callable(taken.former) or signal.getsignal(number) is not _on_signal:
        for monitor in tuple(taken.monitors):
            monitor.stop_asked(signal.Signals(number).name)
        if callable(taken.former):
            taken.former(number, frame)
        return
    now = time.monotonic()
    taken.came_at = now if taken.came_at is None else taken.came_at
    if _is_inside(frame) and now - taken.came_at < _INSIDE_SECONDS:
        _work.put(lambda: _send_again(number))
        return
    signal.signal(number, taken.former)  # a second signal ends the process immediately
    if taken.ending.acquire(blocking=False):
        _publish_exit(tuple(taken.monitors), signal.Signals(number).name)
    else:  # the other thread does it, because this thread was stuck
        time.sleep(_GIVE_UP_SECONDS)
    os.kill(os.getpid(), number)


def _is_inside(frame: FrameType | None) -> bool:
    """Return whether a signal interrupted code of the monitor. This code may hold a lock.

    In this case, the signal is handled a little later, because the code of the monitor finishes within microseconds.
    """
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(_OWN_CODE):
            return True
        frame = frame.f_back
    return False


def _send_again(number: int) -> None:
    time.sleep(_AGAIN_SECONDS)
    ident = threading.main_thread().ident
    if ident is not None:
        signal.pthread_kill(ident, number)


def _publish_exit(monitors: Iterable[Stoppable], name: str) -> None:
    """Write the exit records of `monitors` on this thread. Another thread waits until the service has committed them.

    The interrupted code of this thread may hold locks, so this thread must not wait for the service itself.
    """
    waiting = []
    for monitor in monitors:
        try:
            waiting.append(_put(monitor.last_records(name)))
        except Exception:  # other monitors must still write their records, and a handler must not raise into training
            log.exception("writing the exit record after the signal %s failed", name)
    _wait(waiting)


def _put(wait: FinalWait) -> threading.Event:
    """Call `wait` on the worker thread, and return an event that is set afterwards."""
    heard = threading.Event()

    def work() -> None:
        try:
            wait()
        except Exception:  # logged before the event is set: the process ends as soon as it is
            log.exception("waiting until the service commits the exit record after a stop signal failed")
        finally:
            heard.set()

    _work.put(work)
    return heard


def _wait(events: Iterable[threading.Event]) -> None:
    deadline = time.monotonic() + _GIVE_UP_SECONDS
    for event in events:
        event.wait(max(0.0, deadline - time.monotonic()))


def _start_threads() -> None:
    """Start the thread that waits for the commit of the exit records, and the thread that detects a stuck main thread.

    The threads are started in advance: a signal handler that starts a thread could wait forever for a lock that the
    interrupted main thread holds.
    """
    global _worker, _pipe  # noqa: PLW0603 - see forget_after_fork
    if _worker is None:
        _worker = OwnThread(target=_run, name="rankscope-stop", ends=False, on_fault=_log_fault)
        _worker.start()
    if _pipe is None:
        _pipe = os.pipe()
        os.set_blocking(_pipe[1], False)
        OwnThread(target=_watch, args=(_pipe[0],), name="rankscope-stop-watch", ends=False, on_fault=_log_fault).start()
    other = signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
    if other not in (-1, _pipe[1]):  # an event loop of the script uses this mechanism itself
        signal.set_wakeup_fd(other)


def _leave_pipe() -> None:
    with contextlib.suppress(ValueError):  # not the main thread
        present = signal.set_wakeup_fd(-1)
        if _pipe is None or present != _pipe[1]:
            signal.set_wakeup_fd(present)


def _log_fault(where: str, error: BaseException) -> None:
    log.error("unexpected error in %s, which is started again", where, exc_info=error)


def _run() -> None:
    while True:
        try:
            _work.get()()
        except Exception:  # thread boundary: the thread must survive for a later signal
            log.exception("unexpected error in the thread that waits for the service after stop signals")


def _watch(pipe: int) -> None:
    """End the process by a signal that the main thread has not handled in time. Read signal numbers from `pipe`."""
    while True:
        for number in os.read(pipe, 1):
            taken = _taken.get(number)
            if taken is None or callable(taken.former):
                continue
            time.sleep(STUCK_SECONDS)
            is_unhandled = taken.came_at is None and _taken.get(number) is taken
            if is_unhandled and signal.getsignal(number) is _on_signal and taken.ending.acquire(blocking=False):
                _end_stuck_process(number, tuple(taken.monitors))


def _end_stuck_process(number: int, monitors: Iterable[Stoppable]) -> None:
    name = signal.Signals(number).name
    # Only the main thread can call signal.signal(). A second signal now ends the process immediately.
    ctypes.CDLL(None).signal(number, int(signal.SIG_DFL))
    # On another thread: the stuck thread may hold a lock that the report needs.
    reports = [(lambda monitor=monitor: monitor.last_records(name, is_stuck=True)()) for monitor in monitors]
    _wait([_put(report) for report in reports])
    os.kill(os.getpid(), number)
