"""Retention as a value: the configured number of days, and the resulting limits at a time. No I/O.

A separate module, so that code which reads a configuration need not import code that reads a store.
"""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import dataclass
from typing import Final

from rankscope_contract.model.rollups import ROLLUPS

RAW: Final = ("tensor_stats", "features", "histograms", "hashes", "collectives")
"""Datasets to which `raw_days` applies; scalars and samples have separate numbers of days."""

_LONGEST_SLACK: Final = dt.timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Rows measured before `before` are too old; some may be kept for `slack` longer."""

    before: dt.datetime
    slack: dt.timedelta

    @classmethod
    def of_age(cls, now: dt.datetime, days: float) -> Limit:
        """Return the limit for rows that are kept for `days`; the slack is a tenth of that, at most a day."""
        kept = dt.timedelta(days=days)
        return cls(before=now - kept, slack=min(kept / 10, _LONGEST_SLACK))


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Number of days for which rows are kept, by their `ts`; None is forever."""

    raw_days: float | None = None
    scalars_days: float | None = None
    samples_days: float | None = None
    rollup_days: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for negative days, and for rollups that would be too old when they are written."""
        if any(math.isnan(days) or days < 0 for days in self._days().values()):
            raise ValueError("numbers of days must be 0 or more; omit one to keep the rows forever")
        raw = max((days for days in (self.raw_days, self.scalars_days) if days is not None), default=None)
        if self.rollup_days is not None and raw is not None and self.rollup_days < raw:
            raise ValueError(
                f"rollup_days ({self.rollup_days:g}) counts from when a row was measured, and raw rows are kept for "
                f"{raw:g} days: set it to at least that, or omit it to keep rollups forever"
            )

    @property
    def is_on(self) -> bool:
        """Return whether any rows are ever deleted."""
        return bool(self._days())

    def limits(self, now: dt.datetime) -> dict[str, Limit]:
        """Return the limit of each dataset at `now`. Raises OverflowError for a limit before year 1."""
        return {dataset: Limit.of_age(now, days) for dataset, days in self._days().items()}

    def _days(self) -> dict[str, float]:
        days = {
            **dict.fromkeys(RAW, self.raw_days),
            "scalars": self.scalars_days,
            "samples": self.samples_days,
            **dict.fromkeys(ROLLUPS.values(), self.rollup_days),
        }
        return {dataset: number for dataset, number in days.items() if number is not None}
