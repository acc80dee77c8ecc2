"""One run as a single HTML file: its state in sentences, then numbers, curves, incidents, events and configuration.

The file needs no server and no network, and is readable without scripts. It contains the styles and scripts of the
pages, and the curves as JSON. A notebook shows a part of the same content.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from rankscope_contract.model.events import RunState
from rankscope_contract.model.redaction import redacted_text
from rankscope_storage.base.escaping import sql_string
from rankscope_storage.connection import Connection
from rankscope_view.assets import assets_of_file
from rankscope_view.data.curves import Axis, Curve, CurveRequest, Line, Smoothing, curve
from rankscope_view.data.detail import CHARTS, RunDetail, chart_curve, nothing
from rankscope_view.data.events import EVENT_GROUPS, EventLine, EventLog, Group, Marker, event_log, markers
from rankscope_view.data.incidents import STATE_TEXTS, Incident, counted, incidents
from rankscope_view.data.metrics import own_histories
from rankscope_view.data.ranks import RankTable, rank_table
from rankscope_view.data.series import EVAL_LOSS, LOSS, History, restarts
from rankscope_view.data.summary import Summary, Trend, read_summary
from rankscope_view.pages.format import NOTHING, count, duration, measure, utc
from rankscope_view.pages.ranks import verdicts
from rankscope_view.pages.rendering import last_state, rank_list, render, state_word
from rankscope_view.pages.run import AXES, ChartChoice, chart, configuration
from rankscope_view.pages.sections import sections, title

CURVE_BYTES: Final = 2_000_000
"""Limit of the JSON of all curves. The rest of a report, with styles, scripts and drawings, is below 1 MB."""

_DIGITS: Final = 7
_POINTS: Final = (2000, 1000, 500, 250, 125, 60)
"""Numbers of points of a curve, of which the first one is used with which the curves are below CURVE_BYTES."""

_MAIN_FACTOR: Final = 4
"""The loss has this many times the points of other curves."""

_DRAWN_POINTS: Final = 600
_METRIC_POINTS: Final = 150

MOST_METRICS: Final = 24
"""Largest number of own metrics that a report draws. Its summary has their values, too."""

MOST_INCIDENTS: Final = 50
_MOST_VERDICTS: Final = 4
_BLOCKS: Final = ("progress", "loss", "parameters", "time", "speed", "metrics")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportContent:
    """The data of a report. `curves` are those that the document shows without scripts, by the name of the scalar."""

    summary: Summary
    incidents: Sequence[Incident]
    ranks: RankTable
    log: EventLog
    curves: Mapping[str, Curve]
    axes: Sequence[Axis]  # the first one is shown
    choice: ChartChoice
    made_at: float  # UTC seconds
    source: str  # name of the store

    @property
    def detail(self) -> RunDetail:
        """Return the numbers of the page of the run."""
        return self.summary.detail


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence at the top of a report: `text`, behind the heading of `incident` if there is one."""

    text: str
    incident: Incident | None = None


def report(connection: Connection, run: str, *, made_at: float, source: str) -> str | None:
    """Return the report of `run` as HTML; None if the store does not contain the run.

    `made_at` is in UTC seconds. `source` is the name of the store that the report states.
    """
    content = read_content(connection, run, made_at=made_at, source=source)
    if content is None:
        return None
    found, assets, lines = content.detail, assets_of_file(), content.log.lines[::-1]
    words = {axis: word for axis, word, _ in AXES}
    documents = {
        "summary": json.dumps([title(content.summary), [(one.title, one.rows) for one in sections(content.summary)]]),
        "curves": embedded_curves(found, content.axes),
    }
    return render(
        "report.html",
        policy=assets.policy,
        logo=assets.logo,
        sheet=assets.sheet,
        scripts=assets.scripts,
        documents={name: text.replace("<", "\\u003c") for name, text in documents.items()},  # no end of the element
        content=content,
        found=found,
        row=found.row,
        sentences=list(sentences(content)),
        blocks=[
            (name, [row for row in rows if row[0] not in {"advice", "end"} and row[1] != NOTHING])
            for name, rows in _blocks(content.summary)
        ],
        incident_facts=_incident_facts,
        most_incidents=MOST_INCIDENTS,
        verdicts=list(itertools.islice(verdicts(content.ranks, made_at, is_live=found.row.is_live), _MOST_VERDICTS)),
        axes=[(axis, words[axis]) for axis in content.axes],
        charts=[chart(found, name, drawn, content.choice) for name, drawn in content.curves.items()],
        lines=lines,
        condensed=condensed([line for line in lines if line.group is not Group.EVALUATION]),
        older=sum(number for group, number in content.log.counts.items() if group is not Group.STEP) - len(lines),
        statements=_statements(found.row.run),
        source=redacted_text(source),
        **configuration(found),
    )


