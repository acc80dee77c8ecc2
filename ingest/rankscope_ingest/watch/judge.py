"""Decide from the rows of a log whether its training is running, slow, stalled, finished, failed or stopped.

`LogRows` has the recent rows of the log: steps, times and values, and the checkpoints, evaluations and errors between
them. The module performs no I/O.
"""

from __future__ import annotations

import enum
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from rankscope_contract.model.events import EventType, RunState, Severity
from rankscope_ingest.base.config import WatchSection
from rankscope_ingest.detect.incidents import parse_details
from rankscope_ingest.importers.common.decisions import TRAINING_NAMES
from rankscope_view.pages.format import duration

KEPT_ROWS: Final = 5_000
"""Number of rows of the latest attempt over which the median of the step time is calculated."""
GAPS: Final = 50
"""Number of times between rows over which the expected time between two rows is calculated."""
FEWEST_TIMES: Final = 5
"""Number of step times below which a log has no median with which a step is compared."""
MINUTES_FROM_SECONDS: Final = 600
"""Time without a row from which the text about it has minutes, hours or days."""

_COARSE_SECONDS: Final = 2.0
_MOST_ERRORS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRow:
    """One row of training in a log."""

    seq: int
    rank: int | None
    step: int | None
    written: float | None
    """Time in the row in seconds since 1970, as if it were UTC; None if the row has no time."""
    values: Mapping[str, float]
    step_seconds: float | None
    """Duration of one step: the value in the row, or the time since the row of the previous step."""
    is_after_phase: bool
    """True if a checkpoint or an evaluation is between the previous row and this one."""


