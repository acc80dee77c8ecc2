"""Facts about an attempt and its ranks, from which `tracker` decides the state of the attempt.

`first_cause` finds the rank that failed first. When one rank fails, the others usually fail within seconds, because
they lose the connection to their peer or the launcher ends them. Their reports may arrive earlier than the report of
the first rank, so the order of arrival is no evidence. If the evidence does not identify the first rank, none is named.

A `Target` is one polled process: its identity, the positions up to which its records were read and committed, and its
health.
"""

from __future__ import annotations

import enum
import math
import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from rankscope_contract.model.events import ExitReason, RunState
from rankscope_contract.wire.channel import NOTHING, Registration
from rankscope_ingest.base.config import RunsSection
from rankscope_ingest.runs.blame import STEPS_BEHIND

ENDED: Final = frozenset({RunState.COMPLETED, RunState.STOPPED, RunState.FAILED})

ARRIVAL_SECONDS: Final = 6.0
"""Time in seconds for which incidents wait for the first successful poll of a new rank.

The time starts when the rank registers or when the restarted service restores the rank from the store.
"""

AttemptKey = tuple[str, int]
"""(run, attempt number), the key of an attempt."""


@dataclass(slots=True, kw_only=True)
class Liveness:
    """Latest evidence that a process is alive or not. Times are seconds of the service's monotonic clock."""

    last_sign: float
    last_refused: float = -math.inf

    def note_sign(self, now: float) -> None:
        """Record a sign of life of the process at `now`: a heartbeat or a response."""
        self.last_sign = max(self.last_sign, now)

    def note_refusal(self, now: float) -> None:
        """Record a refused connection at `now`: the port of the process is closed, or another process uses it."""
        self.last_refused = max(self.last_refused, now)

    def exclude(self, seconds: float, now: float) -> None:
        """Do not count `seconds` toward the timeouts of the process.

        The caller calls this method after a pause of `seconds` in which the service could not receive anything.
        """
        shift = min(seconds, now - self.last_sign)
        self.last_sign += shift
        self.last_refused += shift

    def is_alive(self, now: float, ttl_seconds: float) -> bool:
        """Return whether the process is considered alive at `now`.

        Its last heartbeat or response must be less than `ttl_seconds` old, and the process must not have refused a
        connection since then.
        """
        return self.last_refused <= self.last_sign and now - self.last_sign < ttl_seconds

    def has_vanished(self, now: float, limits: RunsSection) -> bool:
        """Return whether the process must be considered dead at `now`.

        A refused connection alone is not sufficient: while heartbeats arrive, only the HTTP server of the rank may have
        failed. The refused connection only shortens the timeout after the last sign of life.
        """
        is_refused = self.last_refused > self.last_sign
        limit = limits.refused_after_seconds if is_refused else limits.failed_after_seconds
        return now - self.last_sign >= limit


