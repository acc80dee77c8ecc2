"""The parts of the statistics table to which single quantities write, and the other buffers of a step.

Changes of the shapes and dtypes in the plan, when the measured tensors have others than the plan states.

A parameter that is converted or resized gets its new shape and dtype. The shape of an activation that varies, as with
sequences of different lengths, is removed from the plan instead, because every new plan is sent to the service.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.quantities.base import Table
from rankscope_exporter.records.pending_step import Deferred, Numbers, Row, Transfer
from rankscope_exporter.sampling.plan import PlanRegistry
from rankscope_exporter.statistics import MeasureGroup, StatisticsTable, copy_entries
from rankscope_exporter.statistics.isolation import Isolation, error_of
from rankscope_exporter.statistics.selection import Ops
from rankscope_exporter.statistics.table import on_device
from rankscope_exporter.statistics.tensor_access import dtype_name, is_freed

MOST_CHANGES: Final = 8
"""Number of steps at which parameters of one quantity may change.

Later changes remove shape and dtype from the plan.
"""

_ALL_VARY_AFTER: Final = 2
"""Number of steps with changed activations after which all shapes of this quantity are removed from the plan."""


class SpecChanges:
    """The changes of the entries of one quantity."""

    def __init__(self, plan: PlanRegistry) -> None:
        self._plan = plan
        self._steps = 0
        self._has_changed = False
        self._all_vary = False

    def describe(self, row: int, tensor: torch.Tensor) -> bool:
        """Correct the entry at table row `row` if `tensor`, which was measured, has another dtype or shape.

        Return False for a tensor without memory, whose shape may be temporary.
        """
        entry, dtype = self._plan.entry(row), dtype_name(tensor.dtype)
        if entry.shape == tensor.shape and entry.dtype == dtype and not self._all_vary:
            return True
        if tensor.is_meta or (tensor.layout is torch.strided and is_freed(tensor)):
            return False
        self._describe(row, dtype, tuple(tensor.shape))
        return True

    def copy(self, source: range, target: range) -> None:
        """Correct the entries at `target`. Their statistics were copied from the rows `source`."""
        if len(target) > 1 and not self._has_changed:
            return
        for row, of in zip(target, source, strict=True):
            entry = self._plan.entry(of)
            if not entry.shape_varies:
                self._describe(row, entry.dtype, entry.shape)
            elif not self._plan.entry(row).shape_varies:
                self._has_changed = True
                self._vary(row, replace(self._plan.entry(row), dtype=entry.dtype))

    def _describe(self, row: int, name: str, shape: tuple[int, ...]) -> None:
        entry = self._plan.entry(row)
        if not (entry.dtype and name):  # dtype and shape are unknown
            return
        is_of_parameter = self._plan.is_of_parameter(row)
        # A framework may store a part of a parameter, or its gradient, as a flat tensor.
        is_flat = is_of_parameter and shape == (math.prod(entry.shape),)
        fits = entry.shape_varies or is_flat or entry.shape == shape
        if fits and entry.dtype == name:
            if self._all_vary:
                self._vary(row, entry)
            return
        self._has_changed = True
        if self._steps >= MOST_CHANGES or (
            entry.dtype != name and self._steps >= _ALL_VARY_AFTER and not is_of_parameter
        ):
            self._plan.replace(row, replace(entry, dtype="", shape=(), shape_varies=False))
        elif fits or is_of_parameter:
            self._plan.replace(row, replace(entry, dtype=name, shape=entry.shape if fits else shape))
        else:
            self._vary(row, replace(entry, dtype=name))

    def end_step(self, added: Iterable[range | None]) -> None:
        """End a sampled step. `added` are the table rows of the entries that were added after attach."""
        if not self._has_changed:
            return
        self._has_changed = False
        self._steps += 1
        if self._steps == _ALL_VARY_AFTER:
            for row in (row for rows in added for row in rows or ()):
                if not self._plan.is_of_parameter(row):
                    self._all_vary = True
                    self._vary(row, self._plan.entry(row))

    def _vary(self, row: int, entry: PlanEntry) -> None:
        if entry.dtype and not entry.shape_varies and not self._plan.is_of_parameter(row):
            self._plan.replace(row, replace(entry, shape=(), shape_varies=True))


DROP_AFTER: Final = 8
"""Entries that were added after attach are dropped when they are absent, and their numbers of sampled steps since they
were last measured add up to more than this factor times the number of other entries.

