"""Hashes of replicas as they arrive, step by step, and what follows when they differ. Pure, the clock is an argument.

What is equal by construction has equal hashes, so any two that differ are news; who of them is wrong is known once the
others have spoken. A rank may be late: a step is judged when all ranks of its group are there, or some seconds after
the first difference, and again for whoever comes then. A tensor that stays apart is told once, until it is equal again.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.diagnostics.collective_format import parse_ranks
from rankscope_ingest.runs.models import AttemptKey

WAIT_SECONDS: Final = 10.0
"""How long the others are waited for once two ranks differ."""

KEPT_STEPS: Final = 16
"""Steps of a group that wait for ranks; a rank that is further behind is judged by the steps after these."""

_COLUMNS: Final = ("run", "attempt", "rank", "step", "replicas", "kind", "tensor", "vpp_stage", "hash")

Name = tuple[str, str, int | None]  # kind, tensor, virtual stage
GroupKey = tuple[AttemptKey, str]  # and the ranks, as text
RanksByHash = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverged:
    """A tensor that differs between replicas. `ranks_by_hash` has each hash with its ranks, the largest group first."""

    attempt_key: AttemptKey
    step: int
    replicas: str
    kind: str
    tensor: str
    vpp_stage: int | None
    ranks_by_hash: RanksByHash

    @property
    def has_majority(self) -> bool:
        """Return whether one camp is larger than every other."""
        return len(self.ranks_by_hash[0][1]) > len(self.ranks_by_hash[1][1])

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that disagree with the largest camp; all where there is none."""
        wrong = self.ranks_by_hash[1:] if self.has_majority else self.ranks_by_hash
        return tuple(sorted(rank for _, ranks in wrong for rank in ranks))

    @property
    def rank(self) -> int | None:
        """Return the one rank that disagrees with all others; None where it is not one alone."""
        return self.ranks[0] if len(self.ranks) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Converged:
    """A tensor that was apart and is equal on all its replicas again."""

    attempt_key: AttemptKey
    step: int
    replicas: str
    kind: str
    tensor: str
    vpp_stage: int | None


@dataclass(slots=True)
class DesyncNews:
    """What one look brought. `opened` are the attempts of which nothing had been apart before."""

    apart: list[Diverged] = field(default_factory=list)
    again: list[Converged] = field(default_factory=list)
    opened: set[AttemptKey] = field(default_factory=set)


@dataclass(slots=True)
class _Told:
    step: int
    ranks: set[int]


@dataclass(slots=True)
class _Step:
    """What the ranks of one group hold at one step; ranks that hold the same share one entry."""

    members: dict[bytes, list[int]] = field(default_factory=dict)
    contents: dict[bytes, dict[Name, int]] = field(default_factory=dict)
    differs_since: float | None = None
    judged: int = 0  # how many ranks had spoken when it was judged

    @property
    def ranks(self) -> set[int]:
        return {rank for ranks in self.members.values() for rank in ranks}

    def add(self, rank: int, digest: bytes, content: dict[Name, int], now: float) -> None:
        for known, ranks in list(self.members.items()):
            if rank in ranks:  # it made the step again
                ranks.remove(rank)
                if not ranks:
                    del self.members[known], self.contents[known]
        self.members.setdefault(digest, []).append(rank)
        self.contents.setdefault(digest, content)
        if len(self.members) > 1 and self.differs_since is None:
            self.differs_since = now

    def ranks_by_hash(self) -> Iterator[tuple[Name, RanksByHash]]:
        """Yield the camps of every tensor on which the ranks that have it disagree."""
        for name in dict.fromkeys(name for content in self.contents.values() for name in content):
            found: dict[int, list[int]] = defaultdict(list)
            for digest, ranks in self.members.items():
                if name in self.contents[digest]:
                    found[self.contents[digest][name]] += ranks
            if len(found) > 1:
                ranks_by_hash = ((hash_, tuple(sorted(ranks))) for hash_, ranks in found.items())
                yield name, tuple(sorted(ranks_by_hash, key=lambda camp: (-len(camp[1]), camp[1])))


