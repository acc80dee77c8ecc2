"""Find the rank that blocks the others in a hang, and return the evidence. The functions have no side effects.

Three sources are used: flight records, stacks, and the last steps of the ranks. One source can be sufficient. A source
that is missing, or that shows several ranks in the same state, is no evidence. If the evidence is not sufficient, or
two sources name different ranks, no rank is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from rankscope_contract.diagnostics.blame_by_calls import Waits, waits_of
from rankscope_contract.diagnostics.rank_groups import Standing, ranks_text
from rankscope_contract.diagnostics.stacks import FlightRecord, StackDump
from rankscope_contract.diagnostics.wait_places import Place, place_of

STEPS_BEHIND: Final = 2
"""Minimum number of steps by which a rank must be behind all others to be named because of its last step.

A difference of one step is normal for waiting ranks.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Data about one active rank.

    A rank that closed its monitor may still enter collectives, but it provides no data.
    """

    rank: int
    stacks: StackDump | None = None
    flight: FlightRecord | None = None
    last_step: int | None = None
    hangs: bool = False  # the rank itself reported a hang


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The rank that blocks the others, or None if unknown, and the evidence as text."""

    rank: int | None
    evidence: str

    def __str__(self) -> str:
        return f"unknown: {self.evidence}" if self.rank is None else f"rank {self.rank}: {self.evidence}"


def single_out(facts: Iterable[RankFacts], world_size: int) -> Verdict:
    """Return which of `world_size` ranks blocks the others, or that this is unknown, and the evidence.

    `facts` contains the data about the active ranks. A rank without data may also be the cause; the result can then be
    unknown.
    """
    known = {fact.rank: fact for fact in facts}
    if world_size == 1 and len(known) == 1:
        return Verdict(rank=next(iter(known)), evidence="it is the only rank of the job")
    if (moving := _by_steps(known, world_size)) is not None:
        return moving
    flights = {rank: fact.flight for rank, fact in known.items() if fact.flight is not None}
    places = {rank: place_of(fact.stacks) for rank, fact in known.items()}
    waits = waits_of(flights, places, range(world_size))
    found = [] if waits.suspect is None else [("flight records", waits.suspect, waits.evidence)]
    if (suspect := _by_stacks(flights, places, waits, world_size)) is not None:
        found.append(("stacks", suspect, _evidence_of_stacks(suspect, known, places)))
    suspects = {rank for _, rank, _ in found}
    if len(suspects) == 1:
        evidence = "; ".join(f"{words} ({source})" for source, _, words in found)
        return Verdict(rank=suspects.pop(), evidence=evidence)
    return Verdict(rank=None, evidence=_lack(known))


def _by_steps(known: Mapping[int, RankFacts], world_size: int) -> Verdict | None:
    """Return a `Verdict` if the last steps of the ranks differ by at least STEPS_BEHIND; else None.

    The verdict names the rank that is behind all others, or no rank if the last steps do not identify a single rank.
    """
    steps = {rank: fact.last_step for rank, fact in known.items() if fact.last_step is not None}
    if len(steps) < 2 or max(steps.values()) - min(steps.values()) < STEPS_BEHIND:
        return None
    rank = min(steps, key=lambda one: steps[one])
    fact, nearest = known[rank], min(step for one, step in steps.items() if one != rank)
    # Without a current report of the rank, its step may be outdated.
    is_current = fact.hangs or fact.stacks is not None or fact.flight is not None
    if len(steps) == world_size and is_current and nearest - steps[rank] >= STEPS_BEHIND:
        return Verdict(
            rank=rank,
            evidence=f"its last step is {steps[rank]}, and all other ranks made step {nearest} or a later one (steps)",
        )
    return Verdict(
        rank=None, evidence="ranks are behind others, but their last steps do not identify a single rank (steps)"
    )


def _by_stacks(
    flights: Mapping[int, FlightRecord], places: Mapping[int, Place], waits: Waits, world_size: int
) -> int | None:
    """Return the only rank that is not in a collective, or None.

    The result is None unless every other rank is, or may be, in a collective.
    """
    pending = {rank: flight.pending for rank, flight in flights.items() if flight.pending is not None}
    outside = []
    for rank in range(world_size):
        place = places.get(rank, Place.UNKNOWN)
        # If the flight record has no active call, the backward pass computes and does not wait.
        if rank in pending or place is Place.IN_COLLECTIVE or (place is Place.MAY_WAIT and rank not in flights):
            continue
        if place is not Place.OUTSIDE:
            return None
        outside.append(rank)
    if len(outside) != 1:
        return None
    # If a record shows for which ranks its rank waits, this rank must be one of them. P2P messages have no such record.
    awaited = (waits.reached.get(rank, ()) for rank, entry in pending.items() if not entry.is_p2p)
    return outside[0] if all(outside[0] in ranks for ranks in awaited) else None


def _evidence_of_stacks(suspect: int, known: Mapping[int, RankFacts], places: Mapping[int, Place]) -> str:
    others = sorted(rank for rank in known if rank != suspect)
    waits = "wait" + "s" * (len(others) == 1) + " in a collective"
    if any(places.get(rank) is Place.MAY_WAIT for rank in others):
        waits += " or in a call that may lead to one"
    return f"it is {Standing.of(suspect, known[suspect].stacks, None)}, and {ranks_text(others)} {waits}"


def _lack(known: Mapping[int, RankFacts]) -> str:
    flights = [rank for rank, fact in known.items() if fact.flight is not None]
    stacks = [rank for rank, fact in known.items() if fact.stacks is not None]
    sources = [
        *([f"the flight records of {ranks_text(flights)}"] if flights else []),
        *([f"the stacks of {ranks_text(stacks)}"] if stacks else []),
    ]
    if not sources:
        return "no rank sent stacks or a flight record"
    return f"{' and '.join(sources)} do not identify a single rank"
