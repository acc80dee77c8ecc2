"""Compare the flight records of all ranks to find collectives that some ranks never entered or never left.

The input is the flight record of each rank. The output is the collectives and sentences that describe them. The
functions have no side effects. All ranks of a group make the calls of the group in the same order. Therefore the
sequence number `seq` of the group identifies the same call on every rank. If the calls with one `seq` differ between
ranks, a rank called the wrong collective (a mismatch).

`grouped` groups ranks that are at the same place in the code. A rank in a collective waits for the ranks that are not
in it. Therefore ranks in no collective come first, then ranks with lower sequence numbers, then smaller groups.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rankscope_contract.model.collective_format import bytes_text, dtype_text, ranks_in, spans
from rankscope_contract.model.stacks import Collective, FlightRecord, Standing, is_library, own_frame
from rankscope_storage.sql.collective_calls import EVEN, CallState

MOST_SPANS: Final = 16
"""Maximum number of spans of consecutive ranks, such as `0-7`, in a list of ranks that is displayed.

Without this limit, a text about every second one of 1,000 ranks would list 500 spans.
"""

_NO_SEQ: Final = -1


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that are at the same place in the code, in ascending order."""

    standings: tuple[Standing, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(standing.rank for standing in self.standings)

    def __str__(self) -> str:
        return f"{ranks_text(self.ranks)} {self.standings[0]}"


def grouped(standings: Iterable[Standing]) -> list[RankGroup]:
    """Return groups of the ranks that are at the same place in the code. Groups that block other ranks come first."""
    found: dict[tuple[object, ...], list[Standing]] = {}
    for standing in sorted(standings, key=lambda item: item.rank):
        found.setdefault(standing.key, []).append(standing)
    return sorted((RankGroup(tuple(members)) for members in found.values()), key=_order_of_group)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text such as `rank 3` or `ranks 0-2, 5`.

    After MOST_SPANS spans, the text ends with the number of further ranks.
    """
    found = spans(ranks).split(",")
    text = ", ".join(found[:MOST_SPANS])
    if len(found) > MOST_SPANS:
        text += f" and {len(set(ranks)) - len(ranks_in(','.join(found[:MOST_SPANS]))):,} more"
    return f"rank{'' if len(ranks) == 1 else 's'} {text}"


def _order_of_group(group: RankGroup) -> tuple[object, ...]:
    pending = group.standings[0].pending
    seq = _NO_SEQ if pending is None else pending.seq
    return pending is not None, seq, len(group.standings), group.ranks


MOST_SENTENCES: Final = 5
"""Maximum number of sentences about single collective calls that `sentences` returns.

A hang of a job with many groups can involve hundreds of collectives.
"""

Records = Mapping[int, FlightRecord]
"""Flight record of each rank, by rank number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The collective with sequence number `seq` of a group, as seen by all ranks of the group.

    Each rank of the group is in exactly one of four tuples, which are in ascending order: `missing` never entered the
    collective, `waiting` are still in it, `left` completed it, and `unknown` have no flight record.
    """

    group: str
    group_id: str
    seq: int
    missing: tuple[int, ...] = ()  # never entered it
    waiting: tuple[int, ...] = ()  # entered it and have not completed it
    left: tuple[int, ...] = ()  # completed it
    unknown: tuple[int, ...] = ()  # no record
    forms: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Each different call at this `seq`, with the ranks that made it. More than one entry is a mismatch."""
    seconds: float = 0.0  # since the first waiting rank entered it

    @property
    def name(self) -> str:
        """Return the name of the call, such as `all_reduce 41 (4.0 MiB float32) of dp`.

        If ranks made different calls, the call of the lowest rank is used.
        """
        return _numbered(f"{self.forms[0][0]} of {self.group}" if self.forms else "", self.seq)

    @property
    def is_mismatch(self) -> bool:
        """Return whether ranks of the group made different calls with the sequence number of this collective."""
        return len(self.forms) > 1

    @property
    def state(self) -> CallState:
        """Return the progress of the call, combined from the progress of all ranks of the group."""
        if self.missing:
            return CallState.NEVER_ENTERED
        if self.waiting and self.left:
            return CallState.NEVER_LEFT
        if not self.waiting:
            return CallState.OVER
        return CallState.UNKNOWN if self.unknown else CallState.ALL_IN

    def sentence(self, sites: Mapping[int, str] | None = None) -> str:
        """Return a sentence for users about the state of the call.

        `sites` maps ranks to their current place in the training code, such as `train.py[88]`.
        """
        no_record = f"; {ranks_text(self.unknown)} {_verb(self.unknown, 'have')} no record" if self.unknown else ""
        return self._progress(_called_at(self.waiting, sites or {})) + no_record

    def _progress(self, site: str) -> str:
        since = f"since {self.seconds:,.0f} s"
        in_it = f"{ranks_text(self.waiting)} {_verb(self.waiting, 'are')} in it {since}{site}" if self.waiting else ""
        if self.is_mismatch:
            forms = ", ".join(f"{ranks_text(ranks)} {form}" for form, ranks in self.forms)
            return "; ".join(filter(None, (f"ranks differ in collective {self.seq} of {self.group}: {forms}", in_it)))
        match self.state:
            case CallState.NEVER_ENTERED:
                return f"{ranks_text(self.missing)} never entered {self.name}; {in_it}"
            case CallState.NEVER_LEFT:
                completed = f"{ranks_text(self.left)} completed it"
                return f"{ranks_text(self.waiting)} entered {self.name} {since}{site} and never left it; {completed}"
            case CallState.ALL_IN:
                return f"{ranks_text(self.waiting)} are all in {self.name} {since}{site}, and none has left it"
            case _:
                return f"{ranks_text(self.waiting)} {_verb(self.waiting, 'are')} in {self.name} {since}{site}"


def calls_of_note(records: Records) -> list[Call]:
    """Return the calls in which ranks wait, and the first mismatch of each group. The probable causes come first.

    A mismatch is a sequence number with which ranks made different calls.
    """
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
    """Return sentences about the calls in which ranks wait and the first mismatch of each group.

    There is one sentence for each call, the probable causes of the hang first. After five sentences, one more sentence
    contains the number of further calls.
    """
    calls = calls_of_note(records)
    more = [f"and {len(calls) - MOST_SENTENCES} more collectives in which ranks wait"] * (len(calls) > MOST_SENTENCES)
    return [*(call.sentence(sites) for call in calls[:MOST_SENTENCES]), *more]


def sites_of(standings: Iterable[Standing]) -> dict[int, str]:
    """Return the place of each rank in the training code, such as `train.py[88]`, by rank number.

    The place is that of the innermost frame outside of libraries. Ranks without such a frame are omitted.
    """
    frames = ((standing.rank, own_frame(standing.frames)) for standing in standings)
    return {rank: f"{frame.short[0]}[{frame.line}]" for rank, frame in frames if frame and not is_library(frame.file)}


def _call(
    key: tuple[str, int],
    entries: Mapping[int, Collective],
    members: Collection[int],
    latest: Mapping[int, Mapping[str, int]],
) -> Call:
    group, seq = key
    places: dict[str, list[int]] = {"missing": [], "waiting": [], "left": [], "unknown": []}
    for rank in sorted({*members, *entries}):
        places[_progress_of(rank, seq, entries.get(rank), latest, group)].append(rank)
    return Call(
        group=next(iter(entries.values())).group,
        group_id=group,
        seq=seq,
        forms=_forms(entries),
        seconds=max((entries[rank].age_seconds for rank in places["waiting"]), default=0.0),
        **{name: tuple(ranks) for name, ranks in places.items()},
    )


def _progress_of(
    rank: int, seq: int, entry: Collective | None, latest: Mapping[int, Mapping[str, int]], group: str
) -> str:
    if entry is not None:
        return "waiting" if entry.is_pending else "left"
    if rank not in latest:
        return "unknown"
    # A record always contains the active calls. A call that is older than the latest and not in the record has ended.
    return "missing" if latest[rank].get(group, -1) < seq else "left"


def _members(records: Records) -> dict[str, set[int]]:
    """Return the ranks of each group, by group id.

    The ranks are those that a flight record reports for the group, or else the ranks that used the group.
    """
    reported: dict[str, set[int]] = {}
    seen: dict[str, set[int]] = {}
    for name, ranks in {(group.id, group.ranks) for record in records.values() for group in record.groups}:
        reported.setdefault(name, set()).update(ranks_in(ranks))
    for rank, record in records.items():
        for entry in record.collectives:
            seen.setdefault(entry.group_key, set()).add(rank)
    return {group: reported.get(group) or seen.get(group, set()) for group in {*reported, *seen}}


def _latest(record: FlightRecord) -> dict[str, int]:
    """Return the sequence number of the last call that the rank of `record` entered in each group, by group id."""
    latest = {group.id: group.latest_seq for group in record.groups}
    for entry in record.collectives:
        if not entry.is_p2p:
            latest[entry.group_key] = max(latest.get(entry.group_key, entry.seq), entry.seq)
    return latest


def _forms(entries: Mapping[int, Collective]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the different calls that ranks made with one sequence number, each with its ranks.

    A call is described by the flight-record entry of its first rank: the lowest rank with tensors, if there is one.
    Different sizes are no mismatch if the sizes of this op may differ between ranks. An entry without tensors is no
    mismatch either: in a scatter, only the source has tensors.
    """
    found: dict[tuple[object, ...], list[int]] = {}
    for rank, entry in sorted(entries.items(), key=lambda item: (not item[1].dtypes, item[0])):
        form: tuple[object, ...] = (entry.op, entry.dtypes, entry.bytes if _is_even(entry.op) else None)
        if not entry.dtypes:
            form = next((known for known in found if known[0] == entry.op), form)
        found.setdefault(form, []).append(rank)
    forms = ((_form(entries[ranks[0]]), tuple(sorted(ranks))) for ranks in found.values())
    return tuple(sorted(forms, key=lambda form: form[1]))


def _form(entry: Collective) -> str:
    size = None if entry.bytes is None else bytes_text(entry.bytes)
    message = " ".join(filter(None, (size, dtype_text(entry.dtypes))))
    return f"{entry.op} ({message})" if message else entry.op


def _is_even(op: str) -> bool:
    """Return whether all ranks transfer equal numbers of bytes in `op`, which may be the name that any backend uses."""
    return any(op.strip("_").startswith(name) for name in EVEN)


def _numbered(text: str, seq: int) -> str:
    """Return `text` with the sequence number `seq` after its first word, which is the op.

    Example: `all_reduce 41 (4.0 MiB float32) of dp` for `all_reduce (4.0 MiB float32) of dp`.
    """
    op, space, rest = text.partition(" ")
    return f"{op} {seq}{space}{rest}"


def _called_at(ranks: Iterable[int], sites: Mapping[int, str]) -> str:
    places = list(dict.fromkeys(sites[rank] for rank in ranks if rank in sites))
    if not places:
        return ""
    return f", called at {places[0]}" + (f" and {len(places) - 1} more places" if len(places) > 1 else "")


def _verb(ranks: Sequence[int], plural: str) -> str:
    return plural if len(ranks) > 1 else {"are": "is", "have": "has"}[plural]


def _order(call: Call, stuck: set[int]) -> tuple[object, ...]:
    """Return a sort key for collective calls.

    Mismatches come first, then calls in which ranks wait for a rank that is not in any collective.
    """
    is_cause = call.is_mismatch or any(rank not in stuck for rank in call.missing)
    return not is_cause, not call.is_mismatch, not call.missing, -call.seconds, call.group, call.seq
