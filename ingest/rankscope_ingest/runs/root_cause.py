"""Which rank failed first, and how an attempt ended: from the last reports of its ranks and the time of their silence.

When one rank fails the others follow within moments: they lose their peer, or the launcher ends them. Their reports may
arrive first, so the order of arrival decides nothing. Where nothing tells which rank was first, none is named. Pure.
"""

from __future__ import annotations

import bisect
import enum
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rankscope_contract.diagnostics.blame import STEPS_BEHIND
from rankscope_contract.diagnostics.rank_groups import ranks_text
from rankscope_contract.model.events import ExitReason, RunState
from rankscope_ingest.runs.models import Attempt, Rank

CLOCKS_DIFFER_MICROSECONDS: Final = 2_000_000
"""Moments on two hosts that are nearer to each other than this are in no known order."""

SIGNS_DIFFER_MICROSECONDS: Final = 30_000_000
"""A rank at work gives a sign more often than this: by a heartbeat, an answer, or a record in its spool."""

MOST_GROUPS: Final = 3
"""Groups of ranks that ended alike and are named in a reason: 1,000 ranks may end in as many ways."""

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
class RankEnd:
    """How one rank ended otherwise than it should, and when: somewhere between two moments in UTC µs."""

    kind: Kind
    rank: Rank
    earliest: int | None  # None: unknown
    latest: int

    @property
    def moment(self) -> int:
        """Return when it happened, as near as is known."""
        return self.latest if self.earliest is None else self.earliest


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The ranks that may have failed first: `ends` are of one kind, and none is known to have come before another."""

    ends: tuple[RankEnd, ...]
    unregistered: int  # ranks of the attempt of which nothing is known

    @property
    def kind(self) -> Kind:
        """Return what happened to all of them."""
        return self.ends[0].kind

    @property
    def culprit(self) -> int | None:
        """Return the rank that failed first; None where the reports do not single it out.

        A rank that lost its peer tells of another one. A rank that vanished may have been killed for a rank that was
        never registered.
        """
        if len(self.ends) > 1 or self.kind is Kind.LOST_PEER or (self.kind is Kind.VANISHED and self.unregistered):
            return None
        return self.ends[0].rank.number

    @property
    def evidence(self) -> str:
        """Return why the culprit is named, or why none is."""
        who, one = ranks_text([end.rank.number for end in self.ends]), len(self.ends) == 1
        if self.culprit is not None:
            what = {Kind.RAISED: "raised an exception of its own", Kind.VANISHED: "vanished without a last report"}
            return f"rank {self.culprit}: it is the first that {what.get(self.kind, 'was ended by a signal')}"
        match self.kind:
            case Kind.LOST_PEER:
                return f"unknown: {who} lost a peer, and no rank is known to have failed before"
            case Kind.VANISHED if one:
                return f"unknown: {who} vanished, and nothing is known of {self.unregistered} ranks: never registered"
            case Kind.VANISHED:
                return f"unknown: {who} vanished, and the order is not known"
            case _:
                return f"unknown: {who} ended within {CLOCKS_DIFFER_MICROSECONDS / 1e6:g} s of each other"

    @property
    def words(self) -> str:
        """Return ranks and reasons for people."""
        ranks = [end.rank for end in self.ends]
        if self.kind is Kind.VANISHED:
            unheard = [rank for rank in ranks if rank.is_unheard]
            silent = [rank for rank in ranks if not rank.is_unheard]
            text = "; ".join([*_vanished(silent), *_not_heard_again(unheard)])
        else:
            text = last_words_of(ranks, "ended by a signal" if self.kind is Kind.SIGNALLED else "exception")
        is_open = self.culprit is None and self.kind is not Kind.SIGNALLED
        return f"{text}; which rank failed first is unknown" if is_open else text

    @property
    def moment(self) -> int:
        """Return when the first of them failed, as near as is known."""
        return min(end.moment for end in self.ends)


def first_cause(attempt: Attempt, wall: int) -> Cause | None:
    """Return which ranks may have failed first, of those that did not end as they should; None while there is none."""
    ends = [end for rank in attempt.ranks.values() if (end := _end(rank, wall)) is not None]
    candidates = [end for end in ends if not any(_precedes(other, end) for other in ends)]
    if not candidates:
        return None
    kind = min(end.kind for end in candidates)
    firsts = sorted((end for end in candidates if end.kind is kind), key=lambda end: end.rank.number)
    return Cause(ends=tuple(firsts), unregistered=max(0, attempt.world_size - len(attempt.ranks)))


def ending(attempt: Attempt) -> tuple[RunState, str | None]:
    """Return how an attempt ended of which no rank lives and none failed."""
    ranks = list(attempt.ranks.values())
    if all(rank.exit_reason == ExitReason.COMPLETED for rank in ranks):
        return RunState.COMPLETED, _short_of_plan(attempt)
    told = [rank for rank in ranks if rank.error]
    return RunState.STOPPED, last_words_of(told) if told else "ended without saying that it was done"


def end_of(ranks: Iterable[Rank], wall: int) -> int:
    """Return when the last of `ranks` ended, in UTC µs."""
    return max((rank.exited_at for rank in ranks if rank.exited_at is not None), default=wall)


def last_words_of(ranks: Sequence[Rank], without: str = "ended") -> str:
    """Return `ranks 0-1: ValueError: no; rank 3: …`, equal reports together; `without` is for ranks that gave none."""
    groups = _grouped(ranks, lambda rank: rank.error or without)
    return "; ".join(f"{ranks_text(numbers)}: {error}" for error, numbers in groups[:MOST_GROUPS]) + _more(groups)


def _vanished(ranks: Sequence[Rank]) -> list[str]:
    hosts = _grouped(ranks, lambda rank: rank.host)
    where = ", ".join(f"{ranks_text(numbers)} on {host}" for host, numbers in hosts[:MOST_GROUPS]) + _more(hosts)
    return [f"{where} vanished without a word"] if hosts else []


def _not_heard_again(ranks: Sequence[Rank]) -> list[str]:
    hosts = _grouped(ranks, lambda rank: rank.host)
    where = ", ".join(f"{ranks_text(numbers)} on {host}" for host, numbers in hosts[:MOST_GROUPS]) + _more(hosts)
    was, it, killed = ("was", "it", "was") if len(ranks) == 1 else ("were", "they", "were")
    text = f"{where} {was} not heard of again since the service came back: {it} ended or {killed} killed meanwhile"
    return [text] if hosts else []


def _grouped(ranks: Iterable[Rank], key: Callable[[Rank], str]) -> list[tuple[str, list[int]]]:
    """Return the numbers of ranks by `key`, in order of the lowest number."""
    found: dict[str, list[int]] = {}
    for rank in sorted(ranks, key=lambda rank: rank.number):
        found.setdefault(key(rank), []).append(rank.number)
    return list(found.items())


def _more(groups: Sequence[tuple[str, Sequence[int]]]) -> str:
    left = sum(len(numbers) for _, numbers in groups[MOST_GROUPS:])
    return f" and {left:,} more ranks" if left else ""


def _end(rank: Rank, wall: int) -> RankEnd | None:
    kind = _kind(rank)
    if kind is None:
        return None
    if kind is Kind.VANISHED:
        return RankEnd(kind=kind, rank=rank, earliest=rank.silent_from, latest=rank.silent_until or wall)
    moment = wall if rank.exited_at is None else rank.exited_at
    return RankEnd(kind=kind, rank=rank, earliest=moment, latest=moment)


def _kind(rank: Rank) -> Kind | None:
    if rank.exit_reason == ExitReason.EXCEPTION:
        return Kind.LOST_PEER if _PEER_LOST.search(rank.error or "") else Kind.RAISED
    if rank.exit_reason == ExitReason.SIGNAL:
        return Kind.SIGNALLED
    return Kind.VANISHED if rank.is_lost else None


def _precedes(one: RankEnd, other: RankEnd) -> bool:
    if one.kind is Kind.SIGNALLED and other.kind is Kind.RAISED:
        return False  # being asked to end excuses a lost peer, no error of the rank's own
    if one.kind is other.kind is Kind.VANISHED and _fell_silent_before(one, other):
        return True
    return other.earliest is not None and one.latest + CLOCKS_DIFFER_MICROSECONDS <= other.earliest


def _fell_silent_before(one: RankEnd, other: RankEnd) -> bool:
    """Return whether `one` was silent already while the other made steps, though both were found dead much later.

    One step proves nothing: of two ranks that died together, one may have recorded the end of a long step just before.
    """
    if one.earliest is None or other.earliest is None:
        return False
    first, second = one.rank.last_step, other.rank.last_step
    is_behind = first is None or second is None or second - first >= STEPS_BEHIND
    return is_behind and other.earliest - one.earliest >= SIGNS_DIFFER_MICROSECONDS


def _short_of_plan(attempt: Attempt) -> str | None:
    planned, last = attempt.planned_steps, attempt.last_step
    is_short = planned is not None and last is not None and last < planned
    return f"ended at step {last} of {planned} planned" if is_short else None


MOST_LINES: Final = 12

_AGES: Final = (10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 21_600.0, 86_400.0)
"""Limits between ages, in seconds. Ranks are polled at different moments; ages between the same limits share a line."""


def last_reports(attempt: Attempt, now: float) -> tuple[str, ...]:
    """Return lines such as `ranks 0-3, 5: step 12, 4 s ago`; the ranks with the lowest step and oldest report first."""
    groups: dict[tuple[int, int, bool, str], list[Rank]] = {}
    for number in sorted(attempt.ranks):
        rank = attempt.ranks[number]
        step = -1 if rank.last_step is None else rank.last_step
        key = step, -bisect.bisect(_AGES, _age(rank, now)), rank.is_restored, _state(rank)
        groups.setdefault(key, []).append(rank)
    lines = [_line(state, ranks, now) for (*_, state), ranks in sorted(groups.items(), key=lambda item: item[0])]
    missing = attempt.world_size - len(attempt.ranks)
    if missing > 0:
        lines.append(f"{missing:,} of {attempt.world_size:,} ranks: never registered")
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"and {len(lines) - MOST_LINES:,} more groups of ranks"]
    return tuple(lines)


def _line(state: str, ranks: list[Rank], now: float) -> str:
    step = "no step" if ranks[0].last_step is None else f"step {ranks[0].last_step}"
    ages = [_age(rank, now) for rank in ranks]
    youngest, oldest = f"{min(ages):.0f}", f"{max(ages):.0f}"
    age = f"{oldest} s ago" if youngest == oldest else f"{youngest}-{oldest} s ago"
    if ranks[0].is_restored:
        age = f"not heard of since the service started {age}"
    return ", ".join(filter(None, (f"{ranks_text([rank.number for rank in ranks])}: {step}", age, state)))


def _age(rank: Rank, now: float) -> float:
    return max(0.0, now - rank.liveness.last_sign)


def _state(rank: Rank) -> str:
    if rank.exit_reason is not None:
        return f"ended: {rank.exit_reason or 'no reason given'}"
    return "ended" if rank.is_closed else "vanished" if rank.is_vanished else ""
