"""Decide over a log how its times are read whose year, or whose order of day and month, is not in the text.

Such times are `I0811 21:54:44`, `10/17/2025 16:31:56`, `26/01/31 10:00:00` and `[11/01 19:16:15`. The decision is made
over the first records and a sample of the lines of the file, and is stored with the import.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

FORM: Final = re.compile(
    r"(?<![\w./-])(?:[IWEF](?P<compact>\d{3,4})|(?P<date>\d{1,2}/\d{1,2}(?:/(?:\d{4}|\d{2}))?"
    r"|\d{2}-\d{2}-\d{2}|\d{1,2}\.\d{1,2}\.(?:\d{4}|\d{2}))),? "
    r"(?P<clock>\d{2}:\d{2}:\d{2})(?:[.,](?P<fraction>\d{1,9}))?(?![\d:])"
)
"""A regular expression for a time without a year, or with an ambiguous order of day and month."""

MONTH_FIRST_TOOLS: Final = (
    r"\[(?:INFO|WARNING|ERROR)\|DP=",  # nanotron
    r"\b(?:d2|detectron2|fvcore)\.",
    r"- (?:mm[a-z]+|root) -",  # MMEngine and mmcv
    r"\d{2}/\d{2}/\d{4} \d{2}:\d{2}:\d{2} - (?:INFO|WARNING|ERROR) -",  # examples of Hugging Face Transformers
    r"\[\d{2}/\d{2}/\d{2} \d{2}:\d{2}:\d{2}\] ",  # the handler of rich, which ColossalAI uses
)
"""Regular expressions for lines of tools that print the month before the day."""

_MONTH_FIRST: Final = re.compile("|".join(MONTH_FIRST_TOOLS))
_FULL_DATE: Final = re.compile(r"(?<![\w./-])(20\d{2})[-/](\d{2})[-/](\d{2})(?:[ T]\d{2}:\d{2}|(?![\w/-]))")
_SEPARATOR: Final = re.compile(r"[/.-]")
_YEARS: Final = range(15, 60)  # of two digits
_MONTHS: Final = 12
_NEAR: Final = dt.timedelta(days=2)
_EASTERN: Final = dt.timedelta(hours=14)  # local times of the east are later than UTC
_HALF_YEAR: Final = dt.timedelta(days=180)
_LEAP_YEAR: Final = 2000
_EPOCH: Final = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - times of a log without a time zone count as UTC
_MICROSECOND: Final = dt.timedelta(microseconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dates:
    """The decision about the times of one log."""

    order: str | None = None
    """Order of the parts of a date, such as `MD`, `MDY`, `DMY` or `YMD`; None if it is unknown."""
    year: int | None = None
    """The year of the first time, if the times have no year. None if it is unknown, or if the times have one."""
    why: str = ""
    """The reason for the decision, as a message to the user."""

    def to_json(self) -> dict[str, Any]:
        """Return the decision as an object for the details of the import event."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Dates:
        """Return the decision that `to_json` has written. Fields of a later release are ignored."""
        return Dates(**{name: document[name] for name in Dates.__dataclass_fields__ if name in document})


class Clock:
    """Converts the times of one log, in its order, according to a decision."""

    def __init__(self, dates: Dates) -> None:
        self.dates = dates
        self._first: dt.datetime | None = None
        self._last: dt.datetime | None = None

    def moment(self, text: str) -> tuple[int | None, float | None]:
        """Return a time as UTC µs and as seconds since the first time of the log; each is None if it is unknown.

        The year increases when the month decreases.
        """
        year = self.dates.year if self._last is None else self._last.year
        found = _moment(text, self.dates.order, _LEAP_YEAR if year is None else year)
        if found is None:
            return None, None
        last = self._last
        if last is not None and "Y" not in (self.dates.order or ""):
            if found.month < last.month and last - found > _NEAR:
                found = _in_year(found, found.year + 1)
            elif (
                found.month > last.month
                and found - last > _HALF_YEAR
                and last - _in_year(found, last.year - 1) <= _NEAR
            ):
                found = _in_year(found, last.year - 1)
        self._first = self._first or found
        self._last = found
        is_known = self.dates.year is not None or "Y" in (self.dates.order or "")
        return (found - _EPOCH) // _MICROSECOND if is_known else None, (found - self._first).total_seconds()


