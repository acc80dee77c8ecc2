"""The summary of one run from any source: progress, loss, parameters, time, speed and hints, as one typed value."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from rankscope_storage.api import summaries
from rankscope_storage.api.summaries import RunSummary
from rankscope_storage.connection import Connection
from rankscope_storage.sql.scalar_history import IS_IMPORTED, is_main_source
from rankscope_view.data.detail import RunDetail, perplexity, read_detail
from rankscope_view.data.documents import json_object
from rankscope_view.data.hints import Hint, tuning_hints
from rankscope_view.data.incidents import incidents, sentence_of
from rankscope_view.data.metrics import MetricSummary, metric_summaries
from rankscope_view.data.ranks import rank_table
from rankscope_view.data.series import GRAD_NORM, LEARNING_RATE, LOSS, Floats, History, main_series
from rankscope_view.data.speed import Speed, Utilization, numbers_of, read_speed, read_utilization

TREND_ROWS: Final = 10
"""The trend compares the mean of this many losses with the mean of as many losses before them."""

TREND_ERRORS: Final = 3.0

_MOST_EPOCHS: Final = 1e6
"""Planned epochs above this are no plan: a run driven by `max_steps` has 2^63 - 1 epochs."""

_MOST_STEPS: Final = 1 << 62
_MOST_EVALUATIONS: Final = 20
_LOWER_IS_BETTER: Final = re.compile(r"loss|perplexity|error|wer\b|mae|mse")
_HIGHER_IS_BETTER: Final = re.compile(r"accuracy|acc\b|f1|bleu|rouge|auc|precision|recall|map\b")
_PLANNED_EPOCHS: Final = ("num_train_epochs", "num_epochs", "max_epochs", "epochs")
_EVALUATIONS: Final = f"""\
SELECT DISTINCT name FROM {{scalars}} WHERE run = $run AND starts_with(name, 'eval') AND value IS NOT NULL
  AND NOT regexp_matches(name, '_(runtime|time|per_second|seconds)$') AND {is_main_source()}
ORDER BY name LIMIT {_MOST_EVALUATIONS}"""
_LOGGED: Final = f"""\
SELECT count(DISTINCT rank) AS ranks, count(DISTINCT coalesce(attempt, 0)) AS attempts, arg_max(value, seq) AS current,
  min(value) FILTER (isfinite(value)) AS lowest, arg_min(step, value) FILTER (isfinite(value)) AS lowest_step
FROM {{scalars}} WHERE run = $run AND name = 'loss' AND {is_main_source()} AND {IS_IMPORTED}"""
_TOTALS: Final = f"""\
SELECT name, sum(value) AS total, arg_max(value, (coalesce(attempt, 0), step)) AS newest FROM {{scalars}}
WHERE run = $run AND name IN ('skipped_iterations', 'nan_iterations', 'loss_scale', 'train_runtime')
  AND isfinite(value) AND {is_main_source()} GROUP BY name"""


class Trend(enum.StrEnum):
    """Direction of the loss: the mean of its last ten values against the finite ones of the ten before them.

    A loss is steady if these means differ by at most TREND_ERRORS standard errors of their difference, unless all ten
    values are above or below those before.
    """

    FALLING = "falling"
    RISING = "rising"
    STEADY = "steady"
    NOT_FINITE = "not finite"  # a NaN or Inf among the last ten
    INSUFFICIENT = "insufficient data"
    NO_DATA = "no data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Steps and epochs that a run has completed. Shares are from 0 to 1; None without a plan."""

    state: str | None
    step: int | None
    planned_steps: int | None
    step_share: float | None
    epoch: float | None
    planned_epochs: float | None  # None also if the number of steps drives the run
    epoch_share: float | None
    eta_seconds: float | None  # None: unknown, or the run has ended before its plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A metric of one evaluation set. `best` is None if it is unknown whether a higher value is better."""

    name: str
    rows: int
    last: float
    last_step: int
    best: float | None
    best_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """The logged losses of steps that are not superseded. `current` may be NaN; the others are of finite losses."""

    rows: int
    nonfinite: int
    current: float | None
    current_step: int | None
    lowest: float | None
    lowest_step: int | None
    highest: float | None
    highest_step: int | None
    mean: float | None
    trend: Trend
    perplexity: float | None  # infinite above a loss of 709.78
    last_finite: float | None
    last_finite_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best checkpoint by the metric that the script chose, from its `trainer_state.json`."""

    metric: float | None
    checkpoint: str | None
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Newest values of the optimizer, and totals of an fp16 training."""

    learning_rate: float | None
    grad_norm: float | None
    nonfinite_grad_norms: int
    loss_scale: float | None
    skipped_iterations: int | None
    nan_iterations: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Times in UTC seconds. `checkpoint_at` is the modification time of the file of an imported trainer state."""

    started_at: float | None
    ended_at: float | None
    newest_row_at: float | None  # None: the rows have no times
    checkpoint_at: float | None
    train_seconds: float | None  # as the script reported it
    wall_seconds: float | None
    goodput: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The summary of one run, with the numbers of its page (`detail`) and of its rows in the store (`stored`)."""

    run: str
    progress: Progress
    losses: Losses
    evaluations: tuple[Evaluation, ...]
    metrics: tuple[MetricSummary, ...]  # the other scalars that the script logged
    best: Best | None
    parameters: Parameters
    times: Times
    speed: Speed
    utilization: Utilization | None
    hints: tuple[Hint, ...]
    detail: RunDetail
    stored: RunSummary
    incidents: int  # open and past ones


