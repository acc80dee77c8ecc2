"""The last step and the age of the last report of each rank, in a few lines however many ranks there are. Pure."""

from __future__ import annotations

import bisect
from typing import Final

from rankscope_contract.standing import ranks_text
from rankscope_ingest.lifecycle.lives import Attempt, Rank

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
    return max(0.0, now - rank.vitals.last_sign)


def _state(rank: Rank) -> str:
    if rank.exit_reason is not None:
        return f"ended: {rank.exit_reason or 'no reason given'}"
    return "ended" if rank.is_closed else "vanished" if rank.is_vanished else ""
