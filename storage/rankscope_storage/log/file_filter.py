"""Which files of a version can hold rows that somebody asks for, by the ranges in the log. Pure.

`FileFilter` is for the arguments of a caller, `Bounds` for the predicates of a statement.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow.compute as pc

_ALL: Final = (-math.inf, math.inf)
_LOG_CUTS: Final = dt.timedelta(milliseconds=1)
"""The log cuts times to the millisecond, so a file may reach a little further than the log says."""


@dataclass(frozen=True, slots=True)
class FileFilter:
    """Files that can hold rows of `dataset`, of `run`, and of the closed ranges `steps` and `times`; None is any."""

    dataset: str
    run: str | None = None
    steps: tuple[int, int] | None = None
    times: tuple[dt.datetime, dt.datetime] | None = None

    def expression(self) -> pc.Expression:
        """Return the predicate over the files of a Snapshot."""
        wanted = pc.field("dataset") == self.dataset
        if self.run is not None:
            wanted &= _may_overlap("run", self.run, self.run)
        if self.steps is not None:
            wanted &= _may_overlap("step", *self.steps)
        if self.times is not None:
            wanted &= _may_overlap("ts", self.times[0] - _LOG_CUTS, self.times[1])
        return wanted


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


def _may_overlap(column: str, low: str | int | dt.datetime, high: str | int | dt.datetime) -> pc.Expression:
    minimum, maximum = pc.field(f"{column}_min"), pc.field(f"{column}_max")
    return minimum.is_null() | ((minimum <= high) & (maximum >= low))
