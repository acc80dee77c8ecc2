"""Signals that ask a job to end, where the configuration names them: the rank says its last word before they do.

Python runs a handler when its main thread returns to the interpreter, so a rank that waits in C code ends later than it
would without one. A handler that the script has set goes first and decides: where it lets training go on, so do we, and
remember that somebody asked.
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
"""Whoever asks kills after some seconds: exit_wait_seconds is cut to this."""

_GIVE_UP_SECONDS: Final = 9.0
_AGAIN_SECONDS: Final = 0.01
_INSIDE_SECONDS: Final = 2.0
_OWN_CODE: Final = __name__.partition(".")[0] + "."

FinalWait = Callable[[], None]


class Stoppable(Protocol):
    """A monitor, as signals see it."""

    def stop_asked(self, name: str) -> None:
        """Note that the signal came; training may go on."""

    def last_records(self, name: str) -> FinalWait:
        """Record that the signal ends this process, and return what waits until it was heard. Called once."""


@dataclass(slots=True)
class _Installed:
    former: Callable[[int, FrameType | None], object] | int
    monitors: set[Stoppable] = field(default_factory=set)
    came_at: float | None = None


_taken: dict[int, _Installed] = {}
_work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
_worker: threading.Thread | None = None


def install(monitor: Stoppable, names: Iterable[str]) -> None:
    """Tell `monitor` of these signals until `give_back`. Raises ConfigError, and takes none, where that cannot be."""
    numbers = [signal.Signals[name] for name in names]
    if numbers and threading.current_thread() is not threading.main_thread():
        raise ConfigError("stop_signals: only the main thread may take signals, so call attach() there")
    for number in numbers:
        if number not in _taken and signal.getsignal(number) is None:
            raise ConfigError(f"stop_signals: {number.name} has a handler in C already; leave it out")
    for number in numbers:
        former = signal.getsignal(number)
        if number not in _taken and former is not None and former != signal.SIG_IGN:  # nohup: nothing ends by it
            _taken[number] = _Installed(former)
            signal.signal(number, _on_signal)
        if number in _taken:
            _taken[number].monitors.add(monitor)
    if numbers:
        _start_worker()


def uninstall(monitor: Stoppable) -> None:
    """Tell `monitor` no more, and put back what was there. Off the main thread a handler stays that only passes on."""
    for number, taken in list(_taken.items()):
        taken.monitors.discard(monitor)
        if not taken.monitors:
            _restore(number)


def forget_after_fork() -> None:
    """In a forked child: signals do there what they did before us."""
    global _work, _worker
    _work, _worker = queue.SimpleQueue(), None
    for number, taken in list(_taken.items()):
        taken.monitors.clear()
        _restore(number)


def _restore(number: int) -> None:
    if signal.getsignal(number) is not _on_signal:  # the script has set its own since, which may still call ours
        return
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(number, _taken[number].former)
        del _taken[number]


def _on_signal(number: int, frame: FrameType | None) -> None:
    taken = _taken.get(number)
    if taken is None:  # given back, and called by a handler of the script that remembered it
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
    signal.signal(number, taken.former)  # a second signal ends the process at once
    _publish_exit(tuple(taken.monitors), signal.Signals(number).name)
    os.kill(os.getpid(), number)


def _is_inside(frame: FrameType | None) -> bool:
    """Return whether training was interrupted within our own code, which may hold a lock: it leaves in microseconds."""
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
    """Record them here, and have another thread wait for the service: what this one holds meanwhile stays held."""
    waiting = []
    for monitor in monitors:
        heard = threading.Event()
        try:
            _work.put(_then(monitor.last_records(name), heard))
        except Exception:  # other monitors have records too, and a handler must not raise into training
            log.exception("recording the end of training by %s failed", name)
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
            log.exception("waiting for the service after a stop signal failed")
        finally:
            heard.set()

    return work


def _start_worker() -> None:
    """Start the thread now: in a handler, starting one could wait for ever for what the main thread holds."""
    global _worker  # noqa: PLW0603 - see forget_after_fork
    if _worker is None:
        _worker = OwnThread(target=_run, name="rankscope-stop")
        _worker.start()


def _run() -> None:
    while True:
        try:
            _work.get()()
        except Exception:  # the edge of the thread: what waits for a later signal needs it
            log.exception("unexpected error in the thread of stop signals")
