"""The numbers of the page of one run: its row, the histories of its charts, its events, its restarts, and advice."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from rankscope_contract.model.events import EventType, Severity
from rankscope_contract.model.kinds import Kind
from rankscope_storage.connection import Connection
from rankscope_view.data.curves import Axis, Curve, CurveRequest, Line, Role, Smoothing, curve
from rankscope_view.data.events import EVENT_GROUPS, NEWEST, EventLine, EventLog, Group, event_lines, event_log
from rankscope_view.data.runs import RunFacts, RunRow, run_facts, run_row
from rankscope_view.data.series import (
    EVAL_LOSS,
    GRAD_NORM,
    LEARNING_RATE,
    LOSS,
    SPEEDS,
    Floats,
    History,
    ScalarRows,
    arrival_history,
    main_series,
    read_rows,
    restarts,
)

PERPLEXITY: Final = "perplexity"
STEP_SECONDS: Final = "step_seconds"
CHARTS: Final = (LOSS, PERPLEXITY, GRAD_NORM, LEARNING_RATE, EVAL_LOSS, *SPEEDS)
_TOKENS: Final = """\
SELECT 1 FROM scalars WHERE run = $run AND (name IN ('tokens_per_second', 'tokens_total')
  OR (name = 'tflops_per_gpu' AND NOT contains(coalesce(labels, ''), 'given'))) LIMIT 1"""
"""A live run with a row is that of a language model: it logs tokens, or its model took tokens in an earlier release."""

_LIVE: Final = "SELECT attempt FROM runs WHERE run = $run AND ended_at IS NULL AND source_kind = 'live'"

RECENT_ROWS: Final = 100
SHORT_ROWS: Final = 5

_FEWEST_ROWS: Final = 10
_COMPARED_ROWS: Final = 20_000
_LEAST_ERRORS: Final = 4.5
"""Least difference of the ranks before and after a change, in standard errors: the largest of 600 random rows is above
4 in 0.2 % of all cases."""
"""Number of the newest rows that the header of a run compares with those before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Begin of a later attempt: the last step before it, and the step to which it went back."""

    attempt: int
    last_step: int
    first_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetail:
    """The numbers of the page of one run. `histories` has the scalars of CHARTS that the run logged, by name."""

    row: RunRow
    facts: RunFacts
    histories: Mapping[str, History]
    lines: Sequence[EventLine]
    restarts: tuple[Restart, ...]
    steps_again: int
    advice: tuple[Advice, ...]
    perplexity: float | None
    loss_change: (
        tuple[float, float, int] | None
    )  # medians of the first and last SHORT_ROWS of the newest rows; their number

    def history(self, name: str) -> History:
        """Return the history of the scalar `name`, without rows if the run has none."""
        return self.histories.get(name) or nothing(name)


def nothing(name: str) -> History:
    """Return the history of a scalar without rows."""
    whole, real = np.array([], np.int64), np.array([], np.float64)
    arrays = {"time": real, "value": real, "lowest": real, "highest": real}
    return History(name=name, attempt=whole, step=whole, cumulative=whole, stands=np.array([], np.bool_), **arrays)


def read_chart(connection: Connection, run: str, name: str, rank: int | None = None) -> History:
    """Return the history of the main series of a scalar, or of the perplexity, which the loss determines.

    With `rank`, it has only the rows of this rank.
    """
    return read_charts(connection, run, [name], rank)[name]


def read_charts(connection: Connection, run: str, names: Sequence[str], rank: int | None = None) -> dict[str, History]:
    """Return the histories of several scalars or of the perplexity, which are read together."""
    sources = {name: LOSS if name == PERPLEXITY else name for name in names}
    found = main_histories(connection, run, sorted(set(sources.values())), rank)
    read = {name: found.get(source) or nothing(name) for name, source in sources.items()}
    return {name: perplexity_history(one) if name == PERPLEXITY else one for name, one in read.items()}


def main_histories(
    connection: Connection, run: str, names: Sequence[str], rank: int | None = None, rows: ScalarRows | None = None
) -> dict[str, History]:
    """Return the main series of those scalars in `names` that `run` has, of all ranks or one.

    `rows` has their rows, if they were read before. A gradient norm that is not logged is that of all gradients.
    """
    found = main_series(connection, run, names, rank, rows)
    if any(one.attempt.any() for one in found.values()):
        for live in connection.query(_LIVE, {"run": run})["attempt"].to_pylist():
            found = {name: _standing(history, live) for name, history in found.items()}
    if GRAD_NORM in names and GRAD_NORM not in found and rank is None:
        total = total_gradient_norm(connection, run)
        found |= {} if total is None else {GRAD_NORM: total}
    return found


_MOST_TENSOR_ROWS: Final = 2_000_000
"""Number of rows of a run above which its total gradient norm is not computed, because it would take seconds."""

# Before clipping, as `clip_grad_norm_` returns it. `tensor_global` combines shards, and has each replica once.
_TOTAL_NORM: Final = f"""\
SELECT coalesce(attempt, 0)::BIGINT AS attempt, step, epoch(max(ts)) AS time,
  CASE WHEN max(nans) > 0 THEN 'nan'::DOUBLE WHEN max(infs) > 0 THEN 'inf'::DOUBLE ELSE sqrt(sum(norm * norm)) END
    AS value, value AS lowest, value AS highest
