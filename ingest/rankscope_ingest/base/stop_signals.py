"""Signals that end a service or a command in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return SIGTERM, SIGINT, and SIGHUP unless it was ignored when the process started, as under nohup."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, signal.SIGINT, *hangup)


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], None], *left_out: signal.Signals) -> Iterator[None]:
    """Call `handler` for the signals that end a command, without those `left_out`, in the context."""
    before = {number: signal.signal(number, handler) for number in stop_signals() if number not in left_out}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextlib.contextmanager
def stop_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """Set `stop` at the first SIGTERM, SIGINT or SIGHUP.

    A second signal has the default effect of the operating system: it ends the process. Only SIGHUP has no effect then,
    because the kernel and the shell both send it when a terminal is closed.
    """
    loop = asyncio.get_running_loop()
    caught = stop_signals()

    def release() -> None:
        for number in caught:
            loop.remove_signal_handler(number)

    def on_signal() -> None:
        release()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stop.set()

    # Outside the main thread, the embedding program handles signals.
    with contextlib.suppress(ValueError, RuntimeError):
        for number in caught:
            loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        release()
