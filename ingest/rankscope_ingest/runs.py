"""Where each run stands, decided from registrations, steps, exit words and silence. Pure: the clock is an argument.

A run is its latest attempt. An attempt has failed as soon as one rank raised or vanished without a word; it has ended
when all ranks it ever had did. Ranks that never registered are counted as missing, but prove nothing: a training may
watch rank 0 alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from rankscope_contract.channel import Registration
from rankscope_contract.events import ExitReason, RunState
from rankscope_ingest.vitals import Patience, Vitals

ENDED: Final = frozenset({RunState.COMPLETED, RunState.STOPPED, RunState.FAILED})

ARRIVAL_SECONDS: Final = 6.0
"""How long a rank may take from a restart of the service, or from its registration, to its first answer."""

AttemptKey = tuple[str, int]


@dataclass(slots=True, kw_only=True)
class Rank:
    """One rank of one attempt."""

    number: int
    incarnation: str
    host: str
    vitals: Vitals
    known_since: float  # restored or registered; monotonic seconds
    last_step: int | None = None
    stepped_at: float | None = None
    phase: str | None = None
    exit_reason: str | None = None
    error: str | None = None
    is_restored: bool = False  # known from the store, and not registered since this service started
    is_read: bool = False  # it answered a poll
    is_closed: bool = False  # it drained and said so
    is_vanished: bool = False

    @property
    def has_ended(self) -> bool:
        """Return whether nothing more is expected of the process."""
        return self.exit_reason is not None or self.is_closed or self.is_vanished


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One launch of a run. Times named `_at` with a µs comment are wall clock, the others monotonic seconds."""

    run: str
    number: int
    launch_id: str
    world_size: int
    started_at: int  # UTC µs
    planned_steps: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    ranks: dict[int, Rank] = field(default_factory=dict)
    state: RunState = RunState.PENDING
    reason: str | None = None
    ended_at: int | None = None  # UTC µs
    last_step: int | None = None

    @property
    def key(self) -> AttemptKey:
        """Return run and number."""
        return self.run, self.number

    @property
    def live_ranks(self) -> list[Rank]:
        """Return the ranks that still run, as far as is known."""
        return [rank for rank in self.ranks.values() if not rank.has_ended]

    def is_arriving(self, now: float) -> bool:
        """Return whether a rank that became known a moment ago has not been read yet: it may know more."""
        return any(not rank.is_read and now - rank.known_since < ARRIVAL_SECONDS for rank in self.live_ranks)

    @property
    def ranks_missing(self) -> int:
        """Return how many ranks of the world are not alive; 0 for an attempt that ended as it should."""
        if self.state in {RunState.COMPLETED, RunState.STOPPED}:
            return 0
        return max(0, self.world_size - len(self.live_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long things may take."""

    patience: Patience
    stalled_after_seconds: float
    stalled_in_phase_after_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one look at the clock brought: attempts whose state changed, and ranks that were found dead."""

    changed: tuple[Attempt, ...]
    vanished: tuple[tuple[Attempt, Rank], ...]


class RunBook:
    """All attempts that may still change, and those that ended since the service started."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._attempts: dict[AttemptKey, Attempt] = {}
        self._past: dict[AttemptKey, Attempt] = {}

    def attempts(self) -> Iterable[Attempt]:
        """Return every attempt known."""
        return self._attempts.values()

    def get(self, key: AttemptKey) -> Attempt | None:
        """Return the attempt, or None."""
        return self._attempts.get(key)

    def latest(self) -> dict[str, Attempt]:
        """Return the highest attempt of each run."""
        return {attempt.run: attempt for _, attempt in sorted(self._attempts.items())}

    def restore(self, attempt: Attempt) -> None:
        """Put back an attempt that had not ended when a former service stopped; its ranks must speak up again."""
        self._attempts[attempt.key] = attempt

    def remember(self, attempt: Attempt) -> None:
        """Keep an attempt that had ended, in case one of its ranks speaks up after all."""
        self._past[attempt.key] = attempt

    def registered(self, registration: Registration, number: int, vitals: Vitals, wall: int) -> Attempt:
        """Note a registration or heartbeat."""
        key = (registration.run, number)
        attempt = self._attempts.get(key) or self._past.pop(key, None) or _new_attempt(registration, number, wall)
        self._attempts[key] = attempt
        attempt.world_size = max(attempt.world_size, registration.world_size)
        attempt.planned_steps = registration.planned_steps or attempt.planned_steps
        attempt.config = attempt.config or registration.config
        rank = attempt.ranks.get(registration.rank)
        if rank is None or rank.incarnation != registration.incarnation:
            rank = attempt.ranks[registration.rank] = Rank(
                number=registration.rank,
                incarnation=registration.incarnation,
                host=registration.host,
                vitals=vitals,
                known_since=vitals.last_sign,
            )
        rank.vitals = vitals
        if rank.is_restored:
            rank.is_restored, rank.known_since = False, vitals.last_sign
        rank.is_vanished = False
        rank.phase = registration.phase
        return attempt

    def heard(self, key: AttemptKey, number: int) -> None:
        """Note that a rank answered: whoever took it for dead was wrong."""
        if rank := self._rank(key, number):
            rank.is_vanished, rank.is_read = False, True

    def stepped(self, key: AttemptKey, number: int, step: int | None, now: float) -> None:
        """Note records of a rank; a step may rewind, any record with a step counts as progress."""
        rank = self._rank(key, number)
        if rank is None or step is None:
            return
        rank.last_step, rank.stepped_at = step, now
        attempt = self._attempts[key]
        attempt.last_step = step if attempt.last_step is None else max(attempt.last_step, step)

    def exited(self, key: AttemptKey, number: int, reason: str, error: str | None) -> None:
        """Note the last word of a process."""
        if rank := self._rank(key, number):
            rank.exit_reason, rank.error = reason, error

    def closed(self, key: AttemptKey, number: int) -> None:
        """Note that a rank handed over everything and ends."""
        if rank := self._rank(key, number):
            rank.is_closed = True

    def forget(self, key: AttemptKey) -> None:
        """Drop an attempt that ended."""
        self._attempts.pop(key, None)

    def tick(self, now: float, wall: int) -> Verdict:
        """Judge every attempt at this moment."""
        changed, vanished = [], []
        for attempt in self._attempts.values():
            vanished += [(attempt, rank) for rank in self._find_vanished(attempt, now)]
            state, reason = self._judge(attempt, now)
            if state is not attempt.state or (state in ENDED and reason != attempt.reason):
                attempt.state, attempt.reason = state, reason
                attempt.ended_at = wall if state in ENDED else None
                changed.append(attempt)
        return Verdict(changed=tuple(changed), vanished=tuple(vanished))

    def _rank(self, key: AttemptKey, number: int) -> Rank | None:
        attempt = self._attempts.get(key)
        return None if attempt is None else attempt.ranks.get(number)

    def _find_vanished(self, attempt: Attempt, now: float) -> list[Rank]:
        found = [rank for rank in attempt.live_ranks if rank.vitals.has_vanished(now, self._timing.patience)]
        for rank in found:
            rank.is_vanished = True
        return found

    def _judge(self, attempt: Attempt, now: float) -> tuple[RunState, str | None]:
        ranks = [attempt.ranks[number] for number in sorted(attempt.ranks)]
        for rank in ranks:
            if rank.exit_reason == ExitReason.EXCEPTION:
                return RunState.FAILED, f"rank {rank.number}: {rank.error or 'ended with an exception'}"
        for rank in ranks:
            if rank.is_vanished and rank.exit_reason is None and not rank.is_closed:
                return RunState.FAILED, f"rank {rank.number} on {rank.host} vanished without a word"
        if ranks and not attempt.live_ranks:
            return _ending(ranks)
        if attempt.last_step is None:
            return RunState.PENDING, None
        idle = self._idle_seconds(attempt, now)
        if idle is not None:
            return RunState.STALLED, f"alive, but no step for {idle:.0f} s"
        return RunState.RUNNING, None

    def _idle_seconds(self, attempt: Attempt, now: float) -> float | None:
        """Return how long no rank made a step, when that is longer than it may be in the announced phase."""
        steps = [rank.stepped_at for rank in attempt.live_ranks if rank.stepped_at is not None]
        in_phase = any(rank.phase for rank in attempt.live_ranks)
        limit = self._timing.stalled_in_phase_after_seconds if in_phase else self._timing.stalled_after_seconds
        idle = now - max(steps, default=math.inf)
        return idle if idle >= limit else None


def _new_attempt(registration: Registration, number: int, wall: int) -> Attempt:
    return Attempt(
        run=registration.run,
        number=number,
        launch_id=registration.launch_id,
        world_size=registration.world_size,
        started_at=registration.started_at or wall,
    )


def _ending(ranks: Iterable[Rank]) -> tuple[RunState, str | None]:
    reasons = {rank.exit_reason for rank in ranks}
    if reasons == {ExitReason.COMPLETED}:
        return RunState.COMPLETED, None
    if ExitReason.SIGNAL in reasons:
        signalled = next(rank for rank in ranks if rank.exit_reason == ExitReason.SIGNAL)
        return RunState.STOPPED, f"rank {signalled.number}: {signalled.error or 'ended by a signal'}"
    return RunState.STOPPED, "ended without saying that it was done"
