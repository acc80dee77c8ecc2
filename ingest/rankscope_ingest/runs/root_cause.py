"""Find the rank of an attempt that failed first, from the last reports and responses of all ranks.

When one rank fails, the others usually fail within seconds, because they lose the connection to their peer or the
launcher ends them. Their reports may arrive earlier than the report of the first rank, so the order of arrival is no
evidence. If the evidence does not identify the first rank, the result names no rank. The module performs no I/O; the
caller passes the time.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

from rankscope_contract.model.events import ExitReason
from rankscope_ingest.runs.blame import STEPS_BEHIND
from rankscope_ingest.runs.models import Attempt, Rank

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
