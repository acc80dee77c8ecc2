"""The plan of a record, with the rows of the statistics table from which the numbers of the record are read."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from rankscope_contract.model.schema import Plan, PlanEntry
from rankscope_exporter.records.plan_entries import PlanItem, entries_at
from rankscope_exporter.records.step_record import NamedPlan
from rankscope_exporter.statistics.selection import Ops, Published, carried_ops, masks


@dataclass(frozen=True, eq=False)
class PlanVersion:
    """The plan of the records of some steps. Position i of the record has the statistics of table row `rows[i]`."""

    rows: Sequence[int]
    items: tuple[PlanItem, ...]
    """For each entry: the entry, or the entries to which it belongs."""
    owners: tuple[int, ...]
    """For each entry: the position of its parameter in the model; -1 for an entry without a parameter."""
    ops: tuple[Ops, ...]
    """For each entry: the statistics that the rank publishes."""

    @functools.cached_property
    def entries(self) -> tuple[PlanEntry, ...]:
        """The entries. Usually read on the publisher thread, because the first access creates most of them."""
        return entries_at(self.rows, self.items)

    @functools.cached_property
    def named(self) -> NamedPlan:
        """The plan with its hash. Read on the publisher thread, because the first access takes milliseconds."""
        return NamedPlan.of(Plan(self.entries, carried_ops(self.ops)))

    @functools.cached_property
    def published(self) -> Published | None:
        """The masks of the statistics to publish; None if all entries have the default selection of ops."""
        return masks(self.ops)

    @property
    def used(self) -> int:
        """The number of table rows to copy, from the first on."""
        return self.rows[-1] + 1 if self.rows else 0
