"""All runs and what was heard of them: registrations, steps, exit words and silence. Pure: the clock is an argument.

A run is its latest attempt. An attempt has failed as soon as one rank raised or vanished without a word; it has ended
when all ranks it ever had did. Ranks that never registered are counted as missing, but prove nothing: a training may
watch rank 0 alone. What the facts say is decided in `rulings`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rankscope_contract.model.events import RunState
from rankscope_contract.protocol.channel import Registration
from rankscope_contract.security.redaction import redacted
from rankscope_ingest.runs.models import ARRIVAL_SECONDS, ENDED, Attempt, AttemptKey, Liveness, Patience, Rank
from rankscope_ingest.runs.state_machine import StateDecision, Timing, judge

__all__ = ["ARRIVAL_SECONDS", "ENDED", "Attempt", "AttemptKey", "Rank", "RunTracker", "Timing", "Verdict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one look at the clock brought: attempts whose state changed, and ranks that were found dead."""

    changed: tuple[Attempt, ...]
    vanished: tuple[tuple[Attempt, Rank], ...]


class RunTracker:
    """All attempts that may still change, and those that ended long ago or under a former service."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._attempts: dict[AttemptKey, Attempt] = {}
        self._past: dict[AttemptKey, Attempt] = {}
        self._newest: dict[str, int] = {}

    @property
    def patience(self) -> Patience:
        """Return after how much silence a rank is taken for dead."""
        return self._timing.patience

    def attempts(self) -> Iterable[Attempt]:
        """Return every attempt that is looked at."""
        return self._attempts.values()

    def get(self, key: AttemptKey) -> Attempt | None:
        """Return the attempt, or None."""
        return self._attempts.get(key)

    def latest(self) -> dict[str, Attempt]:
        """Return the newest attempt of each run; an older one that goes on alone does not speak for its run."""
        return {attempt.run: attempt for attempt in self._attempts.values() if self.is_newest(attempt)}

    def is_newest(self, attempt: Attempt) -> bool:
        """Return whether no later launch of the run is known."""
        return self._newest.get(attempt.run) == attempt.number

    def is_live(self, key: AttemptKey, number: int, incarnation: str) -> bool:
        """Return whether this process is at work as a rank: then `tick` finds out when it vanishes."""
        attempt = self._attempts.get(key)
        rank = None if attempt is None else attempt.ranks.get(number)
        return rank is not None and rank.incarnation == incarnation and not rank.has_ended

    def restore(self, attempt: Attempt, now: float = 0.0) -> None:
        """Put back an attempt that had not ended when a former service stopped; its ranks must speak up again."""
        # One that had stalled stays so until a step comes, though nobody knows any more since when.
        attempt.progressed_at = float("-inf") if attempt.state is RunState.STALLED else now
        self._attempts[attempt.key] = attempt
        self._note_number(attempt)

    def remember(self, attempt: Attempt) -> None:
        """Keep an attempt that had ended, in case one of its ranks speaks up after all."""
        self._past[attempt.key] = attempt
        self._note_number(attempt)

    def forget(self, key: AttemptKey) -> None:
        """Look no more at an attempt that ended, until one of its ranks speaks up."""
        if attempt := self._attempts.pop(key, None):
            if attempt.state is not RunState.FAILED:  # of a failed one, who was lost must be known when some come back
                attempt.ranks.clear()
            self._past[key] = attempt

    def is_over(self, key: AttemptKey, registration: Registration) -> bool:
        """Return whether a process that was never heard of begins a new attempt, though its launch id is known.

        Ranks without a process group derive their launch id, and derive the same one when they are started again.
        """
        attempt = self._attempts.get(key) or self._past.get(key)
        if attempt is None or attempt.live_ranks:
            return False
        if attempt.ranks:
            rank = attempt.ranks.get(registration.rank)
            return rank is not None and rank.incarnation != registration.incarnation
        return attempt.ended_at is not None and registration.started_at > attempt.ended_at

    def registered(self, registration: Registration, number: int, liveness: Liveness, wall: int) -> Attempt:
        """Note a registration or heartbeat."""
        key = (registration.run, number)
        attempt = self._wake(key)
        if attempt is None:
            attempt = self._attempts[key] = _new_attempt(registration, number, wall)
            if registration.served_by is None or not self._began_before_newest(attempt):
                self._note_number(attempt)
        attempt.world_size = max(attempt.world_size, registration.world_size)
        attempt.planned_steps = registration.planned_steps or attempt.planned_steps
        attempt.config = attempt.config or redacted(registration.config)  # a rank of another release may mask less
        rank = attempt.ranks.get(registration.rank)
        if rank is None or rank.incarnation != registration.incarnation:
            # An attempt put back without its ranks had counted this one before it ended.
            attempt.hear_news(of_work=bool(attempt.ranks))
            rank = attempt.ranks[registration.rank] = _new_rank(registration, liveness)
            attempt.progressed_at = max(attempt.progressed_at, liveness.last_sign)
        rank.liveness = liveness
        if rank.is_restored:
            rank.is_restored, rank.known_since, rank.phase = False, liveness.last_sign, registration.phase
        if rank.speaks():
            attempt.hear_news()
        if rank.phase != registration.phase:
            # Behind a long evaluation the next step is not late: its time begins now.
            rank.phase, attempt.progressed_at = registration.phase, liveness.last_sign
        return attempt

    def heard(self, key: AttemptKey, number: int, incarnation: str | None = None) -> None:
        """Note that a rank answered: whoever took it for dead was wrong."""
        if found := self._find(key, number, incarnation):
            attempt, rank = found
            rank.is_read = True
            if rank.speaks():
                attempt.hear_news()

    def stepped(
        self, key: AttemptKey, number: int, step: int | None, now: float, incarnation: str | None = None
    ) -> None:
        """Note records of a rank; a step may rewind, so any step but the one that is known counts as progress."""
        attempt = self._wake(key)
        if attempt is None or step is None:
            return
        found = self._find(key, number, incarnation)
        known = attempt.last_step if found is None or found[1].last_step is None else found[1].last_step
        if step != known:  # a rank that hangs says so under its last step, which is no progress
            attempt.progressed_at = now
        attempt.last_step = step if attempt.last_step is None else max(attempt.last_step, step)
        if found is not None:
            rank = found[1]
            rank.last_step, rank.stepped_at = step, now
            attempt.hear_news(of_work=not rank.has_ended)

    def exited(
        self,
        key: AttemptKey,
        number: int,
        reason: str,
        error: str | None,
        *,
        at: int | None = None,
        incarnation: str | None = None,
    ) -> None:
        """Note the last word of a process, which is the first one heard; `at` is when, in UTC µs by its own clock."""
        found = self._find(key, number, incarnation)
        if found is not None and found[1].exit_reason is None:
            attempt, rank = found
            rank.exit_reason, rank.error, rank.exited_at = reason, error, at
            attempt.hear_news(of_work=True)

    def closed(self, key: AttemptKey, number: int, incarnation: str | None = None) -> None:
        """Note that a rank handed over everything and ends."""
        if found := self._find(key, number, incarnation):
            attempt, rank = found
            rank.is_closed = True
            attempt.hear_news()

    def excuse(self, seconds: float, now: float) -> None:
        """Take `seconds` in which the service itself could not listen off everybody's silence."""
        for attempt in self._attempts.values():
            attempt.progressed_at = min(now, attempt.progressed_at + seconds)
            for rank in attempt.live_ranks:
                rank.liveness.excuse(seconds, now)

    def tick(self, now: float, wall: int) -> Verdict:
        """Judge every attempt at this moment."""
        changed, vanished = [], []
        for attempt in self._attempts.values():
            vanished += [(attempt, rank) for rank in self._find_vanished(attempt, now, wall)]
            ruling = judge(attempt, now, wall, self._timing)
            if ruling is not None and _follow(attempt, ruling, now, wall):
                changed.append(attempt)
        return Verdict(changed=tuple(changed), vanished=tuple(vanished))

    def _began_before_newest(self, attempt: Attempt) -> bool:
        """Return whether a launch that was heard of late, by what a dead process left, is older than the newest."""
        key = (attempt.run, self._newest.get(attempt.run, attempt.number))
        newest = self._attempts.get(key) or self._past.get(key) or attempt
        return attempt.started_at < newest.started_at

    def _note_number(self, attempt: Attempt) -> None:
        self._newest[attempt.run] = max(attempt.number, self._newest.get(attempt.run, 0))

    def _wake(self, key: AttemptKey) -> Attempt | None:
        """Return the attempt, and look at it again when it had ended long ago."""
        if key in self._past:
            self._attempts[key] = self._past.pop(key)
        return self._attempts.get(key)

    def _find(self, key: AttemptKey, number: int, incarnation: str | None) -> tuple[Attempt, Rank] | None:
        """Return the rank; None for a process whose place another one has taken: its words are not about that one."""
        attempt = self._wake(key)
        rank = None if attempt is None else attempt.ranks.get(number)
        if attempt is None or rank is None or incarnation not in {None, rank.incarnation}:
            return None
        return attempt, rank

    def _find_vanished(self, attempt: Attempt, now: float, wall: int) -> list[Rank]:
        found = [rank for rank in attempt.live_ranks if rank.liveness.has_vanished(now, self._timing.patience)]
        for rank in found:
            rank.vanish(now, wall)
            attempt.hear_news()
        return found


