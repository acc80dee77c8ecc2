"""Numbers, durations and moments as logs write them in text. Pure: text in, value or None out."""

from __future__ import annotations

import datetime as dt
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

from rankscope_contract.security.redaction import redacted

MAX_JSON: Final = 65_536

_MAX_DEPTH: Final = 16
_UNPRINTABLE: Final = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def clean_text(text: str, limit: int = 1000) -> str:
    """Return `text` as every store takes it."""
    return text[:limit].encode("utf-8", "replace").decode()


def json_text(value: Any, limit: int = MAX_JSON) -> str:
    """Return `value` as JSON that any reader takes: NaN and Inf as text; too long a text is told, not stored.

    Secrets are masked: a log repeats the settings that training was started with.
    """
    text = json.dumps(redacted(_plain_json(value, 0)), ensure_ascii=False, separators=(",", ":"), default=str)
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
    return _UNPRINTABLE.get(repr(value), value) if isinstance(value, float) else value


NUMBER: Final = (
    r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d[\d_]*)(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"
)
"""A number in text, thousands set apart or not; NaN and Inf in any case."""

_MAX_CHARACTERS: Final = 64
_QUANTITY: Final = re.compile(rf"(?P<number>{NUMBER})\s*(?P<unit>%|[a-zµ][a-z/]*)?", re.IGNORECASE)
_CLOCK: Final = re.compile(
    r"(?:(?P<days>\d{1,6}) days?,? )?(?:(?P<h>\d{1,6}):)?(?P<m>\d{1,6}):(?P<s>\d{1,2}(?:\.\d*)?)"
)
_SPELLED: Final = re.compile(
    r"(\d{1,9}(?:\.\d*)?)\s*(?:(d)(?:ays?)?|(h)(?:(?:ou)?rs?)?|(m)(?:in(?:ute)?s?)?|(s)(?:ec(?:ond)?s?)?)(?![a-z])[\s,:]*"
)
_SECONDS_OF: Final = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_FIRST_MOMENT: Final = 1e9  # seconds; what is less is no date of a training
_LAST_MOMENT: Final = 4.1e9
_LARGEST_STEP: Final = 1 << 53


def number(value: Any) -> float | None:
    """Return a JSON number as a float, beyond its range as ±Inf; None for everything else, true and false included."""
    if isinstance(value, float):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def quantity(text: str) -> tuple[float, str | None] | None:
    """Return number and unit of a text that is nothing else: `0.8674`, `213.66ms`, `0.23%`, `1,234`, `NaN`."""
    text = text.strip()
    if len(text) > _MAX_CHARACTERS:
        return None
    found = _QUANTITY.fullmatch(text)
    if found is None:
        return None
    return float(found["number"].replace(",", "").replace("_", "")), found["unit"]


def seconds(text: str) -> float | None:
    """Return a duration in text as seconds: `9 days, 21:39:23`, `0:32:48`, `49m 19s`."""
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
    """Return a step or count given as a whole number, or as text of one; None for everything else."""
    if isinstance(value, str):
        found = quantity(value)
        value = None if found is None or found[1] else found[0]
    given = number(value)
    if given is None or not given.is_integer() or abs(given) >= _LARGEST_STEP:
        return None
    return int(given)


def micros(value: Any) -> int | None:
    """Return a moment as UTC µs: ISO text (without a zone it is UTC), or seconds, ms, µs or ns since 1970."""
    if isinstance(value, str):
        return _iso(value.strip())
    since = number(value)
    if since is None or not math.isfinite(since):
        return None
    for per_second in (1, 1_000, 1_000_000, 1_000_000_000):
        if _FIRST_MOMENT <= since / per_second < _LAST_MOMENT:
            return round(since * (1_000_000 / per_second))
    return None


def _iso(text: str) -> int | None:
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)
    return (moment - _EPOCH) // dt.timedelta(microseconds=1)
