"""The answer of `POST /api/v1/stacks` as somebody on call wants to read it: who stands where, the cause first. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankscope_contract.collective_calls import sentences, sites_of
from rankscope_contract.stacks import FlightRecord, Frame, StackDump, ThreadStack
from rankscope_contract.standing import Group, Standing, grouped, is_library, ranks_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one rank answered, or why it did not."""

    rank: int
    host: str
    pid: int
    stacks: StackDump | None = None
    flight: FlightRecord | None = None
    error: str | None = None

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Asked:
        """Return one entry of `ranks`. Raises ValueError when it is none."""
        error, flight = entry.get("error"), entry.get("flight")
        return cls(
            rank=int(entry["rank"]),
            host=str(entry.get("host", "")),
            pid=int(entry.get("pid", 0)),
            stacks=StackDump.of(entry["stacks"]) if error is None else None,
            flight=FlightRecord.of(flight) if flight else None,
            error=None if error is None else str(error),
        )


def lines(answer: Mapping[str, Any], *, all_threads: bool = False) -> Iterator[str]:
    """Yield what to print; raises ValueError or KeyError when `answer` is not what a service answers."""
    asked = [Asked.of(entry) for entry in answer["ranks"]]
    given = {each.rank: each for each in asked if each.stacks is not None}
    yield from _head(answer, len(given), len(asked))
    standings = [Standing.of(each.rank, each.stacks, each.flight) for each in given.values()]
    flights = {each.rank: each.flight for each in given.values() if each.flight is not None}
    if told := sentences(flights, sites_of(standings)):
        yield ""
        yield from told
    for group in grouped(standings):
        yield ""
        yield from _group(group, [given[rank] for rank in group.ranks], all_threads=all_threads)
    for each in asked:
        if each.error is not None:
            yield ""
            yield f"rank {each.rank} (process {each.pid} on {each.host}) gave no stacks: {each.error}"


def _head(answer: Mapping[str, Any], given: int, asked: int) -> Iterator[str]:
    why = f": {answer['reason']}" if answer.get("reason") else ""
    yield f"run {answer['run']} (attempt {answer['attempt']}) is {answer['state']}{why}"
    step = "no step yet" if answer.get("step") is None else f"last step {answer['step']:,}"
    yield f"{step}; {given} of {asked} ranks say where they stand"


def _group(group: Group, members: Sequence[Asked], *, all_threads: bool) -> Iterator[str]:
    first = group.standings[0]
    pending = first.pending
    if pending is not None:
        waits = f"waits in {pending} for {pending.age_seconds:,.0f} s"
    elif first.latest is not None:
        waits = f"waits in no collective; the last was {first.latest.op} {first.latest.seq}"
    else:
        waits = "waits in no collective that torch recorded"
    yield f"{ranks_text(group.ranks)}: {waits}"
    places = ", ".join(f"{member.pid} on {member.host}" for member in members[:4])
    yield f"  process {places}{' …' if len(members) > 4 else ''}"
    yield from _frames(first.frames) if first.frames else ["    no Python code"]
    others = [thread for thread in (members[0].stacks.threads if members[0].stacks else ()) if not thread.is_training]
    yield from _others(others, all_threads=all_threads)


def _frames(frames: Sequence[Frame]) -> Iterator[str]:
    """Yield a line per call, the innermost first; an arrow marks the code that no library brought."""
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
            yield f"  {len(theirs)} more {more} ({names}{' …' if len(theirs) > 5 else ''}): --all-threads shows them"
        return
    for thread in threads:
        yield f"  thread {thread.name or hex(thread.ident)}{' (of Rankscope)' if thread.is_ours else ''}"
        yield from _frames(thread.frames) if thread.frames else ["    no Python code"]
