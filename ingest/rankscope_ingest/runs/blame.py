"""Find the rank that blocks the others in a hang, and return the evidence. The functions have no side effects.

Three sources are used: flight records, stacks, and the last steps of the ranks. One source can be sufficient. A source
that is missing, or that shows several ranks in the same state, is no evidence. If the evidence is not sufficient, or
two sources name different ranks, no rank is named.

Find the rank that blocks all ranks in collectives, according to the flight records.

A rank in a collective waits for every rank of its group that has not entered the collective. If the chains of waits of
all ranks end at the same rank, this rank is the suspect. There is no suspect if a flight record is missing, a call
began less than SETTLED_SECONDS ago, or ranks made different calls. The functions have no side effects.

Detect from the stack of the training thread whether a rank waits for other ranks.

A Python stack shows the current call of a thread. It does not show the event for which C code in this call waits. The
result is certain only if the innermost call identifies it. If no call identifies it, the result is `WaitPlace.UNKNOWN`,
which is no evidence. The functions have no side effects.
"""

from __future__ import annotations

import enum
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Final

from rankscope_contract.model.stacks import (
    FlightRecord,
    Frame,
    StackDump,
    Standing,
    ThreadStack,
    is_library,
    is_standard_library,
)
from rankscope_ingest.runs.collective_calls import Call, Records, calls_of_note, ranks_text


class WaitPlace(enum.Enum):
    """Result of the check whether the training thread of a rank waits for other ranks."""

    IN_COLLECTIVE = "in a collective"  # certain: the innermost call is a function of torch.distributed
    MAY_WAIT = "in a call that may wait for other ranks"  # backward pass, .wait() of a torch.distributed Work
    OUTSIDE = "outside of any collective"  # certain: sleeps, reads, loads data or executes Python code
    UNKNOWN = "unknown"


_COLLECTIVE_FILES: Final = (
    ("torch", "distributed", "distributed_c10d.py"),
    ("torch", "distributed", "_functional_collectives.py"),
)
_COLLECTIVE_NAMES: Final = re.compile(
    r"reduce|gather|scatter|broadcast|all_to_all|barrier|send|recv|wait|new_group|split_group|process_group"
)

_BACKWARD: Final = frozenset({"_engine_run_backward", "backward", "grad"})

_WAITING_METHOD: Final = ".wait"
"""Name of the method of torch.distributed's Work object that waits for other ranks.

Methods such as `.item` wait for the device only.
"""

_SYSTEM_CALLS: Final = frozenset({"sleep", "read", "readinto", "readline", "write", "select", "poll", "accept"})
"""Names of methods that block only in the operating system, such as `read`.

A training thread in such a method is not in a collective.
"""

_DISPATCHING: Final = frozenset(
    {"builtins", "operator", "_operator", "math", "functools", "_functools", "itertools", "copy", "pickle", "_pickle"}
    | {"ctypes", "_ctypes", "statistics"}
)
"""Standard-library modules whose functions call methods of their arguments.

Such a function is no proof that a rank does not wait: `float(loss)` waits for the device.
"""


def place_of(dump: StackDump | None) -> WaitPlace:
    """Return whether the training thread waits for other ranks, according to `dump`, the stacks of its process.

    The result is UNKNOWN if `dump` is None or contains no frame of the training thread.
    """
    thread = None if dump is None else dump.training_thread
    if dump is None or thread is None or not thread.frames:
        return WaitPlace.UNKNOWN
    if _is_collective(thread.frames[0]):
        return WaitPlace.IN_COLLECTIVE
    place = _place(thread)
    if place is WaitPlace.OUTSIDE and any(_waits_for_ranks(other) for other in dump.threads if not other.is_training):
        return WaitPlace.UNKNOWN  # the training thread may wait for this other thread, which may wait for other ranks
    return place


