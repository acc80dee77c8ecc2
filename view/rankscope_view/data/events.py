"""The event log of a run by type, and the markers of its charts."""

from __future__ import annotations

import bisect
import enum
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rankscope_contract.model.events import EventType, ExitReason, subject_name
from rankscope_contract.model.phases import Phase
from rankscope_storage.base.rule_names import RUN_FINISHED
from rankscope_storage.connection import Connection
from rankscope_storage.sql.first_causes import INCIDENT_GAP_STEPS
from rankscope_view.data.curves import Axis, on_axis
from rankscope_view.data.incidents import CAUSAL_PLACE
from rankscope_view.data.series import Floats, History, Integers

NEWEST: Final = 200
"""Number of lines of the event log on the page of a run; its full history has a page of its own."""


class Group(enum.StrEnum):
    """Groups into which the event log sorts event types."""

    STEP = "step"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    RESTART = "restart"  # start of attempts, and ends that are no completion
    INCIDENT = "incident"
    OTHER = "other"


EVENT_GROUPS: Final = tuple(group for group in Group if group is not Group.STEP)
"""The groups of events. The lines of logged steps repeat the loss, and a page shows them only if they are chosen."""

_GROUPS: Final = {
    EventType.EVALUATION: Group.EVALUATION,
    EventType.CHECKPOINT: Group.CHECKPOINT,
    EventType.LAUNCH: Group.RESTART,
    EventType.EXIT: Group.RESTART,
    **dict.fromkeys(
        (
            EventType.ANOMALY,
            EventType.INCIDENT,
            EventType.HANG,
            EventType.ERROR,
            EventType.XID,
            EventType.GPU,
            EventType.GAP,
            EventType.STEP_SKIPPED,
            EventType.LOSS_MISSING,
        ),
        Group.INCIDENT,
    ),
}
_OF_PHASE: Final = {Phase.CHECKPOINT: Group.CHECKPOINT, Phase.EVALUATION: Group.EVALUATION}

_LASTING: Final = (EventType.ANOMALY.value, EventType.STEP_SKIPPED.value, EventType.LOSS_MISSING.value)

