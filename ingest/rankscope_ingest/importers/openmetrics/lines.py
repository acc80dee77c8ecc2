"""One line of OpenMetrics, of Prometheus' older text format, or of `promtool tsdb dump`. Pure.

A sample is `name{label="value"} number [time]`; dumps write `{__name__="name", label="value"} number time`, and
Prometheus 3 `{"name",label="value"} …`. Escapes are those of all three, since dumps quote as Go does.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Final

from rankscope_contract.metrics import catalogue
from rankscope_contract.model.kinds import COUNT_OPS, VALUE_OPS
from rankscope_contract.model.schema import canonical_labels
from rankscope_storage.prometheus import names
from rankscope_storage.prometheus.names import NULL, PLACEMENT

MAX_LABELS: Final = 1_000

_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:.]*")
_LABEL: Final = re.compile(
    r'\s*(?:([a-zA-Z_][a-zA-Z0-9_.]*|"(?:[^"\\]|\\.)*")\s*(=))?\s*"((?:[^"\\]|\\.)*)"\s*(,|\})', re.DOTALL
)
_NUMBER: Final = re.compile(r"[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|[iI]nf(?:inity)?|[nN]a[nN])")
_ESCAPE: Final = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_SINGLE: Final = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", '"': '"', "\\": "\\"}
_MILLIS_FROM: Final = 1e11
"""Seconds of the year 5138: a greater time counts milliseconds, as the older format and dumps do."""

_MAX_MICROS: Final = 253_402_300_799_999_999
_NAME_LABEL: Final = "__name__"


class LineError(ValueError):
    """A line that is no sample; the text says why."""


@dataclass(frozen=True, slots=True)
class Series:
    """Name and labels."""

    metric: str
    labels: dict[str, str]


def split_series(line: str) -> tuple[str, str]:
    """Return the text of the series, and value and time behind it. Raises LineError."""
    brace = line.find("{")
    blank = _first_blank(line)
    if brace < 0 or 0 <= blank < brace:
        if blank < 0:
            raise LineError("no value behind the name")
        return line[:blank], line[blank:]
    end = _end_of_labels(line, brace)
    return line[:end], line[end:]


def parse_series(text: str) -> Series:
    """Return name and labels of what `split_series` cut off. Raises LineError."""
    head, brace, rest = text.partition("{")
    metric = head.strip()
    labels: dict[str, str] = {}
    position = 0
    while brace and rest[position:].strip() != "}":
        found = _LABEL.match(rest, position)
        if found is None or len(labels) >= MAX_LABELS:
            raise LineError("its labels cannot be read")
        key, equals, value, end = found.groups()
        position = found.end()
        if equals:
            name = unescape(key[1:-1]) if key.startswith('"') else key
            if name in labels:
                raise LineError(f"label {name!r} stands twice in it")
            labels[name] = unescape(value)
        elif not metric:
            metric = unescape(value)
        else:
            raise LineError("a label without a name")
        if end == "}":
            break
    metric = metric or labels.pop(_NAME_LABEL, "")
    if not metric or (head.strip() and not _NAME.fullmatch(metric)):
        raise LineError("no name of a metric")
    return Series(metric, labels)


def parse_value(rest: str) -> tuple[float, int | None]:
    """Return value and time (UTC µs) from what follows a series. Raises LineError."""
    parts = rest.split("#", 1)[0].split()  # an exemplar may follow
    if not 1 <= len(parts) <= 2:
        raise LineError("no value and time behind the labels")
    value = parse_number(parts[0])
    return value, None if len(parts) == 1 else parse_time(parts[1])


def parse_number(text: str) -> float:
    """Return the number; too great a one becomes infinite. Raises LineError."""
    if not _NUMBER.fullmatch(text):
        raise LineError(f"{text[:30]!r} is no number")
    return float(text)


def parse_time(text: str) -> int:
    """Return seconds, or milliseconds where they can be nothing else, as UTC µs. Raises LineError."""
    moment = parse_number(text)
    scale = 1e3 if abs(moment) >= _MILLIS_FROM else 1e6
    if not math.isfinite(moment) or abs(moment * scale) > _MAX_MICROS:
        raise LineError(f"{text[:30]!r} is no time")
    return round(moment * scale)


def unescape(text: str) -> str:
    r"""Return the text that stands between quotes; `\x` of an unknown x is that x."""
    if "\\" not in text:
        return text
    octets = bytearray()
    position = 0
    for found in _ESCAPE.finditer(text):
        octets += text[position : found.start()].encode("utf-8", "surrogateescape")
        octets += _escaped(found[1])
        position = found.end()
    octets += text[position:].encode("utf-8", "surrogateescape")
    return octets.decode("utf-8", "replace")


def _escaped(code: str) -> bytes:
    if len(code) == 1:
        return _SINGLE.get(code, "\\" + code).encode("utf-8", "surrogateescape")
    number = int(code[1:], 16)
    if code[0] == "x":
        return bytes((number,))
    return chr(number).encode("utf-8", "replace") if number < 0x110000 else "\N{REPLACEMENT CHARACTER}".encode()


def _first_blank(line: str) -> int:
    return min((place for place in (line.find(" "), line.find("\t")) if place >= 0), default=-1)


def _end_of_labels(line: str, brace: int) -> int:
    """Return the place behind the closing brace; braces within quotes do not count."""
    position, quoted = brace + 1, False
    while position < len(line):
        character = line[position]
        if quoted and character == "\\":
            position += 1
        elif character == '"':
            quoted = not quoted
        elif character == "}" and not quoted:
            return position + 1
        position += 1
    raise LineError("its labels have no end")


SCALAR: Final = "scalar"
TENSOR: Final = "tensor"
STEP: Final = "step"
KIND_STEP: Final = "kind_step"
ATTEMPT: Final = "attempt"
OWN: Final = "own"
SAMPLE: Final = "sample"

_TENSOR_LABELS: Final = frozenset({"kind", "tensor", "op", "run", "rank", "job", "instance", *names.TENSOR_EXTRAS})
_INT32: Final = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """Where the values of a series go. The fields are columns of the datasets; `role` says of which."""

    role: str
    run: str | None = None
    rank: int | None = None
    metric: str = ""
    target: str = ""
    labels: str | None = None
    name: str | None = None
    unit: str | None = None
    kind: str | None = None
    tensor: str | None = None
    op: str | None = None
    index: int | None = None
    vpp_stage: int | None = None
    micro_step: int | None = None
    call_seq: int | None = None
    placement: str | None = None
    shard_group: str | None = None


def meaning(series: Series) -> Meaning:
    """Return what `series` is; one of ours that is not as we write it stays a sample."""
    if series.metric.startswith("rankscope_") and "run" in series.labels:
        try:
            found = _ours(series)
        except ValueError:
            found = None
        if found is not None:
            return found
    return sample(series)


def sample(series: Series) -> Meaning:
    """Return `series` as what any exporter may have said."""
    rest = {name: value for name, value in series.labels.items() if name != "instance"}
    return Meaning(
        role=SAMPLE,
        metric=series.metric,
        target=series.labels.get("instance", ""),
        labels=canonical_labels(rest),
        run=series.labels.get("run") if series.metric.startswith("rankscope_") else None,
    )


def _ours(series: Series) -> Meaning | None:
    labels = series.labels
    who: dict[str, Any] = {"run": labels["run"], "rank": _whole(labels, "rank", lowest=0)}
    roles = {catalogue.STEP.name: STEP, names.ATTEMPT: ATTEMPT, names.EXPORT_INFO: OWN}
    if series.metric in roles:
        return Meaning(role=roles[series.metric], **who)
    if series.metric == catalogue.KIND_STEP.name:
        return Meaning(role=KIND_STEP, kind=labels.get("kind"), **who)
    if series.metric in {catalogue.TENSOR_VALUE.name, catalogue.TENSOR_BASELINE.name}:
        return _tensor(series, who)
    scalar = names.read_scalar(series.metric, labels)
    if scalar is None:
        return None
    stages: dict[str, Any] = {name: _whole(labels, name) for name in names.STAGE_EXTRAS}
    return Meaning(role=SCALAR, name=scalar.name, unit=scalar.unit, labels=scalar.labels, **who, **stages)


def _tensor(series: Series, who: dict[str, Any]) -> Meaning | None:
    labels = series.labels
    baseline = series.metric == catalogue.TENSOR_BASELINE.name
    op = labels.get("op", "") + (names.BASELINE_SUFFIX if baseline else "")
    known = {op + names.BASELINE_SUFFIX for op in names.BASELINES_SHOWN} if baseline else {*VALUE_OPS, *COUNT_OPS}
    if op not in known or not {"kind", "tensor"} <= set(labels) or not set(labels) <= _TENSOR_LABELS:
        return None
    placement = labels.get("placement", PLACEMENT)
    numbers: dict[str, Any] = {name: _whole(labels, name) for name in ("index", "vpp_stage", "micro_step")}
    return Meaning(
        role=TENSOR,
        kind=labels["kind"],
        tensor=labels["tensor"],
        op=op,
        placement=None if placement == NULL else placement,
        shard_group=labels.get("shard_group"),
        call_seq=_whole(labels, "call_seq", bound=1 << 63),
        **numbers,
        **who,
    )


def _whole(labels: dict[str, str], name: str, *, lowest: int = -_INT32, bound: int = _INT32) -> int | None:
    """Return a label that is a whole number; raises ValueError for one that is none."""
    text = labels.get(name)
    if text is None:
        return None
    number = int(text) if text.isascii() and text.removeprefix("-").isdigit() and len(text) < 20 else bound
    if not lowest <= number < bound or str(number) != text:
        raise ValueError(f"{name}={text!r}")
    return number
