"""The plan of a record: the entries to which its numbers refer, in the order of the rows of the statistics table.

A plan has up to ten entries for each parameter, and a model may have many thousands of parameters. The entries of
parameters are therefore created each time they are read, most of them on the publisher thread.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankscope_contract.model.schema import Plan, PlanEntry, plan_hash
from rankscope_exporter.records.selection import Ops, Published, carried_ops, masks

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
