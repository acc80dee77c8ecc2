"""Track all runs: registrations, steps, exit reports and timeouts of their ranks. The caller passes the time.

The state of a run is the state of its latest attempt. An attempt fails as soon as one rank raised an exception, or
stopped responding without an exit report. An attempt ends when all its ranks have ended. Ranks that never registered
count as missing, but are no evidence of a failure: a training may monitor only rank 0. docs/runs.md shows the rules of
the states as a table. The module performs no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rankscope_contract.model.events import ExitReason, RunState
from rankscope_contract.model.redaction import redacted
from rankscope_contract.wire.channel import Registration
from rankscope_ingest.base.config import RunsSection
from rankscope_ingest.runs.models import ENDED, Attempt, AttemptKey, Cause, EndKind, Liveness, Rank, first_cause
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


class RunTracker:
    """All attempts of all runs.

    An attempt that ended long ago or under an earlier service is a past attempt, whose state is not evaluated.
    """

    def __init__(self, limits: RunsSection) -> None:
        self.limits = limits
        self._attempts: dict[AttemptKey, Attempt] = {}
        self._past: dict[AttemptKey, Attempt] = {}
        self._newest: dict[str, int] = {}

    def attempts(self) -> Iterable[Attempt]:
        """Return the attempts whose state is still evaluated."""
        return self._attempts.values()

    def get(self, key: AttemptKey) -> Attempt | None:
        """Return the attempt with this key.

        The result is None if the key is unknown, or if the state of the attempt is no longer evaluated.
        """
        return self._attempts.get(key)

    def known(self, key: AttemptKey) -> Attempt | None:
        """Return the attempt with this key, also if its state is no longer evaluated; None if the key is unknown."""
        return self._attempts.get(key) or self._past.get(key)

    def later(self, key: AttemptKey) -> list[Attempt]:
        """Return the known attempts of the same run after the attempt `key`."""
        run, number = key
        numbers = range(number + 1, self._newest.get(run, number) + 1)
        return [attempt for one in numbers if (attempt := self.known((run, one))) is not None]

    def latest(self) -> dict[str, Attempt]:
        """Return the attempt of each run whose state is that of the run: the newest one, by run.

        If the newest one has ended, but an older one trains at the same time, it is the newest of those. A run is left
        out if the state of its newest attempt is no longer evaluated, and none trains.
        """
        found = {one.run: one for one in self._attempts.values() if one.number == self._newest.get(one.run)}
        return found | {older.run: older for older, newest in self.simultaneous(0.0) if newest.has_ended}

    def simultaneous(self, seconds: float) -> list[tuple[Attempt, Attempt]]:
        """Return a live attempt and the newest one of its run, if both train or trained at the same time.

        They have trained together for at least `seconds`. The live attempts are in ascending order of their numbers.
        """
        older = sorted(self._attempts.values(), key=lambda one: one.number)
        pairs = ((one, self.known((one.run, self._newest.get(one.run, -1)))) for one in older)
        return [(one, last) for one, last in pairs if last is not None and one.trains_beside(last, seconds)]

    def is_live(self, key: AttemptKey, number: int, incarnation: str) -> bool:
        """Return whether `incarnation` is the live process of rank `number`.

        `tick` checks the timeouts of such a process.
        """
        attempt = self._attempts.get(key)
        rank = None if attempt is None else attempt.ranks.get(number)
        return rank is not None and rank.incarnation == incarnation and not rank.has_ended

    def restore(self, attempt: Attempt, now: float = 0.0) -> None:
        """Add an attempt that was read from the store and whose state is still evaluated.

        The timeouts of its ranks start at `now`, in monotonic seconds.
        """
        # A stalled attempt remains stalled until its next step; the store does not contain the time of the last step.
        attempt.progressed_at = float("-inf") if attempt.state is RunState.STALLED else now
        self._attempts[attempt.key] = attempt
        self._note_number(attempt)

    def remember(self, attempt: Attempt) -> None:
        """Add an ended attempt that was read from the store as a past attempt.

        The state of a past attempt is evaluated again only if one of its ranks reports.
        """
        self._past[attempt.key] = attempt
        self._note_number(attempt)

    def forget(self, key: AttemptKey) -> None:
        """Move an ended attempt to the past attempts.

        The state of a past attempt is evaluated again only if one of its ranks reports.
        """
        if attempt := self._attempts.pop(key, None):
            if attempt.state is not RunState.FAILED:  # a failed one keeps its lost ranks: only some may come back
                attempt.ranks.clear()
            self._past[key] = attempt

    def is_over(self, key: AttemptKey, registration: Registration) -> bool:
        """Return whether the attempt `key` is over, so that the registering process starts a new attempt.

        Ranks without a process group derive their launch id from environment variables, such as the master address.
        When such a rank is started again, it derives the same launch id. A known launch id therefore does not prove
        that the attempt continues.
        """
        attempt = self.known(key)
        if attempt is None or attempt.live_ranks:
            return False
        if attempt.ranks:
            rank = attempt.ranks.get(registration.rank)
            return rank is not None and rank.incarnation != registration.incarnation
        return attempt.ended_at is not None and registration.started_at > attempt.ended_at

    def registered(
        self, registration: Registration, number: int, liveness: Liveness, wall: int, jumped: int = 0
    ) -> Attempt:
        """Record a registration or heartbeat for attempt `number`; return the attempt.

        `wall` is the present time in UTC µs. `jumped` is the sum of the jumps of this clock so far, in µs.
        """
        key = (registration.run, number)
        attempt = self._wake(key)
        if attempt is None:
            attempt = self._attempts[key] = _new_attempt(registration, number, wall, jumped)
            newest = self.known((attempt.run, self._newest.get(attempt.run, attempt.number))) or attempt
            # A spool can belong to a launch that is older than the newest one, although it is found later.
            if registration.served_by is None or attempt.started_at >= newest.started_at:
                self._note_number(attempt)
        attempt.world_size = max(attempt.world_size, registration.world_size)
        attempt.planned_steps = registration.planned_steps or attempt.planned_steps
        attempt.config = attempt.config or redacted(registration.config)  # other releases may mask less
        rank = attempt.ranks.get(registration.rank)
        if rank is None or rank.incarnation != registration.incarnation:
            # An attempt that was restored without its ranks had counted this one before it ended.
            attempt.note_activity(of_work=bool(attempt.ranks))
            rank = attempt.ranks[registration.rank] = Rank(
                number=registration.rank,
                incarnation=registration.incarnation,
                host=registration.host,
                liveness=liveness,
                known_since=liveness.last_sign,
            )
            attempt.progressed_at = max(attempt.progressed_at, liveness.last_sign)
        rank.liveness = liveness
        if rank.is_restored:
            rank.is_restored, rank.known_since, rank.phase = False, liveness.last_sign, registration.phase
        if rank.revive():
            attempt.note_activity()
        if rank.phase != registration.phase:
            # After a long evaluation, the next step is not late: the time without a step starts here.
            rank.phase, attempt.progressed_at = registration.phase, liveness.last_sign
        return attempt

    def answered(self, key: AttemptKey, number: int, incarnation: str | None = None) -> None:
        """Record that a rank responded to a poll. If the rank was considered dead, it is alive again."""
        if found := self._find(key, number, incarnation):
            attempt, rank = found
            rank.is_read = True
            if rank.revive():
                attempt.note_activity()

    def stepped(
        self, key: AttemptKey, number: int, step: int | None, now: float, incarnation: str | None = None
    ) -> None:
        """Record the last step of new records of a rank.

        A lower step counts as progress too, because training may return to an earlier step. `now` is in monotonic
        seconds.
        """
        attempt = self._wake(key)
        if attempt is None or step is None:
            return
        found = self._find(key, number, incarnation)
        known = attempt.last_step if found is None or found[1].last_step is None else found[1].last_step
        if step != known:  # a rank that hangs reports this under its last step, which is no progress
            attempt.progressed_at = now
        attempt.last_step = step if attempt.last_step is None else max(attempt.last_step, step)
        attempt.first_step = step if attempt.first_step is None else min(attempt.first_step, step)
        if found is not None:
            rank = found[1]
            rank.last_step = step
            rank.stepped_at = rank.stepped_at if step == known else now
            attempt.note_activity(of_work=not rank.has_ended)

    def exited(
        self,
        key: AttemptKey,
        number: int,
        reason: str,
        error: str | None,
        *,
        at: int | None = None,
        step: int | None = None,
        incarnation: str | None = None,
    ) -> None:
        """Record the exit report of a process; later reports of the same process are ignored.

        `at` is the time of the exit in UTC µs, by the clock of the process. `step` is its last completed step.
        """
        found = self._find(key, number, incarnation)
        if found is not None and found[1].exit_reason is None:
            attempt, rank = found
            rank.exit_reason, rank.error, rank.exited_at, rank.completed_step = reason, error, at, step
            attempt.note_activity(of_work=True)

    def closed(self, key: AttemptKey, number: int, incarnation: str | None = None) -> None:
        """Record that a rank has ended and that all its records are committed."""
        if found := self._find(key, number, incarnation):
            attempt, rank = found
            rank.is_closed = True
            attempt.note_activity()

    def exclude(self, seconds: float, now: float) -> None:
        """Do not count `seconds` toward the timeouts of all ranks.

        The caller calls this method after a pause of `seconds` in which the service itself did not run.
        """
        for attempt in self._attempts.values():
            attempt.progressed_at = min(now, attempt.progressed_at + seconds)
            for rank in attempt.live_ranks:
                rank.liveness.exclude(seconds, now)

    def set_clock(self, jump: int) -> None:
        """Record that the wall clock of the service was set forward by `jump` µs."""
        for attempt in (*self._attempts.values(), *self._past.values()):
            attempt.clock_offset += jump

    def tick(self, now: float, wall: int) -> tuple[list[Attempt], list[Rank]]:
        """Find dead ranks and evaluate the state of every attempt. `now` is in monotonic seconds, `wall` in UTC µs.

        Return the attempts whose state changed, and the ranks that are now considered dead.
        """
        changed: list[Attempt] = []
        vanished: list[Rank] = []
        for attempt in self._attempts.values():
            moment = wall - attempt.clock_offset
            for rank in attempt.live_ranks:
                if rank.liveness.has_vanished(now, self.limits):
                    rank.vanish(now, moment)
                    attempt.note_activity()
                    vanished.append(rank)
            decision = judge(attempt, now, moment, self.limits)
            if decision is not None and _apply(attempt, decision, now, moment):
                changed.append(attempt)
        return changed, vanished

    def _note_number(self, attempt: Attempt) -> None:
        self._newest[attempt.run] = max(attempt.number, self._newest.get(attempt.run, 0))

    def _wake(self, key: AttemptKey) -> Attempt | None:
        """Return the attempt with this key, or None if the key is unknown.

        If the state of the attempt was no longer evaluated, it is evaluated again from now on.
        """
        if key in self._past:
            self._attempts[key] = self._past.pop(key)
        return self._attempts.get(key)

    def _find(self, key: AttemptKey, number: int, incarnation: str | None) -> tuple[Attempt, Rank] | None:
        """Return the attempt with the key `key` and its rank with the number `number`.

        Return None if the rank is unknown, or if another process of the rank has replaced the process `incarnation`.
        """
        attempt = self._wake(key)
        rank = None if attempt is None else attempt.ranks.get(number)
        if attempt is None or rank is None or incarnation not in {None, rank.incarnation}:
            return None
        return attempt, rank


def _apply(attempt: Attempt, decision: StateDecision, now: float, wall: int) -> bool:
    """Set the state of `attempt` to that of `decision`; return whether the attempt changed and must be stored again."""
    has_ended = decision.state in ENDED
    is_change = decision.state is not attempt.state or (has_ended and decision.reason != attempt.reason)
    attempt.culprit, attempt.evidence = decision.culprit, decision.evidence
    attempt.has_activity = attempt.is_reopened = False
    if not is_change:
        return False
    if not (has_ended and attempt.has_ended):
        attempt.settled_at = now if has_ended else None
    attempt.judged_at = now if has_ended else None
    attempt.state, attempt.reason = decision.state, decision.reason
    # The clock of a rank may be wrong. An end is never before the start, and never in the future. A present time before
    # the start means that the clock of this service was set back.
    moment = max(attempt.started_at, wall if decision.moment is None else decision.moment)
    moment = min(wall, moment) if wall >= attempt.started_at else moment
    attempt.ended_at = moment if has_ended else None
    return True


def _new_attempt(registration: Registration, number: int, wall: int, jumped: int) -> Attempt:
    # The clock of a rank may be ahead. A start in the future would be later than the end of the attempt. If the clock
    # of this service was set back, that of the rank may still be right.
    started_at = min(registration.started_at or wall, max(wall, wall - jumped))
    return Attempt(
        run=registration.run,
        number=number,
        launch_id=registration.launch_id,
        world_size=registration.world_size,
        started_at=started_at,
        clock_offset=jumped if started_at > wall else 0,
    )
