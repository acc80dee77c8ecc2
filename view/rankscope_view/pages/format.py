"""Numbers, durations and names as text for people."""

from __future__ import annotations

import datetime as dt
import math
from typing import Final

from rankscope_contract.model.kinds import Kind

_MILLENNIUM_SECONDS: Final = 31_556_952_000.0
NOTHING: Final = "–"
"""Text of an unknown value. It is never 0."""

NONFINITE: Final = {"nans": "NaN", "infs": "Inf"}
"""Words for the statistics that count elements that are not finite."""


def count(value: float | None) -> str:
    """Return a count with thousands separators."""
    return NOTHING if value is None else f"{value:,.0f}"


def number(value: float) -> str:
    """Return a measured value as text. The value may be NaN or infinite."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if abs(value) >= 1e9:
        return measure(value)
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def measure(value: float | None) -> str:
    """Return a measured value with four significant digits, with trailing zeros, so that columns keep their width."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return number(value)
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        return f"{value:.2e}".replace("e-0", "e-").replace("e+0", "e")
    if size >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(size)))}f}" if size < 1000 else f"{value:,.1f}"


_KINDS: Final = {
    Kind.PARAM_BEFORE: "weight before the update",
    Kind.PARAM_AFTER: "weight after the update",
    Kind.GRAD_UNREDUCED: "gradient before reduction",
    Kind.GRAD_REDUCED: "gradient after reduction",
    Kind.GRAD_CLIPPED: "gradient after clipping",
    Kind.EXP_AVG: "first moment of Adam",
    Kind.EXP_AVG_SQ: "second moment of Adam",
    Kind.ACT_IN: "input of module",
    Kind.ACT_OUT: "output of module",
    Kind.ACT_GRAD_IN: "gradient of input",
    Kind.ACT_GRAD_OUT: "gradient of output",
}


def kind_words(kind: str) -> str:
    """Return the words for a kind of tensor, such as `gradient before reduction`."""
    return next((words for known, words in _KINDS.items() if known == kind), kind.replace("_", " "))


def short(value: float) -> str:
    """Return a large number with three digits and a factor, such as `625 k` or `1.2 M`."""
    if not math.isfinite(value):
        return number(value)
    for size, factor in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {factor}"
    return f"{value:.3g}"


def percent(ratio: float) -> str:
    """Return a ratio as a percentage with one decimal place. A ratio below 1 is never shown as 100 %."""
    return f"{min(round(100 * ratio, 1), math.inf if ratio >= 1 else 99.9):g} %"


def duration(seconds: float) -> str:
    """Return a duration as text in its two largest units."""
    if not math.isfinite(seconds):
        return "∞"
    if seconds > _MILLENNIUM_SECONDS:  # for example with 2^63 - 1 planned steps
        return "over 1,000 years"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, smaller, small in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit} {rest} {small}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"


def ago(seconds: float | None) -> str:
    """Return the time since an event as text with `ago`, or "never" for None."""
    if seconds is None:
        return "never"
    return "just now" if seconds < 1 else f"{duration(seconds)} ago"


def age(seconds: float) -> str:
    """Return an age in its largest unit, such as `7 min`; `now` below 10 s."""
    if seconds < 10:
        return "now"
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:,.0f} {unit}"
    return f"{seconds:.0f} s"


def utc(seconds: float | None, form: str = "%H:%M:%S") -> str:
    """Return a time in UTC; a dash if it is unknown or outside of the calendar."""
    try:
        return NOTHING if seconds is None else dt.datetime.fromtimestamp(seconds, dt.UTC).strftime(form)
    except (OverflowError, ValueError, OSError):
        return NOTHING
