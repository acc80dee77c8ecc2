"""Retention settings: the configured numbers of days, and the resulting limits at a given time. No I/O.

This is a separate module, so that code which reads a configuration need not import code that reads a store.
"""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import dataclass
from typing import Final

from rankscope_storage.base.datasets import ROLLUPS

RAW: Final = ("tensor_stats", "features", "histograms", "hashes", "collectives")
"""Datasets to which `raw_days` applies. Scalars and samples have separate settings."""

_LONGEST_SLACK: Final = dt.timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Limit for the age of rows: rows measured before `before` are too old.

    A retention job may keep some of these rows for the additional time `slack`.
    """

    before: dt.datetime
    slack: dt.timedelta

    @classmethod
    def of_age(cls, now: dt.datetime, days: float) -> Limit:
        """Return the limit for rows that are kept for `days` days.

        The slack, for which a job may keep rows longer, is a tenth of this time, but at most a day.
        """
        kept = dt.timedelta(days=days)
        return cls(before=now - kept, slack=min(kept / 10, _LONGEST_SLACK))


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Numbers of days for which rows are kept after their time `ts`; None keeps them forever."""

    raw_days: float | None = None
    scalars_days: float | None = None
    samples_days: float | None = None
    rollup_days: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a negative number of days, or if rollups are kept for less time than raw rows.

        Such rollups would already be too old when they are written.
        """
        if any(math.isnan(days) or days < 0 for days in self._days().values()):
            raise ValueError(
                "a number of days to keep rows must be 0 or more: omit the setting to keep the rows forever"
            )
        raw = max((days for days in (self.raw_days, self.scalars_days) if days is not None), default=None)
        if self.rollup_days is not None and raw is not None and self.rollup_days < raw:
            raise ValueError(
                f"rollup_days ({self.rollup_days:g}) is less than the {raw:g} days for which raw rows are kept, and "
                f"both count from the measurement: set rollup_days to at least {raw:g}, or omit it to keep rollups "
                "forever"
            )

    @property
    def is_on(self) -> bool:
        """Return whether these settings ever delete rows."""
        return bool(self._days())

    def limits(self, now: dt.datetime) -> dict[str, Limit]:
        """Return the limit of each dataset at the time `now`. Raises OverflowError for a limit before the year 1."""
        return {dataset: Limit.of_age(now, days) for dataset, days in self._days().items()}

    def _days(self) -> dict[str, float]:
        days = {
            **dict.fromkeys(RAW, self.raw_days),
            "scalars": self.scalars_days,
            "samples": self.samples_days,
            **dict.fromkeys(ROLLUPS.values(), self.rollup_days),
        }
        return {dataset: number for dataset, number in days.items() if number is not None}