def fragment(content: ReportContent) -> str:
    """Return state, sentences, loss curve and summary of a run as a part of an HTML document, for a notebook."""
    return render(
        "fragment.html",
        row=content.detail.row,
        sentences=list(sentences(content)),
        curve=content.curves.get(LOSS),
        blocks=list(_blocks(content.summary)),
    )


def read_content(connection: Connection, run: str, *, made_at: float, source: str) -> ReportContent | None:
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
    return ReportContent(
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


def sentences(content: ReportContent) -> Iterator[Sentence]:
    """Yield the sentences at the top of the report: progress, loss, first cause, slow ranks."""
    ended = content.detail.row.end_sentence
    if ended:
        yield Sentence(ended)
    yield Sentence(_progress(content.detail))
    yield Sentence(_loss(content.summary))
    slow = {row.rank for row in content.ranks.rows if row.slow}
    # A sentence below names a slow rank, so its incident is not counted a second time.
    if not ended:
        others = [one for one in content.incidents if one.tensor is not None or one.rank not in slow]
        yield from _first_incident(others) if others or not content.incidents else ()
    for row in content.ranks.rows:
        if row.slow is not None:
            yield Sentence(f"Rank {row.rank} {row.slow.words}.")
            break


def _progress(found: RunDetail) -> str:
    row = found.row
    if row.step is None:
        return "No step is stored."
    end = row.seen_at if row.ended_at is None and row.is_live else row.ended_at
    spent = f" in {duration(max(0.0, end - row.started_at))}" if row.started_at is not None and end is not None else ""
    attempts = f"{' and' if spent else ' in'} {len(found.restarts) + 1} attempts" if found.restarts else ""
    if row.state in {RunState.FAILED, RunState.STOPPED} and not row.end_sentence:
        planned = f" of {count(row.planned_steps)}" if row.planned_steps else ""
        reason = f": {row.reason.rstrip('.')}" if row.reason else ""
        return f"{state_word(row.state)} at step {count(row.step)}{planned}{spent}{attempts}{reason}."
    share = f"{count(row.step)} of {count(row.planned_steps)} steps" if row.planned_steps else f"Step {count(row.step)}"
    return f"{share}{spent}{attempts}."


def _loss(found: Summary) -> str:
    losses = found.losses
    if losses.current is None:
        return "The run logs no loss."
    if losses.last_finite is None:
        return f"All {count(losses.rows)} losses are NaN or infinite."
    trend = f" and {losses.trend}" if losses.trend in {Trend.FALLING, Trend.RISING, Trend.STEADY} else ""
    if math.isfinite(losses.current):
        late = f", {found.detail.row.loss_note}" if found.detail.row.is_loss_late else ""
        return f"Loss {measure(losses.current)}{trend}{late}."
    last = f"{measure(losses.last_finite)} at step {count(losses.last_finite_step or 0)}"
    return f"Loss {measure(losses.current)}; the last finite loss is {last}."


def _first_incident(found: Sequence[Incident]) -> Iterator[Sentence]:
    if not found:
        yield Sentence("No incident is stored.")
        return
    first, further = found[0], len(found) - 1
    more = f", and {count(further)} more incident{'' if further == 1 else 's'}" if further else ""
    yield Sentence(f"{'' if first.is_open else f' ({last_state(first)})'}{more}.", first)


def _blocks(found: Summary) -> list[tuple[str, Sequence[tuple[str, str]]]]:
    return [(section.title, section.rows) for section in sections(found) if section.title in _BLOCKS]


def _incident_facts(one: Incident) -> list[str]:
    facts = [f"rule {one.rule}"] if one.rule else []
    known = {"value": one.value, "baseline": one.baseline, "threshold": one.threshold}
    facts += [f"{name} {measure(value)}" for name, value in known.items() if value is not None]
    facts += [f"{count(one.events)} anomalies"] if one.events > 1 else []
    facts += [f"ranks {rank_list(one.ranks)}"] if len(one.ranks) > 1 else []
    facts += [f"attempt {one.attempt}"] if one.attempt else []
    return facts + [f"{STATE_TEXTS.get(state, state)} {utc(at, '%d %b %H:%M:%S')}" for at, state in one.states if at]


def condensed(lines: Sequence[EventLine]) -> list[EventLine]:
    """Return the lines of an event log, with one line for consecutive ones that differ only in their steps."""
    found = []
    for _, same in itertools.groupby(lines, key=lambda line: (line.attempt, line.group, line.severity, _text(line))):
        first, *others = same
        last = others[-1].step if others else None
        until = f", until step {count(last)}" if last is not None else ""
        more = f" ({count(len(others) + 1)} times{until})" if others else ""
        found.append(replace(first, text=first.text + more))
    return found


def _text(line: EventLine) -> str:
    """Return the text of a line without its step, which messages of checkpoints contain."""
    return line.text if line.step is None else re.sub(rf"\b{line.step}\b", "", line.text)


def _statements(run: str) -> str:
    name = sql_string(run)
    return (
        f"SELECT * FROM scalar_history WHERE run = {name} AND name = 'loss';\n"
        f"SELECT * FROM events WHERE run = {name} ORDER BY ts;\n"
        f"SELECT * FROM runs WHERE run = {name};"
    )


def offered_axes(found: RunDetail) -> tuple[Axis, ...]:
    """Return the axes on which the curves of a run differ; the first one is the default.

    A run with restarts is shown in the order of arrival, because the axis of steps leaves out superseded steps.
    """
    histories = [history for history in found.histories.values() if len(history)]
    axes = [Axis.STEP]
    if any(len(restarts(history.attempt)) or len(history.standing) < len(history) for history in histories):
        axes = [Axis.ARRIVAL, Axis.STEP, Axis.ATTEMPT]
    if any(np.count_nonzero(np.isfinite(history.time)) > 1 for history in histories):
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
        drawn = chart_curve(history, found.history(LOSS), request)
        lines = [_kept_line(line) for line in drawn.lines]
        documents[name] = drawn.document() | {"lines": lines, "markers": _thinned(marked[axis, name], drawn)}
    return documents


def _thinned(found: Sequence[Marker], drawn: Curve) -> list[list[Any]]:
    """Return the markers of a chart for JSON, at most one of each group in a bucket of the curve."""
    once: dict[tuple[Any, ...], Marker] = {}
    for one in found:
        place = one.x if drawn.bucket_width is None else one.x // drawn.bucket_width
        once.setdefault((one.group, place, one.is_critical), one)
    return [[one.group, _short_number(one.x), one.step, "", one.is_critical] for one in once.values()]


def _kept_line(line: Line) -> dict[str, Any]:
    """Return a line for JSON. Columns that repeat another one are null, and `logic.js` completes them."""
    places = [_short_number(round(x, 3)) for x in line.x.tolist()]
    value, low, high, smoothed = (_rounded(column) for column in (line.value, line.low, line.high, line.smoothed))
    return {
        "label": line.label,
        "role": line.role,
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
        _short_number(float(f"{one:.{_DIGITS}g}")) if is_finite else None
        for one, is_finite in zip(values.tolist(), finite, strict=True)
    ]


def _short_number(value: float) -> float | int:
    """Return an integer in place of a float with an integer value, which is shorter in JSON."""
    return int(value) if value.is_integer() and abs(value) < 1e15 else value
