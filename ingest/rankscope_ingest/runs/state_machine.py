"""The state machine of an attempt: decide the state from the facts about its ranks.

The module performs no I/O. docs/runs.md shows the state machine as a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rankscope_contract.model.events import ExitReason, RunState
from rankscope_ingest.base.config import RunsSection
from rankscope_ingest.runs.models import Attempt
from rankscope_ingest.runs.root_cause import Cause, EndKind, first_cause
from rankscope_ingest.runs.text import (
    NO_SUCCESS,
    exit_reports,
    failure_evidence,
    failure_reason,
    short_of_plan,
    stall_reason,
)

CALM_ENDS: Final = frozenset({RunState.COMPLETED, RunState.STOPPED})


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDecision:
    """The state of an attempt at one evaluation.

    `moment` is the end of the attempt in UTC µs. `culprit` is the rank that failed first, or None if it is unknown.
    """

    state: RunState
    reason: str | None = None
    culprit: int | None = None
    evidence: str | None = None  # of a failed attempt: reason why that rank is named, or why none is
    moment: int | None = None


def judge(attempt: Attempt, now: float, wall: int, limits: RunsSection) -> StateDecision | None:
    """Return the state of `attempt`, or None if the attempt has ended and its state does not change.

    `now` is in monotonic seconds, `wall` in UTC µs. The state of an ended attempt is evaluated again only when one of
    its ranks is active, because a restarted service has less information than the previous process. If a rank only
    delivers records that the store already has, a completed or stopped attempt is not reopened.
    """
    if attempt.has_ended and not attempt.has_activity:
        return None
    if attempt.state in CALM_ENDS and not attempt.is_reopened:
        return None
    cause = first_cause(attempt, wall)
    if cause is not None and cause.kind is not EndKind.SIGNALLED:
        return StateDecision(
            state=RunState.FAILED,
            reason=failure_reason(cause),
            culprit=cause.culprit,
            evidence=failure_evidence(cause),
            moment=cause.moment,
        )
    if attempt.ranks and not attempt.live_ranks:
        return _ended(attempt, cause, wall)
    idle = now - attempt.progressed_at
    is_in_phase = attempt.last_step is None or any(rank.phase for rank in attempt.live_ranks)
    if idle >= (limits.stalled_in_phase_after_seconds if is_in_phase else limits.stalled_after_seconds):
        return StateDecision(state=RunState.STALLED, reason=stall_reason(attempt, idle))
    return StateDecision(state=RunState.PENDING if attempt.last_step is None else RunState.RUNNING)


def _ended(attempt: Attempt, signal: Cause | None, wall: int) -> StateDecision:
    """Return the final state of an attempt that has no live and no failed ranks: stopped or completed.

    `signal` has the ranks that a signal ended; it is None if there are none. `wall` is the present time in UTC µs.
    """
    ranks = attempt.ranks.values()
    moment = max((rank.exited_at for rank in ranks if rank.exited_at is not None), default=wall)
    if signal is not None:
        return StateDecision(state=RunState.STOPPED, reason=failure_reason(signal), moment=moment)
    if all(rank.exit_reason == ExitReason.COMPLETED for rank in ranks):
        return StateDecision(state=RunState.COMPLETED, reason=short_of_plan(attempt), moment=moment)
    reported = [rank for rank in ranks if rank.error]
    return StateDecision(
        state=RunState.STOPPED, reason=exit_reports(reported) if reported else NO_SUCCESS, moment=moment
    )
