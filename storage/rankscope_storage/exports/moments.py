"""Moments as users write them: ISO 8601, or the existing tool's folder times, `Dec03_21-34-40`, which have no year."""

from __future__ import annotations

import datetime as dt
import re
from typing import Final

from rankscope_storage.errors import ExportError

_FOLDER_TIME: Final = re.compile(r"([A-Z][a-z]{2})(\d{2})_(\d{2})-(\d{2})-(\d{2})")
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def parse_moment(text: str, near: dt.datetime) -> dt.datetime:
    """Return the moment that `text` names; without a zone it is UTC, without a year the one closest to `near`."""
    if match := _FOLDER_TIME.fullmatch(text):
        return _closest(text, match, near)
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        raise ExportError(f"{text!r} is no time: write 2026-03-01T12:00:00+00:00 or Mar01_12-00-00") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)


def _closest(text: str, match: re.Match[str], near: dt.datetime) -> dt.datetime:
    moments = []
    for year in range(near.year - 4, near.year + 5):  # the 29th of February needs a leap year
        try:
            day = dt.date(year, _MONTHS.index(match[1]) + 1, int(match[2]))
            clock = dt.time(int(match[3]), int(match[4]), int(match[5]), tzinfo=dt.UTC)
        except ValueError:
            continue
        moments.append(dt.datetime.combine(day, clock))
    if not moments:
        raise ExportError(f"{text!r} is no time: no year has it")
    return min(moments, key=lambda moment: abs(moment - near))
