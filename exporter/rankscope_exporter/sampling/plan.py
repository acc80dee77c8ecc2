"""The plan of a rank: the ordered list of entries to which the numbers of a record refer, and views of its table.

The entries of a quantity may be unknown at attach: the optimizer's state appears with the first update, and the shapes
of activations once a module has run. An entry never moves and is never removed. A position therefore means the same
tensor in every table, and the length of a plan identifies it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from rankscope_contract.model.schema import Plan, PlanEntry
from rankscope_exporter.quantities.base import Table
from rankscope_exporter.records.host_transfer import Deferred, Numbers, Row, Transfer
from rankscope_exporter.records.step_record import NamedPlan
from rankscope_exporter.statistics import MeasureGroup, StatisticsTable, copy_entries
from rankscope_exporter.statistics.selection import EVERY_OP, Ops, carried_ops

MAX_ENTRIES: Final = 200_000
"""Limit of the memory of a model that creates new names without end: 64 bytes per entry in every table."""


class PlanRegistry:
    """All entries of the plan. Grows on the training thread; the publisher thread requests plans of earlier lengths."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self.entries: list[PlanEntry] = []
        self.owners: list[int] = []
        """For each entry: the position of its parameter, -1 for none."""
        self.ops: list[Ops] = []
        """For each entry: the statistics that leave the rank. The list is replaced, never changed in place: a step that
        waits for the publisher keeps the list of its own time."""
        self.left_out = 0  # entries that did not fit
        self._max_entries = max_entries
        self._released: dict[tuple[PlanEntry, ...], range] = {}
        self._named: NamedPlan | None = None
        self._named_ops: Sequence[Ops] = ()

    def __len__(self) -> int:
        return len(self.entries)

    def add(
        self, entries: Sequence[PlanEntry], owners: Sequence[int] | None = None, ops: Ops = EVERY_OP
    ) -> range | None:
        """Append `entries` and return their positions. If they do not fit, count them and return None.

        If the same entries exist and were released, return their existing positions.
        """
        released = self._released.pop(tuple(entries), None) if self._released else None
        if released is not None:
            self.publish(released, ops)
            return released
        first = len(self.entries)
        if first + len(entries) > self._max_entries:
            self.left_out += len(entries)
            return None
        self.owners += [-1] * len(entries) if owners is None else owners
        self.ops += [ops] * len(entries)
        self.entries += entries
        return range(first, first + len(entries))

    def release(self, rows: range) -> None:
        """Allow the entries of one `add` to be filled by the next caller that adds the same entries."""
        if rows:
            self._released[tuple(self.entries[rows.start : rows.stop])] = rows

    def reclaim(self, rows: range) -> None:
        """Revoke a `release` of the entries of one `add`."""
        if rows:
            self._released.pop(tuple(self.entries[rows.start : rows.stop]), None)

    def publish(self, rows: range, ops: Ops) -> None:
        """Set the statistics that leave the rank for the entries `rows`, from now on."""
        if any(choice != ops for choice in self.ops[rows.start : rows.stop]):
            self.ops = [*self.ops[: rows.start], *[ops] * len(rows), *self.ops[rows.stop :]]

    def plan(self, length: int, ops: Sequence[Ops] = ()) -> NamedPlan:
        """Return the plan of the first `length` entries, of which the statistics `ops` are published.

        For the publisher thread: the first call for a plan takes milliseconds.
        """
        if self._named is None or len(self._named.plan.entries) != length or ops is not self._named_ops:
            self._named = NamedPlan.of(Plan(tuple(self.entries[:length]), carried_ops(ops[:length])))
            self._named_ops = ops
        return self._named


@dataclass(frozen=True, slots=True)
class Measurement:
    """Settings of the computation of statistics."""

    zero_below: float = 0.0
    compiled: bool = True  # use the compiled CPU kernel once it is ready


@dataclass(slots=True)
class StepBuffers:
    """The data that all quantities of a step write to: the plan, the table of its entries, and other rows."""

    plan: PlanRegistry
    table: StatisticsTable
    measurement: Measurement
    deferred: list[Deferred] = field(default_factory=list)
    rows: dict[str, list[Row]] = field(default_factory=dict)

    def take_rows(self) -> tuple[list[Deferred], dict[str, list[Row]]]:
        """Return the rows that were written outside of the table, and start with none for the next step."""
        deferred, rows = self.deferred, self.rows
        self.deferred, self.rows = [], {}
        return deferred, rows


