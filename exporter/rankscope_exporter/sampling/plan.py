"""The plan of a rank while it grows, and the buffers of one sampled step: table rows, and rows of other datasets.

Parameters are known when the monitor is attached; activations only once a module has run. An entry never moves and
never leaves, so a position means the same in every table, and a plan is identified by its length.
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
"""64 bytes each in every table; a model that makes up names without end must not fill the memory."""


class PlanRegistry:
    """Grows on the training thread; the publisher may ask for a plan of any length that has been."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self.entries: list[PlanEntry] = []
        self.owners: list[int] = []
        """By entry: the position of the parameter it belongs to, -1 for none."""
        self.ops: list[Ops] = []
        """By entry: which statistics leave the rank. What stands there stays as it is, so that a step that waits for
        the publisher keeps its own: another choice is another list."""
        self.left_out = 0  # entries that found the book full
        self._max_entries = max_entries
        self._released: dict[tuple[PlanEntry, ...], range] = {}
        self._named: NamedPlan | None = None
        self._named_ops: Sequence[Ops] = ()

    def __len__(self) -> int:
        return len(self.entries)

    def add(
        self, entries: Sequence[PlanEntry], owners: Sequence[int] | None = None, ops: Ops = EVERY_OP
    ) -> range | None:
        """Append `entries` and return their positions; None, and counted, when they do not fit any more.

        Where the same ones stand already, and whoever added them has released them, these are returned.
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
        """Let the entries of one `add` be filled by whoever adds the same ones again."""
        if rows:
            self._released[tuple(self.entries[rows.start : rows.stop])] = rows

    def reclaim(self, rows: range) -> None:
        """Let the entries of one `add`, which were released, be filled by whoever added them, and nobody else."""
        if rows:
            self._released.pop(tuple(self.entries[rows.start : rows.stop]), None)

    def publish(self, rows: range, ops: Ops) -> None:
        """Have the statistics `ops` of the entries `rows` leave the rank from now on."""
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
    """How tensors are measured."""

    zero_below: float = 0.0
    compiled: bool = True  # use the compiled CPU kernel once it is ready


@dataclass(slots=True)
class StepBuffers:
    """What the quantities share: the plan, the table of its entries, and the other rows of the step under way."""

    book: PlanRegistry
    table: StatisticsTable
    measurement: Measurement
    deferred: list[Deferred] = field(default_factory=list)
    rows: dict[str, list[Row]] = field(default_factory=dict)

    def take_rows(self) -> tuple[list[Deferred], dict[str, list[Row]]]:
        """Return what was written beside the table, and begin anew."""
        deferred, rows = self.deferred, self.rows
        self.deferred, self.rows = [], {}
        return deferred, rows


class TableView(Table):
    """One quantity's view of the sheet: its rows are counted from its own first entry."""

    def __init__(self, sheet: StepBuffers, first: int, ops: Ops) -> None:
        self._sheet = sheet
        self._first = first
        self._ops = ops
        self._groups: dict[range, MeasureGroup] = {}
        self._added: list[range] = []

    @classmethod
    def create(cls, sheet: StepBuffers, entries: Sequence[PlanEntry], owners: Sequence[int], ops: Ops) -> TableView:
        """Return a window whose first rows are `entries`, of which the statistics `ops` are published."""
        rows = sheet.book.add(entries, owners, ops)
        window = cls(sheet, len(sheet.book) if rows is None else rows.start, ops)
        if rows is not None:
            window._added.append(rows)
            sheet.table.grow(rows.stop)
            sheet.table.accumulate(ops)
        return window

    def add(self, entries: Sequence[PlanEntry], owners: Sequence[int] | None = None) -> range | None:
        """Append entries that were not known before; None when the plan is full."""
        rows = self._sheet.book.add(entries, owners, self._ops)
        if rows is None:
            return None
        self._added.append(rows)
        self._sheet.table.grow(rows.stop)
        self._sheet.table.accumulate(self._ops)
        return range(rows.start - self._first, rows.stop - self._first)

    def publish(self, ops: Ops) -> None:
        """Have the statistics `ops` of all entries, also of those to come, leave the rank."""
        self._ops = ops
        for rows in self._added:
            self._sheet.book.publish(rows, ops)
        self._sheet.table.accumulate(ops)

    def release(self) -> None:
        """Let others fill the entries that were added here: nothing is written any more."""
        for rows in self._added:
            self._sheet.book.release(rows)

    def reclaim(self) -> None:
        """Take the entries back that were released."""
        for rows in self._added:
            self._sheet.book.reclaim(rows)
            self._sheet.book.publish(rows, self._ops)

    def measure(self, tensors: Sequence[torch.Tensor | None], rows: range) -> None:
        """Take the statistics of `tensors` into entries `rows`; None leaves an entry absent."""
        group = self._groups.get(rows)
        if group is None:
            how = self._sheet.measurement
            group = MeasureGroup(self._shifted(rows), zero_below=how.zero_below, compiled=how.compiled)
            self._groups[rows] = group
        group.measure(tensors, self._sheet.table)

    def copy(self, source: range, target: range) -> None:
        """Set entries `target` equal to entries `source`, which were measured before."""
        copy_entries(self._sheet.table, self._shifted(source), self._shifted(target))

    def forget(self, rows: range) -> None:
        """Make entries absent that were measured before."""
        self._sheet.table.forget(self._shifted(rows))

    def forget_equal(self, rows: range, others: range) -> torch.Tensor:
        """Make those of `rows` absent whose statistics are, bit for bit, those of the entry beside them in `others`."""
        return self._sheet.table.forget_equal(self._shifted(rows), self._shifted(others))

    def defer(self, dataset: str, tensor: torch.Tensor, rows: Callable[[Numbers], Iterable[Row]]) -> None:
        """Have `rows` make rows of `dataset` of `tensor` once it is on the host; nothing waits for the device."""
        self._sheet.deferred.append(Deferred(dataset, Transfer.of(tensor), rows))

    def withdraw(self, dataset: str) -> None:
        """Forget what was deferred to `dataset` at this step: it is read anew."""
        self._sheet.deferred = [item for item in self._sheet.deferred if item.dataset != dataset]

    def later(self, tensor: torch.Tensor, use: Callable[[Numbers], None]) -> None:
        """Call `use` on the publisher's thread with what `tensor` holds now, once it is on the host."""

        def no_rows(numbers: Numbers) -> tuple[()]:
            use(numbers)
            return ()

        self._sheet.deferred.append(Deferred(None, Transfer.of(tensor), no_rows))

    def write(self, dataset: str, row: Row) -> None:
        """Add a row of `dataset` that is known already."""
        self._sheet.rows.setdefault(dataset, []).append(row)

    def _shifted(self, rows: range) -> range:
        return range(self._first + rows.start, self._first + rows.stop)
