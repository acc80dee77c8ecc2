"""The clock of the machine of a log, relative to the clock of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

QUARTER_HOUR: Final = 900
TOLERANCE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineClock:
    """The clock of the machine of a log."""

    offset_seconds: float
    """Time of that machine minus time of this machine."""
    source: str
    """Source of the offset, for messages to the user."""
    zone_seconds: int | None = None
    """Offset of the time zone of that machine from UTC; None if it is unknown."""


class RemoteClock:
    """The clock of the machine of a log, as far as it is known.

    A clock that was read over SSH is used first. Otherwise, the offset is estimated from the times at which the growing
    log was changed. A change is never later than the poll that finds it, so the largest difference is the best.
    """

    def __init__(self) -> None:
        self._read: MachineClock | None = None
        self._estimated: float | None = None
        self._zone: int | None = None

    def set(self, clock: MachineClock | None) -> None:
        """Use `clock` from now on. With None, the clock could not be read, and the last known one remains in use."""
        self._read = clock or self._read

    def observe_change(self, modified: float, now: float) -> None:
        """Use the time of a change of the log that was found at `now`, the time of this machine."""
        offset = modified - now
        self._estimated = offset if self._estimated is None else max(self._estimated, offset)

    def observe_row(self, written: float, modified: float) -> None:
        """Derive the time zone of the log from the time `written` of a new row and the time of the last change."""
        self._zone = round((written - modified) / QUARTER_HOUR) * QUARTER_HOUR

    @property
    def source(self) -> str:
        """Return the source of the clock, for messages to the user."""
        if self._read is not None:
            return self._read.source
        return "clock of this machine" if self._estimated is None else "time of the last change of the growing log"

    def now(self, now: float) -> float:
        """Return the time of the machine of the log at `now`, the time of this machine."""
        if self._read is not None:
            return now + self._read.offset_seconds
        return now + (self._estimated or 0.0)

    def moment(self, written: float, modified: float) -> float:
        """Return the time at which a row was written, in seconds since 1970 by the clock of the machine of the log.

        `written` is the time in the row, which has no time zone, as if it were UTC. `modified` is the time of the last
        change of the log, which is not earlier. If the time zone is unknown, the result is `modified`.
        """
        zones = {self._zone} if self._read is None or self._read.zone_seconds is None else {0, self._read.zone_seconds}
        moments = [written - zone for zone in zones if zone is not None]
        return max((moment for moment in moments if moment <= modified + TOLERANCE_SECONDS), default=modified)