FROM tensor_global WHERE run = $run AND kind = '{Kind.GRAD_REDUCED}' AND step IS NOT NULL AND micro_step IS NULL
GROUP BY ALL HAVING value IS NOT NULL ORDER BY 1, 2"""


def total_gradient_norm(connection: Connection, run: str) -> History | None:
    """Return the norm of all reduced gradients of each sampled step; None without any, or of too many rows."""
    rows = sum(connection.files_table("tensor_stats", run=run)["rows"].to_pylist())
    if not 0 < rows <= _MOST_TENSOR_ROWS:
        return None
    found = arrival_history(GRAD_NORM, connection.query(_TOTAL_NORM, {"run": run}))
    return found if len(found) else None


def read_detail(connection: Connection, run: str, *, most_step_times: int | None = None) -> RunDetail | None:
    """Return the numbers of the page of `run`, or None if the store does not contain it.

    The goodput is left out if the run logged more than `most_step_times` step times.
    """
    with connection.pinned():
        names = [name for name in CHARTS if name != PERPLEXITY]
        rows = read_rows(connection, [run], names)
        row = run_row(connection, run, rows)
        if row is None:
            return None
        histories = main_histories(connection, run, names, rows=rows)
        lines = event_lines(connection, run)
        has_tokens = row.source_kind != "live" or bool(connection.query(_TOKENS, {"run": run}).num_rows)
        facts = run_facts(connection, run, with_goodput=_needs_goodput(rows, run, most_step_times))
    loss = histories.get(LOSS) or nothing(LOSS)
    if len(loss) and has_tokens:
        histories[PERPLEXITY] = perplexity_history(loss)
    newest = [one.value[-1] for one in (loss, histories.get(GRAD_NORM, loss)) if len(one)]
    is_ruined = row.is_ruined or not np.isfinite(newest).all()
    early = None if is_ruined else early_stopping(histories.get(EVAL_LOSS) or nothing(EVAL_LOSS), loss)
    advice = [early, logging_interval(loss)]
    return RunDetail(
        row=row,
        facts=facts,
        histories=histories,
        lines=lines,
        restarts=_restarts(loss),
        steps_again=len(loss) - len(loss.standing),
        advice=tuple(one for one in advice if one is not None),
        perplexity=None
        if row.loss is None or math.isnan(row.loss) or not has_tokens
        else float(perplexity(np.array([row.loss]))[0]),
        loss_change=_change(loss),
    )


def _standing(history: History, attempt: int) -> History:
    """Return `history`, in which younger attempts, which have ended, supersede no step of the live `attempt`."""
    return replace(history, stands=(history.attempt == attempt) | (history.stands & (history.attempt < attempt)))


def _needs_goodput(rows: ScalarRows, run: str, most: int | None) -> bool | None:
    """Return whether the goodput must be calculated; None if the run has too many step times, and False without any."""
    count = sum(len(part.step) for parts in rows.parts.get((run, STEP_SECONDS), {}).values() for part in parts)
    return None if most is not None and count > most else count > 0


def _restarts(loss: History) -> tuple[Restart, ...]:
    """Return the restarts that the loss shows."""
    return tuple(
        Restart(attempt=int(loss.attempt[at]), last_step=int(loss.step[at - 1]), first_step=int(loss.step[at]))
        for at in restarts(loss.attempt).tolist()
    )


def _change(loss: History) -> tuple[float, float, int] | None:
    values = loss.standing.value[-RECENT_ROWS:]
    if not np.isfinite(values).all() or not lasting_change(values):
        return None
    return float(np.median(values[:SHORT_ROWS])), float(np.median(values[-SHORT_ROWS:])), len(values)


def lasting_change(values: Floats) -> int:
    """Return the place at which the finite `values` change for good; 0 if each difference may be due to chance.

    The ranks before and after a place are compared in standard errors of their difference, as in the test of Wilcoxon.
    Of all places with at least _FEWEST_ROWS rows on each side, the one with the largest difference is the result.
    """
    count = len(values)
    _, place, equal = np.unique(values, return_inverse=True, return_counts=True)
    if count < 2 * _FEWEST_ROWS or len(equal) < 2:
        return 0
    ranks = (np.cumsum(equal) - (equal - 1) / 2)[place]
    at = np.arange(_FEWEST_ROWS, count - _FEWEST_ROWS + 1)
    errors = np.abs(np.cumsum(ranks - ranks.mean())[at - 1]) / (ranks.std() * np.sqrt(at * (count - at) / count))
    return int(at[np.argmax(errors)]) if errors.max() >= _LEAST_ERRORS else 0


def speed_change(history: History) -> tuple[float, int] | None:
    """Return the relative change of the newest speed against the one before, and the step at which it began.

    Both are medians of the rows after and before the newest lasting change. The change is at least a tenth; otherwise
    the result is None. Of a long history, rows at equal distances are compared.
    """
    known = np.flatnonzero(np.isfinite(history.value))[:: len(history.value) // _COMPARED_ROWS + 1]
    values, begin = history.value[known], 0
    while found := lasting_change(values[begin:]):
        begin += found
    usual = float(np.median(values[:begin])) if begin else 0.0
    change = float(np.median(values[begin:])) / usual - 1 if usual else 0.0
    return (change, int(history.step[known[begin]])) if 0.1 <= abs(change) < math.inf else None


_TRAINING_DECAY: Final = 0.9
TRAINING_LABEL: Final = f"training loss, EMA {_TRAINING_DECAY}"
"""Word for the line. Single values of a training loss would hide the evaluations."""

_TRAINING_POINTS: Final = 1000
"""Limit of the number of points of the training loss, which is only a context here."""

_SHARED_AXES: Final = (Axis.STEP, Axis.CUMULATIVE, Axis.TIME)
"""Axes on which a step of the training and its evaluation have the same place."""

_TRAINING_BULK: Final = (0.005, 0.995)
"""Quantiles of the training loss since the first evaluation that the default range of the chart contains."""


def chart_curve(history: History, loss: History, request: CurveRequest) -> Curve:
    """Return the curve of `history`. That of evaluations has the average of `loss` first, if they share the axis.

    The default range contains the training loss since the first evaluation: before that, it can be much higher.
    """
    own = curve(history, request)
    if (
        history.name != EVAL_LOSS
        or request.axis not in _SHARED_AXES
        or request.newest is not None
        or not len(loss)
        or own.extent is None
    ):
        return own
    training = curve(
        loss,
        replace(request, smoothing=Smoothing.EMA, decay=_TRAINING_DECAY, points=min(request.points, _TRAINING_POINTS)),
    )
    if not training.lines or training.extent is None:
        return own
    (line,) = training.lines
    since = line.smoothed[(line.x >= own.extent[0]) & np.isfinite(line.smoothed)]
    return replace(
        own,
        lines=(_behind(line), *own.lines),
        restarts=training.restarts,  # the first evaluation of an attempt is later
        extent=(min(own.extent[0], training.extent[0]), max(own.extent[1], training.extent[1])),
        bulk=_wider_bulk(own.bulk, since),
    )


def _behind(line: Line) -> Line:
    average = line.smoothed
    nothing = np.full(len(average), np.nan)
    return replace(
        line, label=TRAINING_LABEL, role=Role.TRAINING, value=average, smoothed=nothing, low=average, high=average
    )


def _wider_bulk(bulk: tuple[float, float] | None, values: Floats) -> tuple[float, float] | None:
    if bulk is None or not len(values):
        return bulk
    low, high = np.quantile(values, _TRAINING_BULK)
    return min(bulk[0], float(low)), max(bulk[1], float(high))


EVENT_TYPES: Final = tuple(dict.fromkeys(str(name) for name in (*Group, *EventType)))
"""Names that select lines: groups of the event log, and types of events."""

_SEVERITIES: Final[dict[str, int]] = {
    severity: place for place, severity in enumerate((Severity.INFO, Severity.WARNING, Severity.CRITICAL))
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EventQuery:
    """Selection of lines: by any of `types`, at least `severity`, and of `rank`. Without a value, all are selected.

    A line without a severity, such as that of a step, has the severity info. A line without ranks is of no rank.
    """

    types: Collection[str] = ()
    severity: Severity = Severity.INFO
    rank: int | None = None
    newest: int = NEWEST

    def selects(self, line: EventLine) -> bool:
        """Return whether the query selects `line`."""
        if self.types and line.group not in self.types and line.type not in self.types:
            return False
        if _SEVERITIES.get(line.severity or Severity.INFO, 0) < _SEVERITIES[self.severity]:
            return False
        return self.rank is None or self.rank in line.ranks


def select_events(detail: RunDetail, query: EventQuery) -> EventLog:
    """Return the newest lines of the event log of a run that `query` selects, with one line for each step.

    The counts by group are those of all lines.
    """
    loss = detail.history(LOSS)
    if query.severity is not Severity.INFO:  # the only steps with a severity are those without a finite loss
        loss = loss.select(~np.isfinite(loss.value))
    others = [detail.history(name) for name in (GRAD_NORM, LEARNING_RATE)]
    whole = event_log(detail.lines, detail.history(LOSS), others, detail.history(EVAL_LOSS), newest=0)
    has_steps = query.rank is None and (not query.types or Group.STEP in query.types)
    groups = () if has_steps else EVENT_GROUPS
    every = len(detail.lines) + len(detail.history(EVAL_LOSS)) + query.newest
    found = event_log(detail.lines, loss, others, detail.history(EVAL_LOSS), groups=groups, newest=every)
    lines = [line for line in found.lines if query.selects(line)]
    return EventLog(lines=tuple(lines[: query.newest]), counts=whole.counts)


LARGEST_EXPONENT: Final = math.log(np.finfo(np.float64).max)
"""Loss above which its exponential is larger than any double: 709.78. The perplexity is infinite there."""

PATIENCE: Final = 3
"""Evaluations without an improvement after which the advice mentions the best checkpoint."""

_MOST_ROWS: Final = 100_000
_FEW_ROWS: Final = 50
_RECENT: Final = 5


def perplexity(loss: Floats) -> Floats:
    """Return exp(loss): infinite where the loss exceeds 709.78, and NaN where the loss is NaN."""
    with np.errstate(over="ignore"):
        found: Floats = np.exp(np.asarray(loss, np.float64))
    return found


def perplexity_history(loss: History) -> History:
    """Return the history of the perplexity, from that of the loss."""
    value = perplexity(loss.value)
    lowest, highest = (value if one is loss.value else perplexity(one) for one in (loss.lowest, loss.highest))
    return replace(loss, name="perplexity", value=value, lowest=lowest, highest=highest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A sentence about an observation, and whether it recommends an action."""

    text: str
    is_action: bool