@dataclass(slots=True, kw_only=True)
class Rank:
    """One rank of one attempt.

    Fields with the comment `UTC µs` are wall clock time; all other times are monotonic seconds.
    """

    number: int
    incarnation: str
    host: str
    liveness: Liveness
    known_since: float  # time of its restoration or registration
    last_step: int | None = None
    stepped_at: float = -math.inf  # time at which the service received its last step
    phase: str | None = None
    exit_reason: str | None = None
    error: str | None = None
    exited_at: int | None = None  # UTC µs, by the clock of the rank
    completed_step: int | None = None  # according to its exit report; None: `last_step` is complete
    is_restored: bool = False  # read from the store, and not registered since this service started
    is_read: bool = False  # it has answered a poll
    is_closed: bool = False  # it has drained: the store has all its records
    is_vanished: bool = False
    silent_from: int | None = None  # UTC µs: last sign of life before it vanished
    silent_until: int | None = None  # UTC µs: time at which the service found that it had vanished
    never_answered: bool = False  # it vanished without an answer to this service

    @property
    def has_ended(self) -> bool:
        """Return whether the process has ended as far as the service knows.

        It has ended if it sent an exit report, was drained, or vanished.
        """
        return self.exit_reason is not None or self.is_closed or self.is_vanished

    @property
    def is_lost(self) -> bool:
        """Return whether the process vanished without an exit report and before it was drained."""
        return self.is_vanished and self.exit_reason is None and not self.is_closed

    def revive(self) -> bool:
        """Record a sign of life of the process; return whether the process was considered dead before."""
        was_vanished, self.is_vanished, self.never_answered = self.is_vanished, False, False
        return was_vanished

    def vanish(self, now: float, wall: int) -> None:
        """Record that the process is considered dead from now on.

        `now` is the time in monotonic seconds, `wall` the same time in UTC µs. If the rank was read from the store and
        never responded to this service, the time of its last sign of life is unknown.
        """
        self.is_vanished, self.never_answered, self.silent_until = True, self.is_restored, wall
        self.silent_from = None if self.is_restored else wall - round((now - self.liveness.last_sign) * 1e6)


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One launch of a run.

    Fields with the comment `UTC µs` are wall clock time; all other times are monotonic seconds.
    """

    run: str
    number: int
    launch_id: str
    world_size: int
    started_at: int  # UTC µs
    clock_offset: int = 0  # µs by which the clock of the service was set forward since the registration
    planned_steps: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    ranks: dict[int, Rank] = field(default_factory=dict)
    state: RunState = RunState.PENDING
    reason: str | None = None
    culprit: int | None = None  # the rank that failed first, if the reports single it out
    evidence: str | None = None  # reason why that rank is named, or why none is
    judged_at: float | None = None  # time at which the service found the present reason of the end
    ended_at: int | None = None  # UTC µs
    settled_at: float | None = None  # time at which the service found that the attempt had ended
    progressed_at: float = 0.0  # last step, registration or change of phase of a rank
    first_step: int | None = None  # lowest last step of the records of a response
    last_step: int | None = None
    has_activity: bool = False  # a rank was active after the end of the attempt
    is_reopened: bool = False  # a rank trained after the end of the attempt

    @property
    def key(self) -> AttemptKey:
        """Return (run, attempt number) as the key of the attempt."""
        return self.run, self.number

    @property
    def has_ended(self) -> bool:
        """Return whether the attempt is completed, stopped or failed."""
        return self.state in ENDED

    @property
    def completed_step(self) -> int | None:
        """Return the last step; of a failed or stopped attempt, the last one that all ranks completed."""
        of_ranks = (
            rank.last_step if rank.completed_step is None else rank.completed_step for rank in self.ranks.values()
        )
        steps = [step for step in of_ranks if step is not None]
        return min(steps) if self.state in {RunState.FAILED, RunState.STOPPED} and steps else self.last_step

    @property
    def sampling_interval(self) -> int:
        """Return the largest number of steps between two samples of a tensor, according to the configuration."""
        options = self.config.get("options")
        tables = (self.config, *(options.values() if isinstance(options, dict) else ()))
        every = (table.get("every") for table in tables if isinstance(table, dict))
        return max((one for one in every if isinstance(one, int)), default=1)

    @property
    def sampled_every(self) -> int:
        """Return the number of steps from one sampled step to the next, of quantities without an own interval."""
        every = self.config.get("every")
        return every if isinstance(every, int) and every > 0 else 1

    @property
    def live_ranks(self) -> list[Rank]:
        """Return the ranks that have not ended, as far as the service knows."""
        return [rank for rank in self.ranks.values() if not rank.has_ended]

    def is_arriving(self, now: float) -> bool:
        """Return whether the attempt has a live rank that is new and has not been polled successfully yet.

        A rank is new if it registered, or was restored from the store, less than ARRIVAL_SECONDS before `now`.
        """
        return any(not rank.is_read and now - rank.known_since < ARRIVAL_SECONDS for rank in self.live_ranks)

    def trains_beside(self, other: Attempt, seconds: float) -> bool:
        """Return whether `other` is younger, and a rank gave a sign of life more than `seconds` after its launch."""
        began = min((rank.known_since for rank in other.ranks.values()), default=-math.inf) + seconds
        is_alive = not self.has_ended and any(rank.liveness.last_sign > began for rank in self.live_ranks)
        return is_alive and self.number < other.number

    @property
    def ranks_missing(self) -> int:
        """Return the world size minus the number of live ranks; 0 for a completed or stopped attempt."""
        if self.state in {RunState.COMPLETED, RunState.STOPPED}:
            return 0
        return max(0, self.world_size - len(self.live_ranks))

    def is_quiet(self, now: float, seconds: float) -> bool:
        """Return whether the attempt ended at least `seconds` ago and none of its ranks is alive."""
        return self.has_ended and not self.live_ranks and (self.settled_at is None or now - self.settled_at >= seconds)

    def note_activity(self, *, of_work: bool = False) -> None:
        """Record that a rank of the attempt was active. If the attempt had ended, its state is evaluated again.

        `of_work` states that the rank continued to train. Continued training can reopen a completed or stopped attempt.
        """
        if self.has_ended:
            self.has_activity = True
            self.is_reopened |= of_work


class Health(enum.StrEnum):
    """Health of a target according to its latest polls."""

    PENDING = "pending"  # registered, not polled yet
    UP = "up"
    DRAINING = "draining"  # the process waits until its last records are committed
    FAILING = "failing"  # the last poll failed; the service retries
    GONE = "gone"  # the process ended or vanished; it is no longer polled


@dataclass(slots=True, kw_only=True)
class Target:
    """A process of a rank that the service polls, and the sequence numbers of its records that were read and committed.

    A target is changed only on the event loop of the service.
    """

    registration: Registration
    attempt: int
    lease: str
    liveness: Liveness
    cursor: int = NOTHING  # last seq taken; the next poll requests records after it
    committed: int = NOTHING  # last seq that is durable; it is reported to the rank
    head: int = NOTHING  # newest seq that the rank is known to have published
    expected: int = NOTHING  # newest seq after the queue of the rank at its latest sign of life is published
    health: Health = Health.PENDING
    last_error: str | None = None
    last_scrape: float | None = None  # seconds of the service's monotonic clock
    last_scrape_seconds: float | None = None
    ring_fill: float = 0.0
    failures_in_row: int = 0
    records_lost: int = 0
    gone_at: float | None = None
    last_ts: int | None = None  # UTC µs of the newest record taken, by the clock of the rank
    given_up: int = NOTHING  # records up to this seq that were not taken are counted as lost
    has_notice: bool = False  # the reply to its next registration contains a notice, for which it is asked to register
    uncommitted: deque[tuple[int, int]] = field(default_factory=deque)  # last seq and rows of each pending body

    @property
    def incarnation(self) -> str:
        """Return the incarnation id, which identifies the process."""
        return self.registration.incarnation

    @property
    def attempt_key(self) -> AttemptKey:
        """Return (run, attempt number) of the process."""
        return self.registration.run, self.attempt

    @property
    def identity(self) -> tuple[str, str, int]:
        """Return (run, launch id, rank). At most one live process has this combination."""
        return self.registration.run, self.registration.launch_id, self.registration.rank

    @property
    def is_gone(self) -> bool:
        """Return whether the process ended or is considered dead."""
        return self.health is Health.GONE

    @property
    def is_dead(self) -> bool:
        """Return whether the process is dead and another process serves the dead process's records from its spool."""
        return self.registration.served_by is not None

    @property
    def name(self) -> str:
        """Return `<run>/<rank>` for log messages and for the label `instance`."""
        return f"{self.registration.run}/{self.registration.rank}"

    @property
    def lag_records(self) -> int:
        """Return the number of published records that are not committed yet."""
        return max(0, self.head - self.committed)

    def leave(self, now: float) -> None:
        """Stop polling the process at `now`, because it has ended or is considered dead."""
        self.health, self.gone_at = Health.GONE, now

    def commit(self, seq: int) -> int:
        """Record that all records up to `seq` are committed; return the number of rows that are newly committed."""
        self.committed = max(self.committed, seq)
        rows = 0
        while self.uncommitted and self.uncommitted[0][0] <= seq:
            rows += self.uncommitted.popleft()[1]
        return rows


