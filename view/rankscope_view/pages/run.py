"""The list of runs, and the page of one run: progress, charts, open incidents, events, advice and configuration."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rankscope_contract.model.events import RunState
from rankscope_view.data.curves import POINTS, Axis, Curve, CurveRequest, Smoothing
from rankscope_view.data.detail import (
    CHARTS,
    PERPLEXITY,
    RECENT_ROWS,
    SHORT_ROWS,
    STEP_SECONDS,
    RunDetail,
    speed_change,
)
from rankscope_view.data.documents import flat, json_object
from rankscope_view.data.events import NEWEST, EventLog, Group
from rankscope_view.data.metrics import HARDWARE, MONITOR, SCALAR_TITLES, UNGROUPED, Metric, Metrics
from rankscope_view.data.runs import ENDED, INCIDENTS, PAGE_RUNS, SPEED_STEPS, STOPPING, RunList, RunRow
from rankscope_view.data.series import EVAL_LOSS, GRAD_NORM, LEARNING_RATE, LOSS, SPEEDS, History
from rankscope_view.pages.format import NOTHING, count, duration, measure, percent, short, utc
from rankscope_view.pages.rendering import Place, is_nonfinite, render

AXES: Final = (
    (Axis.STEP, "Step", "Last value of each step"),
    (Axis.CUMULATIVE, "Cumulative", "Steps of all attempts; repeated steps count again"),
    (Axis.ATTEMPT, "Attempts", "One curve for each attempt"),
    (Axis.ARRIVAL, "Arrival", "Order of arrival; labels are the raw steps, so they go back at a restart"),
    (Axis.TIME, "Time", "Time in UTC; a pause is a gap"),
)
SMOOTHINGS: Final = (
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

_SUMMED: Final = ("tokens_per_second", "samples_per_second")
"""Speeds of each rank, of which the header has the sum over ranks and the chart the mean."""

_LAST_GROUPS: Final = (HARDWARE, MONITOR)
_MOST_OPEN: Final = 12
"""Number of charts of metrics up to which their groups are open at first."""

MOST_SETTINGS: Final = 60
LONGEST_CONFIG: Final = 100_000
_OF_TRAINING: Final = ("hyperparameters", "argv", "git_commit", "device", "quantities", "every")
"""Settings in the configuration of a monitor that describe the training. The others are only in the folded JSON."""

_WORDS: Final = {"argv": "command", "git_commit": "commit"}
_LONGEST_VALUE: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartChoice:
    """Choices of the reader for all charts of a page, which its address contains."""

    request: CurveRequest
    is_log: bool = False
    is_cut: bool = False  # the axis has most values, not all

    def values(self) -> dict[str, Any]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """The panel of one chart of a run or a comparison."""

    name: str
    curve: Curve
    title: str
    note: str
    options: Mapping[str, Any]  # for scripts
    hint: str = ""
    axis: str = ""
    is_cut: bool = False

    @property
    def is_loss(self) -> bool:
        """Return whether the chart is that of the loss, which is higher than others."""
        return self.name == LOSS


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of the header: name of the scalar, label, text, and a line of context."""

    name: str
    label: str
    value: str
    line: str = ""
    is_bad: bool = False
    is_pending: bool = False  # the scripts of the page request it

    @property
    def unit(self) -> str:
        """Return the unit; empty for a number without one."""
        return SPEED_UNITS.get(self.name, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartGroup:
    """Charts of metrics below one heading: (name, title, keys of its lines) of each."""

    name: str
    charts: list[tuple[str, str, list[str]]]
    is_open: bool


def page(
    place: Place, found: RunDetail, choice: ChartChoice, *, curves: dict[str, Curve], log: EventLog, metrics: Metrics
) -> str:
    """Return the page of a run. `curves` are drawn for readers without scripts, by the name of the scalar."""
    row, chosen = found.row, choice.values()
    shown = (LOSS, GRAD_NORM, LEARNING_RATE, EVAL_LOSS, *SPEEDS, PERPLEXITY)
    charts = [chart(found, name, curves[name], choice, metrics.sources.get(name)) for name in shown if name in curves]
    return render(
        "run.html",
        place=place,
        found=found,
        row=row,
        about=_about(found),
        reason="" if (row.reason or "").partition("\n")[0].rstrip(".") in row.end_sentence else row.reason,
        marks=[one.last_step / row.planned_steps for one in found.restarts] if row.planned_steps else [],
        figures=list(_figures(found)),
        address=lambda **changes: place.url("runs", row.run, **(chosen | changes)),
        choice=choice,
        axes=AXES,
        smoothings=SMOOTHINGS,
        most_points=POINTS,
        is_long=is_long(curves),
        main=charts[0] if LOSS in curves else None,
        more=[one for one in charts if not one.is_loss],
        stored=", ".join(title(name).lower() for name in found.histories),
        metrics=metric_groups(metrics.found.values()),
        titles={name: title(name) for name in CHARTS},
        log=log,
        newest=NEWEST,
        total=sum(log.counts.values()) - log.counts[Group.STEP],
        groups=_groups(log),
        **configuration(found),
    )


def _about(found: RunDetail) -> str:
    row, hosts, versions = found.row, found.facts.hosts, found.facts.versions
    parts = (
        f"attempt {row.attempt}" if row.attempt else "",
        f"{row.world_size} rank{'s' if row.world_size > 1 else ''}" if row.world_size else "",
        f"{len(hosts)} hosts" if len(hosts) > 1 else "".join(hosts),
        f"torch {versions['torch']}" if "torch" in versions else "",
    )
    return " · ".join(filter(None, parts))


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


def _figures(found: RunDetail) -> Iterator[Figure]:
    """Yield the figures in the header. Only known values are shown."""
    row = found.row
    yield _figure(LOSS, "Loss", row.loss, _loss_line(row, found.loss_change, found.history(LOSS)))
    if found.perplexity is not None:
        yield _figure(PERPLEXITY, "Perplexity", found.perplexity, "exp(loss): equal choices")
    if row.learning_rate is not None:
        line = _direction(found.history(LEARNING_RATE))
        yield _figure(LEARNING_RATE, "Learning rate", row.learning_rate, line)
    norms = found.history(GRAD_NORM)
    if len(norms):
        yield _figure(GRAD_NORM, "Gradient norm", float(norms.value[-1]), _usual(norms))
    for name in SPEEDS:
        history = found.history(name)
        if not len(history):
            continue
        changed = speed_change(history) if row.is_live else None
        line = "" if changed is None else f", {signed(changed[0])} since step {count(changed[1])}"
        value = row.speeds.get(name, float(history.value[-1]))
        label = "Throughput, all ranks" if name in _SUMMED and (row.world_size or 0) > 1 else "Throughput"
        line = f"median, newest {SPEED_STEPS} steps{line}"
        if name == STEP_SECONDS:
            yield _figure(name, "Speed", value, line)
        else:
            yield Figure(name=name, label=label, value=short(value), line=line, is_bad=is_nonfinite(value))
    if (texts := goodput_texts(found.facts.goodput, found.facts.lost_seconds)) is not None:
        yield Figure(name=GOODPUT, label="Goodput", value=texts[0], line=texts[1])
    elif found.facts.lacks_goodput:
        yield Figure(name=GOODPUT, label="Goodput", value=NOTHING, is_pending=True)


def _figure(name: str, label: str, value: float | None, line: str) -> Figure:
    return Figure(name=name, label=label, value=measure(value), line=line, is_bad=is_nonfinite(value))


def _loss_line(row: RunRow, change: tuple[float, float, int] | None, loss: History) -> str:
    """Return the change of the loss over its newest rows; of a loss that is not finite, its last finite value."""
    if row.loss_note:
        return row.loss_note
    rows = loss.standing
    if len(rows) and not math.isfinite(rows.value[-1]) and len(finite := np.flatnonzero(np.isfinite(rows.value))):
        step = int(rows.step[finite[-1]])
        return f"last finite {measure(float(rows.value[finite[-1]]))} at step {count(step)}"
    first, last, recent = change or (0.0, 0.0, 0)
    return f"median of {SHORT_ROWS} rows: {measure(first)} to {measure(last)} in {recent} rows" if recent else ""


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


def signed(ratio: float) -> str:
    """Return a relative change in percent with its sign."""
    return f"{ratio:+.0%}".replace("-", "−").replace("%", " %")


def chart(found: RunDetail, name: str, curve: Curve, choice: ChartChoice, source: str | None = None) -> Chart:
    """Return the panel of one chart.

    `source` is the name under which the script logged the scalar, if it differs from the stored one.
    """
    ranks, logging = found.row.world_size or 0, found.row.loss_ranks + found.row.loss_ranks_missing
    of_loss = "logged by 1 rank" if logging == 1 < ranks else ""
    if logging > 1:
        of_loss = found.row.loss_note or f"mean of {logging} ranks"
    note = {LOSS: of_loss, PERPLEXITY: "exp(loss)", **SPEED_UNITS}.get(name, "")
    if ranks > 1 and name in _SUMMED:
        note += " per rank"
    is_log = choice.is_log or name == GRAD_NORM
    return Chart(
        name=name,
        curve=curve,
        title=title(name),
        note=", ".join(filter(None, (note, f"logged as {source}" if source else ""))),
        hint=_HINTS.get(name, ""),
        axis=next(line for axis, _, line in AXES if axis is choice.request.axis),
        options={"name": name, "log": is_log, "fixed": name == GRAD_NORM, "zero": name in (LEARNING_RATE, *SPEEDS)},
        is_cut=choice.is_cut,
    )


def metric_groups(metrics: Iterable[Metric]) -> list[ChartGroup]:
    """Return the groups of charts of `metrics`, which can be folded and searched.

    The scripts draw a chart when it comes into view, so that hundreds of names cost nothing.
    """
    ordered = sorted(
        metrics,
        key=lambda one: (
            _LAST_GROUPS.index(one.group) + 1 if one.group in _LAST_GROUPS else 0,
            one.group != UNGROUPED,
            one.group,
        ),
    )
    groups: list[ChartGroup] = []
    drawn = 0
    for name, found in itertools.groupby(ordered, key=lambda one: one.group):
        charts = [
            (one.name, SCALAR_TITLES.get(one.name, one.name), [f"{one.stored}{labels or ''}" for labels in one.labels])
            for one in found
        ]
        is_open = name not in _LAST_GROUPS and drawn + len(charts) <= _MOST_OPEN
        drawn += len(charts) if is_open else 0
        groups.append(ChartGroup(name=name, charts=charts, is_open=is_open))
    return groups


def _groups(log: EventLog) -> list[tuple[Group, str, int]]:
    """Return (group, word, number of lines) of all groups of events."""
    return [
        (
            group,
            _GROUP_WORDS.get(group, group.capitalize()),
            log.restarts if group is Group.RESTART else log.counts.get(group, 0),
        )
        for group in Group
    ]


def events_page(place: Place, found: RunDetail, log: EventLog, group: Group | None, page_number: int) -> str:
    """Return the full event log of a run, `NEWEST` lines at a time."""
    end = (page_number + 1) * NEWEST
    return render(
        "events.html",
        place=place,
        row=found.row,
        group=group,
        groups=_groups(log),
        lines=log.lines[page_number * NEWEST : end],
        number=page_number,
        has_older=len(log.lines) > end,
        address=functools.partial(place.url, "runs", found.row.run, "events"),
    )


def configuration(found: RunDetail) -> dict[str, Any]:
    """Return the values of the template of the configuration: `settings` as (name, value), and all as JSON."""
    listed = _settings(found)
    if len(listed) > MOST_SETTINGS:
        listed = [*listed[: MOST_SETTINGS - 1], ("more", f"{len(listed) - MOST_SETTINGS + 1} settings")]
    config = found.facts.config or ""
    shown = [(name, value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]}…") for name, value in listed]
    return {"settings": shown, "config": config if len(config) <= LONGEST_CONFIG else ""}


def _settings(found: RunDetail) -> list[tuple[str, str]]:
    """Return the configuration of a run and facts about it as (name, value). Nested settings have names with dots."""
    row, facts = found.row, found.facts
    known = [("source", row.source_kind), ("ranks", row.world_size), ("hosts", ", ".join(facts.hosts[:8]))]
    known += [("started", utc(row.started_at, "%Y-%m-%d %H:%M:%S UTC") if row.started_at is not None else None)]
    known += [("ended", utc(row.ended_at, "%Y-%m-%d %H:%M:%S UTC") if row.ended_at is not None else None)]
    known += [(name, version) for name, version in facts.versions.items()]
    listed = [(name, str(value)) for name, value in known if value not in (None, "")]
    return [(_WORDS.get(name, name), value) for name, value in _texts(_config(facts.config))] + listed


def _config(document: str | None) -> dict[str, Any]:
    found = json_object(document)
    if "serve" not in found:  # the configuration of an imported run
        return {name: value for name, value in found.items() if name != "import"}
    return {name: found[name] for name in _OF_TRAINING if name in found}


def _texts(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, one in flat(config):
        if one not in (None, "", []):
            words = isinstance(one, list) and all(isinstance(part, str | int | float) for part in one)
            shown = " ".join(map(str, one)) if words else one if isinstance(one, str) else json.dumps(one)
            yield name.removeprefix("hyperparameters."), shown


_STATE_ORDER: Final = (
    *(RunState.RUNNING, RunState.STALLED, STOPPING, RunState.PENDING, RunState.FAILED, RunState.STOPPED),
    *(RunState.COMPLETED, "unknown"),
)
_LIST_COLUMNS: Final = (
    ("run", "Run", ""),
    ("state", "State", ""),
    ("progress", "Progress", ""),
    ("loss", "Loss", "loss"),
    ("", "Learning rate", "n wide"),
    ("", "Speed", "n wide"),
    ("", "Open incident, or reason of the state", ""),
    ("seen", "Seen", "n"),
)
SPEED_UNITS: Final = {
    "tokens_per_second": "tok/s",
    "samples_per_second": "samples/s",
    "steps_per_second": "steps/s",
    "step_seconds": "s/step",
}
_MOVING: Final = frozenset({RunState.RUNNING, STOPPING})
"""States in which a run makes steps, so that the time that is left has a meaning."""

_STILL: Final = frozenset({RunState.PENDING, RunState.STALLED, RunState.FAILED, RunState.STOPPED})
"""States of a run without a speed. The speed of a completed run is its last one."""


def list_page(place: Place, found: RunList, search: str, now: float, alarms: Sequence[str] = ()) -> str:
    """Return the list of runs. `search` is the text of the search field; `alarms` are problems of the service."""
    query = found.query
    return render(
        "runs.html",
        place=place,
        found=found,
        search=search,
        words=" ".join(part for part in search.split() if not part.startswith("state:")) or None,
        now=now,
        alarms=alarms,
        active=sum(number for state, number in found.states.items() if state not in ENDED and state != "unknown"),
        pages=-(-found.selected // PAGE_RUNS),
        sort=("-" if query.is_descending else "") + query.sort,
        address=lambda **changes: place.url(q=search or None, state=query.state, **changes),
        has_speed=_has_speed,
        time_of=_time,
        columns=_LIST_COLUMNS,
        incidents=INCIDENTS,
        moving=_MOVING,
        order=_STATE_ORDER,
        units=SPEED_UNITS,
    )


def _has_speed(row: RunRow) -> bool:
    return row.speed is not None and row.speed_name is not None and row.state not in _STILL


def _time(row: RunRow) -> str:
    """Return the time that is left or that the run took; of other runs, the share of the steps that are done."""
    if row.eta_seconds is not None and row.state in _MOVING:
        return f"{duration(row.eta_seconds)} left"
    if row.ended_at is not None and row.started_at is not None and row.state == RunState.COMPLETED:
        return f"in {duration(max(0.0, row.ended_at - row.started_at))}"
    return "" if row.share is None else percent(row.share)
