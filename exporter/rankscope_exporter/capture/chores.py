"""A thread for what may wait, for a device or for a disk, and must hold up nobody else."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Final

from rankscope_exporter.guard import Guard
from rankscope_exporter.own_threads import OwnThread

MOST_WAITING: Final = 64


class Chores:
    """Does one thing after the other, in order. The thread starts with the first of them."""

    def __init__(self, name: str, guard: Guard) -> None:
        self.dropped = 0
        """How many found the queue full."""
        self._name = name
        self._guard = guard
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def put(self, chore: Callable[[], object]) -> None:
        """Have `chore` done; never waits, from any thread."""
        with self._lock:
            if self._thread is None:
                self._thread = OwnThread(target=self._run, name=f"rankscope-{self._name.replace('_', '-')}")
                self._thread.start()
        try:
            self._queue.put_nowait(chore)
        except queue.Full:
            self.dropped += 1

    def stop(self, timeout_seconds: float) -> bool:
        """Do what waits, for so long at most; return whether all was done."""
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
            self._guard.call(self._name, chore)
