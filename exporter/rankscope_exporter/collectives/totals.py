"""Calls and bytes of each operation so far, for the page."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any, Final

MOST_OPS: Final = 64
"""Operations with a count of their own; there are some thirty in torch."""

OTHER: Final = "_other"


class Totals:
    """Added to by one thread and read by those that answer scrapes."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Count `rows` of the dataset `collectives`."""
        with self._lock:
            for row in rows:
                op = row["op"]
                if op not in self._counts and len(self._counts) >= MOST_OPS:
                    op = OTHER
                calls, total = self._counts.get(op, (0, 0))
                self._counts[op] = calls + 1, total + (row["bytes"] or 0)

    def by_op(self) -> Mapping[str, tuple[int, int]]:
        """Return calls and bytes by operation."""
        with self._lock:
            return dict(self._counts)