def _place(thread: ThreadStack) -> WaitPlace:
    top, libraries = thread.frames[0], _innermost_libraries(thread.frames)
    if any(_has_parts(frame, "torch", "distributed") for frame in libraries):
        # Writing a checkpoint waits for a disk. Nearly all other calls of torch.distributed wait for a rank.
        return (
            WaitPlace.UNKNOWN if _has_parts(top, "checkpoint") or is_standard_library(top.file) else WaitPlace.MAY_WAIT
        )
    is_backward = _has_parts(top, "torch", "autograd") and top.function in _BACKWARD
    if is_backward or _has_parts(top, "torch", "nn", "parallel"):  # DDP broadcasts buffers and rebuilds buckets here
        return WaitPlace.MAY_WAIT
    if any(_has_parts(frame, "torch", "utils", "data") for frame in thread.frames):
        return WaitPlace.OUTSIDE
    if thread.calls is not None and (place := _place_of_call(thread.calls)) is not WaitPlace.UNKNOWN:
        return place
    is_plain = is_standard_library(top.file) and PurePath(top.file).stem not in _DISPATCHING
    return WaitPlace.OUTSIDE if is_plain else WaitPlace.UNKNOWN


def _place_of_call(calls: str) -> WaitPlace:
    if not calls:
        return WaitPlace.OUTSIDE
    path, _, name = calls.rpartition(".")
    module = path.partition(".")[0]
    if module:
        is_plain = module in sys.stdlib_module_names and module not in _DISPATCHING
        return WaitPlace.OUTSIDE if is_plain else WaitPlace.UNKNOWN
    if calls == _WAITING_METHOD:
        return WaitPlace.MAY_WAIT
    return WaitPlace.OUTSIDE if name in _SYSTEM_CALLS else WaitPlace.UNKNOWN


def _waits_for_ranks(thread: ThreadStack) -> bool:
    return not thread.is_ours and any(
        _has_parts(frame, "torch", "distributed") for frame in _innermost_libraries(thread.frames)
    )