def _follow(attempt: Attempt, ruling: StateDecision, now: float, wall: int) -> bool:
    """Let `attempt` be as `ruling` says; return whether that is worth a new version."""
    has_ended = ruling.state in ENDED
    is_change = ruling.state is not attempt.state or (has_ended and ruling.reason != attempt.reason)
    attempt.culprit, attempt.evidence = ruling.culprit, ruling.evidence
    attempt.judged()
    if not is_change:
        return False
    if not (has_ended and attempt.has_ended):
        attempt.settled_at = now if has_ended else None
    attempt.judged_at = now if has_ended else None
    attempt.state, attempt.reason = ruling.state, ruling.reason
    # A rank's clock may be off, and an end is never before the start nor in the future.
    moment = min(wall, max(attempt.started_at, wall if ruling.moment is None else ruling.moment))
    attempt.ended_at = moment if has_ended else None
    return True


def _new_attempt(registration: Registration, number: int, wall: int) -> Attempt:
    return Attempt(
        run=registration.run,
        number=number,
        launch_id=registration.launch_id,
        world_size=registration.world_size,
        started_at=registration.started_at or wall,
    )


def _new_rank(registration: Registration, liveness: Liveness) -> Rank:
    return Rank(
        number=registration.rank,
        incarnation=registration.incarnation,
        host=registration.host,
        liveness=liveness,
        known_since=liveness.last_sign,
    )
