"""Format numbers and names as HTML text for the status page."""

from __future__ import annotations

import math
from typing import Final

from rankscope_contract.security.escaping import html_text

_MILLENNIUM_SECONDS: Final = 31_556_952_000.0


def text(value: object) -> str:
    """Return `value` escaped for HTML.

    Control characters and marks of writing direction are shown as escape sequences.
    """
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(value))
    return html_text(shown)


def count(value: float) -> str:
    """Return a count with thousands separators."""
    return f"{value:,.0f}"


def number(value: float) -> str:
    """Return a measured value as text. The value may be NaN or infinite."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def percent(ratio: float) -> str:
    """Return a ratio as a percentage, rounded down, so that a ratio below 1 is never shown as 100 %."""
    return f"{math.floor(1000 * ratio) / 10:g} %"


def duration(seconds: float) -> str:
    """Return a duration in seconds as text with its two largest units, such as hours and minutes."""
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
