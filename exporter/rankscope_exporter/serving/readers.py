"""Who reads this rank: the programs that asked for its pages lately, by what they call themselves.

For people who wonder why nothing arrives; `rankscope doctor` shows it. Names are taken as they come, cut, and few.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from rankscope_contract.channel import METRICS_PATH, NODE_METRICS_PATH, RECORDS_PATH

MOST_READERS: Final = 8
_LONGEST_NAME: Final = 80
_WATCHED: Final = frozenset({METRICS_PATH, NODE_METRICS_PATH, RECORDS_PATH})


class Readers:
    """The latest readers of each page. Asked and told by any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], float] = {}  # the one seen last is the last

    def note(self, path: str, agent: str) -> None:
        """Note that `agent` was given the page at `path`."""
        if path not in _WATCHED:
            return
        name = "".join(char if char.isprintable() else "?" for char in agent[:_LONGEST_NAME]) or "unnamed"
        with self._lock:
            self._seen.pop((path, name), None)
            self._seen[path, name] = self._clock()
            if len(self._seen) > MOST_READERS:
                del self._seen[next(iter(self._seen))]

    def latest(self) -> list[dict[str, Any]]:
        """Return page, name and how long ago, the latest first."""
        with self._lock:
            seen = list(reversed(self._seen.items()))
        now = self._clock()
        return [{"page": path, "by": by, "seconds_ago": round(now - at, 1)} for (path, by), at in seen]
