"""The state machine of an attempt: what its facts say about it at one moment. Pure; docs/runs.md has it as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rankscope_contract.model.events import RunState
from rankscope_ingest.runs.models import Attempt, Patience
from rankscope_ingest.runs.root_cause import Cause, Kind, end_of, ending, first_cause

CALM_ENDS: Final = frozenset({RunState.COMPLETED, RunState.STOPPED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long things may take."""

    patience: Patience
    stalled_after_seconds: float
    stalled_in_phase_after_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDecision:
    """Where an attempt stands. `moment` is when it ended, in UTC µs; `culprit` the rank that failed first, if known."""

    state: RunState
    reason: str | None = None
    culprit: int | None = None
    evidence: str | None = None  # why that rank is named, or why none is; of an attempt that failed
    moment: int | None = None


def judge(attempt: Attempt, now: float, wall: int, timing: Timing) -> StateDecision | None:
    """Return where `attempt` stands; None for one that ended and stays as it is.

    An attempt that ended is left alone until news of its ranks: a restarted service knows less than the former one.
    A rank that only hands over what is stored already does not bring back what was completed or stopped.
    """
    if attempt.has_ended and not attempt.has_news:
        return None
    if attempt.state in CALM_ENDS and not attempt.is_reopened:
        return None
    cause = first_cause(attempt, wall)
    if cause is not None and cause.kind is not Kind.SIGNALLED:
        return _failed(cause)
    if attempt.ranks and not attempt.live_ranks:
        return _ended(attempt, cause, wall)
    return _at_work(attempt, now, timing)


def _failed(cause: Cause) -> StateDecision:
    return StateDecision(
        state=RunState.FAILED,
        reason=cause.words,
        culprit=cause.culprit,
        evidence=cause.evidence,
        moment=cause.moment,
    )


def _ended(attempt: Attempt, signal: Cause | None, wall: int) -> StateDecision:
    moment = end_of(attempt.ranks.values(), wall)
    if signal is not None:
        return StateDecision(state=RunState.STOPPED, reason=signal.words, moment=moment)
    state, reason = ending(attempt)
    return StateDecision(state=state, reason=reason, moment=moment)


def _at_work(attempt: Attempt, now: float, timing: Timing) -> StateDecision:
    idle = now - attempt.progressed_at
    if attempt.last_step is None:
        if idle < timing.stalled_in_phase_after_seconds:
            return StateDecision(state=RunState.PENDING)
        missing = attempt.world_size - len(attempt.ranks)
        who = f"; {missing} of {attempt.world_size} ranks never registered" if missing > 0 else ""
        return StateDecision(state=RunState.STALLED, reason=f"alive, but no first step for {idle:.0f} s{who}")
    in_phase = any(rank.phase for rank in attempt.live_ranks)
    limit = timing.stalled_in_phase_after_seconds if in_phase else timing.stalled_after_seconds
    if idle < limit:
        return StateDecision(state=RunState.RUNNING)
    return StateDecision(state=RunState.STALLED, reason=f"alive, but no step for {idle:.0f} s")
