"""What becomes of a run when records of a process arrive that is known to be dead: read from its spool.

Its words count as its own, above all the last ones; but that it is read is no sign of life, and a process that has
taken its place since is not touched. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from rankscope_contract.model.events import RunState
from rankscope_ingest.runs.target import Target
from rankscope_ingest.runs.tracker import Attempt, Rank, RunTracker


def registered(runs: RunTracker, target: Target, now: float, wall: int) -> Attempt:
    """Note that somebody speaks for the process. One that was found dead stays so, any other until it is drained."""
    attempt, known = runs.get((target.registration.run, target.attempt)), _rank(runs, target)
    if attempt is not None and known is not None and known.incarnation != target.incarnation:
        return attempt
    before = None if known is None else replace(known)
    attempt = runs.registered(target.registration, target.attempt, target.liveness, wall)
    rank = attempt.ranks[target.registration.rank]
    if attempt.has_ended and attempt.settled_at is None:
        attempt.settled_at = now  # under a former service; there is news of it, so that it is shown again for a while
    if before is not None and before.is_vanished:
        rank.is_vanished, rank.is_unheard = True, before.is_unheard
    elif attempt.state is RunState.FAILED and not _has_spoken(rank):
        rank.vanish(now, wall)
        rank.silent_from = None  # not now: its records will tell
    return attempt


def drained(runs: RunTracker, target: Target, now: float, wall: int) -> None:
    """Note that the process has said all it ever will; without a last word it vanished after its last record."""
    attempt, rank = runs.get((target.registration.run, target.attempt)), _rank(runs, target)
    if attempt is None or rank is None or rank.incarnation != target.incarnation or _has_spoken(rank):
        return
    if not rank.is_vanished:
        rank.vanish(now, wall)
        rank.silent_from = rank.silent_from if target.last_ts is None else target.last_ts
    elif rank.silent_from is None:
        rank.silent_from = target.last_ts
    attempt.hear_news()


def _rank(runs: RunTracker, target: Target) -> Rank | None:
    attempt = runs.get((target.registration.run, target.attempt))
    return None if attempt is None else attempt.ranks.get(target.registration.rank)


def _has_spoken(rank: Rank) -> bool:
    return rank.exit_reason is not None or rank.is_closed