class LogRows:
    """The rows of the latest attempt in a log."""

    def __init__(self) -> None:
        self.last_seqs: dict[str, int] = {}  # of the added records, by incarnation
        self.attempt = 0
        self.last_steps: dict[int, int] = {}  # by attempt
        self.arrived_at: float | None = None
        """Time at which the last row was in the log at the latest, by the clock of the machine of the log."""
        self._begin()

    def _begin(self) -> None:
        self.rows: deque[LogRow] = deque(maxlen=KEPT_ROWS)
        self._gaps: deque[float] = deque(maxlen=GAPS)
        self._phases: dict[str, list[int]] = {EventType.CHECKPOINT: [], EventType.EVALUATION: []}  # their steps
        self._open_phase: str | None = None  # began after the last row
        self._after_phase = False
        self.errors: list[str] = []
        """Class, rank and message of each error since the last row."""

    @property
    def last(self) -> LogRow | None:
        """Return the last row of the attempt."""
        return self.rows[-1] if self.rows else None

    def add(self, stream: str, scalars: pa.Table, events: pa.Table, modified: float) -> None:
        """Add the records of the incarnation `stream` that are behind the last one.

        `modified` is the time of the last change of the log.
        """
        records: dict[int, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {}
        for place, table in enumerate((scalars, events)):
            for row in table.to_pylist():
                records.setdefault(row["seq"], ([], []))[place].append(row)
        before, attempt = None if self.last is None else self.arrived_at, self.attempt
        added = sum(self._record(*records[seq]) for seq in sorted(records))
        self.last_seqs[stream] = max(records, default=self.last_seqs.get(stream, -1))
        if added:
            if before is not None and attempt == self.attempt and self.rows[-1].step_seconds is None:
                self._gaps.append(max(0.0, modified - before) / added)
            self.arrived_at = modified

    def _record(self, scalars: list[dict[str, Any]], events: list[dict[str, Any]]) -> int:
        """Add one record; return 1 if it is a row of training, else 0.

        The first row has a quantity of a training. Then a record of a further step is a row, too: its loss may be
        missing. Other records are timers and evaluations.
        """
        first = (scalars or events)[0]
        attempt = first["attempt"] or 0
        if attempt < self.attempt:
            return 0  # of another writer of the log
        if attempt > self.attempt:
            self.attempt = attempt
            self._begin()
        for event in events:
            self._event(event)
        values = {row["name"]: row["value"] for row in scalars}
        is_ahead = self.last is not None and (first["step"] or 0) > (self.last.step or 0)
        if not values.keys() & TRAINING_NAMES and not (
            is_ahead and any(not name.startswith("eval") for name in values)
        ):
            return 0
        self._row(first, values)
        return 1

    def _row(self, first: Mapping[str, Any], values: Mapping[str, float]) -> None:
        last, written = self.last, None if first["ts"] is None else first["ts"].timestamp()
        gap = None
        if last is not None and first["step"] != last.step:
            steps = max(1, (first["step"] or 0) - (last.step or 0))
            # The times of many logs have no fraction of a second.
            known = [values["step_seconds"]] if "step_seconds" in values else []
            if written is not None and last.written is not None:
                known.append((written - last.written) / steps)
            if known:
                gap = max(0.0, *known)
                self._gaps.append(gap * steps)
        self.rows.append(
            LogRow(
                seq=first["seq"],
                rank=first["rank"],
                step=first["step"],
                written=written,
                values=values,
                step_seconds=values.get("step_seconds", gap),
                is_after_phase=self._after_phase,
            )
        )
        self._after_phase, self._open_phase = False, None
        self.errors.clear()
        if first["step"] is not None:
            self.last_steps[self.attempt] = first["step"]

    def _event(self, event: Mapping[str, Any]) -> None:
        if event["type"] == EventType.ERROR and len(self.errors) < _MOST_ERRORS:
            rank = "" if event["rank"] is None else f"rank {event['rank']}: "
            self.errors.append(f"{event['op'] or 'error'}: {rank}{event['message'] or ''}")
        if (steps := self._phases.get(event["type"])) is None:
            return
        is_over = parse_details(event["details"]).get("action") in {"saved", "loaded"}
        self._after_phase, self._open_phase = True, None if is_over else str(event["type"])
        if event["step"] is not None and steps[-1:] != [event["step"]]:
            steps.append(event["step"])

    @property
    def phase(self) -> str | None:
        """Return the phase that the training may be in: first step, checkpoint or evaluation; None for training.

        A phase is also due at a step according to the steps of the last two.
        """
        if len(self.rows) < 2:
            return "first step"
        if self._open_phase is not None:
            return self._open_phase
        step = self.rows[-1].step or 0
        periodic = {name: steps for name, steps in self._phases.items() if len(steps) > 1}
        return next((name for name, steps in periodic.items() if step >= 2 * steps[-1] - steps[-2]), None)

    @property
    def stride(self) -> int:
        """Return the usual number of steps from one row to the next."""
        steps = [row.step for row in self.rows if row.step is not None]
        return max(1, (steps[-1] - steps[0]) // (len(steps) - 1)) if len(steps) > 1 else 1

    @property
    def expected_seconds(self) -> float | None:
        """Return the expected time between two rows: the median of the last times; None if there is none.

        If times of whole seconds are too coarse for a median, the result is their mean.
        """
        median = statistics.median(self._gaps) if self._gaps else None
        times = [row.written for row in list(self.rows)[-GAPS:] if row.written is not None]
        is_coarse = median is not None and median <= _COARSE_SECONDS and all(time.is_integer() for time in times)
        return (times[-1] - times[0]) / (len(times) - 1) if is_coarse and times[-1:] > times[:1] else median

    @property
    def pace(self) -> str:
        """Return the last step and the time between two rows as a text."""
        expected, last = self.expected_seconds, self.rows[-1]
        step = "" if last.step is None else f"step {last.step}"
        pace = "" if expected is None else f"a row every {expected:.3g} s"
        return ", ".join(filter(None, (step, pace))) or "rows arrive"

    def step_times(self, warm_up_rows: int) -> list[float]:
        """Return the step times of the attempt without its first rows and without rows after a checkpoint or the like.

        The first rows are known only if the attempt has at most KEPT_ROWS rows.
        """
        rows = list(self.rows)[warm_up_rows if len(self.rows) < KEPT_ROWS else 0 :]
        return [row.step_seconds for row in rows if row.step_seconds is not None and not row.is_after_phase]


class Condition(enum.StrEnum):
    """Condition of the training that writes a log."""

    WAITING = "waiting"  # the log has no row yet
    TRAINING = "training"
    SLOW = "slow"
    STALLED = "stalled"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


ENDS: Final = {
    RunState.COMPLETED: Condition.FINISHED,
    RunState.FAILED: Condition.FAILED,
    RunState.STOPPED: Condition.STOPPED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The condition of a training, the reason as a text for users, and the numbers that were compared."""

    condition: Condition
    reason: str
    value: float | None = None
    baseline: float | None = None
    threshold: float | None = None
    severity: str | None = None
    """Severity if it is not that of the condition."""


def judge(
    rows: LogRows,
    limits: WatchSection,
    *,
    silence: float,
    quiet: float,
    clock: str,
    ending: tuple[str, str] | None = None,
    slow_since: float | None = None,
) -> Verdict:
    """Return the condition of the training that writes a log.

    `silence` is the time since the last row in seconds, measured with the clock from the source `clock`; without a row,
    it is the time for which the log was followed. `quiet` is the time since the last change of the log. `ending` has
    state and reason of the end of the run, if the log contains one. `slow_since` is the median step time with which the
    present slow steps are compared; None if the training is not slow.
    """
    stall = _stall(rows, limits, silence, clock)
    if ending is not None:
        condition = ENDS[RunState(ending[0])]
        # An error that training survives is followed by further rows.
        if stall or condition is Condition.FINISHED or quiet >= limits.failed_after_seconds:
            return Verdict(condition=condition, reason=ending[1])
    if stall is not None:
        return stall
    if not rows.rows:
        return Verdict(condition=Condition.WAITING, reason="the log contains no row of training yet")
    if (slow := _slow(rows, limits, slow_since)) is not None:
        return slow
    if ending is not None:  # rows may still follow
        reason = f"{rows.pace}, followed by {ending[1]}"
        return Verdict(condition=Condition.TRAINING, reason=reason, severity=Severity.WARNING)
    return Verdict(condition=Condition.TRAINING, reason=rows.pace)


def _stall(rows: LogRows, limits: WatchSection, silence: float, clock: str) -> Verdict | None:
    expected, phase = rows.expected_seconds, rows.phase
    limit = max(limits.stalled_factor * (expected or 0.0), limits.stalled_after_seconds)
    limit = limit if phase is None else max(limit, limits.stalled_in_phase_after_seconds)
    if silence <= limit:
        return None
    usual = "" if expected is None else f", expected every {expected:.3g} s"
    usual += "" if phase is None else f", {phase} may be in progress"
    time = f"{silence:.0f} s" if silence < MINUTES_FROM_SECONDS else duration(silence)
    return Verdict(
        condition=Condition.STALLED,
        reason=f"no {'row' if rows.rows else 'first row'} for {time} ({clock}){usual}",
        value=silence,
        baseline=expected,
        threshold=limit,
    )


def _slow(rows: LogRows, limits: WatchSection, slow_since: float | None) -> Verdict | None:
    """Return the verdict that the last step is slow, or that slow steps are not over yet; None for normal steps."""
    times = rows.step_times(limits.warm_up_rows)
    if slow_since is not None:
        median, compared = slow_since, times[-limits.recovered_rows :]
    else:
        last = rows.rows[-1]
        if len(times) < FEWEST_TIMES or last.step_seconds is None or last.is_after_phase:
            return None
        median, compared = statistics.median(times), [last.step_seconds]
    slow = [at for at, seconds in enumerate(reversed(compared)) if seconds > limits.slow_factor * median]
    if not slow or not median:  # times of whole seconds are 0 for short steps
        return None
    value, which = compared[-1 - slow[0]], f"a step {slow[0]} rows ago" if slow[0] else "the last step"
    return Verdict(
        condition=Condition.SLOW,
        reason=f"{which} took {value:.3g} s, {value / median:.3g} times the median of {median:.3g} s",
        value=value,
        baseline=median,
        threshold=limits.slow_factor,
    )
