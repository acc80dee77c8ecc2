"""One row of a Megatron log as text: its printer, its time, its step, and `key: value` parts between bars.

This is the careful reader, for whatever the fast one (`columns`) does not take: colours, progress bars glued in front,
two rows on one line, cut rows. Pure: text in, values out.
"""

from __future__ import annotations

import datetime as dt
import functools
import math
import re
from dataclasses import dataclass
from typing import Final

from rankscope_ingest.importers.common.values import seconds

HEAD_PATTERN: Final = r"[Ii]teration[ \t]+\d{1,18}[ \t]*/[ \t]*\d{1,18}[ \t]*\|"
"""What every row begins with, behind its prefixes; the same text is given to Arrow's own regular expressions."""

LABEL_PATTERN: Final = r"(?:\[[^\[\]|]+\][ \t]*:?[ \t]*|[\w.-]+:[ \t]+)"
TIME_PATTERN: Final = r"\d{4}[-/]?\d\d[-/]?\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[-+]\d\d:?\d\d)?"

MAX_PREFIX: Final = 400
"""Characters before a row that can be its prefixes."""

_HEAD: Final = re.compile(r"[Ii]teration[ \t]+(\d{1,18})[ \t]*/[ \t]*(\d{1,18})[ \t]*\|")
_TIME: Final = re.compile(rf"(?<!\d){TIME_PATTERN}")
_BEFORE: Final = re.compile(rf"(?P<labels>(?:{LABEL_PATTERN})*?)(?:\[+(?P<time>{TIME_PATTERN})\]+)?[ \t]*$")
_LABEL: Final = re.compile(LABEL_PATTERN)
_COLOURS: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x00\x08]")
_RANK: Final = re.compile(r"\[(?:default|rank[ -]?)(?P<rank>\d{1,9})(?:/\d+)?\][ \t]*:?", re.IGNORECASE)
_LOCAL: Final = re.compile(r"\[(?P<host>[A-Za-z0-9][\w.-]*(?<!\.py)):(?P<rank>\d{1,9})\][ \t]*:?")
_TASK: Final = re.compile(r"(\d{1,9}):")
_HOST: Final = re.compile(r"([\w.-]+):")
_LARGEST_RANK: Final = 1 << 31
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MOMENT: Final = re.compile(
    r"(\d{4})[-/]?(\d\d)[-/]?(\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,6})\d*)?(Z|[-+]\d\d:?\d\d)?"
)
_BARE: Final = re.compile(
    r"((?:[\w-]{1,40} ){0,4}loss|learning rate|loss scale|grad norm|num zeros|params norm|consumed samples"
    r"|global batch size|elapsed time per iteration \(m?s\)|number of (?:skipped|nan) iterations)[ \t]+(\S+)"
)
"""A part as the first Megatrons print it, without a colon: `lm loss 9.5E+00`."""
_CLOCK: Final = re.compile(r"([^:|]*[^:|\s])\s*:\s*((?:\d{1,6} days?, )?\d{1,6}(?::\d\d){1,2}(?:\.\d+)?)")
_THOUSANDS: Final = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_DECIMAL_COMMA: Final = re.compile(r"[-+]?\d+,\d+(?:[eE][-+]?\d+)?")
_EITHER: Final = re.compile(r"[-+]?\d{1,3},\d{3}")
_SPELLED_NAN: Final = re.compile(r"[-+]?(?:s?nan\(\w*\)|1\.#(?:[qs]?nan|ind)\d*)", re.IGNORECASE)
_SPELLED_INF: Final = re.compile(r"([-+]?)1\.#inf\d*", re.IGNORECASE)
_LIKE_A_NUMBER: Final = re.compile(r"[-+.]{0,2}\d")


@dataclass(frozen=True, slots=True)
class Printer:
    """Who printed a row. Rows of one printer are one sequence; `rank` is known where the prefix says so."""

    rank: int | None = None
    task: int | None = None
    host: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A row as it is in the log. `is_closed` tells that nothing is missing at its end, as far as the bar tells."""

    printer: Printer
    ts: int | None
    step: int
    planned: int
    parts: tuple[tuple[str, str], ...]
    odd_parts: int
    is_closed: bool
    is_whole: bool
    """Whether its last part is a key with a value: so ends a row of a dialect that sets no bar behind it."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of its parts, in their order."""
        return tuple(key for key, _ in self.parts)


def clean(text: str) -> str:
    """Return `text` without colours and other terminal codes."""
    return _COLOURS.sub("", text) if "\x1b" in text or "\x00" in text or "\x08" in text else text


def has_head(text: str) -> bool:
    """Return whether a row begins somewhere in `text`."""
    return _HEAD.search(text) is not None


def parse_rows(text: str) -> list[Row]:
    """Return the rows in one line of a log, in order; a row that another one interrupts is not closed."""
    heads = list(_HEAD.finditer(text))
    rows = []
    for position, head in enumerate(heads):
        prefix = text[max(0, head.start() - MAX_PREFIX) : head.start()]
        before = _BEFORE.search(prefix)
        end = len(text)
        if position + 1 < len(heads):
            following = heads[position + 1].start()
            cut = _BEFORE.search(text[max(head.end(), following - MAX_PREFIX) : following])
            end = following - (len(cut[0]) if cut else 0)
        moment = before["time"] if before and before["time"] else None
        if moment is None and not position:
            moment = last_time(prefix)
        rows.append(_row(head, before, moment, text[head.end() : end]))
    return rows


