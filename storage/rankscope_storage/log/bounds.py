"""Rows that a question can concern, and whether a file, by the ranges the log tells of it, can hold one. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_ALL: Final = (-math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Rows that can matter: of these runs, or of any; with attempt and step in closed ranges, if they have them."""

    runs: frozenset[str] | None = None
    attempts: tuple[float, float] = _ALL
    steps: tuple[float, float] = _ALL

    def may_hold(self, file: Mapping[str, Any]) -> bool:
        """Whether `file`, with its least and greatest run, attempt and step, can have such a row; None is unknown."""
        low, high = file["run_min"], file["run_max"]
        if self.runs is not None and low is not None and not any(low <= run <= high for run in self.runs):
            return False
        return _overlaps(file, "attempt", self.attempts) and _overlaps(file, "step", self.steps)


def _overlaps(file: Mapping[str, Any], column: str, range_: tuple[float, float]) -> bool:
    low, high = file[f"{column}_min"], file[f"{column}_max"]
    return low is None or (bool(low <= range_[1]) and bool(high >= range_[0]))
