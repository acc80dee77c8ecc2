"""CPU time of the serving threads, added up by name. A thread reports itself; nothing is sampled from outside."""

from __future__ import annotations

import threading
import time


class CpuMeter:
    """Seconds of CPU by name, shared by threads that come and go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._thread = threading.local()

    def lap(self, name: str) -> None:
        """Add the CPU time that the calling thread spent since its last lap (or its start) to `name`."""
        now = time.thread_time()
        spent = now - getattr(self._thread, "last", 0.0)
        self._thread.last = now
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + spent

    def totals(self) -> dict[str, float]:
        """Return the seconds so far by name."""
        with self._lock:
            return dict(self._seconds)