def decide_dates(times: Sequence[str], lines: Iterable[str], *, changed: float, year: int | None = None) -> Dates:
    """Return the decision for a log whose times without a complete date are `times`, in the order of the log.

    `lines` is a sample of its lines. `changed` is the modification time of the file in seconds since 1970. `year` is
    the year that the user has given.
    """
    listed = list(lines)
    order, why = _order([date for text in times if (date := _date(text))], listed)
    shown = f"times such as {times[0]!r}"
    if order is None:
        return Dates(why=f"{shown} are not stored: no value above 12 distinguishes day and month")
    why = f"{shown} are {_IN_WORDS[order]}{why}"
    if "Y" in order:
        return Dates(order=order, why=why)
    latest = next((line for line in reversed(listed) if _has_form_of(line, times[0])), times[-1])
    first, last = (_moment(text, order, _LEAP_YEAR) for text in (times[0], latest))
    if first is None or last is None:
        return Dates(order=order, why=why)
    spans = first.month > last.month  # the log begins in the year before the last time
    if (full := _full_date(listed)) is not None:
        return Dates(
            order=order, year=_nearest(first, full), why=f"{why}; the year is that of {full:%Y-%m-%d} in the log"
        )
    if year is not None:
        return Dates(order=order, year=year - spans, why=f"{why}; the year is that of --year")
    written = _EPOCH + dt.timedelta(seconds=changed)
    for candidate in (written.year + 1, written.year, written.year - 1):
        if -_EASTERN <= written - _in_year(last, candidate) <= _NEAR:
            return Dates(
                order=order,
                year=candidate - spans,
                why=f"{why}; the year {candidate} is that of the file's last change",
            )
    return Dates(
        order=order,
        why=f"{why} without a year: only their differences are stored, as elapsed_seconds; --year YEAR adds the year",
    )


_IN_WORDS: Final = {
    "MD": "month and day", "DM": "day and month", "MDY": "month, day and year", "DMY": "day, month and year",
    "YMD": "year, month and day",
}  # fmt: skip


def _date(text: str) -> str | None:
    found = FORM.search(text)
    return found["date"] if found else None


def _has_form_of(line: str, text: str) -> bool:
    one, other = _date(line), _date(text)
    return FORM.search(line) is not None and len(_SEPARATOR.findall(one or "")) == len(_SEPARATOR.findall(other or ""))


def _order(dates: Sequence[str], lines: Sequence[str]) -> tuple[str | None, str]:
    """Return the order of the parts of a date, and the reason if it was not obvious; None if it is unknown."""
    rows = [_parts(date) for date in dates]
    if not rows:
        return "MD", ""  # the compact form
    sampled = [date for line in lines if (date := _date(line))]
    rows += [parts for date in sampled if len(parts := _parts(date)) == len(rows[0])]
    rows = [row for row in rows if len(row) == len(rows[0])]
    columns = list(zip(*rows, strict=True))
    years = [place for place in (0, 2) if place < len(columns) > 2 and _are_years(columns[place])]
    if len(columns) > 2:
        if years == [0] or (years and years[0] == 0 and "-" in dates[0]):
            return "YMD", ""
        if years != [2]:
            return None, ""
    suffix = "Y" if years else ""
    if max(columns[1]) > _MONTHS >= max(columns[0]):
        return f"MD{suffix}", ", because a value is above 12"
    if max(columns[0]) > _MONTHS >= max(columns[1]):
        return f"DM{suffix}", ", because a value is above 12"
    if max(columns[0]) <= _MONTHS and any(map(_MONTH_FIRST.search, lines)):
        return f"MD{suffix}", ", as the tool prints them"
    return None, ""


def _parts(date: str) -> tuple[int, ...]:
    return tuple(map(int, _SEPARATOR.split(date)))


def _are_years(column: Sequence[int]) -> bool:
    return max(column) - min(column) <= 1 and (min(column) in _YEARS or min(column) > 1000)


def _moment(text: str, order: str | None, year: int) -> dt.datetime | None:
    found = FORM.search(text)
    if found is None or order is None:
        return None
    if found["compact"]:
        parts = {"M": int(found["compact"][:-2]), "D": int(found["compact"][-2:])}
    else:
        parts = dict(zip(order, _parts(found["date"]), strict=False))
    own = parts.get("Y", year)
    microseconds = int((found["fraction"] or "0")[:6].ljust(6, "0"))
    try:
        hour, minute, second = map(int, found["clock"].split(":"))
        clock = dt.time(hour, minute, second, microseconds)
        return dt.datetime.combine(dt.date(own + 2000 * (own < 100), parts["M"], parts["D"]), clock)
    except (KeyError, ValueError):
        return None


def _in_year(moment: dt.datetime, year: int) -> dt.datetime:
    try:
        return moment.replace(year=year)
    except ValueError:  # the 29th of February
        return moment.replace(year=year, day=28)


def _full_date(lines: Iterable[str]) -> dt.datetime | None:
    """Return the first complete date in `lines`, or None."""
    for line in lines:
        for found in _FULL_DATE.finditer(line):
            try:
                return dt.datetime(*map(int, found.groups()))  # type: ignore[arg-type]  # noqa: DTZ001 - as above
            except ValueError:
                continue
    return None


def _nearest(moment: dt.datetime, date: dt.datetime) -> int:
    years = (date.year, date.year + 1, date.year - 1)
    return min(years, key=lambda year: abs(_in_year(moment, year) - date))
