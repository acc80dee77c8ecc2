"""The table of a sampled step, to which quantities write: slots of tensors, and rows of other datasets.

A slot is the place of one tensor of one kind. It has a row of the statistics table, and an entry of the plan: the list
to which the numbers of a record refer. Most slots exist at attach. Others are added at the first sampled step that
needs them: the state of an optimizer appears with the first update, and the shapes of activations are known after a
module has run. A slot that is not measured at a step is absent there. Rows are only added. If absent slots cost more
than a new plan, the table is built again without them.

The plan has the shapes and dtypes of the tensors that were measured. A parameter that is converted or resized gets its
new shape and dtype. The shape of an activation that varies, as with sequences of different lengths, is removed from the
plan instead, because every new plan is sent to the service.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, Final

import torch

from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.measure.kernels.isolation import Isolation
from rankscope_exporter.measure.kernels.measure_group import MeasureGroup
from rankscope_exporter.measure.kernels.statistics_table import Rows, StatisticsTable, contiguous_rows, copied_to_host
from rankscope_exporter.measure.kernels.tensor_access import dtype_name, is_freed
from rankscope_exporter.records.plan import EVERY_OP, Ops, ParameterEntries, Placed, PlanItem, PlanVersion, entry_at
from rankscope_exporter.records.record import Deferred, Numbers, Row

MAX_ENTRIES: Final = 200_000
"""Largest number of entries in a plan. It limits the memory of a script that creates new tensor names without end.

An entry needs 64 bytes in every statistics table.
"""

REBUILD_AFTER: Final = 8
"""The table is built again without absent slots if the numbers of sampled steps since they were last requested add up
to more than this factor times the number of other slots.

A new plan costs about as much as 8 records with the same entries, because an entry has about 400 bytes in the plan and
48 bytes in a record. Absent slots are therefore kept for at most twice the cost of a new plan without them.
"""

MOST_CHANGES: Final = 8
"""Number of steps at which tensors of one quantity may change.

