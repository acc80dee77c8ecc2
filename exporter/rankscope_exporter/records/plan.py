"""The plan of a record, and the selection of the statistics (ops) that it has.

All ops are measured in one pass over a tensor. The publisher thread then masks the ops that are not published.

The plan has the entries to which the numbers of a record refer, in the order of the rows of the statistics table.

A plan has up to ten entries for each parameter, and a model may have many thousands of parameters. The entries of
parameters are therefore created each time they are read, most of them on the publisher thread.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rankscope_contract.model.kinds import BASELINE_OPS, COUNT_OPS, DEFAULT_OPS, VALUE_OPS
from rankscope_contract.model.schema import Plan, PlanEntry, plan_hash
from rankscope_contract.rules import AnomalyRule
from rankscope_exporter.process.validation import listed

Ops = frozenset[str]

ALL_OPS: Final = (*VALUE_OPS, *COUNT_OPS)
EVERY_OP: Final[Ops] = frozenset(DEFAULT_OPS)
"""The default selection of ops: all except those that are published only if the configuration names them."""

NO_OP: Final[Ops] = frozenset()
"""The selection of ops for entries that are measured but not published."""

ALWAYS: Final = "numel"
"""The op `numel` (number of elements), which every row has.

A row without it counts as absent, and the store needs it to combine shards.
"""

FALLBACK: Final = "norm"
COUNTED_ANYWAY: Final = ("nans", "infs")
"""Ops that rules read even if they are not published.

