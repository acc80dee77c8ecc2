"""Calls every attached monitor when the process forks, exits or receives a stop signal.

A rank writes its exit record before a signal in the setting `stop_signals` takes effect. A handler of the script
decides whether the process ends. If training continues, the monitor continues too, and stores that the signal arrived.

Python runs a handler when its main thread returns to the interpreter. The main thread of a rank may wait in C code for
a collective, and never return. The interpreter also writes the number of each signal to a pipe, immediately. If the
main thread does not run the handler, a thread that reads this pipe reports the exit and ends the process by the signal.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final, NoReturn, Protocol

from rankscope_contract.model.events import Event, EventType, ExitReason, Severity
from rankscope_contract.model.redaction import redacted_text
from rankscope_exporter.process.errors import ConfigError, encodable
from rankscope_exporter.process.threads import OwnThread

log = logging.getLogger("rankscope")

FinalWait = Callable[[], None]


class AttachedMonitor(Protocol):
    """Interface of an attached monitor: the methods that are called when the process forks, exits or is stopped."""

    def abandon_after_fork(self) -> None:
        """Stop all work in a forked child, without a lock: threads that hold locks may not exist there."""

    def end_of_process(self, reason: ExitReason, error: str | None) -> None:
        """Publish the exit record and stop the monitor. Called when the interpreter is about to exit."""

    def stop_asked(self, name: str) -> None:
        """Store the name of the signal that arrived, for the exit reason. Training may continue."""

    def last_records(self, name: str, *, is_stuck: bool = False) -> FinalWait:
        """Write the exit record, because the signal `name` ends this process.

        Return a function that waits until the service has committed the exit record.

        This method is called at most once. `is_stuck` is true if the training thread does not return from C code. In
        this case, another thread calls this method, and the method must wait neither for the training thread nor for
        the device.
        """


_STOPPED_BY_CODE: Final = {
    128 + signal.Signals[name]: name for name in ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGXCPU")
}
"""Names of signals by the exit code of a script that has caught the signal.

The exit code is 128 + number of the signal, as in shells.
"""

_attached: dict[AttachedMonitor, frozenset[int]] = {}
"""All attached monitors, and the numbers of the signals that are handled for each.

The references are strong, because a monitor without other references still has hooks, threads and a socket. The objects
hold no reference to a model.
"""

_registered = False
_earlier_error: BaseException | None = None
_called_exit: SystemExit | None = None


def watch(monitor: AttachedMonitor) -> None:
    """Register `monitor`, so that its methods are called at forks and at process end, until `forget` is called."""
    global _registered, _earlier_error  # noqa: PLW0603 - process-wide hooks can be registered but never removed
    # In a notebook, `last_value` may be the error of an earlier cell.
    _earlier_error = getattr(sys, "last_value", None)
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_after_fork)
        atexit.register(_at_exit)
    _attached[monitor] = frozenset()


def watched() -> list[AttachedMonitor]:
    """Return the monitors of this process that have not been forgotten."""
    return list(_attached)


def forget(monitor: AttachedMonitor) -> None:
    """Stop calling `monitor` and restore signal handlers; off the main thread, ours only call the previous ones."""
    _attached.pop(monitor, None)
    for number in tuple(_taken):
        if not _monitors_of(number):
            _restore(number)


def note_calls_of_exit() -> None:
    """Store the status of later calls of `sys.exit`: at the end of the process, the interpreter does not show it."""
    former = sys.exit
    if former.__module__ == __name__:
        return

    def exit(status: Any = None, /) -> NoReturn:  # noqa: A001 - replaces the function of this name
        global _called_exit  # noqa: PLW0603 - see `watch`
        _called_exit = SystemExit(status)
        former(status)

    sys.exit = exit


def called_exit() -> SystemExit | None:
    """Return the exception of the last call of `sys.exit`; None without one, or if the calls are not stored."""
    return _called_exit


def _after_fork() -> None:
    with contextlib.ExitStack() as stack:  # if one call raises, the others still run; Python prints the error
        for monitor in watched():
            stack.callback(monitor.abandon_after_fork)
        stack.callback(_forget_signals)


def _forget_signals() -> None:
    """Forget the parent's monitors in a forked child, and restore the signal handlers from before them."""
    global _work, _pipe
    _attached.clear()
    _leave_pipe()
    for descriptor in _pipe or ():
        os.close(descriptor)
    _work, _pipe = queue.SimpleQueue(), None
    for number in tuple(_taken):
        _restore(number)


def _at_exit() -> None:
    # The interpreter sets `last_value` when an uncaught exception ends the program. An exit code, or an exception that
    # a launcher caught, is not visible here.
    error = getattr(sys, "last_value", None)
    known = error is not None and error is not _earlier_error
    reason, text = exit_reason(error) if known else (ExitReason.UNKNOWN, None)
    with contextlib.ExitStack() as stack:  # see above
        for monitor in watched():
            stack.callback(monitor.end_of_process, reason, text)


def exit_reason(error: BaseException | None) -> tuple[ExitReason, str | None]:
    """Return the exit reason and the text of the exception `error`, which ends the process.

    For `sys.exit(0)`, the reason states that the run is complete. The function `weighed_reason` corrects this reason if
    not all planned steps were made.
    """
    if error is None:
        return ExitReason.COMPLETED, None
    text = redacted_text(encodable(f"{type(error).__name__}: {error}".removesuffix(": ")))
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return ExitReason.COMPLETED, "sys.exit(0)"
        name = _STOPPED_BY_CODE.get(error.code) if isinstance(error.code, int) else None
        return (ExitReason.EXCEPTION, text) if name is None else (ExitReason.SIGNAL, f"{name}, {text}")
    # torch's elastic agent turns a signal into this exception if training runs in the agent's process.
    is_signal = isinstance(error, KeyboardInterrupt) or type(error).__name__ == "SignalException"
    return (ExitReason.SIGNAL if is_signal else ExitReason.EXCEPTION), text


