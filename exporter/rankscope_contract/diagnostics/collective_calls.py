"""One collective as all ranks of its group see it: who never entered it, who never left it, where ranks differ.

Pure: flight records in, calls and sentences out. Calls of one group are made by all its ranks in one order, so the
`seq` that a group counts is the same call on every rank, and what differs at one `seq` is a rank that went astray.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rankscope_contract.diagnostics.collective_format import CallState, bytes_text, dtype_text, is_even, ranks_in
from rankscope_contract.diagnostics.rank_groups import Standing, is_library, own_frame, ranks_text
from rankscope_contract.diagnostics.stacks import Collective, FlightRecord

MOST_SENTENCES: Final = 5
"""A job of many groups that stands still waits in hundreds of collectives, and the first of them say why."""

Records = Mapping[int, FlightRecord]
"""What ranks hold of their collectives, by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The collective `seq` of a group. Every member is in exactly one of the four tuples, each ascending."""

    group: str
    group_id: str
    seq: int
    missing: tuple[int, ...] = ()  # never entered it
    waiting: tuple[int, ...] = ()  # entered it and are not through
    left: tuple[int, ...] = ()  # are through
    unknown: tuple[int, ...] = ()  # nothing is known of them
    forms: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """What ranks called, and which did; more than one where they differ."""
    seconds: float = 0.0  # since the first of those that wait entered it

    @property
    def name(self) -> str:
        """Return `all_reduce 41 (4.0 MiB float32) of dp`, as the first rank calls it."""
        return _numbered(f"{self.forms[0][0]} of {self.group}" if self.forms else "", self.seq)

    @property
    def is_mismatch(self) -> bool:
        """Return whether ranks called different things."""
        return len(self.forms) > 1

    @property
    def state(self) -> CallState:
        """Return how far the ranks are."""
        if self.missing:
            return CallState.NEVER_ENTERED
        if self.waiting and self.left:
            return CallState.NEVER_LEFT
        if not self.waiting:
            return CallState.OVER
        return CallState.UNKNOWN if self.unknown else CallState.ALL_IN

    def sentence(self, sites: Mapping[int, str] | None = None) -> str:
        """Return what is the matter; `sites` are the places where ranks stand in the code of the training."""
        silent = f"; {ranks_text(self.unknown)} {_verb(self.unknown, 'say')} nothing" if self.unknown else ""
        return self._matter(_called_at(self.waiting, sites or {})) + silent

    def _matter(self, site: str) -> str:
        what, since = self.name, f"since {self.seconds:,.0f} s"
        in_it = f"{ranks_text(self.waiting)} {_verb(self.waiting, 'are')} in it {since}{site}" if self.waiting else ""
        if self.is_mismatch:
            forms = ", ".join(f"{ranks_text(ranks)} {form}" for form, ranks in self.forms)
            return "; ".join(filter(None, (f"ranks differ in collective {self.seq} of {self.group}: {forms}", in_it)))
        match self.state:
            case CallState.NEVER_ENTERED:
                return f"{ranks_text(self.missing)} never entered {what}; {in_it}"
            case CallState.NEVER_LEFT:
                through = f"{ranks_text(self.left)} {_verb(self.left, 'are')} through"
                return f"{ranks_text(self.waiting)} entered {what} {since}{site} and never left it; {through}"
            case CallState.ALL_IN:
                return f"{ranks_text(self.waiting)} are all in {what} {since}{site}, and none has left it"
            case _:
                return f"{ranks_text(self.waiting)} {_verb(self.waiting, 'are')} in {what} {since}{site}"


def calls_of_note(records: Records) -> list[Call]:
    """Return the calls that somebody waits in, and the first in each group in which ranks differ; causes first."""
    entries: dict[tuple[str, int], dict[int, Collective]] = {}
    for rank, record in sorted(records.items()):
        for entry in record.collectives:
            if not entry.is_p2p:
                entries.setdefault((entry.group_key, entry.seq), {})[rank] = entry
    members = _members(records)
    latest = {rank: _latest(record) for rank, record in records.items()}
    calls = {
        key: _call(key, by_rank, members.get(key[0], ()), latest)
        for key, by_rank in sorted(entries.items(), key=lambda item: item[0])
    }
    first_mismatch: dict[str, int] = {}
    for (group, seq), call in calls.items():
        if call.is_mismatch:
            first_mismatch.setdefault(group, seq)
    noted = [call for (group, seq), call in calls.items() if call.waiting or first_mismatch.get(group) == seq]
    stuck = {rank for call in noted for rank in call.waiting}
    return sorted(noted, key=lambda call: _order(call, stuck))


def sentences(records: Records, sites: Mapping[int, str] | None = None) -> list[str]:
    """Return a sentence for each call of note, the causes first; one number for what is beyond a few."""
    calls = calls_of_note(records)
    more = [f"and {len(calls) - MOST_SENTENCES} more collectives that ranks wait in"] * (len(calls) > MOST_SENTENCES)
    return [*(call.sentence(sites) for call in calls[:MOST_SENTENCES]), *more]


def sites_of(standings: Iterable[Standing]) -> dict[int, str]:
    """Return where each rank stands in code that no library brought, as `train.py[88]`."""
    frames = ((standing.rank, own_frame(standing.frames)) for standing in standings)
    return {rank: f"{frame.short[0]}[{frame.line}]" for rank, frame in frames if frame and not is_library(frame.file)}


def _call(
    key: tuple[str, int],
    entries: Mapping[int, Collective],
    members: Collection[int],
    latest: Mapping[int, Mapping[str, int]],
) -> Call:
    group, seq = key
    where: dict[str, list[int]] = {"missing": [], "waiting": [], "left": [], "unknown": []}
    for rank in sorted({*members, *entries}):
        where[_standing_of(rank, seq, entries.get(rank), latest, group)].append(rank)
    some = next(iter(entries.values()))
    return Call(
        group=some.group,
        group_id=group,
        seq=seq,
        forms=_forms(entries),
        seconds=max((entries[rank].age_seconds for rank in where["waiting"]), default=0.0),
        **{name: tuple(ranks) for name, ranks in where.items()},
    )


def _standing_of(
    rank: int, seq: int, entry: Collective | None, latest: Mapping[int, Mapping[str, int]], group: str
) -> str:
    if entry is not None:
        return "waiting" if entry.is_pending else "left"
    if rank not in latest:
        return "unknown"
    # What is under way is always in a record; what is older than its latest and not in it is over.
    return "missing" if latest[rank].get(group, -1) < seq else "left"


def _members(records: Records) -> dict[str, set[int]]:
    """Return the ranks of each group: as any rank reports them, else the ranks that have used it."""
    told: dict[str, set[int]] = {}
    seen: dict[str, set[int]] = {}
    for name, ranks in {(group.id, group.ranks) for record in records.values() for group in record.groups}:
        told.setdefault(name, set()).update(ranks_in(ranks))
    for rank, record in records.items():
        for entry in record.collectives:
            seen.setdefault(entry.group_key, set()).add(rank)
    return {group: told.get(group) or seen.get(group, set()) for group in {*told, *seen}}


def _latest(record: FlightRecord) -> dict[str, int]:
    """Return the last call of each group that a rank entered."""
    latest = {group.id: group.latest_seq for group in record.groups}
    for entry in record.collectives:
        if not entry.is_p2p:
            latest[entry.group_key] = max(latest.get(entry.group_key, entry.seq), entry.seq)
    return latest


def _forms(entries: Mapping[int, Collective]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return what ranks called, each form named by the first rank that has it.

    Sizes that may differ make no second form, nor does an entry without tensors: in a scatter only the source has any.
    """
    found: dict[tuple[object, ...], list[int]] = {}
    for rank, entry in sorted(entries.items(), key=lambda item: (not item[1].dtypes, item[0])):
        form: tuple[object, ...] = (entry.op, entry.dtypes, entry.bytes if is_even(entry.op) else None)
        if not entry.dtypes:
            form = next((known for known in found if known[0] == entry.op), form)
        found.setdefault(form, []).append(rank)
    forms = ((_form(entries[ranks[0]]), tuple(sorted(ranks))) for ranks in found.values())
    return tuple(sorted(forms, key=lambda form: form[1]))