def read_summary(
    connection: Connection, run: str, *, detail: RunDetail | None = None, peak_tflops: float | None = None
) -> Summary | None:
    """Return the summary of `run`, or None if the store does not contain it.

    `detail` saves reading the numbers of the page of the run again. `peak_tflops` is the peak of one GPU.
    """
    with connection.pinned():
        detail = detail or read_detail(connection, run)
        if detail is None:
            return None
        scalars = connection.relation("scalars", run=run)
        totals = {
            row["name"]: row for row in connection.query(_TOTALS.format(scalars=scalars), {"run": run}).to_pylist()
        }
        epochs = main_series(connection, run, ["epoch"]).get("epoch")
        speed = read_speed(connection, run, detail.histories, detail.facts.config)
        utilization = read_utilization(connection, run, speed, peak_tflops=peak_tflops)
        losses = _as_logged(losses_of(detail.history(LOSS)), connection, scalars, run)
        is_ruined = losses.trend is Trend.NOT_FINITE
        hints = () if is_ruined else tuning_hints(speed, utilization, rank_table(connection, run))
        evaluations = _evaluations(connection, run, scalars)
        named = {one.name for one in evaluations}
        metrics = tuple(one for one in metric_summaries(connection, run) if one.name not in named)
        stored = summaries.summary(connection, run, with_goodput=False)
        grouped = len(incidents(connection, [run]).get(run, ()))
    stored = replace(stored, goodput=detail.facts.goodput, wall_seconds=detail.facts.wall_seconds)
    state = _trainer_state(detail.facts.config)
    return Summary(
        run=run,
        progress=_progress(detail, state, epochs),
        losses=replace(losses, perplexity=detail.perplexity),
        evaluations=evaluations,
        metrics=metrics,
        best=_best(state),
        parameters=_parameters(detail, totals),
        times=_times(detail, stored, totals),
        speed=speed,
        utilization=utilization,
        hints=hints,
        detail=detail,
        stored=stored,
        incidents=grouped,
    )


def _as_logged(losses: Losses, connection: Connection, scalars: str, run: str) -> Losses:
    """Return the summary of the loss with the last and the lowest value as the lines of an imported log show them.

    Otherwise, the values of a step are the means over its ranks.
    """
    [found] = connection.query(_LOGGED.format(scalars=scalars), {"run": run}).to_pylist()
    if found["ranks"] < 2 or found["attempts"] > 1 or found["lowest"] is None:
        return losses
    return replace(
        losses, **{name: found[name] for name in ("current", "lowest", "lowest_step") if found[name] is not None}
    )


