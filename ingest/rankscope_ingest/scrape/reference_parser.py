"""A page of text read by the rules: prometheus_client's own parsers, line by line. Exact, and slow (25 µs a sample).

So a page without anything unusual is taken apart by `simple`, to the same result.

Names stay as they are on the page: comments are left out before the text format is parsed, as with them the parser
renames counters. A page is read whole or refused whole, as Prometheus does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from prometheus_client.samples import Timestamp

from rankscope_ingest.base.errors import DecodeError

_NAME: Final = "[a-zA-Z_][a-zA-Z0-9_]*"
_TEXT: Final = r'"[^"\\\x00-\x1f\x7f-\xa0\u2028\u2029]*"'
_NUMBER: Final = r"[-+]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?(?:[eE][-+]?[0-9]{1,3})?|Inf)|NaN"
_LINE: Final = re.compile(rf"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{{({_NAME}={_TEXT}(?:,{_NAME}={_TEXT})*)\}})? ({_NUMBER})")
_LABEL: Final = re.compile(rf"({_NAME})=({_TEXT})")


class PlainSample(NamedTuple):
    """What a plain line says."""

    metric: str
    labels: dict[str, str]
    value: float


def read_plain(text: str) -> list[PlainSample] | None:
    """Return the samples of a page in order, or None when any of its lines is more than a series and a number."""
    samples = []
    for line in text.split("\n"):
        if not line or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            return None
        metric, inside, number = found.groups()
        pairs = _LABEL.findall(inside) if inside else []
        labels = {name: quoted[1:-1] for name, quoted in pairs}
        if len(labels) < len(pairs) or "__name__" in labels:
            return None
        samples.append(PlainSample(metric, labels, float(number)))
    return samples


OPENMETRICS: Final = "application/openmetrics-text"

_EXEMPLAR: Final = re.compile(r'((?:[^"#]|"(?:[^"\\]|\\.)*")*?) # \{.*')
_MICROS: Final = 1_000_000
_LATEST_SECONDS: Final = 253_402_300_799  # the end of year 9999, as far as times are understood everywhere


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a page; `ts` is in UTC µs where the page itself gives a time."""

    metric: str
    labels: Mapping[str, str]
    value: float
    ts: int | None = None


def read_exactly(text: str, *, openmetrics: bool = False) -> list[Sample]:
    """Return the samples of a page, in order. Raises DecodeError for a page that breaks the rules of its format."""
    plain = None if openmetrics else read_plain(text)
    if plain is not None:
        return [Sample(metric, labels, value) for metric, labels, value in plain]
    try:
        return _samples(_openmetrics(text) if openmetrics else read_text("\n".join(_plain_lines(text))))
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, AssertionError) as error:
        # The parsers say ValueError where they notice, and whatever happens to them where they do not.
        raise DecodeError(f"the page is not valid: {str(error)[:200] or type(error).__name__}") from error


def _openmetrics(text: str) -> Iterable[Metric]:
    families: Iterable[Metric] = read_openmetrics(text)  # type: ignore[no-untyped-call] # as the library has it
    return families


def _plain_lines(text: str) -> Iterable[str]:
    lines = (line for line in text.split("\n") if not line.strip().startswith("#"))
    return map(_without_exemplar, lines)


def _without_exemplar(line: str) -> str:
    """Return the sample alone: the parser would take an exemplar's value for a time."""
    if " # " not in line:
        return line
    found = _EXEMPLAR.fullmatch(line)
    return line if found is None else found[1]


def _samples(families: Iterable[Metric]) -> list[Sample]:
    return [
        Sample(found.name, found.labels, _number(found.value), _micros(found.timestamp))
        for family in families
        for found in family.samples
    ]


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # hundreds of digits, which the parser took for an integer
        return math.inf if value > 0 else -math.inf


def _micros(moment: Timestamp | float | None) -> int | None:
    if moment is None:
        return None
    if isinstance(moment, Timestamp):
        seconds, rest = int(moment.sec), int(moment.nsec) // 1000
    else:
        if not math.isfinite(moment):
            raise ValueError(f"{moment} is no time")
        seconds, rest = 0, round(moment * _MICROS)
    if not 0 <= seconds * _MICROS + rest <= _LATEST_SECONDS * _MICROS:
        raise ValueError(f"{float(moment):g} seconds since 1970 is no time of this age")
    return seconds * _MICROS + rest
