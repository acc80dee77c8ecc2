"""Decide from the rows of a log whether its training is running, slow, stalled, finished, failed or stopped.

The module performs no I/O.
"""

from __future__ import annotations

import enum
import statistics
from dataclasses import dataclass
from typing import Final

from rankscope_contract.model.events import RunState, Severity
from rankscope_ingest.base.config import WatchSection
from rankscope_ingest.watch.rows import LogRows
from rankscope_view.pages.format import duration

FEWEST_TIMES: Final = 5
"""Number of step times below which a log has no median with which a step is compared."""
MINUTES_FROM_SECONDS: Final = 600
"""Time without a row from which the text about it has minutes, hours or days."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a log in addition to its rows. Times are in seconds."""

    silence: float
    """Time since the last row; without a row, the time for which the log was followed."""
    quiet: float
    """Time since the last change of the log; after the end, infinite: lines of the next start do not revoke it."""
    clock: str
    """Source of the clock with which the silence was measured."""
    ending: tuple[str, str] | None = None
    """State and reason of the end of the run, according to the log; None if the log contains no end."""
    slow_since: float | None = None
    """Median step time with which the present slow steps are compared; None if the training is not slow."""


def judge(rows: LogRows, facts: Facts, limits: WatchSection) -> Verdict:
    """Return the condition of the training that writes a log."""
    stall = _stall(rows, facts, limits)
    if facts.ending is not None:
        state, reason = facts.ending
        condition = ENDS[RunState(state)]
        # An error that training survives is followed by further rows.
        if stall or condition is Condition.FINISHED or facts.quiet >= limits.failed_after_seconds:
            return Verdict(condition=condition, reason=reason)
    if stall is not None:
        return stall
    if not rows.rows:
        return Verdict(condition=Condition.WAITING, reason="the log contains no row of training yet")
    if (slow := _slow(rows, facts, limits)) is not None:
        return slow
    if facts.ending is not None:  # rows may still follow
        reason = f"{_pace(rows)}, followed by {facts.ending[1]}"
        return Verdict(condition=Condition.TRAINING, reason=reason, severity=Severity.WARNING)
    return Verdict(condition=Condition.TRAINING, reason=_pace(rows))


def stall_limit(rows: LogRows, limits: WatchSection) -> float:
    """Return the time without a row, in seconds, after which the training is stalled."""
    expected = rows.expected_seconds or 0.0
    limit = max(limits.stalled_factor * expected, limits.stalled_after_seconds)
    return limit if rows.phase is None else max(limit, limits.stalled_in_phase_after_seconds)


def _stall(rows: LogRows, facts: Facts, limits: WatchSection) -> Verdict | None:
    limit = stall_limit(rows, limits)
    if facts.silence <= limit:
        return None
    expected = rows.expected_seconds
    usual = "" if expected is None else f", expected every {expected:.3g} s"
    phase = "" if rows.phase is None else f", {rows.phase} may be in progress"
    silence = f"{facts.silence:.0f} s" if facts.silence < MINUTES_FROM_SECONDS else duration(facts.silence)
    return Verdict(
        condition=Condition.STALLED,
        reason=f"no {'row' if rows.rows else 'first row'} for {silence} ({facts.clock}){usual}{phase}",
        value=facts.silence,
        baseline=expected,
        threshold=limit,
    )


def _slow(rows: LogRows, facts: Facts, limits: WatchSection) -> Verdict | None:
    """Return the verdict that the last step is slow, or that slow steps are not over yet; None for normal steps."""
    times = rows.step_times(limits.warm_up_rows)
    if facts.slow_since is not None:
        median, compared = facts.slow_since, times[-limits.recovered_rows :]
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


def _pace(rows: LogRows) -> str:
    expected, last = rows.expected_seconds, rows.rows[-1]
    step = "" if last.step is None else f"step {last.step}"
    pace = "" if expected is None else f"a row every {expected:.3g} s"
    return ", ".join(filter(None, (step, pace))) or "rows arrive"
