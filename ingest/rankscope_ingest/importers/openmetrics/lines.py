"""Parse lines of OpenMetrics, of Prometheus' older text format, and of `promtool tsdb dump`.

The module performs no I/O. A sample is `name{label="value"} number [time]`. Dumps write `{__name__="name",
label="value"} number time`, and Prometheus 3 writes `{"name",label="value"} …`. The escape sequences of all three
formats are accepted; dumps quote strings as Go does.
"""

from __future__ import annotations

import enum
import math
import re
from typing import Any, Final

from rankscope_contract.metrics import catalogue
from rankscope_contract.model.kinds import COUNT_OPS, VALUE_OPS
from rankscope_contract.model.schema import canonical_labels
from rankscope_storage.prometheus import names
from rankscope_storage.prometheus.names import NULL, PLACEMENT

MAX_LABELS: Final = 1_000

_SERIES: Final = re.compile(r'[^ \t{]*(\{(?:[^"}]|"(?:[^"\\]|\\.)*+")*+\})?', re.DOTALL)
_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:.]*")
_LABEL: Final = re.compile(
    r'\s*(?:([a-zA-Z_][a-zA-Z0-9_.]*|"(?:[^"\\]|\\.)*")\s*(=))?\s*"((?:[^"\\]|\\.)*)"\s*(,|\})', re.DOTALL
)
_NUMBER: Final = re.compile(r"[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|[iI]nf(?:inity)?|[nN]a[nN])")
_ESCAPE: Final = re.compile(rb"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_SINGLE: Final = {
    b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v", b'"': b'"', b"\\": b"\\"
}  # fmt: skip
_MILLIS_FROM: Final = 1e11
"""Smallest number that is interpreted as a time in milliseconds since 1970, as in the older text format and in dumps.

A smaller number is a time in seconds; this number of seconds would be in the year 5138.
"""

_MAX_MICROS: Final = 253_402_300_799_999_999
_NAME_LABEL: Final = "__name__"


class LineError(ValueError):
    """Raised when a line is not a sample. The text of the exception is the reason."""


def split_series(line: str) -> tuple[str, str]:
    """Return the text of the series in `line`, and the text after it (value and time).

    Raises LineError if the line has no value or no closing brace.
    """
    found = _SERIES.match(line)
    assert found is not None  # it also matches an empty text
    rest = line[found.end() :]
    if rest.startswith("{"):
        raise LineError("the labels have no closing brace")
    if not rest and found[1] is None:
        raise LineError("the line has no value after the metric name")
    return found[0], rest


def parse_series(text: str) -> tuple[str, dict[str, str]]:
    """Return the metric name and the labels of the series in `text`, the first result of `split_series`.

    Raises LineError if `text` is not a series.
    """
    head, brace, rest = text.partition("{")
    metric = head.strip()
    labels: dict[str, str] = {}
    position = 0
    while brace and rest[position:].strip() != "}":
        found = _LABEL.match(rest, position)
        if found is None or len(labels) >= MAX_LABELS:
            raise LineError("unreadable labels")
        key, equals, value, end = found.groups()
        position = found.end()
        if equals:
            name = unescape(key[1:-1]) if key.startswith('"') else key
            if name in labels:
                raise LineError(f"the label {name!r} occurs twice")
            labels[name] = unescape(value)
        elif not metric:
            metric = unescape(value)
        else:
            raise LineError("a label value without a label name")
        if end == "}":
            break
    metric = metric or labels.pop(_NAME_LABEL, "")
    if not metric or (head.strip() and not _NAME.fullmatch(metric)):
        raise LineError("the series has no valid metric name")
    return metric, labels


def parse_value(rest: str) -> tuple[float, int | None]:
    """Return the value and the time (UTC µs, None without a time) in `rest`, the second result of `split_series`.

    Raises LineError if one of them is invalid.
    """
    parts = rest.split("#", 1)[0].split()  # an exemplar may follow
    if not 1 <= len(parts) <= 2:
        raise LineError("the series must be followed by a value and at most one time")
    value = parse_number(parts[0])
    return value, None if len(parts) == 1 else parse_time(parts[1])


def parse_number(text: str) -> float:
    """Return the number in `text`; ±Inf if it is out of range. Raises LineError if `text` is not a number."""
    if not _NUMBER.fullmatch(text):
        raise LineError(f"{text[:30]!r} is not a number")
    return float(text)


def parse_time(text: str) -> int:
    """Return the time in `text`, which is in seconds or milliseconds since 1970, as UTC µs.

    A number of 1e11 or more is in milliseconds. Raises LineError if `text` is not a time.
    """
    moment = parse_number(text)
    scale = 1e3 if abs(moment) >= _MILLIS_FROM else 1e6
    if not math.isfinite(moment) or abs(moment * scale) > _MAX_MICROS:
        raise LineError(f"{text[:30]!r} is not a valid time")
    return round(moment * scale)