def _trainer_state(config: str | None) -> Mapping[str, Any]:
    """Return the facts that a `trainer_state.json` has in addition to its history; empty for all other sources."""
    state = json_object(config).get("trainer_state")
    return state if isinstance(state, dict) else {}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _progress(detail: RunDetail, state: Mapping[str, Any], epochs: History | None) -> Progress:
    row = detail.row
    planned = row.planned_steps if row.planned_steps and row.planned_steps < _MOST_STEPS else None
    epoch = _number(state.get("epoch"))
    if epoch is None and epochs is not None:
        epoch = _newest(epochs)
    numbers = dict(numbers_of(detail.facts.config))
    named = [value for key, value in numbers.items() if key.rpartition(".")[2] in _PLANNED_EPOCHS]
    planned_epochs = next((value for value in named if 0 < value < _MOST_EPOCHS), None)
    return Progress(
        state=row.state,
        step=row.step,
        planned_steps=planned,
        step_share=row.share if planned else None,
        epoch=epoch,
        planned_epochs=planned_epochs,
        epoch_share=None if epoch is None or planned_epochs is None else epoch / planned_epochs,
        eta_seconds=0.0 if row.share == 1 and planned else row.eta_seconds if planned else None,
    )


def _newest(history: History) -> float | None:
    return _point(history.standing, _last)[0]


def _point(history: History, find: Callable[[Floats], Any]) -> tuple[float | None, int | None]:
    """Return value and step of the row that `find` finds; None without rows."""
    if not len(history):
        return None, None
    row = int(find(history.value))
    return float(history.value[row]), int(history.step[row])


def _last(values: Floats) -> int:
    return len(values) - 1


def losses_of(loss: History) -> Losses:
    """Return the summary of a loss, without superseded steps."""
    loss = loss.standing
    finite = loss.select(np.isfinite(loss.value))
    current, current_step = _point(loss, _last)
    lowest, lowest_step = _point(finite, np.argmin)
    highest, highest_step = _point(finite, np.argmax)
    last_finite, last_finite_step = _point(finite, _last)
    return Losses(
        rows=len(loss),
        nonfinite=len(loss) - len(finite),
        current=current,
        current_step=current_step,
        lowest=lowest,
        lowest_step=lowest_step,
        highest=highest,
        highest_step=highest_step,
        mean=float(finite.value.mean()) if len(finite) else None,
        trend=trend(loss.value),
        perplexity=None if current is None or math.isnan(current) else float(perplexity(np.array([current]))[0]),
        last_finite=last_finite,
        last_finite_step=last_finite_step,
    )


def trend(losses: Floats) -> Trend:
    """Return the direction of losses: the mean of the last ten against that of the finite ones of ten before them.

    Without a finite loss before the last ten, the data are insufficient.
    """
    if not len(losses):
        return Trend.NO_DATA
    newest, before = losses[-TREND_ROWS:], losses[-2 * TREND_ROWS : -TREND_ROWS]
    if not np.isfinite(newest).all():
        return Trend.NOT_FINITE
    before = before[np.isfinite(before)]
    if not len(before):
        return Trend.INSUFFICIENT
    change = float(newest.mean() - before.mean())
    squares = float(((newest - newest.mean()) ** 2).sum() + ((before - before.mean()) ** 2).sum())
    error = math.sqrt(squares / (len(newest) + len(before) - 2) * (1 / len(newest) + 1 / len(before)))
    # The values of a loss that rises ever faster have a larger error than its change.
    is_apart = len(before) == len(newest) and (newest.min() > before.max() or newest.max() < before.min())
    if not is_apart and abs(change) <= TREND_ERRORS * error:
        return Trend.STEADY
    return Trend.FALLING if change < 0 else Trend.RISING


def _evaluations(connection: Connection, run: str, scalars: str) -> tuple[Evaluation, ...]:
    names = connection.query(_EVALUATIONS.format(scalars=scalars), {"run": run})["name"].to_pylist()
    found = main_series(connection, run, names)
    return tuple(_evaluation(name, history) for name, history in found.items() if history.stands.any())


