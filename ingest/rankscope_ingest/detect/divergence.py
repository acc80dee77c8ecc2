"""Compare the ranks of an attempt: replicas whose hashes differ, and slow ranks that make the others wait.

The module performs no I/O; the caller passes the time. Replicas that must be equal have equal hashes, so every
difference between two hashes is reported.

The service can identify the rank with the wrong values only when it has the hashes of the other ranks, and ranks can
deliver a step late. A step is therefore compared when all ranks of its group have delivered it, or WAIT_SECONDS after
the first difference. The step is compared again when a late rank delivers it.

A tensor that continues to differ is reported once. The tensor can be reported again after it was equal on all ranks.

The phases of the newest steps show which ranks of a running attempt make the others wait. A slow rank is reported once,
and has one open incident; it is reported again after it was as fast as the others for HOLD_SECONDS.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.collective_format import MOST_RANKS
from rankscope_contract.model.events import REPLICA_DESYNC, EventType, Severity, causal_key
from rankscope_contract.model.phases import LABEL, STEP_PHASE_SECONDS, Phase
from rankscope_ingest.detect.incidents import parse_details
from rankscope_ingest.pipeline.rows import Row, Stamp, event_row
from rankscope_ingest.record_channel.bodies import ValidBody
from rankscope_ingest.runs.collective_calls import ranks_text
from rankscope_ingest.runs.incident import Symptom
from rankscope_ingest.runs.models import AttemptKey
from rankscope_ingest.runs.text import divergence_text
from rankscope_storage.base.rule_names import SLOW_RANK
from rankscope_view.data.ranks import find_slow_ranks

WAIT_SECONDS: Final = 10.0
"""Maximum time in seconds to wait for the hashes of further ranks after two ranks of a replica group differ."""

KEPT_STEPS: Final = 16
"""Maximum number of steps per replica group whose hashes wait for ranks that have not delivered the step.

If a rank is further behind, the oldest steps are dropped, and the rank is compared at later steps.
"""

MAX_EVENTS: Final = 200
"""Maximum number of divergence events that one check stores for an attempt.

Without this limit, a model that was never synchronised would cause one event for each of its tensors.
"""

_SPAN: Final = re.compile(r"(\d{1,9})-(\d{1,9})(?::(\d{1,9}))?")
_LIST: Final = re.compile(r"\d{1,9}(,\d{1,9})*")

Name = tuple[str, str, int | None]
"""The kind, the tensor name and the virtual pipeline stage that together identify a replicated tensor."""
GroupKey = tuple[AttemptKey, str]
"""The attempt key and the ranks of the group (text such as `0-3`) that together identify a replica group."""
RanksByHash = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedTensor:
    """A tensor that is replicated on the ranks `replicas` (text such as `0-3`), at one step."""

    attempt_key: AttemptKey
    step: int
    replicas: str
    kind: str
    tensor: str
    vpp_stage: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverged(ReplicatedTensor):
    """A tensor that differs between its replicas at one step.

    `ranks_by_hash` contains each hash with the ranks that have it, the largest group of ranks first.
    """

    ranks_by_hash: RanksByHash

    @property
    def has_majority(self) -> bool:
        """Return whether the largest group of ranks with equal hashes is larger than every other group."""
        return len(self.ranks_by_hash[0][1]) > len(self.ranks_by_hash[1][1])

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks whose hash differs from that of the majority.

        If there is no majority, return all ranks of the group.
        """
        wrong = self.ranks_by_hash[1:] if self.has_majority else self.ranks_by_hash
        return tuple(sorted(rank for _, ranks in wrong for rank in ranks))

    @property
    def rank(self) -> int | None:
        """Return the only rank whose hash differs from that of the majority.

        Return None if several ranks differ or if there is no majority.
        """
        return self.ranks[0] if len(self.ranks) == 1 else None

    @property
    def text(self) -> str:
        """Return a sentence for users that names the ranks on which the tensor differs."""
        groups = [ranks for _, ranks in self.ranks_by_hash]
        return divergence_text(groups, self.ranks if self.has_majority else None)

    @property
    def causal(self) -> tuple[float, ...]:
        """Return the sort key of this difference in the causal order of events; the probable cause sorts first."""
        return causal_key(
            step=self.step, micro_step=None, kind=self.kind, vpp_stage=self.vpp_stage, pp_stage=None, call_id=None
        )


@dataclass(slots=True)
class DivergenceChanges:
    """Result of one check of the replicas: tensors that differ between replicas, and tensors that are equal again.

    `opened` contains the attempts that had no reported divergence before this check.
    """

    diverged: list[Diverged] = field(default_factory=list)
    converged: list[ReplicatedTensor] = field(default_factory=list)
    opened: set[AttemptKey] = field(default_factory=set)

    def by_attempt(self) -> dict[AttemptKey, list[Diverged]]:
        """Return a mapping from attempt key to the diverged tensors of the attempt, in causal order."""
        found: dict[AttemptKey, list[Diverged]] = defaultdict(list)
        for item in sorted(self.diverged, key=lambda item: item.causal):
            found[item.attempt_key].append(item)
        return found