def _innermost_libraries(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Return the library frames at the inner end of `frames`, up to the innermost frame of the training code.

    If no frame is of the training code, return all frames.
    """
    own = next((place for place, frame in enumerate(frames) if not is_library(frame.file)), len(frames))
    return frames[:own]


def _is_collective(frame: Frame) -> bool:
    is_there = any(PurePath(frame.file).parts[-3:] == parts for parts in _COLLECTIVE_FILES)
    return is_there and _COLLECTIVE_NAMES.search(frame.function) is not None


def _has_parts(frame: Frame, *parts: str) -> bool:
    found = PurePath(frame.file).parts
    return any(found[start : start + len(parts)] == parts for start in range(len(found)))


SETTLED_SECONDS: Final = 1.0
"""Minimum age in seconds of a collective call that is evidence.

A more recent call may belong to training that still runs, because the other ranks may enter the call at any time.
"""

MOST_CALLS: Final = 3
"""Maximum number of collective calls that the evidence text lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """For each rank, the ranks for which it waits, directly or through other ranks.

    `suspect` is the rank for which all other ranks wait, or None. `evidence` is a text for users.
    """

    reached: Mapping[int, frozenset[int]] = field(default_factory=dict)
    suspect: int | None = None
    evidence: str = ""


def waits_of(records: Records, places: Mapping[int, WaitPlace], world: Collection[int]) -> Waits:
    """Return for which ranks each rank waits, according to `records`, and the suspect.

    `records` contains the flight record of each rank. The suspect is the rank for which all other ranks wait, or the
    one rank that made a different call than the others; it is None if no single rank is identified.
    `places` states for each rank with stacks whether it is in a collective. `world` contains all ranks of the job.
    """
    calls = calls_of_note(records)
    mismatches = _mismatches(calls)
    if mismatches:
        return _odd_one_out(mismatches)
    oldest = _oldest(calls)
    if not oldest or any(call.seconds < SETTLED_SECONDS for call in oldest.values()):
        return Waits()
    members = _members(records)
    edges: dict[int, set[int]] = {}
    for call in dict.fromkeys(oldest.values()):
        awaited = _awaited(call, members.get(call.group_id, ()), places, has_all=records.keys() >= set(world))
        if awaited is None:
            return Waits()
        for rank in call.waiting:
            if oldest[rank, call.group_id] is call:
                edges.setdefault(rank, set()).update(awaited)
    reached = {rank: _reachable(rank, edges) for rank in edges}
    suspect = _suspect(edges, reached)
    if suspect is None or not _is_cause(suspect, oldest, records, places):
        return Waits(reached=reached)
    return Waits(reached=reached, suspect=suspect, evidence=_evidence(suspect, list(oldest.values())))


def _mismatches(calls: Sequence[Call]) -> list[Call]:
    waited = {call.group_id for call in calls if call.waiting}
    return [call for call in calls if call.is_mismatch and call.group_id in waited]


def _odd_one_out(mismatches: Sequence[Call]) -> Waits:
    """Return as the suspect the one rank that made a different collective call than all other ranks of its group.

    `mismatches` are collectives in which ranks made different calls. A mismatch identifies a rank only if all other
    ranks, at least two, made the same call. The result has no suspect unless all mismatches identify the same rank.
    """
    found: dict[int, str] = {}
    for call in mismatches:
        lone = [(form, ranks) for form, ranks in call.forms if len(ranks) == 1]
        others = [(form, ranks) for form, ranks in call.forms if len(ranks) > 1]
        if len(lone) != 1 or len(others) != 1 or call.missing or call.unknown:
            return Waits()
        (form, (rank,)), (form_of_others, ranks) = lone[0], others[0]
        found[rank] = f"it called {form} as collective {call.seq} of {call.group}, {ranks_text(ranks)} {form_of_others}"
    if len(found) != 1:
        return Waits()
    ((rank, evidence),) = found.items()
    return Waits(suspect=rank, evidence=evidence)


def _oldest(calls: Sequence[Call]) -> dict[tuple[int, str], Call]:
    """Return the oldest unfinished collective call of each rank in each group. The keys are (rank, group id).

    The calls of a group run in order, so a later call cannot begin before the oldest one has ended.
    """
    oldest: dict[tuple[int, str], Call] = {}
    for call in sorted(calls, key=lambda call: call.seq):
        for rank in call.waiting:
            oldest.setdefault((rank, call.group_id), call)
    return oldest


def _members(records: Records) -> dict[str, set[str]]:
    """Return the different lists of ranks that the flight records contain for each group.

    The keys are group ids; a list of ranks is text such as `0-7`.
    """
    found: dict[str, set[str]] = {}
    for record in records.values():
        for group in record.groups:
            if group.ranks:
                found.setdefault(group.id, set()).add(group.ranks)
    return found


def _awaited(
    call: Call, members: Collection[str], places: Mapping[int, WaitPlace], *, has_all: bool
) -> frozenset[int] | None:
    """Return the ranks for which the ranks in `call` wait, or None if some of them are unknown.

    `members` contains the reported lists of ranks of the group. `has_all` states that every rank has a flight record.
    """
    if len(members) > 1 or (not members and not has_all):
        return None  # one name for several groups, or a group without reported ranks
    outside = {rank for rank in call.unknown if places.get(rank) is WaitPlace.OUTSIDE}
    waiting_elsewhere = {rank for rank in call.unknown if places.get(rank) is WaitPlace.IN_COLLECTIVE}
    if set(call.unknown) - outside - waiting_elsewhere:
        return None
    return frozenset(outside.union(call.missing))


def _reachable(rank: int, edges: Mapping[int, Collection[int]]) -> frozenset[int]:
    found: set[int] = set()
    rest = list(edges[rank])
    while rest:
        one = rest.pop()
        if one not in found:
            found.add(one)
            rest += edges.get(one, ())
    return frozenset(found)


def _suspect(edges: Mapping[int, Collection[int]], reached: Mapping[int, Collection[int]]) -> int | None:
    """Return the only rank that waits for no other rank, or None.

    The result is None unless all other ranks wait for this rank, directly or through other ranks.
    """
    ranks = {*edges, *(rank for awaited in edges.values() for rank in awaited)}
    ends = [rank for rank in ranks if not edges.get(rank)]
    if len(ends) != 1 or len(ranks) < 2:
        return None
    return ends[0] if all(ends[0] in reached[rank] for rank in edges if rank != ends[0]) else None


def _is_cause(
    suspect: int, oldest: Mapping[tuple[int, str], Call], records: Records, places: Mapping[int, WaitPlace]
) -> bool:
    """Return whether no flight record or stack shows that `suspect` itself waits for another rank.

    `suspect` is the rank for which all other ranks wait.
    """
    waited = [call for (rank, _), call in oldest.items() if rank == suspect]
    if waited:
        return all(call.waiting == (suspect,) and call.left for call in waited)
    # Gloo does not record P2P messages, monitored barriers and the creation of groups. Stacks show them.
    record = records.get(suspect)
    is_in_message = record is not None and any(entry.is_p2p and entry.is_pending for entry in record.collectives)
    return not is_in_message and places.get(suspect) is not WaitPlace.IN_COLLECTIVE


def _evidence(suspect: int, calls: Sequence[Call]) -> str:
    distinct = list({(call.group_id, call.seq): call for call in calls}.values())
    still_in = [call for call in distinct if suspect in call.waiting]
    if still_in:
        return " and ".join(
            f"it is still in {call.name}, which {ranks_text(call.left)} left" for call in still_in[:MOST_CALLS]
        )
    awaited = [call for call in distinct if suspect in call.missing or suspect in call.unknown]
    names = " and ".join(
        f"{call.name}, in which {ranks_text(call.waiting)} wait{'s' * (len(call.waiting) == 1)}"
        for call in awaited[:MOST_CALLS]
    )
    return f"it never entered {names}"


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
class Blame:
    """The rank that blocks the others, or None if unknown, and the evidence as text."""

    rank: int | None
    evidence: str

    def __str__(self) -> str:
        return f"unknown: {self.evidence}" if self.rank is None else f"rank {self.rank}: {self.evidence}"


def single_out(facts: Iterable[RankFacts], world_size: int) -> Blame:
    """Return which of `world_size` ranks blocks the others, or that this is unknown, and the evidence.

    `facts` contains the data about the active ranks. A rank without data may also be the cause; the result can then be
    unknown.
    """
    known = {fact.rank: fact for fact in facts}
    if world_size == 1 and len(known) == 1:
        return Blame(rank=next(iter(known)), evidence="it is the only rank of the job")
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
        return Blame(rank=suspects.pop(), evidence=evidence)
    return Blame(rank=None, evidence=_lack(known))


def _by_steps(known: Mapping[int, RankFacts], world_size: int) -> Blame | None:
    """Return a `Blame` if the last steps of the ranks differ by at least STEPS_BEHIND; else None.

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
        return Blame(
            rank=rank,
            evidence=f"its last step is {steps[rank]}, and all other ranks made step {nearest} or a later one (steps)",
        )
    return Blame(
        rank=None, evidence="ranks are behind others, but their last steps do not identify a single rank (steps)"
    )


def _by_stacks(
    flights: Mapping[int, FlightRecord], places: Mapping[int, WaitPlace], waits: Waits, world_size: int
) -> int | None:
    """Return the only rank that is not in a collective, or None.

    The result is None unless every other rank is, or may be, in a collective.
    """
    pending = {rank: flight.pending for rank, flight in flights.items() if flight.pending is not None}
    outside = []
    for rank in range(world_size):
        place = places.get(rank, WaitPlace.UNKNOWN)
        # If the flight record has no active call, the backward pass computes and does not wait.
        if rank in pending or place is WaitPlace.IN_COLLECTIVE or (place is WaitPlace.MAY_WAIT and rank not in flights):
            continue
        if place is not WaitPlace.OUTSIDE:
            return None
        outside.append(rank)
    if len(outside) != 1:
        return None
    # If a record shows for which ranks its rank waits, this rank must be one of them. P2P messages have no such record.
    awaited = (waits.reached.get(rank, ()) for rank, entry in pending.items() if not entry.is_p2p)
    return outside[0] if all(outside[0] in ranks for ranks in awaited) else None


def _evidence_of_stacks(suspect: int, known: Mapping[int, RankFacts], places: Mapping[int, WaitPlace]) -> str:
    others = sorted(rank for rank in known if rank != suspect)
    waits = "wait" + "s" * (len(others) == 1) + " in a collective"
    if any(places.get(rank) is WaitPlace.MAY_WAIT for rank in others):
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
