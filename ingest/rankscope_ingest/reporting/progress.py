"""Snapshots of the progress of runs and of the service, for the command line and for metrics."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from rankscope_ingest.runs.models import Attempt
from rankscope_ingest.runs.target import Target

LOSS: Final = "loss"
TOKENS: Final = "tokens_total"
_LOSS_ENDINGS: Final = ("_loss", "/loss", ".loss")
_WINDOW_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """Progress of one run at one time. A value of None is unknown."""

    run: str
    attempt: int
    state: str
    reason: str | None
    step: int | None
    planned_steps: int | None
    loss: float | None  # NaN or infinite if the latest loss of any rank is
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

    @property
    def has_nonfinite_loss(self) -> bool:
        """Return whether the latest loss is NaN or infinite."""
        return self.loss is not None and not math.isfinite(self.loss)


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

    loss: float | None = None
    rows_stored: int = 0
    records_lost: int = 0
    last_step_at: int | None = None
    _losses: dict[tuple[int, str, str | None], float] = field(default_factory=dict)  # by rank, name and labels
    _latest_loss: float | None = None
    _tokens: dict[int, deque[tuple[float, float]]] = field(default_factory=dict)
    _steps: deque[tuple[float, float]] = field(default_factory=deque)

    def observe(self, rank: int, scalars: Mapping[str, pa.Array] | pa.Table | None, ts: int, step: int | None) -> None:
        """Update the values from the scalars of one poll response of a rank.

        `step` is the last step in the response. `ts` is the time of that step in UTC µs by the clock of the rank; if
        the arrival time were used instead, a backlog would look like a high rate.
        """
        seconds = ts / 1e6
        newest = self._steps[-1][1] if self._steps else None
        if step is not None and step != newest:  # reports of a hang repeat the last step
            self.last_step_at = ts if self.last_step_at is None else max(self.last_step_at, ts)
        if step is not None and (newest is None or step >= newest):  # a rank that is behind does not show the rate
            _remember(self._steps, seconds, step)
        if scalars is None:
            return
        self._observe_losses(rank, scalars)
        tokens = last_value(scalars, TOKENS)
        if tokens is not None:
            _remember(self._tokens.setdefault(rank, deque()), seconds, tokens)

    def _observe_losses(self, rank: int, scalars: Mapping[str, pa.Array] | pa.Table) -> None:
        """Update the loss: a NaN or infinite one if there is any, or else the latest value of the scalar `loss`.

        A run can log parts of its loss: values with labels, and scalars with names such as `train_loss`. A finite part,
        or the finite loss of another rank, must not hide one that is NaN.
        """
        for position, name in enumerate(scalars["name"].to_pylist()):
            if name == LOSS or name.endswith(_LOSS_ENDINGS):
                value = scalars["value"][position].as_py()
                if value is not None:
                    self._losses[rank, name, scalars["labels"][position].as_py()] = value
        latest = last_value(scalars, LOSS)
        self._latest_loss = self._latest_loss if latest is None else latest
        self.loss = next((value for value in self._losses.values() if not math.isfinite(value)), self._latest_loss)

    def tokens_per_second(self) -> float | None:
        """Return the tokens per second over the last 30 s, summed over the ranks, or None if unknown."""
        rates = [rate for series in self._tokens.values() if (rate := _rate(series)) is not None]
        return sum(rates) if rates else None

    def steps_per_second(self) -> float | None:
        """Return the steps per second over the last 30 s, or None if unknown.

        The times are those of the clock of the rank with the highest step.
        """
        return _rate(self._steps)

    def eta_seconds(self, planned_steps: int | None, step: int | None) -> float | None:
        """Return the time in seconds that the remaining steps need at the present rate, or None if it is unknown."""
        rate = _rate(self._steps)
        if planned_steps is None or step is None or not rate:
            return None
        return max(0, planned_steps - step) / rate


def run_progress(attempt: Attempt, meter: RunMeter, targets: Iterable[Target]) -> RunProgress:
    """Return the progress of `attempt`. `meter` has the rates of the attempt, and `targets` its ranks."""
    return RunProgress(
        run=attempt.run,
        attempt=attempt.number,
        state=attempt.state,
        reason=attempt.reason,
        step=attempt.last_step,
        planned_steps=attempt.planned_steps,
        loss=meter.loss,
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


def last_value(scalars: Mapping[str, pa.Array] | pa.Table, name: str) -> float | None:
    """Return the newest value of the scalar `name`, or None if there is none.

    Values without labels are preferred. A value with labels is used only if there is no value without labels.
    """
    # A body has a few dozen scalars: a Python loop over them is faster than one call of an Arrow kernel.
    found = [position for position, known in enumerate(scalars["name"].to_pylist()) if known == name]
    if not found:
        return None
    labels = scalars["labels"]
    plain = [position for position in found if not labels[position].is_valid]
    value: float | None = scalars["value"][(plain or found)[-1]].as_py()
    return value


def _remember(series: deque[tuple[float, float]], at: float, value: float) -> None:
    if series and at < series[-1][0]:
        return  # another rank is ahead of this one
    if series and value < series[-1][1]:
        series.clear()  # the counter was reset
    series.append((at, value))
    while at - series[0][0] > _WINDOW_SECONDS:
        series.popleft()


def _rate(series: deque[tuple[float, float]]) -> float | None:
    if len(series) < 2:
        return None
    (begin, low), (end, high) = series[0], series[-1]
    return (high - low) / (end - begin) if end > begin else None
