"""Handles the signals in the setting `stop_signals`: the rank writes its exit record before a signal takes effect.

Python runs a handler when its main thread returns to the interpreter. A rank that waits in C code therefore ends later
than without a handler. A handler of the script runs first and decides whether the process ends. If training continues,
the monitor continues too, and stores the name of the signal for the exit reason.
"""

from __future__ import annotations

import contextlib
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

from rankscope_exporter.base.errors import ConfigError
from rankscope_exporter.process.threads import OwnThread

log = logging.getLogger("rankscope")

STOP_WAIT_SECONDS: Final = 5.0
"""Maximum, in seconds, of the setting `exit_wait_seconds` if a signal ends the process.

The sender of a signal usually kills the process some seconds later.
"""

_GIVE_UP_SECONDS: Final = 9.0
_AGAIN_SECONDS: Final = 0.01
_INSIDE_SECONDS: Final = 2.0
_OWN_CODE: Final = __name__.partition(".")[0] + "."

FinalWait = Callable[[], None]


class Stoppable(Protocol):
    """Methods of a monitor that are called when a stop signal arrives."""

    def stop_asked(self, name: str) -> None:
        """Store the name of the signal that arrived, for the exit reason. Training may continue."""

    def last_records(self, name: str) -> FinalWait:
        """Write the exit record, because the signal `name` ends this process.

        Return a function that waits until the service has committed the exit record.

        The method `last_records` is called at most once.
        """


@dataclass(slots=True)
class _Installed:
    former: Callable[[int, FrameType | None], object] | int
    monitors: set[Stoppable] = field(default_factory=set)
    came_at: float | None = None


_taken: dict[int, _Installed] = {}
_work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
_worker: threading.Thread | None = None


def install(monitor: Stoppable, names: Iterable[str]) -> None:
    """Install handlers that notify `monitor` of the signals `names`, until `uninstall`.

    Raises ConfigError, without any change, if a signal has a handler in C code or the caller is not the main thread.
    """
    numbers = [signal.Signals[name] for name in names]
    if numbers and threading.current_thread() is not threading.main_thread():
        raise ConfigError("stop_signals: only the main thread can handle signals: call attach() on the main thread")
    for number in numbers:
        if number not in _taken and signal.getsignal(number) is None:
            raise ConfigError(
                f"stop_signals: {number.name} already has a handler in C code; remove it from stop_signals"
            )
    for number in numbers:
        former = signal.getsignal(number)
        if (
            number not in _taken and former is not None and former != signal.SIG_IGN
        ):  # with nohup, this signal does not end the process
            _taken[number] = _Installed(former)
            signal.signal(number, _on_signal)
        if number in _taken:
            _taken[number].monitors.add(monitor)
    if numbers:
        _start_worker()


def uninstall(monitor: Stoppable) -> None:
    """Stop notifying `monitor` of signals, and restore the previous handlers.

    Only the main thread can restore a handler. On another thread the handler remains, but calls only the previous
    handler.
    """
    for number, taken in list(_taken.items()):
        taken.monitors.discard(monitor)
        if not taken.monitors:
            _restore(number)


def forget_after_fork() -> None:
    """Restore the signal handlers from before `install`. Called in a forked child."""
    global _work, _worker
    _work, _worker = queue.SimpleQueue(), None
    for number, taken in list(_taken.items()):
        taken.monitors.clear()
        _restore(number)


def _restore(number: int) -> None:
    if (
        signal.getsignal(number) is not _on_signal
    ):  # the script installed a later handler, which may still call this one
        return
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(number, _taken[number].former)
        del _taken[number]


def _on_signal(number: int, frame: FrameType | None) -> None:
    taken = _taken.get(number)
    if taken is None:  # uninstalled, but still called by a handler of the script
        return
    if callable(taken.former):
        for monitor in tuple(taken.monitors):
            monitor.stop_asked(signal.Signals(number).name)
        taken.former(number, frame)
        return
    now = time.monotonic()
    taken.came_at = now if taken.came_at is None else taken.came_at
    if _is_inside(frame) and now - taken.came_at < _INSIDE_SECONDS:
        _work.put(lambda: _send_again(number))
        return
    signal.signal(number, taken.former)  # a second signal ends the process immediately
    _publish_exit(tuple(taken.monitors), signal.Signals(number).name)
    os.kill(os.getpid(), number)


def _is_inside(frame: FrameType | None) -> bool:
    """Return whether the signal interrupted code of the monitor, which may hold a lock.

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
        heard = threading.Event()
        try:
            _work.put(_then(monitor.last_records(name), heard))
        except Exception:  # other monitors must still write their records, and a handler must not raise into training
            log.exception("writing the exit record after the signal %s failed", name)
            continue
        waiting.append(heard)
    deadline = time.monotonic() + _GIVE_UP_SECONDS
    for heard in waiting:
        heard.wait(max(0.0, deadline - time.monotonic()))


def _then(wait: FinalWait, heard: threading.Event) -> Callable[[], None]:
    def work() -> None:
        try:
            wait()
        except Exception:  # logged before the event is set: the process ends as soon as it is
            log.exception("waiting until the service commits the exit record after a stop signal failed")
        finally:
            heard.set()

    return work


def _start_worker() -> None:
    """Start the thread that waits, after a stop signal, until the service has committed the exit records.

    The thread is started in advance: a signal handler that starts a thread could wait forever for a lock that the
    interrupted main thread holds.
    """
    global _worker  # noqa: PLW0603 - see forget_after_fork
    if _worker is None:
        _worker = OwnThread(target=_run, name="rankscope-stop")
        _worker.start()


def _run() -> None:
    while True:
        try:
            _work.get()()
        except Exception:  # thread boundary: the thread must survive for a later signal
            log.exception("unexpected error in the thread that waits for the service after stop signals")
