"""One run as a single HTML file: it needs no server and no network, and is readable without scripts.

The file contains the styles and scripts of the pages, and the curves as JSON. A policy in the file permits exactly
these scripts and styles, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rankscope_storage.connection import Connection
from rankscope_view.assets import ASSETS
from rankscope_view.assets.bundle import bundle, chart_library, style
from rankscope_view.data.curves import Axis, Curve, CurveRequest, Line, Smoothing, curve
from rankscope_view.data.detail import RunDetail, nothing
from rankscope_view.data.events import Group, Marker, event_log, markers
from rankscope_view.data.history import EVAL_LOSS, LOSS, History
from rankscope_view.data.incidents import incidents
from rankscope_view.data.ranks import rank_table
from rankscope_view.data.summary import read_summary
from rankscope_view.pages import report as report_page
from rankscope_view.pages.format import text, utc
from rankscope_view.pages.parts import icon
from rankscope_view.pages.run import ChartChoice
from rankscope_view.pages.sections import sections, title

CURVE_BYTES: Final = 2_000_000
"""Limit of the JSON of all curves. The rest of a report, with styles, scripts and drawings, is below 1 MB."""

_POINTS: Final = (2000, 1000, 500, 250, 125, 60)
"""Numbers of points of a curve, of which the first one is used with which the curves are below CURVE_BYTES."""

_MAIN_FACTOR: Final = 4
"""The loss has this many times the points of other curves."""

_DIGITS: Final = 7
_DRAWN_POINTS: Final = 600


@dataclass(frozen=True, slots=True)
class Report:
    """A report: the complete HTML document, and its policy."""

    html: str
    policy: str


def report(connection: Connection, run: str, *, made_at: float, source: str) -> Report | None:
    """Return the report of `run`; None if the store does not contain the run.

    `made_at` is in UTC seconds. `source` is the name of the store that the report states.
    """
    content = read_content(connection, run, made_at=made_at, source=source)
    if content is None:
        return None
    scripts = [ASSETS["theme.js"].read().decode(), chart_library(), bundle("app")]
    permitted = policy(scripts, style())
    return Report(_document(content, embedded_curves(content.detail, content.axes), scripts, permitted), permitted)


def read_content(connection: Connection, run: str, *, made_at: float, source: str) -> report_page.ReportContent | None:
    """Return the data of the report of `run`, without the curves for scripts; None if there is no such run."""
    with connection.pinned():
        summary = read_summary(connection, run)
        if summary is None:
            return None
        found = summary.detail
        listed = incidents(connection, [run]).get(run, [])
        ranks = rank_table(connection, run)
    axes = offered_axes(found)
    request = CurveRequest(axis=axes[0], points=_DRAWN_POINTS)
    groups = [group for group in Group if group is not Group.STEP]
    return report_page.ReportContent(
        summary=summary,
        incidents=listed,
        ranks=ranks,
        log=event_log(found.lines, found.history(LOSS), (), found.history(EVAL_LOSS), groups=groups),
        curves={name: curve(history, request) for name, history in found.histories.items() if len(history)},
        axes=axes,
        choice=ChartChoice(request=request),
        made_at=made_at,
        source=source,
    )


def offered_axes(found: RunDetail) -> tuple[Axis, ...]:
    """Return the axes on which the curves of a run differ; the first one is the default.

    A run with restarts is shown in the order of arrival, because the axis of steps leaves out superseded steps.
    """
    histories = [history for history in found.histories.values() if len(history)]
    axes = [Axis.STEP]
    if any(len(np.unique(history.attempt)) > 1 or not history.stands.all() for history in histories):
        axes = [Axis.ARRIVAL, Axis.STEP, Axis.ATTEMPT]
    if any(np.isfinite(history.time).sum() > 1 for history in histories):
        axes.append(Axis.TIME)
    return tuple(axes)


def embedded_curves(found: RunDetail, axes: Sequence[Axis], limit: int = CURVE_BYTES) -> str:
    """Return the curves on each axis as JSON of at most `limit` bytes, with as many points as possible."""
    document = ""
    marked = {(axis, name): _marked(found, history, axis) for axis in axes for name, history in found.histories.items()}
    for points in _POINTS:
        curves = {axis.value: _curves_on(found, axis, points, marked) for axis in axes}
        document = json.dumps(curves, allow_nan=False, separators=(",", ":"))
        if len(document) <= limit:
            break
    return document


def _marked(found: RunDetail, history: History, axis: Axis) -> list[Marker]:
    """Return the markers of a chart. Only the loss has a lane for all; in other charts, incidents are lines."""
    if history.name == LOSS:
        return markers(found.lines, found.history(EVAL_LOSS), history, axis)
    return [one for one in markers(found.lines, nothing(EVAL_LOSS), history, axis) if one.is_critical]


def _curves_on(
    found: RunDetail, axis: Axis, points: int, marked: Mapping[tuple[Axis, str], Sequence[Marker]]
) -> dict[str, Any]:
    documents = {}
    for name, history in found.histories.items():
        smoothing = Smoothing.NONE if name == EVAL_LOSS else Smoothing.EMA
        request = CurveRequest(axis=axis, smoothing=smoothing, points=points * (_MAIN_FACTOR if name == LOSS else 1))
        drawn = curve(history, request)
        lines = [_line(line) for line in drawn.lines]
        documents[name] = drawn.document() | {"lines": lines, "markers": _thinned(marked[axis, name], drawn)}
    return documents


def _thinned(found: Sequence[Marker], drawn: Curve) -> list[list[Any]]:
    """Return the markers of a chart for JSON, at most one of each group in a bucket of the curve."""
    once: dict[tuple[Any, ...], Marker] = {}
    for one in found:
        place = one.x if drawn.bucket_width is None else one.x // drawn.bucket_width
        once.setdefault((one.group, place, one.is_critical), one)
    return [[one.group, _number(one.x), one.step, "", one.is_critical] for one in once.values()]


def _line(line: Line) -> dict[str, Any]:
    """Return a line for JSON. Columns that repeat another one are null, and `logic.js` completes them."""
    places = [_number(round(x, 3)) for x in line.x.tolist()]
    value, low, high, smoothed = (_rounded(column) for column in (line.value, line.low, line.high, line.smoothed))
    return {
        "label": line.label,
        "x": places,
        "step": None if line.step.tolist() == places else line.step.tolist(),
        "value": value,
        "smoothed": smoothed if any(one is not None for one in smoothed) else None,
        "low": None if low == value else low,
        "high": None if high == value else high,
    }


def _rounded(values: Any) -> list[float | int | None]:
    """Return values with seven digits, which no chart can distinguish from all digits; null in place of NaN."""
    finite = np.isfinite(values).tolist()
    return [
        _number(float(f"{one:.{_DIGITS}g}")) if is_finite else None
        for one, is_finite in zip(values.tolist(), finite, strict=True)
    ]


def _number(value: float) -> float | int:
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def _document(content: report_page.ReportContent, curves: str, scripts: Sequence[str], permitted: str) -> str:
    run = content.detail.row.run
    logo = base64.b64encode(ASSETS["icon.svg"].read()).decode()
    first, *others = [f"<script>{script}</script>" for script in scripts]
    summary = [title(content.summary), [(one.title, one.rows) for one in sections(content.summary)]]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{permitted}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Report of {text(run)} · Rankscope</title>
<link rel="icon" href="data:image/svg+xml;base64,{logo}">
<style>{style()}</style>
{first}
</head>
<body data-page="report" data-axis="{content.axes[0]}">
<header class="top"><span class="brand">{icon("logo")}<b>Rankscope</b></span>
<span class="crumbs"><b><bdi>{text(run)}</bdi></b><span class="slash">/</span><span>Report</span></span>
<span class="right"><span class="history"><i></i>Snapshot of {utc(content.made_at, "%H:%M")} UTC</span>
<button id="theme" title="Theme (T)" aria-label="Change the theme">{icon("theme")}</button>
<button id="help" title="Keys (?)" aria-label="Keys"><kbd>?</kbd></button></span></header>
<main class="report">{report_page.body(content)}</main>
{_data("summary", json.dumps(summary))}
{_data("curves", curves)}
{"".join(others)}
</body>
</html>
"""


def _data(name: str, document: str) -> str:
    """Return a JSON document as an element that is no script. It cannot end the element early."""
    escaped = document.replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{escaped}</script>'


def policy(scripts: Sequence[str], sheet: str) -> str:
    """Return a Content-Security-Policy that permits `scripts` and `sheet` by their hashes, and no request."""
    allowed = " ".join(_hash(script) for script in scripts if script)
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_hash(sheet)}; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'"
    )


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
