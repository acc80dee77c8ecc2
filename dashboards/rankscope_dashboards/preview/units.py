"""Values as Grafana shows them, with the units of the boards."""

from __future__ import annotations

import datetime as dt
import math
import re
from typing import Final

_PREFIXED: Final = {"bytes": ("B", 1024.0), "Bps": ("B/s", 1000.0)}
_NAMES: Final = {"celsius": " °C", "watt": " W", "percent": "%"}
_BINARY: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi")
_DECIMAL: Final = ("", "k", "M", "G", "T", "P")
_SECONDS: Final = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_EXPONENT: Final = re.compile(r"e([+-])0")
"""Exponent of one digit, which Python writes with two digits and Grafana with one."""

_MOST_DECIMALS: Final = 6


def formatted(value: float, unit: str, decimals: int | None = None) -> str:
    """Return `value` with its unit. Without `decimals`, it has three significant digits or all digits of an integer."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if unit == "dateTimeAsIso":
        return _time(value)
    if unit == "dtdurations":
        return _duration(value)
    if unit == "sci":
        return _EXPONENT.sub(r"e\1", f"{value:.{3 if decimals is None else decimals}e}")
    factor, word = scale(unit, abs(value))
    return f"{_number(value * factor, decimals)}{word}"


def scale(unit: str, largest: float) -> tuple[float, str]:
    """Return the factor and the unit, with its space, with which values up to `largest` have few digits."""
    if unit == "percentunit":
        return 100.0, "%"
    if unit in _PREFIXED:
        word, base = _PREFIXED[unit]
        power = 0
        while power < len(_BINARY) - 1 and largest >= base ** (power + 1):
            power += 1
        return base**-power, f" {(_BINARY if base == 1024 else _DECIMAL)[power]}{word}"
    if unit == "s":
        size, word = next((one for one in _SECONDS if largest >= one[0]), (1.0, "s"))
        return 1 / size, f" {word}"
    if unit.startswith("suffix:"):
        return 1.0, unit.removeprefix("suffix:")
    return 1.0, _NAMES.get(unit, "" if unit in {"none", "short", "", "sci"} else f" {unit}")


def _number(value: float, decimals: int | None) -> str:
    if decimals is not None:
        return f"{value:,.{decimals}f}"
    if value.is_integer() and abs(value) < 1e15:
        return f"{value:,.0f}"
    size = abs(value)
    if size < 1e-4 or size >= 1e15:
        return f"{value:.3g}"
    places = min(_MOST_DECIMALS, max(0, 2 - math.floor(math.log10(size))))
    return f"{value:,.{places}f}"


def _time(milliseconds: float) -> str:
    try:
        return dt.datetime.fromtimestamp(milliseconds / 1000, dt.UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return f"{milliseconds:g}"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    days, rest = divmod(whole, 86_400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days} d {clock}" if days else clock