@dataclass(slots=True)
class _Reported:
    """A reported divergence of a tensor that is not yet equal on all ranks again."""

    step: int
    ranks: set[int]


@dataclass(slots=True)
class _Step:
    """The tensor hashes of one replica group at one step, with the ranks that have them."""

    groups: list[tuple[dict[Name, int], set[int]]] = field(default_factory=list)
    differs_since: float | None = None
    judged: int = 0  # number of ranks that had delivered the step when it was judged

    @property
    def ranks(self) -> set[int]:
        return {rank for _, ranks in self.groups for rank in ranks}

    def add(self, rank: int, hashes: dict[Name, int], now: float) -> None:
        for _, ranks in self.groups:
            ranks.discard(rank)  # the rank repeated the step
        same = next((ranks for known, ranks in self.groups if known == hashes), None)
        if same is None:
            self.groups.append((hashes, same := set()))
        same.add(rank)
        self.groups = [group for group in self.groups if group[1]]
        if len(self.groups) > 1 and self.differs_since is None:
            self.differs_since = now

    def differences(self) -> Iterator[tuple[Name, RanksByHash]]:
        """Yield the name of each tensor that differs between ranks, and its hashes with the ranks that have them."""
        for name in dict.fromkeys(name for hashes, _ in self.groups for name in hashes):
            found: dict[int, set[int]] = defaultdict(set)
            for hashes, ranks in self.groups:
                if name in hashes:
                    found[hashes[name]] |= ranks
            if len(found) > 1:
                yield name, largest_first((hash_, tuple(sorted(ranks))) for hash_, ranks in found.items())


def largest_first(groups: Iterable[tuple[int, tuple[int, ...]]]) -> RanksByHash:
    """Return the (hash, ranks with this hash) pairs of one tensor, the largest group of ranks first.

    Groups of equal size are in ascending order of their ranks.
    """
    return tuple(sorted(groups, key=lambda group: (-len(group[1]), group[1])))


class DivergenceTracker:
    """Finds replicas that diverge.

    Keeps the hashes of steps that some ranks have not delivered yet, and the divergences that were reported.
    """

    def __init__(self, reported: Iterable[Diverged] = ()) -> None:
        """Create a tracker of replica divergences.

        `reported` contains the divergences that an earlier service reported and that have not ended.
        """
        self._steps: dict[GroupKey, dict[int, _Step]] = defaultdict(dict)
        self._reported: dict[GroupKey, dict[Name, _Reported]] = defaultdict(dict)
        for item in reported:
            name = (item.kind, item.tensor, item.vpp_stage)
            self._reported[item.attempt_key, item.replicas][name] = _Reported(item.step, set(item.ranks))

    def add(self, hashes: Iterable[Row], now: float) -> None:
        """Add rows of `hashes` at time `now`: those of a poll response, or those that a starting service reads."""
        steps: dict[tuple[GroupKey, int, int], dict[Name, int]] = defaultdict(dict)
        for row in hashes:
            if row["step"] is not None and row["replicas"] is not None:
                group = (row["run"], row["attempt"]), row["replicas"]
                steps[group, row["step"], row["rank"]][row["kind"], row["tensor"], row["vpp_stage"]] = row["hash"]
        for (group, step, rank), content in steps.items():
            try:
                parse_ranks(group[1])
            except ValueError:
                continue  # of another release: the rows are stored unchanged and are not compared
            self._steps[group].setdefault(step, _Step()).add(rank, content, now)

    def check(self, attempts: Iterable[AttemptKey], now: float) -> DivergenceChanges:
        """Return the tensors that diverged or became equal since the last check.

        `attempts` contains the keys of all active attempts. The tracker discards its state of all other attempts.
        """
        changes, active = DivergenceChanges(), set(attempts)
        for group in [group for group in (*self._steps, *self._reported) if group[0] not in active]:
            self._steps.pop(group, None)
            self._reported.pop(group, None)
        for group, steps in self._steps.items():
            had_diverged = self._has_diverged(group[0])
            members = set(parse_ranks(group[1]))
            for number in sorted(steps):
                if not self._judge(group, number, steps[number], changes, now):
                    break  # steps are reported in order
            if not had_diverged and self._has_diverged(group[0]):
                changes.opened.add(group[0])
            for number in [number for number, step in steps.items() if step.judged and step.ranks >= members]:
                del steps[number]
            for number in sorted(steps)[:-KEPT_STEPS]:
                del steps[number]
        return changes

    @property
    def diverged(self) -> set[AttemptKey]:
        """Return the active attempts with replicas that differ now."""
        return {group[0] for group, reported in self._reported.items() if reported}

    def _has_diverged(self, key: AttemptKey) -> bool:
        return any(reported for (attempt, _), reported in self._reported.items() if attempt == key)

    def _judge(self, group: GroupKey, number: int, step: _Step, changes: DivergenceChanges, now: float) -> bool:
        """Compare the hashes of one replica group at one step.

        Add the tensors that differ or are equal again to `changes`. Return False if the comparison must wait for ranks
        that have not delivered the step. The hashes of these ranks may show which rank is wrong.
        """
        delivered = step.ranks
        is_complete = delivered >= set(parse_ranks(group[1]))
        if step.differs_since is not None and not is_complete and now - step.differs_since < WAIT_SECONDS:
            return False
        if (step.differs_since is None and not is_complete) or len(delivered) == step.judged:
            return True
        step.judged = len(delivered)
        differences, reported = dict(step.differences()), self._reported[group]
        for name, ranks_by_hash in differences.items():
            item = Diverged(**_tensor(group, number, name), ranks_by_hash=ranks_by_hash)
            before = reported.get(name)
            if before is None:
                reported[name] = _Reported(number, set(item.ranks))
            elif number >= before.step and not set(item.ranks) <= before.ranks:
                before.ranks |= set(item.ranks)
            else:
                continue
            changes.diverged.append(item)
        if is_complete:
            for name in [name for name, item in reported.items() if name not in differences and number > item.step]:
                del reported[name]
                changes.converged.append(ReplicatedTensor(**_tensor(group, number, name)))
        return True


