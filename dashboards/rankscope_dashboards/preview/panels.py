"""Panels of a board with their data: latest values, curves over time, states over time and tables."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope_dashboards.preview.intervals import step_seconds, time_variables
from rankscope_dashboards.preview.prometheus import PreviewError, Prometheus, QueryError, Series, Window
from rankscope_dashboards.preview.tables import Table, table
from rankscope_dashboards.preview.units import scale
from rankscope_dashboards.preview.values import Cell, cell, colour_key
from rankscope_dashboards.preview.variables import interpolated

_LABEL: Final = re.compile(r"\{\{ *(\w+) *\}\}")
_PIXELS_PER_COLUMN: Final = 55
"""Width of one of the 24 columns of the grid. A curve has at most one point per pixel."""

_DRAWN: Final = frozenset({"stat", "gauge", "bargauge", "timeseries", "table", "status-history", "state-timeline"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Latest:
    """The latest value of one series. `share` is its place between minimum and maximum of a gauge, from 0 to 1."""

    name: str
    cell: Cell
    share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Curves over time. All values are multiplied by a factor so that they have the unit `unit`.

    A NaN without a sample behind it breaks a line: samples are missing there.
    """

    lines: tuple[tuple[str, Series], ...]
    unit: str
    step: float  # between two samples, in seconds
    is_logarithmic: bool
    has_zero: bool  # the axis begins at zero


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Values over time as coloured cells: for each series its name, and (first, last, cell) in UTC seconds.

    `key` has the meanings of the colours.
    """

    rows: tuple[tuple[str, tuple[tuple[float, float, Cell], ...]], ...]
    key: tuple[Cell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel with its data. Without any, `body` is None and `empty` has the reason."""

    title: str
    description: str
    width: int  # columns of the grid of 24
    empty: str
    body: tuple[Latest, ...] | Curves | States | Table | None
    notes: tuple[str, ...] = ()  # rejected queries, and differences from Grafana


@dataclass(frozen=True, slots=True)
class Context:
    """Data source, range and variables of a preview."""

    prometheus: Prometheus
    window: Window
    variables: Mapping[str, str]
    scrape_seconds: float

    def text(self, text: str, step: float) -> str:
        """Return `text` with the values of all variables."""
        return interpolated(text, {**self.variables, **time_variables(self.window, step, self.scrape_seconds)})


def read_panel(panel: Mapping[str, Any], context: Context) -> Panel:
    """Return a panel with the results of its queries. A rejected query is a note of the panel."""
    points = panel.get("maxDataPoints") or panel["gridPos"]["w"] * _PIXELS_PER_COLUMN
    least = max(context.scrape_seconds, float((panel.get("interval") or "0s").removesuffix("s")))
    step = step_seconds(context.window, points, least)
    notes, results = [], {}
    for target in panel.get("targets") or ():
        try:
            results[target["refId"]] = _result(target, context, step)
        except QueryError as error:
            notes.append(f"Query {target['refId']}: {error}")
    body = None
    try:
        body = _body(panel, results, step) if any(results.values()) else None
    except PreviewError as error:
        notes.append(str(error))
    if body is not None and panel["type"] not in _DRAWN:
        notes.append(f"Panels of the type {panel['type']} are shown as a table of latest values in a preview.")
    if isinstance(body, Curves):
        notes += _curve_notes(panel)
    return Panel(
        title=context.text(panel["title"], step),
        description=panel.get("description", ""),
        width=panel["gridPos"]["w"],
        empty=panel.get("fieldConfig", {}).get("defaults", {}).get("noValue") or _content(panel),
        body=body,
        notes=tuple(notes),
    )


def _content(panel: Mapping[str, Any]) -> str:
    """Return the text of a panel of the type text, or that of a panel without a reason for missing data."""
    return str(panel.get("options", {}).get("content") or "No data")