Later changes remove shape and dtype from the plan.
"""

_ALL_VARY_AFTER: Final = 2
"""Number of steps with changed activations after which all shapes of this quantity are removed from the plan."""


class StepTable:
    """The statistics table of a step, its plan, and the rows of other datasets. Only the training thread uses it."""

    def __init__(
        self,
        statistics: StatisticsTable,
        tell: Callable[[str], None],
        *,
        max_entries: int = MAX_ENTRIES,
    ) -> None:
        self.statistics = statistics
        self.tell = tell
        """Function that publishes a notice for the user."""
        self.deferred: list[Deferred] = []
        self.deferred_before = 0
        """Number of `deferred` before the present training forward pass."""
        self.changes = 0  # of entries that were in the plan before
        self.left_out = 0  # entries that did not fit
        self.has_left = False
        """True if a quantity has left, or is suspended, so that another one may have the same slots."""
        self._items: list[PlanItem] = []
        self._owners: list[int] = []
        self._ops: list[Ops] = []
        self._max_entries = max_entries
        self._by_series: dict[tuple[Any, ...], int] = {}
        self._version: PlanVersion | None = None
        self._unused = self._unused_age = 0  # slots of no quantity, and sampled steps since there are any

    def __len__(self) -> int:
        return len(self._items)

    def entry(self, row: int) -> PlanEntry:
        """Return the entry at table row `row`."""
        return entry_at(row, self._items[row])

    def is_of_parameter(self, row: int) -> bool:
        """Return whether the entry at table row `row` belongs to a parameter."""
        return self._owners[row] >= 0

    def version(self) -> PlanVersion:
        """Return the present plan. The object is the same until the plan changes."""
        if self._version is None:
            self._version = PlanVersion(tuple(self._items), tuple(self._owners), tuple(self._ops))
        return self._version

    def without(self, micro_steps: AbstractSet[int], deferred: list[Deferred]) -> PlanVersion:
        """Delete the data of some forward passes of this step, and return the plan in which the others are numbered."""
        plan = self.version()
        numbers = sorted({entry.micro_step for entry in plan.entries if entry.micro_step is not None})
        place = {number: i for i, number in enumerate(sorted(numbers, key=lambda one: (one in micro_steps, one)))}
        items = [
            entry if entry.micro_step is None else replace(entry, micro_step=place[entry.micro_step])
            for entry in plan.entries
        ]
        self.statistics.forget(tuple(row for row, entry in enumerate(plan.entries) if entry.micro_step in micro_steps))
        for item in deferred:
            item.rows = functools.partial(_renumbered, item.rows, micro_steps, place)
        return PlanVersion(tuple(items), plan.owners, plan.ops)

    def add(
        self, entries: Sequence[PlanEntry], owners: Sequence[int] | None = None, ops: Ops = EVERY_OP
    ) -> Rows | None:
        """Add `entries` and return their table rows; count them as left out and return None if the plan is full.

        An entry with the series of an earlier one gets its row, if `has_left` is true. `owners` has the position of the
        parameter of each entry, -1 for none. The rank publishes the statistics `ops` of the entries.
        """
        known: list[int | None] = [None] * len(entries)
        if self.has_left:
            self._by_series = self._by_series or {self.entry(row).series: row for row in range(len(self))}
            known = [self._by_series.get(entry.series) for entry in entries]
        new = known.count(None)
        if len(self) + new > self._max_entries:
            self.left_out += new
            return None
        first, owners = len(self), [-1] * len(entries) if owners is None else owners
        if new == len(entries):
            items = [Placed(entries, first)] * new if isinstance(entries, ParameterEntries) else entries
            rows: Rows = range(first, first + new)
        else:
            items = [entry for entry, row in zip(entries, known, strict=True) if row is None]
            owners = [owner for owner, row in zip(owners, known, strict=True) if row is None]
            places = iter(range(first, first + new))
            rows = contiguous_rows([next(places) if row is None else row for row in known])
        self._items += items
        self._owners += owners
        self._ops += [ops] * new
        if self._by_series:
            self._by_series |= {entry.series: row for entry, row in zip(entries, rows, strict=True)}
        self._version = None
        self.publish(rows, ops)
        self.statistics.grow(len(self))
        return rows

    def replace(self, row: int, entry: PlanEntry) -> None:
        """Replace the entry at table row `row` by `entry`, which has the same series."""
        self._items[row] = entry
        self._version = None
        self.changes += 1

    def publish(self, rows: Iterable[int], ops: Ops) -> None:
        """Set the statistics `ops` that the rank publishes for the entries at `rows`, from now on."""
        for row in rows:
            if self._ops[row] != ops:
                self._ops[row] = ops
                self._version = None
        self.statistics.accumulate(ops)

    def find_unused(self, tables: Iterable[Table]) -> None:
        """Count the slots that none of `tables` has. Called when quantities have changed."""
        used = {row for table in tables for slots in table.all_slots() for row in slots.rows}
        self._unused, self._unused_age = len(self) - len(used), 0

    def end_step(self, tables: Iterable[Table]) -> bool:
        """End a sampled step, at which `tables` were used; return whether the table should be built again."""
        self._unused_age += 1
        absent, ages = self._unused, self._unused * self._unused_age
        for table in tables:
            count, age = table.end()
            absent, ages = absent + count, ages + age
        return ages > REBUILD_AFTER * (len(self._items) - absent)

    def rebuild(self, tables: Sequence[Table]) -> None:
        """Build the empty table again with the slots of `tables` that were requested at their last sampled step."""
        listed = [slots for table in tables for slots in table.recent_slots()]
        rows = sorted({row for slots in listed for row in slots.rows})
        place = {row: number for number, row in enumerate(rows)}
        self._items = [self.entry(row) for row in rows]
        self._owners = [self._owners[row] for row in rows]
        self._ops = [self._ops[row] for row in rows]
        for slots in listed:
            slots.move(contiguous_rows([place[row] for row in slots.rows]))
        self._by_series, self._version, self._unused = {}, None, 0
        self.changes += 1


def _renumbered(
    rows: Callable[[Numbers], Iterable[Row]], left_out: AbstractSet[int], place: Mapping[int, int], numbers: Numbers
) -> Iterator[Row]:
    for row in rows(numbers):
        micro_step = row.get("micro_step")
        if micro_step not in left_out:
            yield row if micro_step is None else {**row, "micro_step": place.get(micro_step, micro_step)}


class Slots:
    """The slots of tensors that a quantity measures together, in the order of the tensors."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.requested = 0
        """Number of the sampled step of the quantity at which it last requested the slots."""
        self.group: MeasureGroup | None = None
        """The group of the rows, which measures their tensors; None until a tensor was measured."""
        self._single: dict[int, Slots] = {}

    def __getitem__(self, position: int) -> Slots:
        """Return one of the slots, for a tensor that is measured alone."""
        if (found := self._single.get(position)) is None:
            found = self._single[position] = Slots(contiguous_rows([self.rows[position]]))
        return found

    def move(self, rows: Rows) -> None:
        """Let the slots have other rows of the statistics table."""
        self.rows = rows
        self.group = None
        self._single = {}