def last_time(prefix: str) -> str | None:
    """Return the last time in what stands before a row: loggers put theirs in front of other labels."""
    found = _TIME.findall(prefix)
    return found[-1] if found else None


def _row(head: re.Match[str], before: re.Match[str] | None, moment: str | None, rest: str) -> Row:
    pieces = rest.split("|")
    is_closed = not pieces[-1].strip()
    if is_closed:
        pieces.pop()
    split = [split_part(piece) for piece in pieces]
    parts = dict(reversed([part for part in split if part is not None]))
    return Row(
        printer=printer(before["labels"]) if before else Printer(),
        ts=micros(moment) if moment else None,
        step=int(head[1]),
        planned=int(head[2]),
        parts=tuple(reversed(parts.items())),
        odd_parts=sum(part is None or _is_odd(*part) for part in split),
        is_closed=is_closed,
        is_whole=bool(split) and split[-1] is not None,
    )


def split_part(piece: str) -> tuple[str, str] | None:
    """Return key and value of ` lm loss: 2.1E+00 `, or of ` lm loss 2.1E+00 `; None where one of the two is missing."""
    key, colon, value = piece.rpartition(":")
    key, value = key.strip(), value.strip()
    if colon and ":" in key and (clock := _CLOCK.fullmatch(piece.strip())):
        return clock[1], clock[2]
    if not colon and (bare := _BARE.fullmatch(value)) and number(bare[2]) is not None:
        return bare[1], bare[2]
    return (key, value) if colon and key and value else None


def number(text: str) -> float | None:
    """Return a number of a log, NaN and Inf included; None for anything else."""
    if "_" in text:
        return None
    try:
        return float(text)
    except ValueError:
        return _oddly_written(text.strip())


def _oddly_written(text: str) -> float | None:
    """Return a number with `1,234.5` thousands, a `0,5` comma, or the NaN of another C library.

    `1,234` may be either, and is none: a wrong number is worse than a part that is told not to make sense.
    """
    if _SPELLED_NAN.fullmatch(text):
        return math.nan
    if infinite := _SPELLED_INF.fullmatch(text):
        return -math.inf if infinite[1] == "-" else math.inf
    if _EITHER.fullmatch(text):
        return None
    if _THOUSANDS.fullmatch(text):
        return float(text.replace(",", ""))
    return float(text.replace(",", ".")) if _DECIMAL_COMMA.fullmatch(text) else None


def _is_odd(key: str, text: str) -> bool:
    """Return whether a value that looks like a number cannot be read as one."""
    return number(text) is None and _LIKE_A_NUMBER.match(text) is not None and not values(key, text)


def values(key: str, text: str) -> list[tuple[str, bool, float, str | None]]:
    """Return (key, is an average, value, unit) for each number in a value: one, `current/average`, or one per key.

    `hip mem usage/free/total: 144.89GB/47.10GB/191.98GB` names its numbers in the key.
    """
    single = number(text)
    if single is not None:
        return [(key, False, single, None)]
    if ":" in text and (duration := seconds(text)) is not None:
        return [(key, False, duration, "s")]
    read = [_with_unit(part) for part in text.split("/")]
    given = [part for part in read if part is not None]
    if not given or len(given) < len(read):
        return []
    names = key.split("/")
    if len(given) == 1:
        return [(key, False, *given[0])]
    if len(names) == len(given):
        stem = names[0].rpartition(" ")[0]
        full = [names[0], *(f"{stem} {name}".strip() for name in names[1:])]
        return [(name, False, *part) for name, part in zip(full, given, strict=True)]
    if len(given) == 2:
        return [(key, False, *given[0]), (key, True, *given[1])]
    return []


_WITH_UNIT: Final = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?nan|[-+]?inf)\s*([A-Za-z%]{1,8})?")


def _with_unit(text: str) -> tuple[float, str | None] | None:
    found = _WITH_UNIT.fullmatch(text.strip())
    if found is None:
        alone = number(text.strip())
        return None if alone is None else (alone, None)
    return float(found[1]), found[2]


@functools.lru_cache(maxsize=65_536)
def printer(labels: str) -> Printer:
    """Return who the prefixes of a row name: `node-1: [default7]:`, `[node-1:7]:`, `3:`."""
    rank = local = task = host = None
    for label in _LABEL.findall(labels):
        text = label.strip()
        if found := _RANK.fullmatch(text):
            rank = int(found["rank"])
        elif found := _LOCAL.fullmatch(text):
            host, local = found["host"], int(found["rank"])
        elif found := _TASK.fullmatch(text):
            task = int(found[1])
        elif found := _HOST.fullmatch(text):
            host = found[1]
    rank = local if rank is None else rank
    return Printer(rank if rank is None or rank < _LARGEST_RANK else None, task, host)


@functools.lru_cache(maxsize=1024)
def micros(text: str) -> int | None:
    """Return a time as UTC µs; a log that does not say its zone is taken for UTC."""
    found = _MOMENT.fullmatch(text)
    if found is None:
        return None
    year, month, day, clock, fraction, zone = found.groups()
    try:
        moment = dt.datetime.fromisoformat(
            f"{year}-{month}-{day} {clock}.{(fraction or '0').ljust(6, '0')}{zone or 'Z'}"
        )
    except ValueError:
        return None
    return (moment - _EPOCH) // dt.timedelta(microseconds=1)
