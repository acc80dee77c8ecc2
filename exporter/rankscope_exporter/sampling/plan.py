"""The plan of a rank, and the parts of the statistics table to which single quantities write.

The plan is the ordered list of entries to which the numbers of a record refer. The statistics table has the same
entries. Some entries are unknown at attach: the state of an optimizer appears with the first update, and the shapes of
activations are known after a module has run. An entry never moves and is never removed. A position therefore means the
same tensor in the statistics table of every step, and the number of entries identifies a plan.
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
"""Largest number of entries in a plan. It limits the memory of a script that creates new tensor names without end.

An entry needs 64 bytes in every statistics table.
"""


class PlanRegistry:
    """All entries of the plan of a rank.

    The training thread adds entries. The publisher thread requests the plan of an earlier step, which may have fewer
    entries.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self.entries: list[PlanEntry] = []
        self.owners: list[int] = []
        """For each entry: the position of its parameter in the model; -1 for an entry without a parameter."""
        self.ops: list[Ops] = []
        """For each entry: the statistics that the rank publishes.

        The list is replaced, never changed in place. A step that waits for the publisher therefore keeps the list with
        which it was measured.
        """
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
        """Append `entries` and return their positions.

        If the plan is full, count the entries as dropped and return None.

        If the same entries exist and `release` was called for them, return their existing positions. `owners` has the
        position of the parameter of each entry, -1 for none. The rank publishes the statistics `ops` of the entries.
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
        """Allow the next call of `add` with the same entries to return the existing positions `rows`.

        `rows` is the result of one earlier call of `add`.
        """
        if rows:
            self._released[tuple(self.entries[rows.start : rows.stop])] = rows

    def reclaim(self, rows: range) -> None:
        """Keep the entries at `rows`, although `release` was called for them. One call of `add` has returned `rows`."""
        if rows:
            self._released.pop(tuple(self.entries[rows.start : rows.stop]), None)

    def publish(self, rows: range, ops: Ops) -> None:
        """Set the statistics `ops` that the rank publishes for the entries at `rows`, from now on."""
        if any(choice != ops for choice in self.ops[rows.start : rows.stop]):
            self.ops = [*self.ops[: rows.start], *[ops] * len(rows), *self.ops[rows.stop :]]

    def plan(self, length: int, ops: Sequence[Ops] = ()) -> NamedPlan:
        """Return the plan of the first `length` entries.

        `ops` has the statistics that the rank publishes, for each entry.

        Called on the publisher thread, because the first call for a plan takes milliseconds.
        """
        if self._named is None or len(self._named.plan.entries) != length or ops is not self._named_ops:
            self._named = NamedPlan.of(Plan(tuple(self.entries[:length]), carried_ops(ops[:length])))
            self._named_ops = ops
        return self._named


@dataclass(frozen=True, slots=True)
class Measurement:
    """Settings for the computation of statistics."""

    zero_below: float = 0.0
    compiled: bool = True  # use the compiled CPU kernel once it is ready


@dataclass(slots=True)
class StepBuffers:
    """The buffers of a step to which all quantities write: plan, statistics table, and rows of other datasets."""

    plan: PlanRegistry
    table: StatisticsTable
    measurement: Measurement
    deferred: list[Deferred] = field(default_factory=list)
    rows: dict[str, list[Row]] = field(default_factory=dict)

    def take_rows(self) -> tuple[list[Deferred], dict[str, list[Row]]]:
        """Return the rows of this step for datasets other than the statistics of tensors, and clear their buffers."""
        deferred, rows = self.deferred, self.rows
        self.deferred, self.rows = [], {}
        return deferred, rows


class TableView(Table):
    """The entries of one quantity in the statistics table, which has the entries of all quantities.

    Row number 0 of this object is the first entry of the quantity.
    """

    def __init__(self, buffers: StepBuffers, entries: Sequence[PlanEntry], owners: Sequence[int], ops: Ops) -> None:
        """Add `entries` to the plan and to the statistics table, as the first entries of this quantity.

        The rank publishes the statistics `ops` of these entries.
        """
        self._buffers = buffers
        self._first = len(buffers.plan)  # of the first entry, or of a later one where the plan is full
        self._ops = ops
        self._groups: dict[range, MeasureGroup] = {}
        self._added: list[range] = []
        rows = self._add(entries, owners)
        if rows is not None:
            self._first = rows.start

    def add(self, entries: Sequence[PlanEntry], owners: Sequence[int] | None = None) -> range | None:
        """Append entries that were not known at attach, and return their row numbers.

        Row numbers count from the first entry of this quantity. Return None if the plan is full.
        """
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
        """Set the statistics that the rank publishes for all present and future entries of this quantity."""
        self._ops = ops
        for rows in self._added:
            self._buffers.plan.publish(rows, ops)
        self._buffers.table.accumulate(ops)

    def release(self) -> None:
        """Allow another quantity to write to the entries of this quantity, which does not write any more."""
        for rows in self._added:
            self._buffers.plan.release(rows)

    def reclaim(self) -> None:
        """Cancel `release`: this quantity writes to its entries in the statistics table again."""
        for rows in self._added:
            self._buffers.plan.reclaim(rows)
            self._buffers.plan.publish(rows, self._ops)

    def measure(self, tensors: Sequence[torch.Tensor | None], rows: range) -> None:
        """Compute the statistics of `tensors` and write them to the entries at `rows`.

        If a tensor is None, its entry remains absent.
        """
        group = self._groups.get(rows)
        if group is None:
            how = self._buffers.measurement
            group = MeasureGroup(self._shifted(rows), zero_below=how.zero_below, compiled=how.compiled)
            self._groups[rows] = group
        group.measure(tensors, self._buffers.table)

    def copy(self, source: range, target: range) -> None:
        """Copy the statistics of the entries at `source`, measured at this step, to the entries at `target`."""
        copy_entries(self._buffers.table, self._shifted(source), self._shifted(target))

    def forget(self, rows: range) -> None:
        """Delete the statistics of the entries at `rows`, which were measured at this step.

        The entries are then absent.
        """
        self._buffers.table.forget(self._shifted(rows))

    def forget_equal(self, rows: range, others: range) -> torch.Tensor:
        """Compare the i-th entry of the range `rows` with the i-th entry of the range `others`, for all i.

        If both are equal, make the entry of `rows` absent. Entries are equal if all bits of their statistics are equal.

        Return bool [len(rows)] on the device: True for entries at `rows` that were measured and differ.
        """
        return self._buffers.table.forget_equal(self._shifted(rows), self._shifted(others))

    def defer(self, dataset: str, tensor: torch.Tensor, rows: Callable[[Numbers], Iterable[Row]]) -> None:
        """Copy `tensor` to the host asynchronously; the function `rows` gets its elements when the copy is complete.

        Does not wait for the device.

        The function `rows` runs on the publisher thread and returns rows of `dataset`, which are added to the step's
        record.
        """
        self._buffers.deferred.append(Deferred(dataset, Transfer.of(tensor), rows))

    def withdraw(self, dataset: str) -> None:
        """Discard the tensors that were passed to `defer` for `dataset` at this step; they give no rows.

        Called if the quantity reads the data again.
        """
        self._buffers.deferred = [item for item in self._buffers.deferred if item.dataset != dataset]

    def later(self, tensor: torch.Tensor, use: Callable[[Numbers], None]) -> None:
        """Copy the values of `tensor` to the host asynchronously, and pass them to the function `use`.

        The function `use` runs on the publisher thread.
        """

        def no_rows(numbers: Numbers) -> tuple[()]:
            use(numbers)
            return ()

        self._buffers.deferred.append(Deferred(None, Transfer.of(tensor), no_rows))

    def write(self, dataset: str, row: Row) -> None:
        """Add `row` to the rows of `dataset` in the record of this step. Its values are already on the host."""
        self._buffers.rows.setdefault(dataset, []).append(row)

    def _shifted(self, rows: range) -> range:
        return range(self._first + rows.start, self._first + rows.stop)