def early_stopping(evaluation: History, training: History) -> Advice:
    """Return advice on early stopping, from the evaluation loss and the training loss without superseded steps."""
    evaluation = evaluation.standing
    if len(evaluation) and not np.isfinite(evaluation.value[-1]):
        text = "The newest evaluation loss is not finite: early stopping cannot be judged."
        return Advice(text=text, is_action=False)
    evaluation = evaluation.select(np.isfinite(evaluation.value))
    if len(evaluation) < 2:
        count = "no evaluation loss" if not len(evaluation) else "one evaluation loss"
        return Advice(text=f"There is {count} so far: early stopping cannot be judged.", is_action=False)
    best = int(np.argmin(evaluation.value))
    since = len(evaluation) - 1 - best
    words = f"best {evaluation.value[best]:.4g} at step {evaluation.step[best]:,}"
    if since == 0:
        improved = int((np.diff(np.minimum.accumulate(evaluation.value)) < 0).sum())
        last = "the last evaluation" if best == 1 else f"{improved} of the last {best} evaluations"
        text = f"Evaluation loss improved in {last}; {words}."
        return Advice(text=f"{text} No reason to stop.", is_action=False)
    text = f"No improvement in {since} evaluation{'' if since == 1 else 's'}; {words}."
    if since < PATIENCE:
        return Advice(text=f"{text} Wait: {PATIENCE} are needed for advice.", is_action=False)
    overfits = _is_falling(training, int(evaluation.step[best]))
    reason = "The training loss still falls, which is overfitting. " if overfits else ""
    return Advice(text=f"{text} {reason}Consider stopping, and use the checkpoint of that step.", is_action=True)


def _is_falling(training: History, since: int) -> bool:
    """Return whether the mean training loss after step `since` is lower than that of as many rows before it."""
    rows = training.select(training.stands & np.isfinite(training.value))
    after = rows.value[rows.step > since]
    before = rows.value[rows.step <= since][-len(after) :] if len(after) else after
    return bool(len(after) and len(before) and after.mean() < before.mean())


def logging_interval(loss: History) -> Advice | None:
    """Return advice on the interval of logging if a run has very many or very few rows; otherwise None."""
    steps = loss.standing.step
    if len(loss) > _MOST_ROWS and 2 * np.count_nonzero(np.diff(steps) <= 1) >= len(steps) - 1:
        text = f"{len(loss):,} rows are logged, one per step: a higher logging interval keeps the curve and saves time."
        return Advice(text=text, is_action=False)
    if not _RECENT < len(loss) < _FEW_ROWS:
        return None
    interval = float(np.median(np.diff(steps))) if len(steps) > _RECENT else 0.0
    if interval >= 10:
        text = f"One row per {interval:,.0f} steps: a lower logging interval shows more detail."
        return Advice(text=text, is_action=False)
    return None
