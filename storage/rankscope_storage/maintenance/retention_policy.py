"""How long rows are kept, as a value: what a service's configuration says, and what it means at a moment. No I/O.

Apart from all else, so that who reads a configuration need not load what reads a store.
"""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import dataclass
from typing import Final

from rankscope_contract.model.rollups import ROLLUPS

RAW: Final = ("tensor_stats", "features", "histograms", "hashes", "collectives")
"""Datasets that `raw_days` is about; scalars and samples have days of their own."""

_LONGEST_SLACK: Final = dt.timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Rows measured before `before` are too old; some of them may stay for `slack` longer."""

    before: dt.datetime
    slack: dt.timedelta

    @classmethod
    def of_age(cls, now: dt.datetime, days: float) -> Limit:
        """Return the limit for rows that are kept `days`: the slack is a tenth of that, a day at most."""
        kept = dt.timedelta(days=days)
        return cls(before=now - kept, slack=min(kept / 10, _LONGEST_SLACK))


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Days that rows are kept, by the clock in `ts`; None is for ever."""

    raw_days: float | None = None
    scalars_days: float | None = None
    samples_days: float | None = None
    rollup_days: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is no number of days, and rollups that would be too old when they are made."""
        if any(math.isnan(days) or days < 0 for days in self._days().values()):
            raise ValueError("days to keep rows for are 0 or more, or left out to keep them for ever")
        raw = max((days for days in (self.raw_days, self.scalars_days) if days is not None), default=None)
        if self.rollup_days is not None and raw is not None and self.rollup_days < raw:
            raise ValueError(
                f"rollup_days ({self.rollup_days:g}) counts from when a row was measured, and raw rows are kept "
                f"{raw:g} days: make it at least that, or leave it out to keep rollups for ever"
            )

    @property
    def is_on(self) -> bool:
        """Whether anything ever goes."""
        return bool(self._days())

    def limits(self, now: dt.datetime) -> dict[str, Limit]:
        """Return what is too old at `now`, by dataset. Raises OverflowError before all time."""
        return {dataset: Limit.of_age(now, days) for dataset, days in self._days().items()}

    def _days(self) -> dict[str, float]:
        days = {
            **dict.fromkeys(RAW, self.raw_days),
            "scalars": self.scalars_days,
            "samples": self.samples_days,
            **dict.fromkeys(ROLLUPS.values(), self.rollup_days),
        }
        return {dataset: number for dataset, number in days.items() if number is not None}
