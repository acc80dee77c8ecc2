"""Snapshots of the progress of runs and of the service, for the command line and for metrics."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from rankscope_ingest.runs.models import Attempt, Target

LOSS: Final = "loss"
TOKENS: Final = "tokens_total"
_LOSS_ENDINGS: Final = ("_loss", "/loss", ".loss")
_WINDOW_SECONDS: Final = 30.0
_LEAST_STEPS: Final = 10
_PARTS: Final = 5  # of the newest steps: the time left follows from their median, as in the view `run_eta`


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """Progress of one run at one time. A value of None is unknown."""

    run: str
    attempt: int
    state: str
    reason: str | None
    step: int | None
    planned_steps: int | None
    loss: float | None  # mean over the ranks that logged it at its newest step
    loss_ranks: int | None = None  # number of these ranks
    loss_ranks_missing: int = 0  # ranks that logged the loss before, and not at its newest step
    nonfinite_loss: str | None = None  # name of a loss, or of a part of one, of which a newest value is NaN or infinite
    tokens_per_second: float | None
    rows_stored: int
    lag_records: int
    records_lost: int
    ranks_alive: int
    world_size: int
    eta_seconds: float | None
    started_at: int | None = None  # UTC µs
    ended_at: int | None = None  # UTC µs; None while the attempt runs
    failed_rank: int | None = None  # the rank that failed first
    last_step_at: int | None = None  # UTC µs, by the rank's clock
    steps_per_second: float | None = None
    notice: str | None = None  # that two trainings use the name of the run at the same time

    @property
    def loss_note(self) -> str:
        """Return the number of ranks in the mean of the loss, if ranks are missing: ` (1 of 2 ranks)`."""
        of = (self.loss_ranks or 0) + self.loss_ranks_missing
        return f" ({self.loss_ranks} of {of} ranks)" if self.loss_ranks_missing else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """State of the service at one time: its URL, the progress of its runs, and its numbers of targets and rows."""

    url: str
    runs: tuple[RunProgress, ...]
    targets: int
    rows_pending: int
    rows_stored: int
    degraded: str | None  # text: reason why the service cannot store rows


@dataclass(slots=True, kw_only=True)
class RunMeter:
    """Loss, speed and counts of one attempt, collected from the poll responses of its ranks."""

    rows_stored: int = 0
    records_lost: int = 0
    last_step_at: int | None = None
    _losses: dict[int, tuple[int, float]] = field(default_factory=dict)  # newest step and value, by rank
    _parts: dict[tuple[int, str, str | None], float] = field(default_factory=dict)  # by rank, name and labels
    _tokens: dict[int, deque[tuple[float, float]]] = field(default_factory=dict)
    _steps: deque[tuple[float, float]] = field(default_factory=deque)

    def observe(
        self,
        rank: int,
        scalars: Mapping[str, pa.Array] | pa.Table | None,
        ts: int,
        step: int | None,
        steps: Callable[[int], int | None] | None = None,
    ) -> None:
        """Update the values from the scalars of one poll response of a rank.

        `step` is the last step in the response. `ts` is the time of that step in UTC µs by the clock of the rank; if
        the arrival time were used instead, a backlog would look like a high rate. `steps` returns the step of the
        scalar with a number; without it, all have the last step.
        """
        seconds = ts / 1e6
        newest = self._steps[-1][1] if self._steps else None
        if step is not None and step != newest:  # reports of a hang repeat the last step
            self.last_step_at = ts if self.last_step_at is None else max(self.last_step_at, ts)
        if step is not None and (newest is None or step >= newest):  # a rank that is behind does not show the rate
            _remember(self._steps, seconds, step, _LEAST_STEPS + 1)
        if scalars is None:
            return
        # A body has a few dozen scalars: Python loops over them are faster than calls of Arrow kernels.
        names, labels, values = (scalars[column].to_pylist() for column in ("name", "labels", "value"))
        for name, label, value in zip(names, labels, values, strict=True):
            if (name == LOSS or name.endswith(_LOSS_ENDINGS)) and value is not None:
                self._parts[rank, name, label] = value  # also values with labels, and scalars such as `train_loss`
        at = _last_position(names, labels, LOSS)
        if at is not None and values[at] is not None:
            loss_step = step if steps is None else steps(at)
            if loss_step is not None:
                self._losses[rank] = loss_step, values[at]
        at = _last_position(names, labels, TOKENS)
        if at is not None and values[at] is not None:
            _remember(self._tokens.setdefault(rank, deque()), seconds, values[at])

    @property
    def loss(self) -> tuple[float, int, int] | None:
        """Return the mean of the loss over the ranks that logged it at its newest step; None without a loss.

        The further values are the numbers of these ranks and of those that logged it before only. Pages and queries of
        the store have the same mean. Of a pipeline, the ranks of one stage log the loss.
        """
        newest = max((step for step, _ in self._losses.values()), default=None)
        values = [value for step, value in self._losses.values() if step == newest]
        count = len(values)
        return (sum(values) / count, count, len(self._losses) - count) if count else None

    @property
    def nonfinite_loss(self) -> str | None:
        """Return the name of a loss, or part of one, of which the newest value of a rank is NaN or infinite."""
        return next((name for (_, name, _), value in self._parts.items() if not math.isfinite(value)), None)

    def tokens_per_second(self) -> float | None:
        """Return the tokens per second over the last 30 s, summed over the ranks, or None if unknown."""
        rates = [rate for series in self._tokens.values() if (rate := _rate(series)) is not None]
        return sum(rates) if rates else None

    def steps_per_second(self) -> float | None:
        """Return the steps per second over the last 30 s and at least ten steps, or None if unknown.

        The times are those of the clock of the rank with the highest step.
        """
        return _rate(self._steps)

    def eta_seconds(self, planned_steps: int | None, step: int | None) -> float | None:
        """Return the time in seconds that the remaining steps need at the present rate, or None if it is unknown."""
        pace = _pace(self._steps)
        if planned_steps is None or step is None or not pace:
            return None
        return max(0, planned_steps - step) * pace


def run_progress(attempt: Attempt, meter: RunMeter, targets: Iterable[Target]) -> RunProgress:
    """Return the progress of `attempt`. `meter` has the rates of the attempt, and `targets` its ranks."""
    loss, ranks, missing = meter.loss or (None, None, 0)
    return RunProgress(
        run=attempt.run,
        attempt=attempt.number,
        state=attempt.state,
        reason=attempt.reason,
        step=attempt.completed_step,
        planned_steps=attempt.planned_steps,
        loss=loss,
        loss_ranks=ranks,
        loss_ranks_missing=missing,
        nonfinite_loss=meter.nonfinite_loss,
        tokens_per_second=meter.tokens_per_second(),
        rows_stored=meter.rows_stored,
        lag_records=sum(target.lag_records for target in targets if not target.is_gone),
        records_lost=meter.records_lost,
        ranks_alive=len(attempt.live_ranks),
        world_size=attempt.world_size,
        eta_seconds=None if attempt.has_ended else meter.eta_seconds(attempt.planned_steps, attempt.last_step),
        started_at=attempt.started_at,
        ended_at=attempt.ended_at,
        failed_rank=attempt.culprit,
        last_step_at=meter.last_step_at,
        steps_per_second=meter.steps_per_second(),
    )


def _last_position(names: Sequence[str], labels: Sequence[str | None], name: str) -> int | None:
    """Return the position of the newest value of the scalar `name`; of the first labels if all values have some."""
    found = [position for position, known in enumerate(names) if known == name]
    main = min((labels[position] or "" for position in found), default="")
    return max((position for position in found if (labels[position] or "") == main), default=None)


def _remember(series: deque[tuple[float, float]], at: float, value: float, least: int = 1) -> None:
    if series and at < series[-1][0]:
        return  # another rank is ahead of this one
    if series and value < series[-1][1]:
        series.clear()  # the counter was reset
    series.append((at, value))
    while len(series) > least and at - series[0][0] > _WINDOW_SECONDS:
        series.popleft()


def _rate(series: deque[tuple[float, float]]) -> float | None:
    if len(series) < 2:
        return None
    (begin, low), (end, high) = series[0], series[-1]
    return (high - low) / (end - begin) if end > begin else None


def _pace(series: deque[tuple[float, float]]) -> float | None:
    edges = sorted({(len(series) - 1) * part // _PARTS for part in range(_PARTS + 1)}) if series else []
    marks = itertools.pairwise(series[edge] for edge in edges)
    paces = [(end - begin) / (high - low) for (begin, low), (end, high) in marks if high > low]
    return statistics.median(paces) if paces else None
