"""Parse values in logs: numbers, durations and times in text, and JSON documents. The module opens no files."""

from __future__ import annotations

import datetime as dt
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

MAX_JSON: Final = 65_536

_MAX_DEPTH: Final = 16
_NOT_JSON: Final = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def json_text(value: Any, limit: int = MAX_JSON) -> str:
    """Return `value` as standard JSON text; NaN and Inf become strings. Secrets are masked before it is stored.

    A text of more than `limit` characters is replaced by an object that contains its length.
    """
    text = json.dumps(_plain_json(value, 0), ensure_ascii=False, separators=(",", ":"), default=str)
    if len(text) > limit:
        return json.dumps({"left_out": f"{len(text):,} characters"})
    return text.encode("utf-8", "replace").decode()


def _plain_json(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        return "…"
    if isinstance(value, Mapping):
        return {str(key): _plain_json(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_json(item, depth + 1) for item in value]
    return _NOT_JSON.get(repr(value), value) if isinstance(value, float) else value


NUMBER: Final = (
    r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d[\d_]*)(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"
)
"""A regular expression for a number in text, with or without thousands separators. NaN and Inf match in any case."""

MULTIPLES: Final = {"k": 1, "K": 1, "M": 2, "G": 3, "B": 3, "T": 4}
"""Suffixes of a number that multiply it by a power of 1000. The value is the exponent. `B` is also the unit byte."""

_MAX_CHARACTERS: Final = 64
_UNIT: Final = r"\s*(?P<unit>%|[a-zµ][a-z/]*)?"
_QUANTITY: Final = re.compile(
    rf"(?P<number>{NUMBER}|[-+]?\d+,\d+(?:e[-+]?\d+)?)(?!(?<=[fny])[a-zµ]){_UNIT}", re.IGNORECASE
)
_GROUPED: Final = re.compile(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?")
_AMBIGUOUS: Final = re.compile(rf"[-+]?[1-9]\d{{0,2}},\d{{3}}{_UNIT}", re.IGNORECASE)
_CLOCK: Final = re.compile(
    r"(?:(?P<days>\d{1,6}) ?(?:d|days?),? )?(?:(?P<h>\d{1,6}):)?(?P<m>\d{1,6}):(?P<s>\d{1,2}(?:\.\d*)?)"
)
_SPELLED: Final = re.compile(
    r"(\d{1,9}(?:\.\d*)?)\s*(?:(d)(?:ays?)?|(h)(?:(?:ou)?rs?)?|(m)(?:in(?:ute)?s?)?|(s)(?:ec(?:ond)?s?)?)(?![a-z])[\s,:]*"
)
_SECONDS_OF: Final = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_FIRST_TIME: Final = 1e9  # seconds; an earlier time is no date of a training
_LAST_TIME: Final = 4.1e9
_LARGEST_STEP: Final = 1 << 53


FORM: Final = re.compile(
    r"(?<![\w./-])(?:[IWEF](?P<compact>\d{3,4})|(?P<date>\d{1,2}/\d{1,2}(?:/(?:\d{4}|\d{2}))?"
    r"|\d{2}-\d{2}-\d{2}|\d{1,2}\.\d{1,2}\.(?:\d{4}|\d{2}))),? "
    r"(?P<clock>\d{2}:\d{2}:\d{2})(?:[.,](?P<fraction>\d{1,9}))?(?![\d:])"
)
"""A regular expression for a time without a year, or with an ambiguous order of day and month."""


def number(value: Any) -> float | None:
    """Return a JSON number as a float, or ±Inf if it is out of range.

    Return None for all other values, including true and false.
    """
    if isinstance(value, float):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def quantity(text: str) -> tuple[float, str | None] | None:
    """Return number and unit of a text such as `0.8674`, `213.66ms`, `0.23%`, `1,234` or `NaN`.

    Commas between groups of three digits separate thousands, if the first group does not begin with 0. Any other single
    comma is a decimal comma: `0,439` and `12,5`. The unit is None if the text has none. Return None for any other text.
    """
    text = text.strip()
    if len(text) > _MAX_CHARACTERS:
        return None
    found = _QUANTITY.fullmatch(text)
    if found is None:
        return None
    digits = found["number"].replace("_", "")
    if "," in digits:
        if _GROUPED.fullmatch(digits):
            digits = digits.replace(",", "")
        elif digits.count(",") == 1 and "." not in digits:
            digits = digits.replace(",", ".")
        else:
            return None
    return float(digits), found["unit"]


def plain(text: str) -> int | float | str:
    """Return text that is a number without unit and separators as a number, and any other text unchanged."""
    if len(text) > _MAX_CHARACTERS or "_" in text:
        return text
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text


def is_ambiguous(text: str) -> bool:
    """Return whether `text` is a number such as `1,234`, which means 1234 in one country and 1.234 in another."""
    return len(text) <= _MAX_CHARACTERS and _AMBIGUOUS.fullmatch(text.strip()) is not None


def seconds(text: str) -> float | None:
    """Return a duration such as `9 days, 21:39:23`, `0:32:48` or `49m 19s` in seconds; None for any other text."""
    text = text.strip().lower()
    if len(text) > _MAX_CHARACTERS:
        return None
    if clock := _CLOCK.fullmatch(text):
        days, hours, minutes = (int(clock[part] or 0) for part in ("days", "h", "m"))
        return float(days * 86_400 + hours * 3_600 + minutes * 60) + float(clock["s"])
    parts = _SPELLED.findall(text)
    if not parts or _SPELLED.sub("", text):
        return None
    return sum(float(count) * _SECONDS_OF["".join(unit)] for count, *unit in parts)


def whole(value: Any) -> int | None:
    """Return a step or count as an integer; None for any other value.

    `value` is a whole number with a magnitude below 2**53, or text that contains such a number.
    """
    if isinstance(value, str):
        found = quantity(value)
        value = None if found is None or found[1] else found[0]
    given = number(value)
    if given is None or not given.is_integer() or abs(given) >= _LARGEST_STEP:
        return None
    return int(given)


def micros(value: Any) -> int | None:
    """Return a time as UTC µs; None if `value` is not a time.

    `value` is ISO 8601 text, which is taken as UTC if it has no time zone, or a number of s, ms, µs or ns since 1970,
    which may be a text.
    """
    if isinstance(value, str):
        value = plain(value.strip())
    if isinstance(value, str):
        return _iso(value)
    since = number(value)
    if since is None or not math.isfinite(since):
        return None
    for per_second in (1, 1_000, 1_000_000, 1_000_000_000):
        if _FIRST_TIME <= since / per_second < _LAST_TIME:
            return round(since * (1_000_000 / per_second))
    return None


def _iso(text: str) -> int | None:
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)
    return (moment - _EPOCH) // dt.timedelta(microseconds=1)


_MAX_DIGITS: Final = 400  # beyond float64 anyway
_EDGE_CHARACTERS: Final = 16  # a token this close to the end of a truncated text may be incomplete
_NOT_BLANK: Final = re.compile(r"[^ \t\r\n]")
_STRUCTURE: Final = frozenset(" \t\r\n,]}:")


def _whole(digits: str) -> int | float:
    # int() raises ValueError for more than 4,300 digits.
    return int(digits) if len(digits) <= _MAX_DIGITS else math.copysign(math.inf, -1 if digits[0] == "-" else 1)


DECODER: Final = json.JSONDecoder(parse_int=_whole)
"""JSON decoder that accepts the same text as Python's default decoder, and integers of any length."""

_SPELLED_NUMBERS: Final = re.compile(
    r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|$)'
    r"|(?<![\w.+-])(?P<sign>[-+]?)(?P<name>nan(?:\(\w*\))?|inf(?:inity)?)(?=\s*[,\]}])",
    re.IGNORECASE | re.DOTALL,
)


def standard_numbers(text: str) -> str:
    """Return JSON text in which `nan`, `inf`, `-INF` and similar numbers are spelled NaN, Infinity and -Infinity.

    Python's JSON decoder accepts only these spellings. Strings are not changed.
    """
    return _SPELLED_NUMBERS.sub(_standard_number, text)


def _standard_number(found: re.Match[str]) -> str:
    if found["name"] is None:
        return found[0]
    return "NaN" if found["name"][0] in "nN" else f"{'-' * (found['sign'] == '-')}Infinity"


class Cut(Exception):  # noqa: N818 - a state of the text, not an error of the caller
    """Raised when a JSON text ends inside a value."""


class Malformed(Exception):  # noqa: N818 - as above
    """Raised when a text is not valid JSON."""


class JsonReader:
    """Reads the values of a JSON text one by one.

    JSON libraries reject `NaN` and `Infinity`, which Python prints, and stop at a truncated document (ijson, issues 33
    and 139). The decoder of the standard library accepts `NaN` and `Infinity`, but decodes only a complete value. This
    class therefore finds the beginning of each value, and passes the text from there on to that decoder.
    """

    def __init__(self, data: bytes) -> None:
        self._text = data.decode("utf-8-sig", "replace")
        self._is_standard = False  # the rest of the text has only numbers as Python spells them
        self._at = 0
        self._line = 1
        self._counted = 0  # the end of the part of which the line feeds are counted

    def peek(self) -> str:
        """Return the next character that is not white space. Raises Cut at the end of the text."""
        found = _NOT_BLANK.search(self._text, self._at)
        if found is None:
            raise Cut
        self._at = found.start()
        return found[0]

    def take(self, character: str) -> None:
        """Consume the next character. Raises Malformed if it is not `character`."""
        if self.peek() != character:
            raise Malformed(f"expected the character {character!r}, found {self._text[self._at]!r}")
        self._at += 1

    def value(self) -> Any:
        """Return the next value and consume it.

        Raises Cut if the text ends inside the value, and Malformed if the value is not valid JSON.
        """
        self.peek()
        reason = "no value"
        try:
            value, end = DECODER.raw_decode(self._text, self._at)
        except json.JSONDecodeError as error:
            end, reason = error.pos, error.msg
        except (RecursionError, ValueError) as error:
            raise Malformed(str(error)) from error
        else:  # more digits may follow a number
            if isinstance(value, dict | list | str) or self._text[end : end + 1] in _STRUCTURE:
                self._at = end
                return value
        if reason == "Expecting value" and not self._is_standard:
            self._text = self._text[: self._at] + standard_numbers(self._text[self._at :])
            self._is_standard = True
            return self.value()
        if end < len(self._text) - _EDGE_CHARACTERS and not reason.startswith("Unterminated"):
            raise Malformed(reason)
        raise Cut

    def resume_at(self, pattern: re.Pattern[str]) -> None:
        """Move behind the next match of `pattern`. Raises Cut if there is no match in the rest of the text."""
        found = pattern.search(self._text, self._at + 1)
        if found is None:
            raise Cut
        self._at = found.end()

    @property
    def line_here(self) -> int:
        """The line number of the current position, from 1."""
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._line