def _evaluation(name: str, history: History) -> Evaluation:
    history = history.standing
    finite = history.select(np.isfinite(history.value))
    best: tuple[float | None, int | None] = (None, None)
    if _LOWER_IS_BETTER.search(name):
        best = _point(finite, np.argmin)
    elif _HIGHER_IS_BETTER.search(name):
        best = _point(finite, np.argmax)
    last, last_step = float(history.value[-1]), int(history.step[-1])
    return Evaluation(name=name, rows=len(history), last=last, last_step=last_step, best=best[0], best_step=best[1])


def _best(state: Mapping[str, Any]) -> Best | None:
    checkpoint, step = state.get("best_model_checkpoint"), state.get("best_global_step")
    found = Best(
        metric=_number(state.get("best_metric")),
        checkpoint=checkpoint if isinstance(checkpoint, str) else None,
        step=step if isinstance(step, int) else None,
    )
    return found if found.metric is not None or found.checkpoint is not None else None


def _parameters(detail: RunDetail, totals: Mapping[str, Mapping[str, Any]]) -> Parameters:
    grad_norm = detail.history(GRAD_NORM)
    grad_norm = grad_norm.standing

    def total(name: str) -> int | None:
        return int(totals[name]["total"]) if name in totals else None

    return Parameters(
        learning_rate=_newest(detail.history(LEARNING_RATE)),
        grad_norm=_newest(grad_norm),
        nonfinite_grad_norms=int((~np.isfinite(grad_norm.value)).sum()),
        loss_scale=totals["loss_scale"]["newest"] if "loss_scale" in totals else None,
        skipped_iterations=total("skipped_iterations"),  # counts per row, reset by each row
        nan_iterations=total("nan_iterations"),
    )


def _times(detail: RunDetail, stored: RunSummary, totals: Mapping[str, Mapping[str, Any]]) -> Times:
    row = detail.row
    is_file = row.source_kind == "trainer_state"
    known = (one.time[np.isfinite(one.time)] for one in detail.histories.values())
    times = [float(one.max()) for one in known if len(one)]
    return Times(
        started_at=row.started_at,
        ended_at=None if is_file else row.ended_at,
        newest_row_at=max(times, default=None),
        checkpoint_at=row.ended_at if is_file else None,
        train_seconds=totals["train_runtime"]["newest"] if "train_runtime" in totals else None,
        wall_seconds=stored.wall_seconds,
        goodput=stored.goodput,
    )


def summary_document(found: Summary) -> dict[str, Any]:
    """Return the summary as a document for JSON, without the curves. NaN and Inf remain numbers."""
    speed, throughput, check = found.speed, found.speed.throughput, found.speed.batch_check
    document: dict[str, Any] = {name: getattr(speed, name) for name in ("step_seconds", "first_step_seconds")}
    document |= {"global_batch": speed.global_batch, "time_spent": speed.time_spent or None}
    document |= {name: _known(getattr(speed, name)) for name in ("data_wait", "collective")}
    document["batch_check"] = check and asdict(check) | {"difference": check.difference, "is_off": check.is_off}
    document["throughput"] = throughput and {
        **{name: getattr(throughput, name) for name in ("name", "unit", "source", "ranks", "median")},
        "p10": throughput.low,
        "rows_below_p10": throughput.rows_below,
    }
    return {
        "run": found.run,
        "reason": found.stored.reason,
        "incidents": found.incidents,
        "open_incidents": [sentence_of(one) for one in found.detail.row.incidents],
        "end": found.detail.row.end_sentence or None,
        **{name: asdict(getattr(found, name)) for name in ("progress", "losses", "parameters", "times")},
        **{name: list(map(asdict, getattr(found, name))) for name in ("evaluations", "metrics", "hints")},
        "best": _known(found.best),
        "speed": document,
        "utilization": found.utilization and asdict(found.utilization) | {"words": found.utilization.words},
        "advice": [asdict(one) for one in found.detail.advice],
        "stored": asdict(found.stored),
    }


def _known(value: Any) -> dict[str, Any] | None:
    return None if value is None else asdict(value)
