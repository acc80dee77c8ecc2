"""Evaluate the rules between ranks for the tensor statistics of polled records.

The module performs no I/O. A step is evaluated when all live ranks of the attempt have delivered it, or a later one.
The statistics that the rules read are taken from the numbers of the checked body, before the body is decoded.

Ranks are compared in parts: two ranks are in the same part if they have a tensor in common. The ranks of a pipeline
stage, for example, are a part. A part has its own evaluator.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from rankscope_contract.model.events import EventType
from rankscope_contract.model.kinds import Kind
from rankscope_contract.rules.evaluator import Frame, Layout, ScoreEvaluator
from rankscope_contract.rules.expression import Node
from rankscope_contract.rules.score import RANKS_RULES, ScoreRule, kinds_of
from rankscope_ingest.detect.incidents import parse_details, symptoms
from rankscope_ingest.pipeline.rows import Row, Stamp, event_row
from rankscope_ingest.record_channel.bodies import Measured, PlanColumns, ValidBody, absent_counts
from rankscope_ingest.runs.collective_calls import ranks_text
from rankscope_ingest.runs.incident import Symptom
from rankscope_ingest.runs.models import AttemptKey

KEPT_BYTES: Final = 64 << 20
"""Maximum size of the statistics of an attempt that wait for ranks which have not delivered the step.

Beyond it, the oldest step is evaluated without these ranks.
"""

KEPT_STEPS: Final = 1000
"""Maximum number of steps of an attempt that wait for ranks."""

MOST_SERIES: Final = 100_000
"""Maximum number of tensors, times the ranks that are compared: of more, those that most ranks have are evaluated."""

BLAMED: Final = 2.0
"""A rank is blamed if its score is this many times that of every other rank, or if no other one is above the limit."""

_LARGEST: Final = float(np.finfo(np.float32).max)  # instead of Inf, which would count as a non-finite value
_OPS: Final = ("norm", "min", "max", "mean", "zeros", "numel")

Block = npt.NDArray[np.float32]
TensorKey = tuple[Any, ...]


class _Selection:
    """The entries of a plan that rules between ranks read. `tensors` has a key for each tensor.

    Compared are replicas, and the gradients that several ranks compute of the same elements. Shards are not.
    """

    def __init__(self, plan: PlanColumns, kinds: Sequence[str]) -> None:
        places: dict[TensorKey, int] = {}
        found: list[tuple[int, int, int]] = []
        for column, entry in enumerate(plan.entries):
            is_compared = entry.placement == ("partial" if entry.kind == Kind.GRAD_UNREDUCED else "replica")
            if entry.kind in kinds and is_compared and entry.micro_step is entry.call_seq is None:
                key = entry.tensor, entry.index, entry.vpp_stage, entry.shape
                found.append((kinds.index(entry.kind), places.setdefault(key, len(places)), column))
        self.tensors = tuple(places)
        columns = np.full((len(kinds), len(places)), -1)
        for kind, place, column in found:
            columns[kind, place] = column
        self._values, self._counts = (
            self._source(names, columns, len(plan)) for names in (plan.value_ops, plan.count_ops)
        )
        self._shape = len(_OPS), len(kinds), len(places)

    @staticmethod
    def _source(names: Sequence[str], columns: npt.NDArray[np.int64], width: int) -> tuple[Any, Any]:
        """Return positions in the numbers of a record, and where in a block [ops, kinds, tensors] they belong."""
        ops = np.array([names.index(op) if op in names else -1 for op in _OPS])[:, None, None]
        is_known = (ops >= 0) & (columns >= 0)
        places = np.flatnonzero(is_known)
        is_span = len(places) and places[-1] - places[0] == len(places) - 1
        return (ops * width + columns)[is_known], slice(places[0], places[-1] + 1) if is_span else places

    def blocks(self, measured: Measured) -> Block:
        """Return the statistics of each record, [records, ops, kinds, tensors]; NaN where there is none."""
        count = len(measured.records)
        blocks = np.full((count, math.prod(self._shape)), np.nan, np.float32)
        values = measured.values.to_numpy(zero_copy_only=False).reshape(count, -1)
        blocks[:, self._values[1]] = values.take(self._values[0], axis=1)
        source, places = self._counts
        counts = measured.counts.fill_null(0) if measured.counts.null_count else measured.counts
        blocks[:, places] = counts.to_numpy().reshape(count, -1).take(source, axis=1)
        if measured.counts.null_count:
            absent = absent_counts(measured).reshape(count, -1).take(source, axis=1)
            blocks[:, places] = np.where(absent, np.nan, blocks[:, places])
        return blocks.reshape(count, *self._shape)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Ranks with tensors in common.

    `members` has, for each selection, the rows of its ranks, and for each tensor of the layout its position in the
    selection, -1 without it.
    """

    layout: Layout
    members: list[tuple[_Selection, list[int], npt.NDArray[np.int64]]]

    def rows(self, blocks: Mapping[int, tuple[_Selection, Block]]) -> dict[str, npt.NDArray[np.float64]]:
        """Return the statistics by op, as in a frame, from the blocks of each rank."""
        ranks = self.layout.ranks
        shape = blocks[ranks[0]][1].shape
        found = np.empty((len(ranks), *shape[:-1], len(self.layout.tensors)))
        for _, rows, places in self.members:
            own = [blocks[ranks[row]][1] for row in rows]
            if len(own) == len(ranks) and len(places) == shape[-1]:
                np.stack(own, out=found)  # all have the same plan
            else:
                found[rows] = np.where(places >= 0, np.stack(own)[..., places], np.nan)
        return {op: found[:, number].reshape(len(ranks), -1) for number, op in enumerate(_OPS)}


