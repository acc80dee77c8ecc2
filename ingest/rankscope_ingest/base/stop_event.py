"""Signals that end a service or a command in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return SIGTERM, SIGINT, and SIGHUP unless it was ignored when the process started, as under nohup."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *(() if is_ignored else (signal.SIGHUP,)))


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