CLOCKS_DIFFER_MICROSECONDS: Final = 2_000_000
"""Maximum difference in µs between the clocks of two hosts. The order of two closer events is unknown."""

SIGNS_DIFFER_MICROSECONDS: Final = 30_000_000
"""Maximum interval in µs between two signs of life of a rank that trains.

A sign of life is a heartbeat, a response to a poll, or a record in the spool of the rank.
"""

_PEER_LOST: Final = re.compile(
    r"closed by peer|reset by peer|connection (was )?(closed|reset|refused|aborted|lost)|broken pipe|gloo|nccl"
    r"|timed? ?out|timeout|DistNetworkError|DistStoreError|DistBackendError|remote process|killed by signal",
    re.IGNORECASE,
)


class EndKind(enum.IntEnum):
    """Kind of failure of a rank.

    If it is unknown which of two ranks failed first, the failure of the kind with the lower number is considered the
    cause.
    """

    RAISED = 0
    VANISHED = 1
    SIGNALLED = 2
    LOST_PEER = 3  # an exception that is typical after the death of another rank


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """The failure of one rank. The failure happened between the times `earliest` and `latest`, in UTC µs."""

    kind: EndKind
    rank: Rank
    earliest: int | None  # None: unknown
    latest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The ranks that may have failed first.

    `ends` has one failure of each of these ranks. All failures are of the same kind. For no two of them is it known
    which happened first.
    """

    ends: tuple[RankEnd, ...]
    unregistered: int  # number of ranks of the attempt that never registered

    @property
    def kind(self) -> EndKind:
        """Return the kind of failure, which is the same for all ranks that may have failed first."""
        return self.ends[0].kind

    @property
    def culprit(self) -> int | None:
        """Return the rank that failed first, or None if the reports do not identify it.

        The result is None if several ranks may have failed first. It is None if the only candidate failed because it
        lost a peer, because then an unknown rank failed earlier. It is None if the candidate vanished and some ranks
        never registered, because one of these may have failed first.
        """
        if (
            len(self.ends) > 1
            or self.kind is EndKind.LOST_PEER
            or (self.kind is EndKind.VANISHED and self.unregistered)
        ):
            return None
        return self.ends[0].rank.number

    @property
    def moment(self) -> int:
        """Return the time of the first failure in UTC µs.

        The result is the earliest possible time of the failure if it is known, else the time at which the service found
        the failure.
        """
        return min(end.latest if end.earliest is None else end.earliest for end in self.ends)


def first_cause(attempt: Attempt, wall: int) -> Cause | None:
    """Return the ranks that may have failed first, or None if no rank failed. `wall` is the present time in UTC µs."""
    ends = [end for rank in attempt.ranks.values() if (end := _end(rank, wall)) is not None]
    candidates = [end for end in ends if not any(_precedes(other, end) for other in ends)]
    if not candidates:
        return None
    kind = min(end.kind for end in candidates)
    firsts = sorted((end for end in candidates if end.kind is kind), key=lambda end: end.rank.number)
    return Cause(ends=tuple(firsts), unregistered=max(0, attempt.world_size - len(attempt.ranks)))


def _end(rank: Rank, wall: int) -> RankEnd | None:
    """Return the failure of `rank`, or None if it has not failed."""
    if rank.exit_reason == ExitReason.EXCEPTION:
        kind = EndKind.LOST_PEER if _PEER_LOST.search(rank.error or "") else EndKind.RAISED
    elif rank.exit_reason == ExitReason.SIGNAL:
        kind = EndKind.SIGNALLED
    elif rank.is_lost:
        return RankEnd(kind=EndKind.VANISHED, rank=rank, earliest=rank.silent_from, latest=rank.silent_until or wall)
    else:
        return None
    moment = wall if rank.exited_at is None else rank.exited_at
    return RankEnd(kind=kind, rank=rank, earliest=moment, latest=moment)


def _precedes(one: RankEnd, other: RankEnd) -> bool:
    if one.kind is EndKind.SIGNALLED and other.kind is EndKind.RAISED:
        return False  # a signal to one rank explains the lost peer of another, but not another exception
    if one.kind is other.kind is EndKind.VANISHED and _fell_silent_before(one, other):
        return True
    return other.earliest is not None and one.latest + CLOCKS_DIFFER_MICROSECONDS <= other.earliest


def _fell_silent_before(one: RankEnd, other: RankEnd) -> bool:
    """Return whether rank `one` stopped responding while rank `other` continued to train.

    The service finds both ranks dead much later, so the steps and the last signs of life are compared. A difference of
    one step is not sufficient: of two ranks that died together, one may have recorded the end of a long step just
    before it died.
    """
    if one.earliest is None or other.earliest is None:
        return False
    first, second = one.rank.last_step, other.rank.last_step
    is_behind = first is None or second is None or second - first >= STEPS_BEHIND
    return is_behind and other.earliest - one.earliest >= SIGNS_DIFFER_MICROSECONDS