For example, a NaN must be detected even if the number of NaN is not published.
"""

_ELSEWHERE: Final = ("shape", "dtype")
_OTHER_NAMES: Final = {"id": "mean"}


def chosen_ops(names: Sequence[str]) -> Ops:
    """Return the statistics that `names` selects.

    If `names` contains no statistic, select `norm`. `numel` is always selected.

    Raise ValueError if some names are statistics and others are unknown; the error contains the most similar known
    name. `shape` and `dtype` are accepted and ignored, because the plan of every rank contains them. `id`, the value
    of a single number, is read as `mean`.
    """
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"ops must be a list of statistics, not {names!r}")
    known = {_OTHER_NAMES.get(name, name) for name in names} & set(ALL_OPS)
    unknown = [name for name in names if name not in (*ALL_OPS, *_ELSEWHERE, *_OTHER_NAMES)]
    if known and unknown:
        raise ValueError(f"ops: {unknown[0]!r} is not a statistic; the statistics are {listed(ALL_OPS, unknown[0])}")
    return frozenset({*(known or {FALLBACK}), ALWAYS})


def op_notices(names: Sequence[str]) -> list[str]:
    """Return notices for the user about `names` that are accepted as ops, but have no effect or another meaning."""
    notices = []
    if not {_OTHER_NAMES.get(name, name) for name in names} & set(ALL_OPS):
        notices.append(f"ops {list(names)} contains no statistic, so norm is published; valid: {', '.join(ALL_OPS)}")
    if any(name in _ELSEWHERE for name in names):
        notices.append(
            "ops: shape and dtype are always published, in the plan of each rank and in `tensors` of the store"
        )
    if "id" in names:
        notices.append("ops: id is read as mean, which is the value of a single number")
    return notices


def rule_notices(rules: Iterable[AnomalyRule], published: Mapping[str, Ops]) -> list[str]:
    """Return a notice for each rule that reads an op that is not published.

    `published` has the published ops by kind.
    """
    notices = []
    for rule in rules:
        missing = [op for op in DEFAULT_OPS if op not in COUNTED_ANYWAY and _is_missed(rule, op, published)]
        if missing:
            notices.append(f"rule {rule.name} reads {', '.join(missing)}, which the setting ops does not publish")
    return notices


def _is_missed(rule: AnomalyRule, op: str, published: Mapping[str, Ops]) -> bool:
    return any(rule.reads(kind, op) and op not in ops for kind, ops in published.items() if ops)


@dataclass(frozen=True, slots=True)
class Finished:
    """The statistics of one step on the host. `values` is NaN for an entry that is absent or has no finite element.

    The arrays are numpy arrays, because a torch operation on the publisher thread would start a team of OpenMP threads.
    """

    values: npt.NDArray[np.float32]  # [len(VALUE_OPS), T]
    counts: npt.NDArray[np.int64]  # [len(COUNT_OPS), T], 0 where absent
    present: npt.NDArray[np.bool_]  # [T]


@dataclass(frozen=True, slots=True)
class Published:
    """Two masks, one for values and one for counts, with a row per statistic and a column per plan entry.

    True means that the number is published.
    """

    values: npt.NDArray[np.bool_]  # [len(VALUE_OPS), T]
    counts: npt.NDArray[np.bool_]  # [len(COUNT_OPS), T]

    def only(self, finished: Finished) -> Finished:
        """Return `finished` with NaN for values that are not published. Counts remain, because rules read them."""
        present = finished.present & self.counts[-1]
        values = np.where(self.values, finished.values, np.float32(np.nan))
        return replace(finished, values=values, present=present)


def carried_ops(choices: Iterable[Ops]) -> tuple[str, ...]:
    """Return the names of the floating-point statistics in a record, given the selected ops of each entry.

    The order is: default ops, ops that are selected by name, baselines.
    """
    wanted = EVERY_OP.union(*set(choices))
    return (*(op for op in VALUE_OPS if op in wanted), *BASELINE_OPS)


def masks(ops: Sequence[Ops]) -> Published | None:
    """Return the masks of plan entries with the selections `ops`; None if all have the default selection."""
    distinct = list(dict.fromkeys(ops))
    if distinct in ([], [EVERY_OP]):
        return None
    place = {choice: position for position, choice in enumerate(distinct)}
    rows = [[op in choice for op in ALL_OPS] for choice in distinct]
    mask = np.array(rows, np.bool_).T[:, [place[choice] for choice in ops]]
    assert COUNT_OPS[-1] == "numel"
    return Published(mask[: len(VALUE_OPS)], mask[len(VALUE_OPS) :])


Descriptions = Sequence[tuple[Any, ...]]
"""Descriptions of all parameters, which several kinds of entries have in common: the fields of each entry in the order
of `PlanEntry`, without the kind."""


class ParameterEntries(Sequence[PlanEntry]):
    """The plan entries of the same parameters for several kinds: those of the first kind, then those of the next."""

    def __init__(self, groups: Iterable[tuple[str, Descriptions]] = ()) -> None:
        """Each of `groups` consists of a kind and the descriptions of all parameters for this kind."""
        self._groups = tuple(groups)
        self._count = len(self._groups[0][1]) if self._groups else 0

    def __len__(self) -> int:
        return len(self._groups) * self._count

    def __iter__(self) -> Iterator[PlanEntry]:
        return (PlanEntry(kind, *fields) for kind, described in self._groups for fields in described)

    def __getitem__(self, position: Any) -> Any:
        group, index = divmod(range(len(self))[position], self._count)  # IndexError ends an iteration
        kind, described = self._groups[group]
        return PlanEntry(kind, *described[index])

    def __add__(self, others: ParameterEntries) -> ParameterEntries:
        return ParameterEntries((*self._groups, *others._groups))

    @property
    def kinds(self) -> set[str]:
        return {kind for kind, _ in self._groups} if self._count else set()

    def by_kind(self) -> Iterator[tuple[str, ParameterEntries]]:
        """Yield each kind with its entries."""
        return ((kind, ParameterEntries([(kind, described)])) for kind, described in self._groups)


@dataclass(frozen=True, slots=True)
class Placed:
    """Entries in a plan, and the table row of the first of them."""

    entries: ParameterEntries
    first: int


PlanItem = PlanEntry | Placed
"""An entry of the plan, or the entries to which the entry belongs."""


def entry_at(row: int, item: PlanItem) -> PlanEntry:
    """Return the entry at table row `row`, where the plan has `item`."""
    found: PlanEntry = item.entries[row - item.first] if isinstance(item, Placed) else item
    return found


@dataclass(frozen=True, slots=True)
class NamedPlan:
    """A plan, the ordered list of entries to which the numbers of a record refer, with its hash and JSON text.

    Hash and text are computed once per plan and not per step. Plans with the same hash are equal.
    """

    plan: Plan = field(compare=False)
    hash: str
    json: str = field(compare=False)
    kinds: tuple[str, ...] = field(compare=False)  # of the entries, in their order

    @classmethod
    def of(cls, plan: Plan) -> NamedPlan:
        """Create an object for `plan`, and compute the hash, the canonical JSON text and the kinds of the plan."""
        text = plan.to_json()
        return cls(plan, plan_hash(text), text, tuple(dict.fromkeys(str(entry.kind) for entry in plan.entries)))


@dataclass(frozen=True, eq=False)
class PlanVersion:
    """The plan of the records of some steps. A record has the statistics of the table rows in their order."""

    items: tuple[PlanItem, ...]
    """For each entry: the entry, or the entries to which it belongs."""
    owners: tuple[int, ...]
    """For each entry: the position of its parameter in the model; -1 for an entry without a parameter."""
    ops: tuple[Ops, ...]
    """For each entry: the statistics that the rank publishes."""

    @functools.cached_property
    def entries(self) -> tuple[PlanEntry, ...]:
        """The entries. Usually read on the publisher thread, because the first access creates most of them."""
        created: dict[int, list[PlanEntry]] = {}  # by id() of the `Placed` object; one by one takes three times as long
        found: list[PlanEntry] = []
        for row, item in enumerate(self.items):
            if isinstance(item, Placed):
                if id(item) not in created:
                    created[id(item)] = list(item.entries)
                found.append(created[id(item)][row - item.first])
            else:
                found.append(item)
        return tuple(found)

    @functools.cached_property
    def named(self) -> NamedPlan:
        """The plan with its hash. Read on the publisher thread, because the first access takes milliseconds."""
        return NamedPlan.of(Plan(self.entries, carried_ops(self.ops)))

    @functools.cached_property
    def published(self) -> Published | None:
        """The masks of the statistics to publish; None if all entries have the default selection of ops."""
        return masks(self.ops)

    def __len__(self) -> int:
        return len(self.items)
