"""The page of one run: progress, figures, charts, open incidents, events, and advice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from rankscope_view.data.advice import Advice
from rankscope_view.data.curves import POINTS, Axis, Curve, CurveRequest, Smoothing, notice
from rankscope_view.data.detail import (
    CHARTS,
    PERPLEXITY,
    RECENT_ROWS,
    SHORT_ROWS,
    STEP_SECONDS,
    RunDetail,
    speed_change,
)
from rankscope_view.data.events import NEWEST, EventLine, EventLog, Group
from rankscope_view.data.history import EVAL_LOSS, GRAD_NORM, LEARNING_RATE, LOSS, SPEEDS, History
from rankscope_view.data.metrics import SCALAR_TITLES, Metrics
from rankscope_view.data.newest import SPEED_STEPS
from rankscope_view.data.runs import RunRow
from rankscope_view.pages import svg
from rankscope_view.pages.format import NOTHING, count, duration, measure, percent, short, text, utc
from rankscope_view.pages.metrics import metric_groups
from rankscope_view.pages.parts import (
    Place,
    close_command,
    document,
    icon,
    incident_line,
    page_title,
    panel,
    run_document,
    run_pill,
    segmented,
    tabs,
    tag_list,
)
from rankscope_view.pages.run_list import SPEED_UNITS
from rankscope_view.pages.settings import configuration

AXES: Final = (
    (Axis.STEP, "Step", "Last value of each step"),
    (Axis.CUMULATIVE, "Cumulative", "Steps of all attempts; repeated steps count again"),
    (Axis.ATTEMPT, "Attempts", "One curve for each attempt"),
    (Axis.ARRIVAL, "Arrival", "Order of arrival; labels are the raw steps, so they go back at a restart"),
    (Axis.TIME, "Time", "Time in UTC; a pause is a gap"),
)
_SMOOTHINGS: Final = (
    *((Smoothing.NONE, "None"), (Smoothing.EMA, "EMA"), (Smoothing.AVERAGE, "Average")),
    (Smoothing.BOTH, "EMA, then average"),
)
_HINTS: Final = {
    PERPLEXITY: "10 means: as unsure as among 10 words of equal chance. Lower is better.",
    GRAD_NORM: "Before clipping. Above 100: clip. Near 0: vanishing.",
    LEARNING_RATE: "Warm-up, then the shape of the schedule. A jump at a restart is a changed setting.",
    EVAL_LOSS: "If it rises while the training loss falls, the model overfits.",
    **dict.fromkeys(SPEEDS, "Dips at checkpoints are normal. A level that remains lower is not."),
    STEP_SECONDS: "Peaks at checkpoints are normal. A level that remains higher is not.",
}
GOODPUT: Final = "goodput"
_TITLES: Final = {
    GRAD_NORM: "Gradient norm",
    EVAL_LOSS: "Evaluation loss",
    "tokens_per_second": "Throughput",
    STEP_SECONDS: "Step time",
}
_GROUP_WORDS: Final = {Group.EVALUATION: "Eval"}


OUTSIDE: Final = f'<span class="mark">{icon("outside")} outside of a cut axis</span>'
"""Entry of a legend for the triangles at the edges of a chart."""

_BAD: Final = ' class="bad"'
_NOT_FINITE: Final = frozenset(measure(value) for value in (np.nan, np.inf, -np.inf))
_SUMMED: Final = ("tokens_per_second", "samples_per_second")
"""Speeds of each rank, of which the header has the sum over ranks and the chart the mean."""

_MARKS: Final = "".join(
    f'<span class="mark">{icon(group)} {group}</span>'
    for group in (Group.INCIDENT, Group.RESTART, Group.CHECKPOINT, Group.EVALUATION)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartChoice:
    """Choices of the reader for all charts of a page, which its address contains."""

    request: CurveRequest
    is_log: bool = False
    is_cut: bool = False  # the axis has most values, not all

    def values(self) -> dict[str, object]:
        """Return the parameters of an address with these choices."""
        request = self.request
        strength = request.decay if request.smoothing is Smoothing.EMA else request.width
        return {
            "axis": request.axis,
            "smooth": request.smoothing,
            "strength": strength if request.smoothing is not Smoothing.NONE else None,
            "from_": request.first,
            "to": request.last,
            "log": 1 if self.is_log else None,
            "cut": 1 if self.is_cut else None,
            "tail": request.newest,
        }


def page(
    place: Place, found: RunDetail, choice: ChartChoice, *, curves: dict[str, Curve], log: EventLog, metrics: Metrics
) -> str:
    """Return the page of a run. `curves` are drawn for readers without scripts, by the name of the scalar."""
    row = found.row
    main = _no_loss(place, found)
    sources = metrics.sources
    if LOSS in curves:
        main = chart_panel(found, LOSS, curves[LOSS], choice, is_main=True, source=sources.get(LOSS))
    more = [name for name in (GRAD_NORM, LEARNING_RATE, EVAL_LOSS, *SPEEDS, PERPLEXITY) if name in curves]
    folded = "".join(
        chart_panel(found, name, curves[name], choice, is_main=False, source=sources.get(name)) for name in more
    )
    words = ", ".join(title(name).lower() for name in more)
    group = (
        f'<details class="more" id="more" open><summary>{words.capitalize()} <span class="dim">{len(more)} chart{"" if len(more) == 1 else "s"}</span> '
        f"<kbd>m</kbd></summary><div class=grid2>{folded}</div></details>"
    )
    body = (
        f'{header(place, found)}<div class="columns" id="run" data-run="{text(row.run)}" data-live-run="{row.is_live:d}"><div>'
        f"{toolbar(lambda values: place.url('runs', row.run, **values), choice, is_long=is_long(curves))}{main}{group if more else ''}"
        f"{metric_groups(metrics.found.values(), {name: title(name) for name in CHARTS})}</div>"
        f"<aside>{_incidents(place, row)}{_events(place, row, log)}{_advice(found.advice)}{configuration(found)}</aside></div>"
    )
    title_ = page_title(row, row.run)
    return document(place, title_, body, crumbs=[(row.run, None)], nav=tabs(place, row, ""), page="run")


def is_long(curves: Mapping[str, Curve]) -> bool:
    """Return whether any of `curves` has more rows than a chart draws, so that its newest rows are a choice."""
    return any(curve.rows > POINTS for curve in curves.values())


def title(name: str) -> str:
    """Return the title of the chart of a scalar."""
    words = name.replace("_", " ").capitalize() if name in CHARTS else name
    return {**SCALAR_TITLES, **_TITLES}.get(name, words)


def scalar_words(name: str) -> str:
    """Return the words for a scalar with its labels as JSON, such as `learning rate, group 0`."""
    plain, brace, labels = name.partition('{"')
    try:
        known = json.loads(brace + labels) if brace else {}
    except ValueError:
        plain, known = name, {}
    words = title(plain).lower() if plain in CHARTS else title(plain)
    return ", ".join((words, *(f"{key} {value}" for key, value in known.items())))


def header(place: Place, found: RunDetail) -> str:
    """Return name, state, progress and current values of a run."""
    row, facts = found.row, found.facts
    parts = [
        f"attempt {row.attempt}" if row.attempt else "",
        f"{row.world_size} rank{'s' if row.world_size > 1 else ''}" if row.world_size else "",
    ]
    parts += [f"{len(facts.hosts)} hosts" if len(facts.hosts) > 1 else "".join(facts.hosts)]
    parts += [f"torch {facts.versions['torch']}" if "torch" in facts.versions else ""]
    about = " · ".join(text(part) for part in parts if part)
    is_named = row.reason is not None and row.reason.partition("\n")[0].rstrip(".") in row.end_sentence
    reason = f'<p class="reason">{text(row.reason)}</p>' if row.reason and not is_named else ""
    ended = f'<p class="reason bad">{text(row.end_sentence)}</p>' if row.end_sentence else ""
    note = f'<p class="note">{text(row.note)}</p>' if row.note else ""
    restarts = ", ".join(f"{count(one.last_step)} → {count(one.first_step)}" for one in found.restarts[:4])
    again = f"restarts at {restarts}, {count(found.steps_again)} steps trained again" if restarts else ""
    marks = [one.last_step / row.planned_steps for one in found.restarts] if row.planned_steps else []
    bar = svg.bar(row.share, row.state or "unknown", marks) if row.share is not None else ""
    figures = "".join(
        f'<div><dt>{label}</dt><dd><b{_BAD if value in _NOT_FINITE else ""}><bdi data-value="{name}">{value}</bdi>{_unit(name)}</b><span>{line}</span></dd></div>'
        for name, label, value, line in _figures(place, found)
    )
    report = f'<a class="button" href="{place.url("runs", row.run, "report")}" download>Report</a>'
    compare = f'<a class="button" href="{place.url("compare", run=row.run)}">Compare</a>'
    return (
        f'<div class="runhead" id="head" data-planned="{row.planned_steps or ""}" data-attempt="{row.attempt or 0}" data-ranks="{row.loss_ranks + row.loss_ranks_missing}" data-step="{"" if row.step is None else row.step}" data-live><div class="title"><h1><bdi>{text(row.run)}</bdi></h1>{run_pill(row)}'
        f'{tag_list(sorted(row.tags.items()))}<span class="dim">{about}</span><span class="aside">{report}{compare}</span></div>{ended}{reason}{note}'
        f'<div class="figures"><span>{_progress(row)}</span><span class="dim">{again}</span></div>{bar}'
        f"<dl>{figures}</dl></div>"
    )


def _progress(row: RunRow) -> str:
    if row.step is None:
        return f"step {NOTHING}"
    step = f'<b data-value="step">{count(row.step)}</b>'
    parts = [f"{step} of {count(row.planned_steps)} steps" if row.planned_steps else f"step {step}"]
    if row.share is not None:
        parts.append(f"<span data-share>{percent(row.share)}</span>")
    about, left = "", row.eta_seconds if row.is_live else None
    if left:
        about = f", about {utc(row.seen_at + left, '%d %b %H:%M')} UTC" if row.seen_at else ""
        about = f" · <b>{duration(left)}</b> left{about}"
    if not row.is_live and row.started_at and row.ended_at:
        parts.append(f"ran for {duration(max(0.0, row.ended_at - row.started_at))}")
    return " · ".join(parts) + (f"<span data-left>{about}</span>" if row.is_live else "")


def _figures(place: Place, found: RunDetail) -> Iterator[tuple[str, str, str, str]]:
    """Yield (name, label, value, line of context) of the figures in the header. Only known values are shown."""
    row = found.row
    change = found.loss_change
    yield LOSS, "Loss", measure(row.loss), _loss_line(row, change, found.history(LOSS))
    if found.perplexity is not None:
        yield PERPLEXITY, "Perplexity", measure(found.perplexity), "exp(loss): equal choices"
    if row.learning_rate is not None:
        yield LEARNING_RATE, "Learning rate", measure(row.learning_rate), _direction(found.history(LEARNING_RATE))
    norms = found.history(GRAD_NORM)
    if len(norms):
        yield GRAD_NORM, "Gradient norm", measure(float(norms.value[-1])), _usual(norms)
    for name in SPEEDS:
        history = found.history(name)
        if not len(history):
            continue
        changed = speed_change(history) if row.is_live else None
        line = "" if changed is None else f", {signed(changed[0])} since step {count(changed[1])}"
        value = row.speeds.get(name, float(history.value[-1]))
        shown = measure(value) if name == STEP_SECONDS else short(value)
        label = "Throughput, all ranks" if name in _SUMMED and (row.world_size or 0) > 1 else "Throughput"
        yield name, {STEP_SECONDS: "Speed"}.get(name, label), shown, f"median, newest {SPEED_STEPS} steps{line}"
    if (texts := goodput_texts(found.facts.goodput, found.facts.lost_seconds)) is not None:
        yield GOODPUT, "Goodput", *texts
    elif found.facts.lacks_goodput:
        link = f'<a href="{place.url("runs", row.run, goodput=1)}">calculate</a>'
        pending = place.url("data", "goodput", run=row.run)
        yield GOODPUT, "Goodput", NOTHING, f'<span data-pending="{pending}">{link}</span>'


def _loss_line(row: RunRow, change: tuple[float, float, int] | None, loss: History) -> str:
    """Return the change of the loss over its newest rows; of a loss that is not finite, its last finite value."""
    if row.loss_note:
        return row.loss_note
    values = loss.value[loss.stands]
    finite = np.flatnonzero(np.isfinite(values))
    if len(values) and len(finite) and finite[-1] != len(values) - 1:
        step = int(loss.step[loss.stands][finite[-1]])
        return f"last finite {measure(float(values[finite[-1]]))} at step {count(step)}"
    first, last, rows = change or (0.0, 0.0, 0)
    return f"median of {SHORT_ROWS} rows: {measure(first)} to {measure(last)} in {rows} rows" if rows else ""


def goodput_texts(share: float | None, lost: float | None) -> tuple[str, str] | None:
    """Return the texts of the goodput: its share in percent, and the lost time; None if it is unknown."""
    return None if share is None else (percent(share), f"{duration(lost)} lost" if lost else "")


def _direction(rates: History) -> str:
    """Return whether the learning rate falls, rises or is constant, over its last rows."""
    values = rates.value[-RECENT_ROWS:]
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return ""
    signs = np.sign(np.diff(values))
    rows = 1 + int(np.argmax([*(signs[::-1] != signs[-1]), True]))
    word = {1.0: "rising", 0.0: "constant"}.get(float(signs[-1]), "falling")
    return word if signs[-1] == 0 and rows == len(values) else f"{word} in {rows} rows"


def _usual(norms: History) -> str:
    """Return the median of the last gradient norms, which their newest value is read against."""
    values = norms.value[-RECENT_ROWS:]
    values = values[np.isfinite(values)]
    return f"median {measure(float(np.median(values)))} in {len(values)} rows" if len(values) > 1 else ""


def _unit(name: str) -> str:
    return f" <small>{SPEED_UNITS[name]}</small>" if name in SPEED_UNITS else ""


def signed(ratio: float) -> str:
    """Return a relative change in percent with its sign."""
    return f"{ratio:+.0%}".replace("-", "−").replace("%", " %")


def toolbar(
    address: Callable[[dict[str, object]], str], choice: ChartChoice, *, has_axes: bool = True, is_long: bool = False
) -> str:
    """Return the choices of axis, smoothing, scale and range, as links that work without scripts.

    `address` returns the address of the page with the parameters that it receives.
    """
    request, values = choice.request, choice.values()
    axes = [(axis.value, word, address(values | {"axis": axis, "from_": None, "to": None})) for axis, word, _ in AXES]
    smoothings = [(one.value, word, address(values | {"smooth": one, "strength": None})) for one, word in _SMOOTHINGS]
    scales = [(value, word, address(values | {"log": value or None})) for value, word in (("", "Linear"), ("1", "Log"))]
    strength = request.decay if request.smoothing is Smoothing.EMA else float(request.width)
    low, high, step = ("0", "0.99", "0.01") if request.smoothing is Smoothing.EMA else ("2", "200", "1")
    is_zoomed = request.first is not None or request.last is not None
    slider = (
        f'<label class="strength"><input id="strength" type="range" min="{low}" max="{high}" step="{step}" value="{strength:g}">'
        f'<output id="strength-word">{strength:g}</output></label>'
    )
    cut = address(values | {"cut": None if choice.is_cut else 1})
    newest = ""
    if is_long or request.newest:
        tail = address(values | {"tail": None if request.newest else POINTS})
        current = " aria-current=true" if request.newest else ""
        newest = (
            f'<a class="button" id="tail" href="{tail}" title="Draw only the newest rows, each of them"{current}>'
            f"Newest {count(POINTS)}</a>"
        )
    whole = address(values | {"from_": None, "to": None})
    is_used = choice.is_cut or request.newest or (has_axes and request.axis is not Axis.STEP)
    rare = (
        f"{segmented('Axis', axes, request.axis.value, 'axis') if has_axes else ''}{slider}"
        f'<a class="button" id="cut" href="{cut}"{" aria-current=true" if choice.is_cut else ""}>Cut outliers</a>{newest}'
    )
    return (
        f'<div class="toolbar charts" id="toolbar">{segmented("Smoothing", smoothings, request.smoothing.value, "smooth")}'
        f"{segmented('', scales, '1' if choice.is_log else '', 'log')}"
        f'<details class="options"{" open" if is_used else ""}><summary class="button">{"Axis and more" if has_axes else "More"}</summary>{rare}</details>'
        f'<a class="button{"" if is_zoomed else " off"}" id="whole" href="{whole}">Reset zoom <kbd>0</kbd></a></div>'
    )


def chart_panel(
    found: RunDetail, name: str, curve: Curve, choice: ChartChoice, *, is_main: bool, source: str | None = None
) -> str:
    """Return the panel of one chart. The scripts of the page replace the drawing of the server.

    `source` is the name under which the script logged the scalar, if it differs from the stored one.
    """
    hint = _HINTS.get(name, "")
    axis = next(line for axis, _, line in AXES if axis is choice.request.axis)
    ranks, logging = found.row.world_size or 0, found.row.loss_ranks + found.row.loss_ranks_missing
    of_loss = "logged by 1 rank" if logging == 1 < ranks else ""
    if logging > 1:
        of_loss = found.row.loss_note or f"mean of {logging} ranks"
    note = {LOSS: of_loss, PERPLEXITY: "exp(loss)", **SPEED_UNITS}.get(name, "")
    if ranks > 1 and name in _SUMMED:
        note += " per rank"
    note = ", ".join(part for part in (note, f"logged as {source}" if source else "") if part)
    is_log = choice.is_log or name == GRAD_NORM
    legend = '<span class="legend"></span><button class="save" title="Save as CSV or PNG" aria-label="Save">⤓</button>'
    below = f'<p class="notice">{notice(curve)} · <span class="axisword">{axis}</span>{_MARKS}{OUTSIDE}</p>'
    known = {"name": name, "log": is_log, "fixed": name == GRAD_NORM, "zero": name in (LEARNING_RATE, *SPEEDS)}
    height, heading = 240 if name == LOSS else 150, text(title(name))
    body = (
        f'{f"<p class=hint>{hint}</p>" if hint else ""}<div class="plot{" tall" if name == LOSS else ""}" '
        f'data-chart="{text(json.dumps(known))}" tabindex="0" role="group" aria-label="{heading}">'
        f"{svg.line_chart(curve, label=title(name), height=height, width=820 if is_main else 400, is_cut=choice.is_cut)}</div>{below if is_main and name == LOSS else ''}"
    )
    return panel(heading, body, note=text(note), aside=legend, kind="chartbox", name=f"chart-{text(name)}")


def _no_loss(place: Place, found: RunDetail) -> str:
    others = ", ".join(text(title(name).lower()) for name in found.histories) or "no other curve"
    link = f'<a class="button" href="{place.url("runs", found.row.run, "tensors")}">Tensors</a>'
    words = f"This run logs no loss</strong><p>Stored: {others}.</p>{link}"
    words = "Waiting for the first step</strong>" if found.row.is_live and found.row.step is None else words
    return f'<div class="panel blank" id="no-loss" data-live>{icon("unknown")}<strong>{words}</div>'


def _incidents(place: Place, row: RunRow) -> str:
    if not row.incidents:
        none = panel("Open incidents", '<p class="empty">None.</p>', kind="quiet")
        return f'<div id="incidents" data-live>{none}</div>'
    items = "".join(
        f'<a class="item" href="{place.url("runs", row.run, "incidents", one.key)}">{incident_line(one)}</a>'
        for one in row.incidents[:5]
    )
    every = f'<a href="{place.url("runs", row.run, "incidents")}">All</a>'
    if row.end_sentence and place.store:
        items += f'<p class="empty">The run has ended. To close: {close_command(place, row.run)}</p>'
    badge = f'<span class="count bad">{len(row.incidents)}</span>'
    return f'<div id="incidents" data-live>{panel(f"Open incidents {badge}", items, aside=every)}</div>'


def event_rows(lines: Sequence[EventLine]) -> str:
    """Return lines of the event log as a table."""
    return '<table class="events">' + "".join(map(_event_row, lines)) + "</table>"


def _event_row(line: EventLine) -> str:
    kind = line.group if line.severity != "critical" or line.group is Group.STEP else "critical"
    step = NOTHING if line.step is None else count(line.step)
    full = utc(line.at, "%Y-%m-%d %H:%M:%S UTC")
    bad = ' class="bad"' if line.severity == "critical" else ""
    return (
        f'<tr><td class="dim" title="{full}">{utc(line.at)}</td><td>{icon(line.group, kind)}</td><td class="n">{step}</td>'
        f"<td{bad}>{text(line.text)}</td></tr>"
    )


def _shown_count(log: EventLog, group: Group) -> int:
    return log.restarts if group is Group.RESTART else log.counts.get(group, 0)


def _events(place: Place, row: RunRow, log: EventLog) -> str:
    total = sum(log.counts.values()) - log.counts.get(Group.STEP, 0)
    note = f"newest {min(NEWEST, total)} of {count(total)}, UTC"
    chips = "".join(
        f'<a href="{place.url("runs", row.run, "events", group=group)}">{icon(group)}{_GROUP_WORDS.get(group, group.capitalize())}</a>'
        for group in Group
        if _shown_count(log, group)
    )
    body = f'<nav class="chips small" id="groups">{chips}</nav><div class="scroll">{event_rows(log.lines)}</div>'
    link = f'<a href="{place.url("runs", row.run, "events")}">Full history</a>'
    return f'<div id="events" data-live>{panel("Events", body, note=note, aside=link)}</div>'


def _advice(advice: Sequence[Advice]) -> str:
    lines = "".join(f"<p>{icon('warning') if one.is_action else ''}{text(one.text)}</p>" for one in advice)
    shown = panel("Advice", f'<div class="prose">{lines}</div>', kind="advice") if lines else ""
    return f'<div id="advice" data-live>{shown}</div>'


def events_page(place: Place, found: RunDetail, log: EventLog, group: Group | None, page_number: int) -> str:
    """Return the full event log of a run, `NEWEST` lines at a time."""
    row, run = found.row, found.row.run
    chips = [f'<a href="{place.url("runs", run, "events")}"{"" if group else " aria-current=true"}>All events</a>']
    chips += [
        f'<a href="{place.url("runs", run, "events", group=one)}"{" aria-current=true" if one is group else ""}>{icon(one)}'
        f"{_GROUP_WORDS.get(one, one.capitalize())} <b>{count(number)}</b></a>"
        for one in log.counts
        if (number := _shown_count(log, one))
    ]
    lines = log.lines[page_number * NEWEST : (page_number + 1) * NEWEST]
    older = place.url("runs", run, "events", group=group, page=page_number + 1)
    newer = place.url("runs", run, "events", group=group, page=page_number - 1 or None)
    links = f'<a class="button" href="{newer}">Newer</a>' if page_number else ""
    links += f'<a class="button" href="{older}">Older</a>' if len(log.lines) > (page_number + 1) * NEWEST else ""
    body = f'<nav class="chips">{"".join(chips)}</nav>{panel("Events", event_rows(lines), note="UTC", name="log")}<nav class="pages">{links}</nav>'
    return run_document(place, row, "Events", body, page="events")