def _tensor(group: GroupKey, step: int, name: Name) -> dict[str, Any]:
    kind, tensor, vpp_stage = name
    place = {"attempt_key": group[0], "replicas": group[1], "step": step}
    return place | {"kind": kind, "tensor": tensor, "vpp_stage": vpp_stage}


def diverged_row(item: Diverged, stamp: Stamp) -> Row:
    """Return the row of `events` which reports that a tensor differs between its replicas."""
    details = {
        "state": "apart",
        "replicas": item.replicas,
        "ranks": item.ranks,
        "majority": item.has_majority,
        # As hexadecimal text: many JSON readers cannot represent 64-bit integers.
        "hashes": {f"{hash_ % 2**64:016x}": ranks for hash_, ranks in item.ranks_by_hash},
    }
    columns = _columns(item) | {"rank": item.rank, "op": "hash", "value": float(len(item.ranks))}
    return event_row(stamp, EventType.ANOMALY, Severity.CRITICAL, item.text, details, **columns)


def converged_row(item: ReplicatedTensor, stamp: Stamp) -> Row:
    """Return the row of `events` which reports that a tensor is equal on all its replicas again."""
    message = f"{item.kind} of {item.tensor} is equal on ranks {item.replicas} again"
    details = {"state": "equal", "replicas": item.replicas}
    return event_row(stamp, EventType.NOTE, Severity.INFO, message, details, **_columns(item))


def _columns(item: ReplicatedTensor) -> Row:
    run, attempt = item.attempt_key
    names = {name: getattr(item, name) for name in ("kind", "tensor", "vpp_stage", "step")}
    return {"run": run, "attempt": attempt, "rule": REPLICA_DESYNC, **names}


def divergence_symptom(found: Sequence[Diverged]) -> Symptom:
    """Return one symptom (the input of the incident detection) for all diverged tensors `found` of one attempt.

    `found` must be in causal order, because the symptom has the rank, step, kind and name of the first tensor.
    """
    first = found[0]
    run, attempt = first.attempt_key
    return Symptom(
        run=run,
        attempt=attempt,
        rank=first.rank,
        step=first.step,
        severity=Severity.CRITICAL,
        causal=first.causal,
        events=len(found),
        rule=REPLICA_DESYNC,
        kind=first.kind,
        tensor=first.tensor,
        op="hash",
        further_subjects=frozenset((REPLICA_DESYNC, item.tensor) for item in found),
        message=first.text + (f" and {len(found) - 1} more tensors" if len(found) > 1 else ""),
        ranks=None if len(first.ranks) == 1 else ranks_text(first.ranks),
    )


def parse_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks in `0-7`, `0-24:8` (every eighth) or `0,3,5`, in ascending order.

    Raises ValueError if the text has another form.
    """
    if span := _SPAN.fullmatch(text):
        first, last, step = int(span[1]), int(span[2]), int(span[3] or 1)
        if first <= last and step >= 1 and (last - first) // step < MOST_RANKS:
            return tuple(range(first, last + 1, step))
    elif _LIST.fullmatch(text):
        return tuple(sorted({int(part) for part in text.split(",")}))
    raise ValueError(f"{text!r} is no group of ranks: write 0-7, 0-24:8 or 0,3,5")


LEAST_SHARE: Final = 0.3
"""Share of the time of a step that the others wait, from which on a slow rank is reported.

