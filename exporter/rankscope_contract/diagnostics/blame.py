"""Which rank holds up the others, and the evidence that singles it out; no rank without such evidence. Pure.

Each of three sources can be sufficient: flight records, stacks, and the steps that ranks reported. A source that is
missing, or shows several ranks alike, is no evidence. Sources that single out different ranks cancel each other.
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
"""A rank so many steps behind all others holds up none of them. One step may lie between ranks that wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Facts about one rank at work. A rank that left its monitor may still enter collectives: it has no facts."""

    rank: int
    stacks: StackDump | None = None
    flight: FlightRecord | None = None
    last_step: int | None = None
    hangs: bool = False  # it reported itself that its training gives no sign


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The rank that is singled out, None where none is, and the evidence for either."""

    rank: int | None
    evidence: str

    def __str__(self) -> str:
        return f"unknown: {self.evidence}" if self.rank is None else f"rank {self.rank}: {self.evidence}"


def single_out(facts: Iterable[RankFacts], world_size: int) -> Verdict:
    """Return which of `world_size` ranks holds up the others. Ranks without facts are unknown, not innocent."""
    known = {fact.rank: fact for fact in facts}
    if world_size == 1 and len(known) == 1:
        return Verdict(rank=next(iter(known)), evidence="it is the only rank")
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
    """Return a verdict where steps show that some ranks go on while others do not; None where steps show nothing."""
    steps = {rank: fact.last_step for rank, fact in known.items() if fact.last_step is not None}
    if len(steps) < 2 or max(steps.values()) - min(steps.values()) < STEPS_BEHIND:
        return None
    rank = min(steps, key=lambda one: steps[one])
    fact, nearest = known[rank], min(step for one, step in steps.items() if one != rank)
    # Steps of a rank that cannot be read are old; its own report of this moment shows that there are no newer ones.
    is_read = fact.hangs or fact.stacks is not None or fact.flight is not None
    if len(steps) == world_size and is_read and nearest - steps[rank] >= STEPS_BEHIND:
        return Verdict(
            rank=rank,
            evidence=f"its last step is {steps[rank]}, and all other ranks made step {nearest} or a later one (steps)",
        )
    return Verdict(rank=None, evidence="some ranks are steps behind others, and no single one of them (steps)")


def _by_stacks(
    flights: Mapping[int, FlightRecord], places: Mapping[int, Place], waits: Waits, world_size: int
) -> int | None:
    """Return the one rank that is outside of any collective, while every other rank waits or may wait in one."""
    pending = {rank: flight.pending for rank, flight in flights.items() if flight.pending is not None}
    outside = []
    for rank in range(world_size):
        place = places.get(rank, Place.UNKNOWN)
        # Where there is a record without a call under way, a backward pass computes and does not wait.
        if rank in pending or place is Place.IN_COLLECTIVE or (place is Place.MAY_WAIT and rank not in flights):
            continue
        if place is not Place.OUTSIDE:
            return None
        outside.append(rank)
    if len(outside) != 1:
        return None
    # A rank whose record shows for which ranks it waits must wait for this one; messages have no such record.
    awaited = (waits.reached.get(rank, ()) for rank, entry in pending.items() if not entry.is_p2p)
    return outside[0] if all(outside[0] in ranks for ranks in awaited) else None


def _evidence_of_stacks(suspect: int, known: Mapping[int, RankFacts], places: Mapping[int, Place]) -> str:
    others = sorted(rank for rank in known if rank != suspect)
    what = "wait" + "s" * (len(others) == 1) + " in a collective"
    if any(places.get(rank) is Place.MAY_WAIT for rank in others):
        what += " or in a call that may lead to one"
    return f"it is {Standing.of(suspect, known[suspect].stacks, None)}, and {ranks_text(others)} {what}"


def _lack(known: Mapping[int, RankFacts]) -> str:
    flights = [rank for rank, fact in known.items() if fact.flight is not None]
    stacks = [rank for rank, fact in known.items() if fact.stacks is not None]
    sources = [
        *([f"the flight records of {ranks_text(flights)}"] if flights else []),
        *([f"the stacks of {ranks_text(stacks)}"] if stacks else []),
    ]
    if not sources:
        return "no rank gave stacks or a flight record"
    return f"{' and '.join(sources)} single out no rank"