def _parts(selections: Mapping[int, _Selection], kinds: Sequence[str]) -> list[_Part]:
    """Return the parts that have several ranks. `selections` has the selection of each rank."""
    parents: dict[_Selection, _Selection] = {}
    owners: dict[TensorKey, _Selection] = {}
    members: dict[_Selection, list[int]] = defaultdict(list)
    for rank in sorted(selections):  # they arrive in any order
        members[selections[rank]].append(rank)

    def root(selection: _Selection) -> _Selection:
        while parents[selection] is not selection:
            selection = parents[selection]
        return selection

    for selection in members:
        parents[selection] = selection
        for tensor in selection.tensors:
            parents[root(selection)] = root(owners.setdefault(tensor, selection))
    groups: dict[_Selection, list[_Selection]] = defaultdict(list)
    for selection in members:
        groups[root(selection)].append(selection)
    return [part for group in groups.values() if (part := _part({one: members[one] for one in group}, kinds))]


def _part(members: Mapping[_Selection, list[int]], kinds: Sequence[str]) -> _Part | None:
    holders: Counter[TensorKey] = Counter()
    for selection, ranks in members.items():
        holders.update(dict.fromkeys(selection.tensors, len(ranks)))
    ranks = sorted(rank for own in members.values() for rank in own)
    tensors = [tensor for tensor, count in holders.items() if count > 1]
    if not tensors:
        return None
    if len(ranks) * len(tensors) > MOST_SERIES:  # those that most ranks have
        tensors = sorted(tensors, key=lambda tensor: -holders[tensor])[: max(1, MOST_SERIES // len(ranks))]
    count = len(tensors)
    columns = {kind: np.arange(count) + number * count for number, kind in enumerate(kinds)}
    rows = {rank: row for row, rank in enumerate(ranks)}
    found = []
    for selection, own in members.items():
        places = {tensor: place for place, tensor in enumerate(selection.tensors)}
        at = np.array([places.get(tensor, -1) for tensor in tensors])
        found.append((selection, [rows[rank] for rank in own], at))
    return _Part(Layout(tuple(tensors), columns, tuple(ranks)), found)


@dataclass(slots=True)
class _Attempt:
    """The steps of an attempt that some ranks have not delivered, and the evaluators of its parts."""

    waiting: dict[int, dict[int, tuple[_Selection, Block]]] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)  # by rank
    size: int = 0  # of the waiting statistics, in bytes
    judged: int = -1
    selections: dict[int, _Selection] = field(default_factory=dict)  # by rank, at the last step
    parts: list[tuple[_Part, ScoreEvaluator]] = field(default_factory=list)

    def take(self, step: int) -> dict[int, tuple[_Selection, Block]]:
        found = self.waiting.pop(step)
        self.size -= sum(block.nbytes for _, block in found.values())
        self.judged = step
        return found

    def follow(self, selections: dict[int, _Selection], rules: Sequence[ScoreRule], kinds: Sequence[str]) -> None:
        """Divide the ranks of a step into parts. A part has the evaluator of its tensors at the step before."""
        if selections == self.selections:
            return
        known = {tensor: evaluator for part, evaluator in self.parts for tensor in part.layout.tensors}
        self.selections, self.parts = selections, []
        taken: set[ScoreEvaluator] = set()
        for part in _parts(selections, kinds):
            found = (known[tensor] for tensor in part.layout.tensors if tensor in known)
            evaluator = next((one for one in found if one not in taken), None) or ScoreEvaluator(rules)
            taken.add(evaluator)
            self.parts.append((part, evaluator))


class RankScores:
    """The rules between ranks, and the statistics of all running attempts that they wait for."""

    def __init__(self, rules: Iterable[ScoreRule] = RANKS_RULES) -> None:
        self._rules = tuple(rules)
        self._kinds = tuple(dict.fromkeys(kind for rule in self._rules for kind in kinds_of(rule.tree)))
        self._selections: WeakKeyDictionary[PlanColumns, _Selection] = WeakKeyDictionary()
        self._attempts: dict[AttemptKey, _Attempt] = defaultdict(_Attempt)

    @property
    def waiting(self) -> dict[AttemptKey, int]:
        """Return the number of steps that wait for ranks, by attempt."""
        return {key: len(attempt.waiting) for key, attempt in self._attempts.items()}

    def add(self, key: AttemptKey, rank: int, body: ValidBody) -> None:
        """Add the statistics of the steps in one poll response."""
        if body.last_step is None:
            return
        attempt = self._attempts[key]
        attempt.newest[rank] = max(body.last_step, attempt.newest.get(rank, -1))
        for measured in body.statistics:
            selection = self._selections.get(measured.plan)
            if selection is None:
                selection = self._selections[measured.plan] = _Selection(measured.plan, self._kinds)
            if not selection.tensors:
                continue
            column = body.columns["step"]
            steps = (column.fill_null(-1) if column.null_count else column).to_numpy()[measured.records].tolist()
            for step, block in zip(steps, selection.blocks(measured), strict=True):
                if step > attempt.judged:
                    known = attempt.waiting.setdefault(step, {})
                    attempt.size += block.nbytes if rank not in known else 0
                    known.setdefault(rank, (selection, block))

    def check(self, attempts: Mapping[AttemptKey, Collection[int]], stamp: Callable[[], Stamp]) -> Iterator[Row]:
        """Yield an event for each rule that fires at the steps that are complete, in the order of the steps.

        `attempts` contains the live ranks of all active attempts. The state of all other attempts is discarded.
        """
        for key in [key for key in self._attempts if key not in attempts]:
            del self._attempts[key]
        for key, attempt in self._attempts.items():
            newest = min((attempt.newest.get(rank, -1) for rank in attempts[key]), default=math.inf)
            for step in sorted(attempt.waiting):
                if step > newest and attempt.size <= KEPT_BYTES and len(attempt.waiting) <= KEPT_STEPS:
                    break
                follows, found = step == attempt.judged + 1, attempt.take(step)
                selections = {rank: selection for rank, (selection, _) in found.items()}
                attempt.follow(selections, self._rules, self._kinds)
                for part, evaluator in attempt.parts:
                    verdict = evaluator.observe(Frame(rows=part.rows(found), layout=part.layout, follows=follows))
                    for rule, tensor in dict.fromkeys((one.rule, one.tensor) for one in verdict.firings):
                        columns, ranks, message = _firing(evaluator, part.layout, rule, tensor or 0)
                        columns |= {"run": key[0], "attempt": key[1], "step": step}
                        details = {"ranks": ranks}
                        yield event_row(stamp(), EventType.ANOMALY, rule.severity, message, details, **columns)


def _firing(evaluator: ScoreEvaluator, layout: Layout, rule: ScoreRule, tensor: int) -> tuple[Row, list[int], str]:
    scores = _values(evaluator, layout, rule.tree, tensor)
    above = np.flatnonzero(scores > rule.above)
    above = above[np.argsort(-scores[above], kind="stable")]
    ranks = sorted(layout.ranks[row] for row in above.tolist())
    is_clear = len(above) == 1 or scores[above[0]] >= BLAMED * scores[above[1]]
    name, index, vpp_stage, _ = layout.tensors[tensor]
    score = float(scores[above[0]])
    label = name if index is None else f"{name}[{index}]"
    columns = {
        "rank": layout.ranks[above[0]] if is_clear else None,
        "rule": rule.name,
        "kind": _kind(evaluator, layout, rule, tensor, int(above[0])),
        "tensor": name,
        "vpp_stage": vpp_stage,
        "op": rule.subject,
        "value": min(score, _LARGEST),
        "threshold": rule.above,
    }
    return columns, ranks, f"{rule.message(label, score)}, {ranks_text(ranks)}"


def _values(evaluator: ScoreEvaluator, layout: Layout, node: Node, tensor: int) -> npt.NDArray[np.float64]:
    """Return the value of a part of a score at the last step, for each rank."""
    return np.broadcast_to(evaluator.memo[node.source], layout.shape)[:, tensor]


def _kind(evaluator: ScoreEvaluator, layout: Layout, rule: ScoreRule, tensor: int, row: int) -> str:
    """Return the kind of tensor that the score reads first; of a maximum, that of the first part above the limit."""
    tree = rule.tree
    parts = tree.arguments if tree.name == "max" else ()
    above = (part for part in parts if _values(evaluator, layout, part, tensor)[row] > rule.above)
    return kinds_of(next(above, tree))[0]


def symptoms_between(rows: Iterable[Row]) -> Iterator[Symptom]:
    """Yield the symptoms of the events of rules between ranks. Events that blame the same rank belong together."""
    by_rank: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        by_rank[row["run"], row["attempt"], row["rank"]].append(row)
    for (_, _, rank), own in by_rank.items():
        for symptom in symptoms(own):
            named = next(row for row in own if row["message"] == symptom.message)
            ranks = ranks_text(parse_details(named["details"])["ranks"])
            yield symptom if rank is not None else replace(symptom, ranks=ranks)