class TableView(Table):
    """The rows of one quantity in the shared table. Row 0 is the first entry of the quantity."""

    def __init__(self, buffers: StepBuffers, entries: Sequence[PlanEntry], owners: Sequence[int], ops: Ops) -> None:
        """Add `entries` to the plan as the first rows. Their statistics `ops` are published."""
        self._buffers = buffers
        self._first = len(buffers.plan)  # of the first entry, or of a later one where the plan is full
        self._ops = ops
        self._groups: dict[range, MeasureGroup] = {}
        self._added: list[range] = []
        rows = self._add(entries, owners)
        if rows is not None:
            self._first = rows.start

    def add(self, entries: Sequence[PlanEntry], owners: Sequence[int] | None = None) -> range | None:
        """Append entries that were not known before, and return their rows; None when the plan is full."""
        rows = self._add(entries, owners)
        return None if rows is None else range(rows.start - self._first, rows.stop - self._first)

    def _add(self, entries: Sequence[PlanEntry], owners: Sequence[int] | None) -> range | None:
        rows = self._buffers.plan.add(entries, owners, self._ops)
        if rows is not None:
            self._added.append(rows)
            self._buffers.table.grow(rows.stop)
            self._buffers.table.accumulate(self._ops)
        return rows

    def publish(self, ops: Ops) -> None:
        """Set the statistics that leave the rank, for all present and future entries of this view."""
        self._ops = ops
        for rows in self._added:
            self._buffers.plan.publish(rows, ops)
        self._buffers.table.accumulate(ops)

    def release(self) -> None:
        """Allow another view to fill the entries of this one, which writes no more."""
        for rows in self._added:
            self._buffers.plan.release(rows)

    def reclaim(self) -> None:
        """Fill the released entries again."""
        for rows in self._added:
            self._buffers.plan.reclaim(rows)
            self._buffers.plan.publish(rows, self._ops)

    def measure(self, tensors: Sequence[torch.Tensor | None], rows: range) -> None:
        """Compute the statistics of `tensors` into the entries `rows`; None leaves an entry absent."""
        group = self._groups.get(rows)
        if group is None:
            how = self._buffers.measurement
            group = MeasureGroup(self._shifted(rows), zero_below=how.zero_below, compiled=how.compiled)
            self._groups[rows] = group
        group.measure(tensors, self._buffers.table)

    def copy(self, source: range, target: range) -> None:
        """Copy the statistics of the entries `source`, which were measured before, to the entries `target`."""
        copy_entries(self._buffers.table, self._shifted(source), self._shifted(target))

    def forget(self, rows: range) -> None:
        """Make entries absent that were measured before."""
        self._buffers.table.forget(self._shifted(rows))

    def forget_equal(self, rows: range, others: range) -> torch.Tensor:
        """Make each entry of `rows` absent that is bit-identical to its counterpart in `others`."""
        return self._buffers.table.forget_equal(self._shifted(rows), self._shifted(others))

    def defer(self, dataset: str, tensor: torch.Tensor, rows: Callable[[Numbers], Iterable[Row]]) -> None:
        """Call `rows` for rows of `dataset` once `tensor` has reached the host; does not wait for the device."""
        self._buffers.deferred.append(Deferred(dataset, Transfer.of(tensor), rows))

    def withdraw(self, dataset: str) -> None:
        """Discard the deferred rows of `dataset` of this step: the quantity reads it again."""
        self._buffers.deferred = [item for item in self._buffers.deferred if item.dataset != dataset]

    def later(self, tensor: torch.Tensor, use: Callable[[Numbers], None]) -> None:
        """Call `use` on the publisher thread with the present values of `tensor`, once they have reached the host."""

        def no_rows(numbers: Numbers) -> tuple[()]:
            use(numbers)
            return ()

        self._buffers.deferred.append(Deferred(None, Transfer.of(tensor), no_rows))

    def write(self, dataset: str, row: Row) -> None:
        """Add a complete row of `dataset`."""
        self._buffers.rows.setdefault(dataset, []).append(row)

    def _shifted(self, rows: range) -> range:
        return range(self._first + rows.start, self._first + rows.stop)