A new plan costs about as much as 8 records with the same entries, because an entry has about 400 bytes in the plan and
48 bytes in a record. Absent entries are therefore kept for at most twice the cost of dropping them.
"""


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
    tell: Callable[[str], None]
    """Function that publishes a notice for the user."""
    deferred: list[Deferred] = field(default_factory=list)
    rows: dict[str, list[Row]] = field(default_factory=dict)

    def take_rows(self) -> tuple[list[Deferred], dict[str, list[Row]]]:
        """Return the rows of this step for datasets other than the statistics of tensors, and clear their buffers."""
        deferred, rows = self.deferred, self.rows
        self.deferred, self.rows = [], {}
        return deferred, rows


@dataclass(slots=True)
class _Added:
    """Entries that a quantity has added after attach, and the sampled step at which it last requested them."""

    rows: range | None  # None: the plan was full
    requested: int


class TableView(Table):
    """The entries of one quantity in the statistics table, which has the entries of all quantities.

    Row number 0 of this object is the first entry of the quantity. The class has many methods, because it has all
    operations of `Table` and those that decide which entries remain in the plan.
    """

    def __init__(self, buffers: StepBuffers, entries: Sequence[PlanEntry], owners: Sequence[int], ops: Ops) -> None:
        """Add `entries` to the plan and to the statistics table, as the first entries of this quantity.

        The rank publishes the statistics `ops` of these entries.
        """
        self._buffers = buffers
        self._first = buffers.plan.size  # of the first entry, or of a later one where the plan is full
        self._ops = ops
        self._groups: dict[tuple[range, bool], MeasureGroup] = {}
        self._parts: dict[tuple[range, bool], tuple[tuple[int, ...], MeasureGroup]] = {}  # without tensors left out
        self._added: dict[Hashable, _Added] = {}
        self._step = self._requested = 0
        self._specs = SpecChanges(buffers.plan)
        self._isolation = Isolation(buffers.tell)
        self._own = self._add(entries, owners)
        if self._own is not None:
            self._first = self._own.start

    def begin(self, step: int) -> None:
        """Begin a sampled step with the number `step`."""
        self._step += 1
        self._requested = 0
        self._isolation.begin(step)

    def end(self) -> None:
        """End a sampled step."""
        self._specs.end_step(added.rows for added in self._added.values())

    def absent(self) -> tuple[int, int]:
        """Return the number of added entries that were not requested at this step, and the sum of their ages.

        An age is the number of sampled steps since the entry was requested.
        """
        if self._requested == len(self._added):
            return 0, 0
        ages = [(len(added.rows or ()), self._step - added.requested) for added in self._added.values()]
        return sum(count for count, age in ages if age), sum(count * age for count, age in ages)

    def drop_absent(self) -> None:
        """Remove the added entries that were not requested at this step from the plan."""
        stale = {key: added.rows for key, added in self._added.items() if added.requested < self._step}
        for key, rows in stale.items():
            del self._added[key]
            if rows is not None:
                self._groups.pop((self._relative(rows), False), None)
                self._parts.pop((self._relative(rows), False), None)
                self._isolation.forget(self._relative(rows))
        self._buffers.plan.drop(row for rows in stale.values() for row in rows or ())

    def add(
        self, key: Hashable, entries: Callable[[], Sequence[PlanEntry]], owners: Sequence[int] | None = None
    ) -> range | None:
        """Return the row numbers of the entries with the key `key`, and add the entries if they do not exist.

        `entries` is called only in the second case. Row numbers count from the first entry of this quantity. Return
        None if the plan is full. Entries that were not requested for many sampled steps may be dropped.
        """
        added = self._added.get(key)
        if added is None:
            added = self._added[key] = _Added(self._add(entries(), owners), 0)
        if added.requested != self._step:
            added.requested = self._step
            self._requested += 1
        return None if added.rows is None else self._relative(added.rows)

    def _add(self, entries: Sequence[PlanEntry], owners: Sequence[int] | None) -> range | None:
        rows = self._buffers.plan.add(entries, owners, self._ops)
        if rows is not None:
            self._buffers.table.grow(rows.stop)
            self._buffers.table.accumulate(self._ops)
        return rows

    def _all_rows(self) -> Iterator[range]:
        yield from filter(None, (self._own, *(added.rows for added in self._added.values())))

    def publish(self, ops: Ops) -> None:
        """Set the statistics that the rank publishes for all present and future entries of this quantity."""
        self._ops = ops
        for rows in self._all_rows():
            self._buffers.plan.publish(rows, ops)
        self._buffers.table.accumulate(ops)

    def release(self) -> None:
        """Allow another quantity to write to the entries of this quantity, which does not write any more."""
        for rows in self._all_rows():
            self._buffers.plan.release(rows)

    def abandon(self) -> None:
        """Allow the plan to drop the entries of this quantity, which was removed, unless another quantity has them."""
        for rows in self._all_rows():
            self._buffers.plan.abandon(rows)

    def reclaim(self) -> None:
        """Cancel `release`: this quantity writes to its entries in the statistics table again."""
        for rows in self._all_rows():
            self._buffers.plan.reclaim(rows)
            self._buffers.plan.publish(rows, self._ops)

    def measure(self, tensors: Sequence[torch.Tensor | None], rows: range, *, are_derived: bool = False) -> None:
        """Compute the statistics of `tensors` and write them to the entries at `rows`.

        If a tensor is None, or if its statistics cannot be computed, its entry remains absent. If `are_derived` is
        true, the shapes and dtypes of the entries remain those of other tensors, from which `tensors` were computed.
        """
        whole = self._groups.get((rows, are_derived))
        if whole is None:
            whole = self._groups[rows, are_derived] = self._group(self._shifted(rows), are_derived=are_derived)
        error = None
        if not self._isolation.has_failures(rows):
            error = error_of(whole.measure, tensors, self._buffers.table)
            if error is None:
                return
        self._measure_apart(whole, tensors, rows, error, are_derived=are_derived)

    def _measure_apart(
        self,
        group: MeasureGroup,
        tensors: Sequence[torch.Tensor | None],
        rows: range,
        error: Exception | None,
        *,
        are_derived: bool,
    ) -> None:
        """Measure `tensors` without those that raise, and report these. `error` is that of all of them together."""
        table = self._buffers.table

        def compute(positions: Sequence[int]) -> None:
            if len(positions) == len(tensors):
                group.measure(tensors, table)
            else:
                known, part = self._parts.get((rows, are_derived), ((), None))
                if part is None or known != tuple(positions):
                    part = self._group([group.rows[position] for position in positions], are_derived=are_derived)
                    self._parts[rows, are_derived] = tuple(positions), part
                part.measure([tensors[position] for position in positions], table)

        def undo(positions: Sequence[int]) -> None:
            for position in positions:
                if tensors[position] is not None:  # otherwise the row has the result of another call
                    row = group.rows[position]
                    table.forget(range(row, row + 1))

        entry = self._buffers.plan.entry
        what = lambda: entry(group.rows[0]).kind  # noqa: E731 - called after an error only
        name = lambda position: entry(group.rows[position]).label  # noqa: E731 - called after an error only
        self._isolation.run(rows, tensors, compute, what=what, name=name, undo=undo, error=error)

    def isolate(
        self,
        scope: str,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor | None],
        compute: Callable[[Sequence[int]], None],
    ) -> None:
        """Call `compute` with the positions of `tensors`; if it raises, with each half of them, down to single ones.

        Tensors for which `compute` raises are reported with their `names`, and are left out if they raise at several
        sampled steps. `scope` identifies the computation.
        """
        self._isolation.run(scope, tensors, compute, what=lambda: scope, name=names.__getitem__)

    def _group(self, rows: Sequence[int], *, are_derived: bool) -> MeasureGroup:
        how, described = self._buffers.measurement, None if are_derived else self._specs.describe
        known = self._buffers.plan.specs(rows) if isinstance(rows, range) else None
        return MeasureGroup(rows, zero_below=how.zero_below, compiled=how.compiled, described=described, known=known)

    def copy(self, source: range, target: range) -> None:
        """Copy the statistics of the entries at `source`, measured at this step, to the entries at `target`."""
        copy_entries(self._buffers.table, self._shifted(source), self._shifted(target))
        self._specs.copy(self._shifted(source), self._shifted(target))

    def forget(self, rows: range) -> None:
        """Delete the statistics of the entries at `rows`, which were measured at this step.

        The entries are then absent.
        """
        self._buffers.table.forget(self._shifted(rows))

    def forget_equal(self, rows: range, others: range) -> None:
        """Compare the i-th entry of the range `rows` with the i-th entry of the range `others`, for all i.

        If both are equal, make the entry of `rows` absent. Entries are equal if all bits of their statistics are equal.
        """
        self._buffers.table.forget_equal(self._shifted(rows), self._shifted(others))

    def save(self, rows: range) -> torch.Tensor:
        """Return a copy of the statistics of the entries at `rows`, the first entries of this quantity."""
        shifted = self._shifted(rows)
        return self._buffers.table.buffer[:, shifted.start : shifted.stop].clone()

    def restore(self, saved: torch.Tensor, rows: Sequence[int]) -> None:
        """Write the statistics of the entries at `rows` in `saved`, a result of `save`, to the table again."""
        buffer = self._buffers.table.buffer
        index = on_device(rows, buffer.device)
        buffer[: len(saved)].index_copy_(1, index + self._first, saved.index_select(1, index))

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

    def write(self, dataset: str, row: Row) -> None:
        """Add `row` to the rows of `dataset` in the record of this step. Its values are already on the host."""
        self._buffers.rows.setdefault(dataset, []).append(row)

    def _shifted(self, rows: range) -> range:
        return range(self._first + rows.start, self._first + rows.stop)

    def _relative(self, rows: range) -> range:
        return range(rows.start - self._first, rows.stop - self._first)


def drop_absent(views: Sequence[TableView], plan: PlanRegistry) -> None:
    """Drop the absent entries of `views`, which were sampled at this step, if they cost more than a new plan.

    The entries of quantities that were removed are absent too.
    """
    counts, ages = zip(plan.abandoned(), *(view.absent() for view in views), strict=True)
    if sum(ages) > DROP_AFTER * (len(plan) - sum(counts)):
        plan.drop_abandoned()
        for view in views:
            view.drop_absent()