def unescape(text: str) -> str:
    r"""Return the text between quotes with its escapes replaced; an unknown escape `\x` is kept."""
    return _ESCAPE.sub(_escaped, text.encode("utf-8", "replace")).decode("utf-8", "replace")


def _escaped(found: re.Match[bytes]) -> bytes:
    code = found[1]
    if len(code) == 1:
        return _SINGLE.get(code, found[0])
    number = int(code[1:], 16)
    if code.startswith(b"x"):
        return bytes((number,))
    return chr(number).encode("utf-8", "replace") if number < 0x110000 else "\N{REPLACEMENT CHARACTER}".encode()


class SeriesRole(enum.StrEnum):
    """The use of a series.

    Its values are stored in a dataset, or they are a fact about other series, such as their step.
    """

    SCALAR = enum.auto()
    TENSOR = enum.auto()
    STEP = enum.auto()
    KIND_STEP = enum.auto()
    ATTEMPT = enum.auto()
    EXPORT = enum.auto()  # of the metric that marks an export of a store
    SAMPLE = enum.auto()


_TENSOR_LABELS: Final = frozenset({"kind", "tensor", "op", "run", "rank", "job", "instance", *names.TENSOR_EXTRAS})
_INT32: Final = 1 << 31


def series_columns(metric: str, labels: dict[str, str]) -> dict[str, Any]:
    """Return the role of a series, and the values of the columns that are equal in all its rows.

    The role selects the dataset of the rows, or states which fact about other series the values are. `labels` in the
    result are those of the series without the instance. A series of a Rankscope metric in an unknown form is stored in
    the dataset `samples`, and so is each series of a file with several runs: the name and the labels are known for all.
    """
    series = {
        "role": SeriesRole.SAMPLE,
        "metric": metric,
        "target": labels.get("instance", ""),
        "labels": canonical_labels({name: value for name, value in labels.items() if name != "instance"}),
    }
    if not metric.startswith("rankscope_") or "run" not in labels:
        return series
    series["run"] = labels["run"]
    try:
        return {**series, "rank": _whole(labels, "rank", lowest=0), **_own_columns(metric, labels)}
    except ValueError:  # a label that is no number
        return series


def _own_columns(metric: str, labels: dict[str, str]) -> dict[str, Any]:
    roles = {
        catalogue.STEP.name: SeriesRole.STEP,
        names.ATTEMPT: SeriesRole.ATTEMPT,
        names.EXPORT_INFO: SeriesRole.EXPORT,
    }
    if metric in roles:
        return {"role": roles[metric]}
    if metric == catalogue.KIND_STEP.name:
        return {"role": SeriesRole.KIND_STEP, "kind": labels.get("kind")}
    if metric in {catalogue.TENSOR_VALUE.name, catalogue.TENSOR_BASELINE.name}:
        return _tensor(labels, is_baseline=metric == catalogue.TENSOR_BASELINE.name)
    scalar = names.read_scalar(metric, labels)
    if scalar is None:
        return {}
    stages = {name: _whole(labels, name) for name in names.STAGE_EXTRAS}
    return {
        "role": SeriesRole.SCALAR,
        "name": scalar.name,
        "unit": scalar.unit,
        "scalar_labels": scalar.labels,
        **stages,
    }


def _tensor(labels: dict[str, str], *, is_baseline: bool) -> dict[str, Any]:
    op = labels.get("op", "") + (names.BASELINE_SUFFIX if is_baseline else "")
    known = {op + names.BASELINE_SUFFIX for op in names.BASELINES_SHOWN} if is_baseline else {*VALUE_OPS, *COUNT_OPS}
    if op not in known or not {"kind", "tensor"} <= set(labels) or not set(labels) <= _TENSOR_LABELS:
        return {}
    placement = labels.get("placement", PLACEMENT)
    return {
        "role": SeriesRole.TENSOR,
        "kind": labels["kind"],
        "tensor": labels["tensor"],
        "op": op,
        "placement": None if placement == NULL else placement,
        "shard_group": labels.get("shard_group"),
        "call_seq": _whole(labels, "call_seq", bound=1 << 63),
        **{name: _whole(labels, name) for name in ("index", "vpp_stage", "micro_step")},
    }


def _whole(labels: dict[str, str], name: str, *, lowest: int = -_INT32, bound: int = _INT32) -> int | None:
    """Return the label `name` as an integer; None without the label.

    Raises ValueError if the label is not an integer from `lowest` to below `bound`.
    """
    text = labels.get(name)
    if text is None:
        return None
    number = int(text) if text.isascii() and text.removeprefix("-").isdigit() and len(text) < 20 else bound
    if not lowest <= number < bound or str(number) != text:
        raise ValueError(f"{name}={text!r}")
    return number