# One line for the same event on several ranks, and for all firings of a rule, or skipped steps, that are at most
# INCIDENT_GAP_STEPS apart: a NaN that remains gives thousands of firings. Further keys order lines and events that have
# the same time, because the order in which DuckDB returns equal rows depends on its threads.
_LINES: Final = f"""\
WITH placed AS (
  SELECT *, {{first: CASE WHEN type = 'anomaly' THEN {CAUSAL_PLACE} END, ts: ts, rank: rank, tensor: tensor, op: op,
      value: value, message: message}} AS place,
    coalesce(coalesce(step, 0) - lag(coalesce(step, 0)) OVER firing > {INCIDENT_GAP_STEPS}, true)::INT AS begins
  FROM (SELECT events.* REPLACE (if(type = 'launch' AND ts > ended_at, started_at, ts) AS ts) FROM events  -- read later
    LEFT JOIN (SELECT attempt, started_at, ended_at FROM attempts WHERE run = $run) USING (attempt) WHERE run = $run)
  WINDOW firing AS (PARTITION BY attempt, type, rule, step IS NULL ORDER BY step)
),
event AS (
  SELECT *, CASE WHEN type IN {_LASTING} THEN sum(begins) OVER firing ELSE step END AS stretch FROM placed
  WINDOW firing AS (
    PARTITION BY attempt, type, rule, step IS NULL ORDER BY step, begins DESC ROWS UNBOUNDED PRECEDING)
),
line AS (
  SELECT attempt, min(step) AS step, max(step) AS last_step, type, rule, epoch(min(ts)) AS happened_at,
    count(*) AS events, count(DISTINCT step) AS steps,
    list(DISTINCT rank ORDER BY rank) AS ranks,
    max(severity) FILTER (severity = 'critical') AS critical, max(severity) AS severity,
    arg_min(tensor, place) AS tensor, arg_min(op, place) AS op,
    arg_min(value, place) AS value, arg_min(message, place) AS message,
    max(CASE type WHEN 'phase' THEN details::JSON->>'$.phase' WHEN 'exit' THEN details::JSON->>'$.reason' END)
      FILTER (json_valid(details)) AS phase,
    max(coalesce(ordinal, 0)) AS ordinal
  FROM event
  GROUP BY attempt, stretch, step IS NULL, type, rule,
    CASE WHEN type IN ('anomaly', 'launch', 'exit') THEN NULL ELSE message END
)
SELECT * EXCLUDE (critical) REPLACE (coalesce(critical, severity) AS severity) FROM line
ORDER BY happened_at DESC NULLS LAST, attempt DESC NULLS LAST, step DESC NULLS LAST, ordinal DESC,
  type, rule NULLS FIRST, message NULLS FIRST"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLine:
    """One line of the event log: events with the same meaning at one step, on one or several ranks."""

    group: Group
    type: str
    at: float | None  # UTC seconds
    attempt: int | None
    step: int | None
    severity: str | None
    text: str
    ranks: tuple[int, ...]
    events: int
    tensor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLog:
    """The newest lines of the event log, and the number of all lines by group."""

    lines: tuple[EventLine, ...]
    counts: dict[Group, int]
    restarts: int = 0  # launches after the first one


def event_lines(connection: Connection, run: str) -> list[EventLine]:
    """Return all lines of the event log of `run` without its steps, the newest first."""
    return [_line(row) for row in connection.query(_LINES, {"run": run}).to_pylist()]


def event_log(
    lines: Iterable[EventLine],
    loss: History,
    others: Collection[History],
    evaluations: History,
    *,
    groups: Collection[Group] = (),
    newest: int = NEWEST,
) -> EventLog:
    """Return the `newest` lines of the `groups`, merged with one line for each step of `loss` and each evaluation.

    The line of a step also has the values of `others`, such as the gradient norm. Without groups, all are selected.
    """
    values = _value_lines(evaluations, Group.EVALUATION, "evaluation loss", ())
    valued = {(Group.EVALUATION, line.attempt or 0, line.step) for line in values}
    known = [*(line for line in lines if (line.group, line.attempt or 0, line.step) not in valued), *values]
    counts = dict.fromkeys(Group, 0)
    for line in known:
        counts[line.group] += 1
    counts[Group.STEP] = len(loss)
    chosen = [line for line in known if not groups or line.group in groups]
    if not groups or Group.STEP in groups:
        chosen += step_lines(loss, others, newest)
    times = _times(loss, {line.attempt or 0 for line in chosen if line.at is None})
    chosen.sort(key=lambda line: _newest_first(line, times))
    launches = sum(line.type == EventType.LAUNCH for line in known)
    return EventLog(lines=tuple(chosen[:newest]), counts=counts, restarts=max(0, launches - 1))


def _times(loss: History, attempts: Iterable[int]) -> dict[int, tuple[Integers, Floats]]:
    """Return the steps of each attempt that have a time, in ascending order, with their times."""
    found = {}
    for attempt in attempts:
        own = np.flatnonzero((loss.attempt == attempt) & np.isfinite(loss.time))
        own = own[np.argsort(loss.step[own], kind="stable")]
        found[attempt] = loss.step[own], loss.time[own]
    return found


def _newest_first(line: EventLine, times: Mapping[int, tuple[Integers, Floats]]) -> tuple[float, ...]:
    """Return the sort key of a line. A line without a time follows the row of its step, or the last row before it."""
    at, is_later = line.at, False
    if at is None and line.step is not None and len(times[line.attempt or 0][0]):
        steps, of_rows = times[line.attempt or 0]
        before = int(np.searchsorted(steps, line.step, "right")) - 1
        at, is_later = float(of_rows[max(before, 0)]), before >= 0
    at = -math.inf if at is None else at
    return -at, -(line.attempt or 0), -(line.step or 0), not is_later, line.group is not Group.STEP


def step_lines(loss: History, others: Collection[History], newest: int) -> list[EventLine]:
    """Return a line for each of the `newest` steps of the loss."""
    tail = loss.select(np.arange(max(0, len(loss) - newest), len(loss)))
    first = int(tail.step.min()) if len(tail) else 0
    return _value_lines(tail, Group.STEP, "loss", [other.select(other.step >= first) for other in others])


def _value_lines(history: History, group: Group, word: str, others: Collection[History]) -> list[EventLine]:
    """Return a line with each value of `history`, and with the values of `others` at the same step."""
    values = [(other.name.removesuffix("_norm").replace("_", " "), _by_step(other)) for other in others]
    found = []
    rows = zip(
        *(column.tolist() for column in (history.attempt, history.step, history.time, history.value)), strict=True
    )
    for attempt, step, at, value in rows:
        parts = [f"{word} {number_text(value)}"]
        parts += [f"{name} {number_text(known[attempt, step])}" for name, known in values if (attempt, step) in known]
        found.append(
            EventLine(
                group=group,
                type=group.value,
                at=None if math.isnan(at) else at,
                attempt=attempt,
                step=step,
                severity=None if math.isfinite(value) else "critical",
                text=", ".join(parts),
                ranks=(),
                events=1,
            )
        )
    return found


def _by_step(history: History) -> dict[tuple[int, int], float]:
    """Return the values by attempt and step."""
    keys = zip(history.attempt.tolist(), history.step.tolist(), strict=True)
    return dict(zip(keys, history.value.tolist(), strict=True))


def number_text(value: float) -> str:
    """Return a measured value as text with four digits, or as NaN, ∞ or -∞."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if 1e-3 <= abs(value) < 1000:
        return f"{value:#.4g}"  # with trailing zeros, so that values in a column have the same width
    return f"{value:,.0f}" if 10_000 <= abs(value) < 1e9 else f"{value:.4g}"


