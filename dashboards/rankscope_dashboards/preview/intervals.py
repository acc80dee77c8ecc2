"""Steps of queries and the variables of time that Grafana adds to a board, from the range and the width of a panel."""

from __future__ import annotations

import itertools
from typing import Final

from rankscope_dashboards.preview.prometheus import MOST_POINTS, Window

_MINUTE: Final = 60
_HOUR: Final = 60 * _MINUTE
_DAY: Final = 24 * _HOUR
_ROUND: Final = (
    *(1, 2, 5, 10, 15, 20, 30, _MINUTE),
    *(2 * _MINUTE, 5 * _MINUTE, 10 * _MINUTE, 15 * _MINUTE, 20 * _MINUTE, 30 * _MINUTE),
    *(_HOUR, 2 * _HOUR, 3 * _HOUR, 6 * _HOUR, 12 * _HOUR, _DAY, 7 * _DAY, 30 * _DAY),
)
"""Intervals in seconds to which Grafana rounds the step of a query."""


def step_seconds(window: Window, points: int, scrape_seconds: float) -> float:
    """Return the step of a query with about `points` points, but never less than the scrape interval."""
    wanted = window.seconds / max(1, points)
    rounded = next((low for low, high in itertools.pairwise(_ROUND) if wanted < (low + high) / 2), _ROUND[-1])
    return max(float(rounded), scrape_seconds, window.seconds / (MOST_POINTS - 1))


def time_variables(window: Window, step: float, scrape_seconds: float) -> dict[str, str]:
    """Return the variables of time in a query with this step, by name."""
    span, rate = max(1, round(window.seconds)), max(step + scrape_seconds, 4 * scrape_seconds)
    return {
        "__interval": _seconds(step),
        "__interval_ms": str(round(1000 * step)),
        "__rate_interval": _seconds(rate),
        "__range": f"{span}s",
        "__range_s": str(span),
        "__range_ms": str(1000 * span),
    }


def _seconds(value: float) -> str:
    return f"{value:.0f}s" if float(value).is_integer() else f"{1000 * value:.0f}ms"