Ranks that share cores differ by 0.1 to 0.25 over tens of steps without a cause in the training.
"""

HOLD_SECONDS: Final = 60.0
"""Time after which a rank that is no longer slow is forgotten: a rank that is slow now and then has one incident."""

_KEPT_STEPS: Final = 200
_JUDGED_SECONDS: Final = 10.0
_JUDGED_STEPS: Final = (12, 40)  # the time of fewer or shorter steps is too irregular
_EVERY_STEPS: Final = 5
_PHASES: Final = (*map(str, Phase), "announced_phase")


class _Rank(NamedTuple):
    """The newest steps of one rank, and their seconds [steps, phases]. A step is at its number modulo _KEPT_STEPS."""

    steps: Any
    seconds: Any


class StragglerTracker:
    """The newest steps of all running attempts, and the slow ranks that were reported."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ranks: dict[AttemptKey, dict[int, _Rank]] = defaultdict(dict)
        self.reported: dict[AttemptKey, dict[int, float]] = defaultdict(dict)
        """The time at which each reported rank was last seen to be slow, in monotonic seconds."""
        self._checked: dict[AttemptKey, int] = {}

    def add(self, key: AttemptKey, rank: int, body: ValidBody) -> None:
        """Add the phases of the steps in one poll response."""
        scalars = body.nested.get("scalars")
        if scalars is None:
            return
        rows = np.flatnonzero(pc.equal(scalars.columns["name"], STEP_PHASE_SECONDS).to_numpy(zero_copy_only=False))
        steps = body.columns["step"].take(pa.array(scalars.records[rows])).to_pylist()
        labels, values = (scalars.columns[name].take(pa.array(rows)).to_pylist() for name in ("labels", "value"))
        fresh = _Rank(np.full(_KEPT_STEPS, -1), np.zeros((_KEPT_STEPS, len(_PHASES)), np.float32))
        known = self._ranks[key].setdefault(rank, fresh)
        for step, text, value in zip(steps, labels, values, strict=True):
            if step is None or value is None:
                continue
            row = step % _KEPT_STEPS
            if known.steps[row] != step:
                known.steps[row], known.seconds[row] = step, 0.0
            known.seconds[row, _phase(text)] += value

    def check(self, attempts: Iterable[AttemptKey], stamp: Callable[[], Stamp]) -> Iterator[tuple[Row, bool]]:
        """Yield the event of each slow rank with new steps, and whether the rank was not slow before.

        `attempts` contains the keys of all active attempts. The state of all other attempts is discarded.
        """
        active = set(attempts)
        for state in (self._ranks, self.reported, self._checked):
            for key in [key for key in state if key not in active]:
                del state[key]
        for key, known in self._ranks.items():
            numbers = sorted(known)
            newest = min(int(known[rank].steps.max()) for rank in numbers)
            if len(numbers) < 2 or newest - self._checked.get(key, 0) < _EVERY_STEPS:
                continue
            self._checked[key], now = newest, self._clock()
            before = {n: at for n, at in self.reported[key].items() if now - at < HOLD_SECONDS}
            steps = np.arange(max(0, newest - _KEPT_STEPS + 1), newest + 1)
            at = steps % _KEPT_STEPS
            parts = [np.where((one.steps[at] == steps)[:, None], one.seconds[at], np.nan) for one in known.values()]
            seconds = np.array(parts, np.float64)[np.argsort(list(known))]
            usual = np.nanmedian(np.nansum(seconds[:, -_JUDGED_STEPS[0] :], axis=2))
            judged = int(np.clip(_JUDGED_SECONDS / max(float(usual), 1e-9), *_JUDGED_STEPS))
            slow = {numbers[one.row]: one for one in find_slow_ranks(seconds, _PHASES, steps.tolist(), steps=judged)}
            found = {n: one for n, one in slow.items() if one.pauses or one.share >= LEAST_SHARE or n in before}
            self.reported[key] = before | dict.fromkeys(found, now)
            for number, one in found.items():
                columns = {"run": key[0], "attempt": key[1], "rank": number, "step": newest, "rule": SLOW_RANK}
                columns |= {"op": one.phase, "value": one.share}
                text, details = f"rank {number} {one.words}", {"seconds": one.seconds, "pauses": one.pauses}
                row = event_row(stamp(), EventType.ANOMALY, Severity.WARNING, text, details, **columns)
                yield row, number not in before


@functools.lru_cache(maxsize=256)
def _phase(labels: str | None) -> int:
    """Return the place of the phase of a scalar in _PHASES; announced phases share the last one."""
    name = str(parse_details(labels).get(LABEL))
    return _PHASES.index(name) if name in _PHASES else len(_PHASES) - 1