def _line(row: dict[str, Any]) -> EventLine:
    kind = row["type"]
    group = _GROUPS.get(kind, Group.OTHER)
    if kind == EventType.PHASE:
        group = _OF_PHASE.get(row["phase"], Group.OTHER)
    elif row["rule"] == RUN_FINISHED or (kind == EventType.EXIT and row["phase"] == ExitReason.COMPLETED):
        group = Group.OTHER  # neither a fault nor a restart
    text = row["message"] or row["rule"] or kind.replace("_", " ")
    if kind == EventType.ANOMALY:
        more = f" and {row['events'] - 1:,} more" if row["events"] > 1 else ""
        more += f" until step {row['last_step']:,}" if row["last_step"] != row["step"] else ""
        text = f"{row['rule'] or 'anomaly'}: {subject_name(row['tensor'], row['op']) or text}{more}"
    elif kind in _LASTING and row["steps"] > 1:
        text = f"{text}: {row['steps']:,} steps until step {row['last_step']:,}"
    elif kind == EventType.LAUNCH:
        count = len(row["ranks"])
        text = f"attempt {row['attempt'] or 0}: {count:,} rank{'' if count == 1 else 's'} registered"
    elif kind == EventType.PHASE and row["phase"]:
        text = row["phase"].replace("_", " ")
    return EventLine(
        group=group,
        type=kind,
        at=row["happened_at"],
        attempt=row["attempt"],
        step=row["step"],
        severity=row["severity"],
        text=text.partition("\n")[0],
        ranks=tuple(rank for rank in row["ranks"] or () if rank is not None),
        events=row["events"],
        tensor=row["tensor"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """A mark in the lane above a chart, at a place on its axis."""

    group: Group
    x: float
    step: int
    text: str
    is_critical: bool = False


def markers(lines: Sequence[EventLine], evaluations: History, history: History, axis: Axis) -> list[Marker]:
    """Return the markers of a chart of `history`: restarts, checkpoints, evaluations and incidents on its axis."""
    rows, x = on_axis(history, axis)
    if not len(rows):
        return []
    found = []
    starts = np.flatnonzero(np.diff(rows.attempt) != 0) + 1
    if axis is not Axis.ATTEMPT:
        for row in starts.tolist():
            text = f"attempt {rows.attempt[row]} begins at step {rows.step[row]:,}"
            found.append(Marker(group=Group.RESTART, x=float(x[row]), step=int(rows.step[row]), text=text))
    is_grouped = any(line.type == EventType.INCIDENT for line in lines)  # then single anomalies need no mark
    seen = [line for line in lines if not (is_grouped and line.type == EventType.ANOMALY)]
    seen += _value_lines(evaluations, Group.EVALUATION, "evaluation", ())
    places: dict[tuple[int, bool], tuple[list[int], list[float], float]] = {}
    # A later attempt repeats the steps before a failure, and only its rows are on the axis.
    is_repeated = axis is Axis.STEP and bool((np.diff(rows.step) > 0).all())
    once: set[tuple[Group, float]] = set()
    for line in sorted(seen, key=lambda one: one.severity != "critical"):
        if line.step is None or line.group not in (Group.CHECKPOINT, Group.EVALUATION, Group.INCIDENT):
            continue
        attempt, is_critical = line.attempt or 0, line.severity == "critical"
        key = attempt, is_repeated and line.group is Group.INCIDENT
        if key not in places:
            own = np.flatnonzero(rows.attempt >= attempt if key[1] else rows.attempt == attempt)
            interval = float(np.median(np.diff(rows.step[own]))) if len(own) > 1 else 0.0
            places[key] = (rows.step[own].tolist(), x[own].tolist(), 2 * interval)
        steps, own_x, reach = places[key]  # reach: events between two logged steps
        if not steps or not steps[0] <= line.step <= steps[-1] + reach:
            continue
        at = own_x[min(bisect.bisect_left(steps, line.step), len(steps) - 1)]
        if (line.group, at) not in once:
            once.add((line.group, at))
            found.append(Marker(group=line.group, x=float(at), step=line.step, text=line.text, is_critical=is_critical))
    return sorted(found, key=lambda marker: marker.x)