class Specs:
    """The shapes and dtypes in the plan of one quantity. They follow the tensors that are measured."""

    def __init__(self, table: StepTable) -> None:
        self._table = table
        self._steps = 0
        self._all_vary = False
        self._copied: set[tuple[Rows, Rows]] = set()  # whose entries agree since the plan was changed
        self._changes = 0
        self.have_changed = False
        """True if the plan was corrected at the present step."""

    def describe(self, row: int, tensor: torch.Tensor) -> bool:
        """Correct the entry at table row `row` if `tensor`, which was measured, has another dtype or shape.

        Return False for a tensor without memory, whose shape may be temporary.
        """
        if tensor.is_meta or (tensor.layout is torch.strided and is_freed(tensor)):
            return False
        self._describe(row, dtype_name(tensor.dtype), tuple(tensor.shape))
        return True

    def copy(self, source: Rows, target: Rows) -> None:
        """Correct the entries at `target`. Their statistics were copied from the rows `source`."""
        if self._changes != self._table.changes:
            self._copied, self._changes = set(), self._table.changes
        if (source, target) in self._copied:
            return
        self._copied.add((source, target))
        for row, of in zip(target, source, strict=True):
            entry = self._table.entry(of)
            if not entry.shape_varies:
                self._describe(row, entry.dtype, entry.shape)
            elif not self._table.entry(row).shape_varies:
                self.have_changed = True
                self._vary(row, replace(self._table.entry(row), dtype=entry.dtype))

    def _describe(self, row: int, name: str, shape: tuple[int, ...]) -> None:
        entry = self._table.entry(row)
        if not (entry.dtype and name):  # dtype and shape are unknown
            return
        is_of_parameter = self._table.is_of_parameter(row)
        # A framework may store a part of a parameter, or its gradient, as a flat tensor.
        is_flat = is_of_parameter and shape == (math.prod(entry.shape),)
        fits = entry.shape_varies or is_flat or entry.shape == shape
        if fits and entry.dtype == name:
            if self._all_vary:
                self._vary(row, entry)
            return
        self.have_changed = True
        if self._steps >= MOST_CHANGES:
            self._table.replace(row, replace(entry, dtype="", shape=(), shape_varies=False))
        elif fits or is_of_parameter:
            self._table.replace(row, replace(entry, dtype=name, shape=entry.shape if fits else shape))
        else:
            self._vary(row, replace(entry, dtype=name))

    def end_step(self, added: Iterable[Slots]) -> None:
        """End a sampled step with changes. `added` are the slots that were added after attach."""
        self.have_changed = False
        self._steps += 1
        if self._steps == _ALL_VARY_AFTER:
            for row in (row for slots in added for row in slots.rows):
                if not self._table.is_of_parameter(row):
                    self._all_vary = True
                    self._vary(row, self._table.entry(row))

    def _vary(self, row: int, entry: PlanEntry) -> None:
        if entry.dtype and not entry.shape_varies and not self._table.is_of_parameter(row):
            self._table.replace(row, replace(entry, shape=(), shape_varies=True))


