"""Signals that end a service or a command in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def stop_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """Set `stop` at the first SIGTERM or SIGINT.

    A second signal has the default effect of the operating system: it ends the process.
    """
    loop = asyncio.get_running_loop()
    caught = (signal.SIGTERM, signal.SIGINT)

    def release() -> None:
        for number in caught:
            loop.remove_signal_handler(number)

    def on_signal() -> None:
        release()
        stop.set()

    # Outside the main thread, the embedding program handles signals.
    with contextlib.suppress(ValueError, RuntimeError):
        for number in caught:
            loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        release()
