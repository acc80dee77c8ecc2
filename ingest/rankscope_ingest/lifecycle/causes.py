"""Which rank failed first, and how an attempt ended: read off what its ranks said last and since when they are silent.

When one rank fails the others follow within moments: they lose their peer, or the launcher ends them. Their words may
arrive first, so that order of arrival decides nothing. Pure.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rankscope_contract.events import ExitReason, RunState
from rankscope_ingest.lifecycle.lives import Attempt, Rank

CLOCKS_DIFFER_MICROSECONDS: Final = 2_000_000
"""Moments on two hosts that are nearer to each other than this are in no known order."""

_PEER_LOST: Final = re.compile(
    r"closed by peer|reset by peer|connection (was )?(closed|reset|refused|aborted|lost)|broken pipe|gloo|nccl"
    r"|timed? ?out|timeout|DistNetworkError|DistStoreError|DistBackendError|remote process|killed by signal",
    re.IGNORECASE,
)


class Kind(enum.IntEnum):
    """What happened to a rank; where the order in time is open, the smaller one came first."""

    RAISED = 0
    VANISHED = 1
    SIGNALLED = 2
    LOST_PEER = 3  # an exception such as the death of another rank brings


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a rank ended otherwise than it should, and when: somewhere between two moments in UTC µs."""

    kind: Kind
    rank: Rank
    earliest: int | None  # None: nobody knows
    latest: int

    @property
    def words(self) -> str:
        """Return rank and reason for people."""
        rank = self.rank
        if self.kind is not Kind.VANISHED:
            silent = "ended by a signal" if self.kind is Kind.SIGNALLED else "ended with an exception"
            return f"rank {rank.number}: {rank.error or silent}"
        where = f"rank {rank.number} on {rank.host}"
        if rank.is_unheard:
            return f"{where} was not heard of again since the service came back: it ended or was killed meanwhile"
        return f"{where} vanished without a word"

    @property
    def moment(self) -> int:
        """Return when it happened, as near as is known."""
        return self.latest if self.earliest is None else self.earliest


def first_cause(attempt: Attempt, wall: int) -> Cause | None:
    """Return what ended the first of the ranks that did not end as they should; None while there is none."""
    causes = [cause for rank in attempt.ranks.values() if (cause := _cause(rank, wall)) is not None]
    candidates = [cause for cause in causes if not any(_precedes(other, cause) for other in causes)]
    return min(candidates, key=lambda cause: (cause.kind, cause.earliest or 0, cause.rank.number), default=None)


def ending(attempt: Attempt) -> tuple[RunState, str | None]:
    """Return how an attempt ended of which no rank lives and none failed."""
    ranks = sorted(attempt.ranks.values(), key=lambda rank: (rank.exited_at or 0, rank.number))
    if all(rank.exit_reason == ExitReason.COMPLETED for rank in ranks):
        return RunState.COMPLETED, _short_of_plan(attempt)
    said = next((rank for rank in ranks if rank.error), None)
    if said is not None:
        return RunState.STOPPED, f"rank {said.number}: {said.error}"
    return RunState.STOPPED, "ended without saying that it was done"


def end_of(ranks: Iterable[Rank], wall: int) -> int:
    """Return when the last of `ranks` ended, in UTC µs."""
    return max((rank.exited_at for rank in ranks if rank.exited_at is not None), default=wall)


def _cause(rank: Rank, wall: int) -> Cause | None:
    kind = _kind(rank)
    if kind is None:
        return None
    if kind is Kind.VANISHED:
        return Cause(kind=kind, rank=rank, earliest=rank.silent_from, latest=rank.silent_until or wall)
    moment = wall if rank.exited_at is None else rank.exited_at
    return Cause(kind=kind, rank=rank, earliest=moment, latest=moment)


def _kind(rank: Rank) -> Kind | None:
    if rank.exit_reason == ExitReason.EXCEPTION:
        return Kind.LOST_PEER if _PEER_LOST.search(rank.error or "") else Kind.RAISED
    if rank.exit_reason == ExitReason.SIGNAL:
        return Kind.SIGNALLED
    return Kind.VANISHED if rank.is_lost else None


def _precedes(one: Cause, other: Cause) -> bool:
    if one.kind is Kind.SIGNALLED and other.kind is Kind.RAISED:
        return False  # being asked to end excuses a lost peer, no error of the rank's own
    return other.earliest is not None and one.latest + CLOCKS_DIFFER_MICROSECONDS <= other.earliest


def _short_of_plan(attempt: Attempt) -> str | None:
    planned, last = attempt.planned_steps, attempt.last_step
    is_short = planned is not None and last is not None and last < planned
    return f"ended at step {last} of {planned} planned" if is_short else None
