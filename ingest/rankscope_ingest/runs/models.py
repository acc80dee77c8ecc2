"""What is known of an attempt and of each of its ranks: the facts from which its state is decided. No decision here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

from rankscope_contract.model.events import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long silence may last before it means that a process is gone."""

    refused_after_seconds: float  # nobody listens any more, and no heartbeat came since
    failed_after_seconds: float  # silence for whatever reason: a host may be down, or a network cut


@dataclass(slots=True, kw_only=True)
class Liveness:
    """Times are seconds of the service's monotonic clock."""

    last_sign: float
    last_refused: float = -math.inf

    def heard(self, now: float) -> None:
        """Note a heartbeat or any answer."""
        self.last_sign = max(self.last_sign, now)

    def refused(self, now: float) -> None:
        """Note that nobody listened, or somebody else."""
        self.last_refused = max(self.last_refused, now)

    def excuse(self, seconds: float, now: float) -> None:
        """Take a time in which nobody listened off the silence, of which there is none at `now` at the least."""
        shift = min(seconds, now - self.last_sign)
        self.last_sign += shift
        self.last_refused += shift

    def is_alive(self, now: float, ttl_seconds: float) -> bool:
        """Return whether the process must be assumed to run: heard of lately, and not found gone since."""
        return self.last_refused <= self.last_sign and now - self.last_sign < ttl_seconds

    def has_vanished(self, now: float, patience: Patience) -> bool:
        """Return whether the process must be assumed dead.

        A closed port alone is not enough: while heartbeats come, only the exporter's server may have failed.
        """
        silence = now - self.last_sign
        is_refused = self.last_refused > self.last_sign
        return silence >= (patience.refused_after_seconds if is_refused else patience.failed_after_seconds)


ENDED: Final = frozenset({RunState.COMPLETED, RunState.STOPPED, RunState.FAILED})

ARRIVAL_SECONDS: Final = 6.0
"""How long a rank may take from a restart of the service, or from its registration, to its first answer."""

AttemptKey = tuple[str, int]


@dataclass(slots=True, kw_only=True)
class Rank:
    """One rank of one attempt. Times with a µs comment are wall clock, the others monotonic seconds."""

    number: int
    incarnation: str
    host: str
    liveness: Liveness
    known_since: float  # restored or registered
    last_step: int | None = None
    stepped_at: float | None = None
    phase: str | None = None
    exit_reason: str | None = None
    error: str | None = None
    exited_at: int | None = None  # UTC µs, by the clock of the rank
    is_restored: bool = False  # known from the store, and not registered since this service started
    is_read: bool = False  # it answered a poll
    is_closed: bool = False  # it drained and said so
    is_vanished: bool = False
    silent_from: int | None = None  # UTC µs: the last sign of one that vanished
    silent_until: int | None = None  # UTC µs: when that was found
    is_unheard: bool = False  # it vanished without having spoken to this service at all

    @property
    def has_ended(self) -> bool:
        """Return whether nothing more is expected of the process."""
        return self.exit_reason is not None or self.is_closed or self.is_vanished

    @property
    def is_lost(self) -> bool:
        """Return whether the process is gone and nobody knows why."""
        return self.is_vanished and self.exit_reason is None and not self.is_closed

    def speaks(self) -> bool:
        """Note a sign of life; return whether that is news: whoever took the process for dead was wrong."""
        was_vanished, self.is_vanished, self.is_unheard = self.is_vanished, False, False
        return was_vanished

    def vanish(self, now: float, wall: int) -> None:
        """Note that the process is taken for dead; of one that only the store knows, the last sign is not known."""
        self.is_vanished, self.is_unheard, self.silent_until = True, self.is_restored, wall
        self.silent_from = None if self.is_restored else wall - round((now - self.liveness.last_sign) * 1e6)


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One launch of a run. Times with a µs comment are wall clock, the others monotonic seconds."""

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
    culprit: int | None = None  # the rank that failed first, where the reports single it out
    evidence: str | None = None  # why that rank is named, or why none is
    judged_at: float | None = None  # when the service found the present reason of its end
    ended_at: int | None = None  # UTC µs
    settled_at: float | None = None  # when the service found that it had ended
    progressed_at: float = 0.0  # when a rank last stepped, registered or changed its phase
    last_step: int | None = None
    has_news: bool = False  # of a rank, since it ended
    is_reopened: bool = False  # a rank that had not been counted is at work

    @property
    def key(self) -> AttemptKey:
        """Return run and number."""
        return self.run, self.number

    @property
    def has_ended(self) -> bool:
        """Return whether the attempt is over, as far as is known."""
        return self.state in ENDED

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

    def is_quiet(self, now: float, seconds: float) -> bool:
        """Return whether it ended `seconds` ago, and nobody of it came back."""
        return self.has_ended and not self.live_ranks and (self.settled_at is None or now - self.settled_at >= seconds)

    def judged(self) -> None:
        """Note that all news so far were weighed."""
        self.has_news = self.is_reopened = False

    def hear_news(self, *, of_work: bool = False) -> None:
        """Note that a rank did something; after the end that is a reason to judge again."""
        if self.has_ended:
            self.has_news = True
            self.is_reopened |= of_work