class Table:
    """The slots of one quantity, and all that it writes at a sampled step."""

    def __init__(self, table: StepTable, entries: ParameterEntries, owners: Sequence[int], ops: Ops) -> None:
        """Add slots for `entries`, one for each parameter and kind. The rank publishes the statistics `ops` of them."""
        self._table = table
        self._ops = ops
        self._step = self._requested = 0
        self._specs = Specs(table)
        self._isolation = Isolation(table.tell)
        self._added: dict[Hashable, Slots] = {}
        self.slots: dict[str, Slots | None] = {}
        """The slots that the quantity has from the start, by kind; None if the plan was full."""
        for kind, of_kind in entries.by_kind():
            self.slots[kind] = self._new(of_kind, owners)

    @property
    def is_compiled(self) -> bool:
        """True if the compiled kernel is used on a CPU."""
        return self._table.statistics.may_compile

    def begin(self, step: int) -> None:
        """Begin a sampled step with the number `step`."""
        self._step += 1
        self._requested = 0
        self._isolation.sample, self._isolation.step = self._step, step

    def end(self) -> tuple[int, int]:
        """End a sampled step. Return the number of absent slots among the added ones, and the sum of their ages.

        An age is the number of sampled steps since slots were requested.
        """
        if self._specs.have_changed:
            self._specs.end_step(self._added.values())
        if self._requested == len(self._added):
            return 0, 0
        ages = [(len(slots.rows), self._step - slots.requested) for slots in self._added.values()]
        return sum(count for count, age in ages if age), sum(count * age for count, age in ages)

    def all_slots(self) -> Iterator[Slots]:
        """Yield all slots of the quantity."""
        yield from filter(None, (*self.slots.values(), *self._added.values()))

    def recent_slots(self) -> list[Slots]:
        """Forget the added slots that were not requested at the last sampled step, and return all others."""
        for key, slots in list(self._added.items()):
            if slots.requested < self._step:
                del self._added[key]
                self._isolation.failures.pop(slots, None)
        return list(self.all_slots())

    def add(
        self, key: Hashable, entries: Callable[[], Sequence[PlanEntry]], owners: Sequence[int] | None = None
    ) -> Slots | None:
        """Return the slots with the key `key`; None if the plan is full.

        The function `entries` returns their entries. It is called if the slots do not exist, or not any more: slots
        that are not requested for many sampled steps may be dropped. For each entry, `owners` has the position of its
        parameter in the list of all parameters of the model.
        """
        slots = self._added.get(key)
        if slots is None:
            slots = self._new(entries(), owners)
            if slots is None:
                return None
            self._added[key] = slots
        if slots.requested != self._step:
            slots.requested = self._step
            self._requested += 1
        return slots

    def _new(self, entries: Sequence[PlanEntry], owners: Sequence[int] | None) -> Slots | None:
        rows = self._table.add(entries, owners, self._ops)
        return None if rows is None else Slots(rows)

    def publish(self, ops: Ops) -> None:
        """Set the statistics that the rank publishes for all present and future slots of this quantity."""
        self._ops = ops
        for slots in self.all_slots():
            self._table.publish(slots.rows, ops)

    def measure(self, tensors: Sequence[torch.Tensor | None], slots: Slots | None) -> None:
        """Compute the statistics of `tensors`, one for each of `slots`.

        The slot of None remains as it is, and so does that of a tensor whose statistics cannot be computed. The plan
        gets the shapes and dtypes of `tensors`.
        """
        if slots is None:
            return
        group = slots.group = slots.group or MeasureGroup(slots.rows, self._specs.describe)
        if slots not in self._isolation.failures:
            try:
                group.measure(tensors, self._table.statistics)
            except Exception:  # noqa: BLE001, S110 - any error of a tensor subclass, which the isolation reports
                pass
            else:
                return
        self._measure_apart(slots, group, tensors)

    def _measure_apart(self, slots: Slots, whole: MeasureGroup, tensors: Sequence[torch.Tensor | None]) -> None:
        """Measure `tensors` without those that raise, and report these."""
        statistics, rows = self._table.statistics, slots.rows

        def compute(positions: Sequence[int]) -> None:
            is_whole = len(positions) == len(tensors)
            group = whole if is_whole else MeasureGroup([rows[place] for place in positions], self._specs.describe)
            group.measure([tensors[position] for position in positions], statistics)

        def undo(positions: Sequence[int]) -> None:
            for position in positions:
                if tensors[position] is not None:  # otherwise the row has the result of another call
                    statistics.forget(range(rows[position], rows[position] + 1))

        entry = self._table.entry
        what = lambda: entry(rows[0]).kind  # noqa: E731 - called after an error only
        name = lambda position: entry(rows[position]).label  # noqa: E731 - called after an error only
        self._isolation.run(slots, tensors, compute, what=what, name=name, undo=undo)

    def isolate(
        self,
        scope: str,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor | None],
        compute: Callable[[Sequence[int]], None],
    ) -> None:
        """Call `compute` with the positions of `tensors`; if it raises, with each half of them, down to single ones.

        Tensors for which `compute` raises are reported with their `names`, and are left out if they raise at several
        sampled steps. `scope` is the name of the computation, the same at each step.
        """
        self._isolation.run(scope, tensors, compute, what=lambda: scope, name=names.__getitem__)

    def copy(self, source: Slots | None, target: Slots | None) -> None:
        """Copy the statistics of `source`, which were measured at this step, to `target`."""
        if source is not None and target is not None:
            self._table.statistics.copy(source.rows, target.rows)
            if self._specs.have_changed or len(target.rows) == 1:
                self._specs.copy(source.rows, target.rows)

    def forget(self, slots: Slots | None) -> None:
        """Delete the statistics of `slots`, which were measured at this step: the slots are absent then."""
        if slots is not None:
            self._table.statistics.forget(slots.rows)

    def forget_equal(self, slots: Slots | None, others: Slots | None) -> None:
        """Make each of `slots` absent whose statistics are equal, bit for bit, to those of the same one of `others`."""
        if slots is not None and others is not None:
            self._table.statistics.forget_equal(slots.rows, others.rows)

    def save(self) -> torch.Tensor:
        """Return a copy of the statistics that the step has so far."""
        return self._table.statistics.buffer.clone()

    def restore(self, saved: torch.Tensor, slots: Iterable[Slots | None], positions: Sequence[int]) -> None:
        """Write the statistics in `saved`, a result of `save`, of some of each of `slots` to the table again."""
        rows = tuple(one.rows[position] for one in slots if one is not None for position in positions)
        self._table.statistics.restore(saved, rows)

    def defer(self, dataset: str, tensor: torch.Tensor, rows: Callable[[Numbers], Iterable[Row]]) -> None:
        """Copy `tensor` to the host, and add the rows that the function `rows` computes from the copy to `dataset`.

        The training thread does not wait for the device. The publisher thread calls `rows` with a numpy array, so the
        dtype of `tensor` must exist in numpy.
        """
        self._table.deferred.append(Deferred(dataset, copied_to_host(tensor), rows))

    def withdraw(self, dataset: str) -> None:
        """Discard the rows of `dataset` that `defer` scheduled at this step, because the caller reads them again."""
        self._table.deferred = [item for item in self._table.deferred if item.dataset != dataset]
