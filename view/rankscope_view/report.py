"""One run as a single HTML file: it needs no server and no network, and is readable without scripts.

The file contains the styles and scripts of the pages, and the curves as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from rankscope_storage.connection import Connection
from rankscope_view.data.curves import Axis, Curve, CurveRequest, Smoothing, curve
from rankscope_view.data.detail import CHARTS, RunDetail, nothing
from rankscope_view.data.evaluation import evaluation_curve
from rankscope_view.data.events import EVENT_GROUPS, Marker, event_log, markers
from rankscope_view.data.history import EVAL_LOSS, LOSS, History
from rankscope_view.data.incidents import counted, incidents
from rankscope_view.data.metrics import own_histories
from rankscope_view.data.ranks import rank_table
from rankscope_view.data.summary import read_summary
from rankscope_view.pages import report as report_page
from rankscope_view.pages.format import utc
from rankscope_view.pages.parts import page_title
from rankscope_view.pages.run import ChartChoice
from rankscope_view.pages.sections import sections, title
from rankscope_view.standalone import File, FilePage, file, kept_line, short_number

CURVE_BYTES: Final = 2_000_000
"""Limit of the JSON of all curves. The rest of a report, with styles, scripts and drawings, is below 1 MB."""

_POINTS: Final = (2000, 1000, 500, 250, 125, 60)
"""Numbers of points of a curve, of which the first one is used with which the curves are below CURVE_BYTES."""

_MAIN_FACTOR: Final = 4
"""The loss has this many times the points of other curves."""

_DRAWN_POINTS: Final = 600
_METRIC_POINTS: Final = 150

MOST_METRICS: Final = 24
"""Largest number of own metrics that a report draws. Its summary has their values, too."""


def report(connection: Connection, run: str, *, made_at: float, source: str) -> File | None:
    """Return the report of `run`; None if the store does not contain the run.

    `made_at` is in UTC seconds. `source` is the name of the store that the report states.
    """
    content = read_content(connection, run, made_at=made_at, source=source)
    if content is None:
        return None
    summary = [title(content.summary), [(one.title, one.rows) for one in sections(content.summary)]]
    return file(
        FilePage(
            title=page_title(content.detail.row, f"Report of {run}"),
            subject=content.detail.row.run,
            place="Report",
            state=f"Snapshot of {utc(made_at, '%H:%M')} UTC",
            body=report_page.body(content),
            kind="report",
            axis=content.axes[0],
            documents={"summary": json.dumps(summary), "curves": embedded_curves(content.detail, content.axes)},
        )
    )


def read_content(connection: Connection, run: str, *, made_at: float, source: str) -> report_page.ReportContent | None:
    """Return the data of the report of `run`, without the curves for scripts; None if there is no such run."""
    with connection.pinned():
        summary = read_summary(connection, run)
        if summary is None:
            return None
        found = summary.detail
        histories = {
            **{name: one for name in CHARTS if (one := found.histories.get(name)) is not None},
            **own_histories(connection, run, MOST_METRICS),
        }
        summary = replace(summary, detail=replace(found, histories=histories))
        found = summary.detail
        listed = counted(connection, incidents(connection, [run]).get(run, []))
        ranks = rank_table(connection, run)
    axes = offered_axes(found)
    request = CurveRequest(axis=axes[0], points=_DRAWN_POINTS)
    return report_page.ReportContent(
        summary=summary,
        incidents=listed,
        ranks=ranks,
        log=event_log(found.lines, found.history(LOSS), (), found.history(EVAL_LOSS), groups=EVENT_GROUPS),
        curves={
            name: curve(history, request if name in CHARTS else replace(request, points=_METRIC_POINTS))
            for name, history in found.histories.items()
            if len(history)
        },
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
        is_evaluation = name == EVAL_LOSS
        drawn = evaluation_curve(history, found.history(LOSS), request) if is_evaluation else curve(history, request)
        lines = [kept_line(line) for line in drawn.lines]
        documents[name] = drawn.document() | {"lines": lines, "markers": _thinned(marked[axis, name], drawn)}
    return documents


def _thinned(found: Sequence[Marker], drawn: Curve) -> list[list[Any]]:
    """Return the markers of a chart for JSON, at most one of each group in a bucket of the curve."""
    once: dict[tuple[Any, ...], Marker] = {}
    for one in found:
        place = one.x if drawn.bucket_width is None else one.x // drawn.bucket_width
        once.setdefault((one.group, place, one.is_critical), one)
    return [[one.group, short_number(one.x), one.step, "", one.is_critical] for one in once.values()]