def weighed_reason(
    reason: ExitReason, error: str | None, last_step: int | None, planned_steps: int | None, asked: str | None = None
) -> tuple[ExitReason, str | None]:
    """Return the exit reason and the error text, corrected by the number of planned steps and by a stop signal.

    `reason` and `error` are the uncorrected values. `asked` is the name of the stop signal that arrived, None without
    one.

    A process without an error that made all planned steps is complete. A process that called `sys.exit(0)` before the
    last planned step is not complete, because scripts exit in this way after a stop request. If a training loop ends
    before the last planned step without a signal and without an error, the reason is not changed.
    """
    if reason not in (ExitReason.COMPLETED, ExitReason.UNKNOWN):
        return reason, error
    if planned_steps is not None and last_step is not None and last_step >= planned_steps:
        return ExitReason.COMPLETED, None
    if asked is not None:
        return ExitReason.SIGNAL, asked if error is None else f"{asked}, {error}"
    if planned_steps is None or last_step is None or error is None:
        return reason, None if reason is ExitReason.COMPLETED else error
    return ExitReason.UNKNOWN, f"{error} at step {last_step} of {planned_steps} planned"


def exit_event(reason: ExitReason, error: str | None, last_step: int | None) -> Event:
    """Return the event that a rank publishes last, with the exit reason, the last step and the error."""
    calm = reason in (ExitReason.COMPLETED, ExitReason.UNKNOWN)
    return Event(
        type=EventType.EXIT,
        severity=Severity.INFO if calm else Severity.CRITICAL,
        message=f"{reason}: {error}" if error else str(reason),
        details={"reason": reason, "last_step": last_step, "error": error},
    )


# Stop signals.

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


@dataclass(slots=True)
class _Handled:
    """A signal that is handled for at least one monitor, and the handler from before."""

    former: Callable[[int, FrameType | None], object] | int
    came_at: float | None = None
    ending: threading.Lock = field(default_factory=threading.Lock)
    """Lock that a thread holds while it ends the process, so that no other thread does the same."""


_taken: dict[int, _Handled] = {}
_work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
_pipe: tuple[int, int] | None = None  # its read end and its write end; None before the threads are started


def handle_signals(monitor: AttachedMonitor, names: Iterable[str]) -> None:
    """Install handlers that notify `monitor` of the signals `names`, until `forget` is called.

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
            _taken[number] = _Handled(former)
            signal.signal(number, _on_signal)
    _attached[monitor] = frozenset(numbers)
    if numbers:
        _start_threads()


def _monitors_of(number: int) -> list[AttachedMonitor]:
    return [monitor for monitor, numbers in tuple(_attached.items()) if number in numbers]


def _refusal(numbers: Iterable[signal.Signals]) -> str | None:
    """Return the reason why the signals `numbers` cannot be handled, or None if they can."""
    for number in numbers:
        if threading.current_thread() is not threading.main_thread():
            return "stop_signals: only the main thread can handle signals: call attach() on the main thread"
        if number not in _taken and signal.getsignal(number) is None:
            return f"stop_signals: {number.name} already has a handler in C code; remove it from stop_signals"
    return None


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
        for monitor in _monitors_of(number):
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
        _publish_exit(_monitors_of(number), signal.Signals(number).name)
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
    os.kill(os.getpid(), number)


def _publish_exit(monitors: Iterable[AttachedMonitor], name: str) -> None:
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
    global _pipe  # noqa: PLW0603 - see _forget_signals
    if _pipe is None:
        _pipe = os.pipe()
        os.set_blocking(_pipe[1], False)
        watch_pipe = functools.partial(_watch_pipe, _pipe[0])
        for name, target in (("rankscope-stop", _run), ("rankscope-stop-watch", watch_pipe)):
            OwnThread(target=target, name=name, ends=False, on_fault=_log_fault).start()
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
        _work.get()()


def _watch_pipe(pipe: int) -> None:
    """End the process by a signal that the main thread has not handled in time. Read signal numbers from `pipe`."""
    while True:
        for number in os.read(pipe, 1):
            taken = _taken.get(number)
            if taken is None or callable(taken.former):
                continue
            time.sleep(STUCK_SECONDS)
            is_unhandled = taken.came_at is None and _taken.get(number) is taken
            if is_unhandled and signal.getsignal(number) is _on_signal and taken.ending.acquire(blocking=False):
                _end_stuck_process(number, _monitors_of(number))


def _end_stuck_process(number: int, monitors: Iterable[AttachedMonitor]) -> None:
    name = signal.Signals(number).name
    # Only the main thread can call signal.signal(). A second signal now ends the process immediately.
    ctypes.CDLL(None).signal(number, int(signal.SIG_DFL))
    # On another thread: the stuck thread may hold a lock that the report needs.
    reports = [(lambda monitor=monitor: monitor.last_records(name, is_stuck=True)()) for monitor in monitors]
    _wait([_put(report) for report in reports])
    os.kill(os.getpid(), number)


_LAST_STANDARD: Final = 2


def occupy_standard_descriptors() -> None:
    """Open the null device for closed descriptors from 0 to 2, until the process exits; children do not inherit it.

    The kernel gives a new file the lowest free descriptor. In a process that starts with a closed standard output, a
    record file or a socket would get its number, and output of native code would be written into it.
    """
    with contextlib.suppress(OSError):  # no null device, or the limit of open files: nothing else depends on it
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _LAST_STANDARD:
            pass
        os.close(descriptor)
