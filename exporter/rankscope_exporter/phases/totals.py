"""Seconds by phase since the process attached, and when they are worth a row. Thread-safe.

Every number is read on the publisher's thread at the moment it is published: a counter must never seem to fall.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from rankscope_contract.phases import LABEL, PHASE_SECONDS, PRE_COLLECTIVE_TOTAL
from rankscope_exporter.record import Scalar

EVERY_SECONDS: Final = 1.0
"""Totals are for those who look every few seconds; what single steps were made of has rows of its own."""

UNIT: Final = "seconds"


class Totals:
    """Grows on the training and on the publisher's thread, and is read on the latter."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._pre_collective = 0.0
        self._changed: set[str] = set()
        self._told_at = float("-inf")

    def add(self, phases: Mapping[str, float], pre_collective: float | None = None) -> None:
        """Add seconds to phases, and to what is computed before ranks meet."""
        with self._lock:
            for phase, seconds in phases.items():
                self._seconds[phase] = self._seconds.get(phase, 0.0) + max(0.0, seconds)
                self._changed.add(phase)
            self._pre_collective += pre_collective or 0.0

    def of(self, phase: str) -> list[Scalar]:
        """Return the total of one phase."""
        with self._lock:
            self._changed.discard(phase)
            return [self._scalar(phase)] if phase in self._seconds else []

    def due(self, *, is_last: bool = False) -> list[Scalar]:
        """Return all totals that have grown, if they were not told a moment ago."""
        now = self._clock()
        with self._lock:
            if now - self._told_at < EVERY_SECONDS and not is_last:
                return []
            self._told_at = now
            changed, self._changed = sorted(self._changed), set()
            told = [self._scalar(phase) for phase in changed]
            if self._pre_collective:
                told.append(Scalar(PRE_COLLECTIVE_TOTAL, self._pre_collective, UNIT))
            return told

    def _scalar(self, phase: str) -> Scalar:
        return Scalar(PHASE_SECONDS, self._seconds[phase], UNIT, {LABEL: phase})