def _form(entry: Collective) -> str:
    size = None if entry.bytes is None else bytes_text(entry.bytes)
    what = " ".join(filter(None, (size, dtype_text(entry.dtypes))))
    return f"{entry.op} ({what})" if what else entry.op


def _numbered(what: str, seq: int) -> str:
    """Return `all_reduce 41 (4.0 MiB float32) of dp`, given it without the number."""
    op, space, rest = what.partition(" ")
    return f"{op} {seq}{space}{rest}"


def _called_at(ranks: Iterable[int], sites: Mapping[int, str]) -> str:
    places = list(dict.fromkeys(sites[rank] for rank in ranks if rank in sites))
    if not places:
        return ""
    return f", called at {places[0]}" + (f" and {len(places) - 1} more places" if len(places) > 1 else "")


def _verb(ranks: Sequence[int], plural: str) -> str:
    return plural if len(ranks) > 1 else {"are": "is", "say": "says"}[plural]


def _order(call: Call, stuck: set[int]) -> tuple[object, ...]:
    """Put first what others wait for: ranks that differ, then ranks that stand outside of any collective."""
    is_cause = call.is_mismatch or any(rank not in stuck for rank in call.missing)
    return not is_cause, not call.is_mismatch, not call.missing, -call.seconds, call.group, call.seq
