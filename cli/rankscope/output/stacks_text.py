"""Format the response of `POST /api/v1/stacks` as text: the cause of a stall, then ranks grouped by equal stacks.

This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rankscope_contract.model.events import RunState
from rankscope_contract.model.stacks import FlightRecord, Frame, StackDump, Standing, ThreadStack, is_library
from rankscope_ingest.runs.blame import RankFacts, single_out
from rankscope_ingest.runs.collective_calls import RankGroup, grouped, ranks_text, sentences, sites_of


def _facts(entry: Mapping[str, Any]) -> RankFacts:
    """Return the stacks of one rank, from an entry of the list `ranks` in the response of the service.

    An entry with an error has no stacks. Raises ValueError if the entry is malformed.
    """
    flight = entry.get("flight")
    return RankFacts(
        rank=int(entry["rank"]),
        stacks=StackDump.of(entry["stacks"]) if entry.get("error") is None else None,
        flight=FlightRecord.of(flight) if flight else None,
        last_step=None if entry.get("step") is None else int(entry["step"]),
    )


def stacks_lines(response: Mapping[str, Any], *, all_threads: bool = False) -> Iterator[str]:
    """Yield the lines that `rankscope stacks` prints. Raises ValueError or KeyError if `response` is malformed."""
    facts = [_facts(entry) for entry in response["ranks"]]
    given = {each.rank: each for each in facts if each.stacks is not None}
    processes = {
        each.rank: (entry.get("pid", 0), entry.get("host", ""))
        for each, entry in zip(facts, response["ranks"], strict=True)
    }
    yield from _head(response, len(given), len(facts))
    if response["state"] == RunState.STALLED:
        yield f"cause: {single_out(facts, int(response['world_size']))}"
    standings = [Standing.of(each.rank, each.stacks, each.flight) for each in given.values()]
    flights = {each.rank: each.flight for each in given.values() if each.flight is not None}
    if findings := sentences(flights, sites_of(standings)):
        yield ""
        yield from findings
    for group in grouped(standings):
        yield ""
        places = [f"{pid} on {host}" for pid, host in (processes[rank] for rank in group.ranks)]
        yield from _group(group, places, given[group.ranks[0]].stacks, all_threads=all_threads)
    for each, entry in zip(facts, response["ranks"], strict=True):
        if each.stacks is None:
            pid, host = processes[each.rank]
            yield ""
            yield f"rank {each.rank} (process {pid} on {host}) returned no stacks: {entry['error']}"


def _head(response: Mapping[str, Any], given: int, asked: int) -> Iterator[str]:
    why = f": {response['reason']}" if response.get("reason") else ""
    yield f"run {response['run']} (attempt {response['attempt']}) is {response['state']}{why}"
    step = "no step yet" if response.get("step") is None else f"last step {response['step']:,}"
    yield f"{step}; {given} of {asked} ranks returned their stacks"


def _group(group: RankGroup, places: Sequence[str], stacks: StackDump | None, *, all_threads: bool) -> Iterator[str]:
    first = group.standings[0]
    pending = first.pending
    if pending is not None:
        waits = f"waiting in {pending} for {pending.age_seconds:,.0f} s"
    elif first.latest is not None:
        waits = f"not in a collective; the last was {first.latest.op} {first.latest.seq}"
    else:
        waits = "not in a collective that torch recorded"
    yield f"{ranks_text(group.ranks)}: {waits}"
    yield f"  process {', '.join(places[:4])}{' …' if len(places) > 4 else ''}"
    yield from _frames(first.frames) if first.frames else ["    no Python code"]
    others = [thread for thread in (stacks.threads if stacks else ()) if not thread.is_training]
    yield from _others(others, all_threads=all_threads)


def _frames(frames: Sequence[Frame]) -> Iterator[str]:
    """Yield one line per frame of a stack, the innermost frame first. `>` marks code that is not in a library."""
    width = min(28, max(len(frame.function) for frame in frames))
    for frame in frames:
        mark = " " if is_library(frame.file) else ">"
        yield f"  {mark} {frame.function:<{width}}  {frame.file}:{frame.line}"


def _others(threads: Sequence[ThreadStack], *, all_threads: bool) -> Iterator[str]:
    if not all_threads:
        theirs = [thread for thread in threads if not thread.is_ours]
        names = ", ".join(dict.fromkeys(thread.name or "unnamed" for thread in theirs[:5]))
        if theirs:
            more = "thread" if len(theirs) == 1 else "threads"
            yield f"  {len(theirs)} more {more} ({names}{' …' if len(theirs) > 5 else ''}): see --all-threads"
        return
    for thread in threads:
        yield f"  thread {thread.name or hex(thread.ident)}{' (of Rankscope)' if thread.is_ours else ''}"
        yield from _frames(thread.frames) if thread.frames else ["    no Python code"]