class DivergenceTracker:
    """Knows what waits for other ranks, and what was told. `told` are the tensors of a former service."""

    def __init__(self, told: Iterable[Diverged] = ()) -> None:
        self._steps: dict[GroupKey, dict[int, _Step]] = defaultdict(dict)
        self._told: dict[GroupKey, dict[Name, _Told]] = defaultdict(dict)
        for item in told:
            name = (item.kind, item.tensor, item.vpp_stage)
            self._told[item.attempt_key, item.replicas][name] = _Told(item.step, set(item.ranks))

    def heard(self, hashes: pa.Table | None, now: float) -> None:
        """Take the hashes of one body, or those that the store has of what is not complete."""
        if hashes is None or hashes.num_rows == 0:
            return
        known = hashes.select(_COLUMNS)
        known = known.filter(pc.and_(pc.is_valid(known["step"]), pc.is_valid(known["replicas"])))
        spoken = known.select(["run", "attempt", "rank", "step", "replicas"])
        for one in spoken.group_by(spoken.column_names).aggregate([]).to_pylist():
            wanted = pc.and_(pc.equal(known["step"], one["step"]), pc.equal(known["replicas"], one["replicas"]))
            for column in ("run", "attempt", "rank"):
                wanted = pc.and_(wanted, pc.equal(known[column], one[column]))
            self._add(one, known.filter(wanted), now)

    def look(self, attempts: Iterable[AttemptKey], now: float) -> DesyncNews:
        """Return what is to be told at this moment; `attempts` are all that go on."""
        news, going_on = DesyncNews(), set(attempts)
        for group in [group for group in (*self._steps, *self._told) if group[0] not in going_on]:
            self._steps.pop(group, None)
            self._told.pop(group, None)
        for group, steps in self._steps.items():
            was_apart = self._is_apart(group[0])
            for number in sorted(steps):
                if not self._judge(group, number, steps[number], news, now):
                    break  # the first step comes first
            if not was_apart and self._is_apart(group[0]):
                news.opened.add(group[0])
            self._forget(group, steps)
        return news

    def _add(self, one: Mapping[str, Any], rows: pa.Table, now: float) -> None:
        try:
            parse_ranks(one["replicas"])
        except ValueError:
            return  # of a rank that speaks otherwise: its rows are stored as they came, and compared with nothing
        names = zip(rows["kind"].to_pylist(), rows["tensor"].to_pylist(), rows["vpp_stage"].to_pylist(), strict=True)
        content = dict(sorted(zip(names, rows["hash"].to_pylist(), strict=True), key=lambda item: repr(item[0])))
        digest = hashlib.blake2b(repr(content).encode("utf-8", "replace"), digest_size=16).digest()
        group = (one["run"], one["attempt"]), one["replicas"]
        self._steps[group].setdefault(one["step"], _Step()).add(one["rank"], digest, content, now)

    def _is_apart(self, key: AttemptKey) -> bool:
        return any(told for (attempt, _), told in self._told.items() if attempt == key)

    def _judge(self, group: GroupKey, number: int, step: _Step, news: DesyncNews, now: float) -> bool:
        """Judge one step if it can be; return False where it waits for ranks that may tell who is wrong."""
        spoken = step.ranks
        is_complete = spoken >= set(parse_ranks(group[1]))
        if step.differs_since is not None and not is_complete and now - step.differs_since < WAIT_SECONDS:
            return False
        if (step.differs_since is None and not is_complete) or len(spoken) == step.judged:
            return True
        step.judged = len(spoken)
        found = dict(step.ranks_by_hash())
        for (kind, tensor, stage), ranks_by_hash in found.items():
            item = Diverged(
                attempt_key=group[0],
                step=number,
                replicas=group[1],
                kind=kind,
                tensor=tensor,
                vpp_stage=stage,
                ranks_by_hash=ranks_by_hash,
            )
            self._tell(group, (kind, tensor, stage), item, news)
        if is_complete:
            self._take_back(group, number, set(found), news)
        return True

    def _tell(self, group: GroupKey, name: Name, item: Diverged, news: DesyncNews) -> None:
        told = self._told[group].get(name)
        if told is None:
            self._told[group][name] = _Told(item.step, set(item.ranks))
        elif not set(item.ranks) <= told.ranks and item.step >= told.step:
            told.ranks |= set(item.ranks)
        else:
            return
        news.apart.append(item)

    def _take_back(self, group: GroupKey, number: int, apart: set[Name], news: DesyncNews) -> None:
        for name, told in list(self._told[group].items()):
            if name not in apart and number > told.step:
                del self._told[group][name]
                kind, tensor, stage = name
                news.again.append(
                    Converged(
                        attempt_key=group[0], step=number, replicas=group[1], kind=kind, tensor=tensor, vpp_stage=stage
                    )
                )

    @staticmethod
    def _forget(group: GroupKey, steps: dict[int, _Step]) -> None:
        everyone = set(parse_ranks(group[1]))
        for number in [number for number, step in steps.items() if step.judged and step.ranks >= everyone]:
            del steps[number]
        for number in sorted(steps)[:-KEPT_STEPS]:
            del steps[number]