def _result(target: Mapping[str, Any], context: Context, step: float) -> list[tuple[str, Series]]:
    """Return the series of a query with their names."""
    query = context.text(target["expr"], step)
    if target.get("instant"):
        found = context.prometheus.instant(query, context.window.end)
    else:
        found = context.prometheus.over(query, context.window, step)
    legend = target.get("legendFormat") or ""
    return [(series_name(one.labels, legend), one) for one in found if one.values]


def series_name(labels: Mapping[str, str], legend: str) -> str:
    """Return the name of a series: `legend` with the values of its labels, or all labels."""
    if legend:
        return _LABEL.sub(lambda found: labels.get(found[1], ""), legend).strip()
    return ", ".join(f"{name}={value}" for name, value in sorted(labels.items()))


def _body(
    panel: Mapping[str, Any], results: Mapping[str, Sequence[tuple[str, Series]]], step: float
) -> tuple[Latest, ...] | Curves | States | Table:
    settings = panel.get("fieldConfig", {}).get("defaults", {})
    named = [one for listed in results.values() for one in listed]
    if panel["type"] in {"stat", "gauge", "bargauge"}:
        is_named = panel.get("options", {}).get("textMode") == "value_and_name" or len(named) > 1
        return tuple(_latest(name if is_named else "", one, settings, panel["type"]) for name, one in named)
    if panel["type"] == "timeseries":
        return _curves(named, settings, step)
    if panel["type"] in {"status-history", "state-timeline"}:
        rows = tuple((name, _cells(one, settings, step)) for name, one in named)
        return States(rows=rows, key=tuple(colour_key(settings)))
    return table(panel, {query: [one for _, one in listed] for query, listed in results.items()})


def _latest(name: str, series: Series, settings: Mapping[str, Any], kind: str) -> Latest:
    value = series.values[-1]
    low, high = settings.get("min", 0.0), settings.get("max", 100.0)
    is_gauge = kind != "stat" and math.isfinite(value)
    share = min(max((value - low) / ((high - low) or 1.0), 0.0), 1.0) if is_gauge else None
    return Latest(name=name, cell=cell(value, settings, has_thresholds=True), share=share)


def _curves(named: Sequence[tuple[str, Series]], settings: Mapping[str, Any], step: float) -> Curves:
    sizes = [abs(value) for _, one in named for value in one.values if math.isfinite(value)]
    factor, unit = scale(settings.get("unit", ""), max(sizes, default=0.0))
    custom = settings.get("custom", {})
    return Curves(
        lines=tuple((name, _scaled(one, factor)) for name, one in named),
        unit=unit.strip(),
        step=step,
        is_logarithmic=custom.get("scaleDistribution", {}).get("type") == "log",
        has_zero=settings.get("min") == 0,
    )


def _scaled(series: Series, factor: float) -> Series:
    return Series(series.labels, series.times, tuple(value * factor for value in series.values))


def _curve_notes(panel: Mapping[str, Any]) -> list[str]:
    custom = panel["fieldConfig"]["defaults"].get("custom", {})
    is_stacked = custom.get("stacking", {}).get("mode", "none") != "none"
    if not is_stacked and custom.get("drawStyle", "line") == "line":
        return []
    words = [
        *(["stacks the series"] if is_stacked else []),
        *(["draws bars"] if custom.get("drawStyle") == "bars" else []),
    ]
    return [f"Grafana {' and '.join(words)}; a preview draws lines."]


def _cells(series: Series, settings: Mapping[str, Any], step: float) -> tuple[tuple[float, float, Cell], ...]:
    """Return the cells of a row. Consecutive cells with the same text or colour are one cell."""
    found: list[tuple[float, float, Cell]] = []
    for time, value in zip(series.times, series.values, strict=True):
        one = cell(value, settings, has_thresholds=True)
        if found and found[-1][2].colour == one.colour and time - found[-1][1] < step / 2:
            found[-1] = (
                found[-1][0],
                time + step,
                found[-1][2] if found[-1][2].text == one.text else Cell("", one.colour),
            )
        else:
            found.append((time, time + step, one))
    return tuple(found)
