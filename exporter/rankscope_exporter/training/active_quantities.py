"""All quantities of one attached model, the steps at which they are sampled, and the table of their statistics.

All functions of this module run on the training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.adapters.base import GradientSource
from rankscope_exporter.adapters.hook_context import HookContext
from rankscope_exporter.measure.kernels.statistics_table import HostCopy, StatisticsTable
from rankscope_exporter.measure.quantities.base import Quantity
from rankscope_exporter.measure.table import Measurement, StepTable, Table
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.records.pending_step import ExpectedRows
from rankscope_exporter.records.selection import NO_OP, Finished, Ops, carried_ops
from rankscope_exporter.records.step_record import StepBacklog, StepRecord
from rankscope_exporter.training.active_quantity import ActiveQuantity, GateState
from rankscope_exporter.training.sampling_config import Part, QuantitySampling

MAX_BACKLOG: Final = 64
"""Largest number of sampled steps that may wait for the publisher.

A further step is not measured and is counted as dropped.
"""


_Call = tuple[ActiveQuantity, Callable[..., None], Table | None]
"""A quantity, its method that handles an event, and the table of the quantity."""

_EVENTS: Final[tuple[Callable[..., None], ...]] = (
    *(Quantity.on_step_begin, Quantity.on_forward_failed, Quantity.on_gradient_ready, Quantity.on_gradients_ready),
    *(Quantity.on_backward_end, Quantity.on_optimizer_step_begin, Quantity.on_optimizer_step_end, Quantity.on_step_end),
)


class ActiveQuantities:
    """The quantities that are measured now. Starts, performs and ends the measurement of each sampled step.

    The quantities `captured` have hooks from the beginning, and are measured during captures only.
    """

    def __init__(
        self,
        quantities: Sequence[Part],
        captured: Sequence[Part] = (),
        *,
        device: torch.device,
        boundary: ErrorBoundary,
        measurement: Measurement | None = None,
    ) -> None:
        self._boundary = boundary
        self._attached: list[ActiveQuantity] = []  # all quantities that have hooks
        self._members: list[ActiveQuantity] = []  # those that are measured by their schedules
        self._measured: list[ActiveQuantity] = []  # and those that a capture measures
        self._tables: list[Table] = []  # of the measured quantities
        self._captured: dict[ActiveQuantity, QuantitySampling] = {}
        self._calls: dict[Callable[..., None], list[_Call]] = {}  # by event, see `_measure`
        self._hooking: HookContext | None = None
        first = sum(len(quantity.first_entries) for quantity, _ in quantities)
        table = StatisticsTable(first, device)
        table.may_compile = device.type == "cpu"  # elsewhere from `use_compiled` on
        tell = lambda message: None if self._hooking is None else self._hooking.tell(message)  # noqa: E731 - short
        self.table = StepTable(table, measurement or Measurement(), tell)
        self._is_clear = True  # the table has no rows of a step that could not be ended
        self._deferred_before = 0  # rows of other datasets before the present forward pass
        self._expected: dict[str, ExpectedRows] = {}  # of the present step, by quantity
        self.backlog = StepBacklog()
        self.unsampled = 0  # steps that were not measured because of the backlog
        self.replace(quantities)
        self._captured = self.prepare(captured)

    def install(self, hooking: HookContext) -> None:
        """Let all quantities register their hooks on the model."""
        self._hooking = hooking
        hooking.keep(self)
        for member in self._attached:
            member.install(hooking, self._boundary)

    def remove(self) -> None:
        """Remove the hooks of all quantities."""
        self._hooking = None
        for member in self._attached:
            self._boundary.call(member.where, member.unhook)

    # Changes between two steps.

    def prepare(self, parts: Sequence[Part]) -> dict[ActiveQuantity, QuantitySampling]:
        """Register the hooks of the quantities `parts`, and return these quantities with their sampling settings.

        A quantity of the same class and options that has hooks is returned instead of a new one.
        """
        prepared = {}
        for quantity, sampling in parts:
            known = (member for member in self._attached if member.measures_as(quantity) and not member.is_retired)
            member = next(known, None)
            if member is None:
                member = ActiveQuantity(quantity)
                self._attached.append(member)
                if self._hooking is not None:
                    member.install(self._hooking, self._boundary)
            prepared[member] = sampling
        return prepared

    def replace(self, parts: Sequence[Part]) -> None:
        """Measure only the quantities `parts` from now on. This ends a capture.

        Their schedules restart with the configured sampling interval, without the factor that `set_stretch` has set.
        The hooks of all other quantities are removed, except those of captured quantities.
        """
        prepared = self.prepare(parts)
        self.table.has_left = len(self.table) > 0
        attached, self._attached = self._attached, [*(prepared | self._captured)]
        for member in attached:
            if member not in prepared:
                member.leave()
            if member not in self._attached:
                self._boundary.call(member.where, member.unhook)
        self._members = [
            member for member, sampling in prepared.items() if member.activate(self.table, sampling, self._boundary)
        ]
        self._measure(self._members)

    def set_stretch(self, factor: int) -> None:
        """Multiply the sampling intervals of all quantities by `factor`, beginning with the step that begins now."""
        for member in self._members:
            member.schedule.stretch = factor

    def capture(self) -> None:
        """Measure the captured quantities at every step until `release`, in addition to the other quantities.

        The schedules of the other quantities continue. A quantity of the same class as a captured one with other
        options is not measured until `release`, because the statistics table has only one row per tensor and step.
        """
        self.table.has_left = len(self.table) > 0
        added = [member for member in self._captured if member not in self._members]
        for member in self._members:
            if any(type(member.quantity) is type(other.quantity) for other in added):
                member.gate = GateState.CLOSED
        added = [member for member in added if member.activate(self.table, self._captured[member], self._boundary)]
        for member in self._captured:
            member.gate = GateState.OPEN
        self._measure([*self._members, *added])

    def release(self) -> None:
        """End the capture: measure the same quantities as before the capture."""
        for member in self._measured:
            if member in self._members:
                member.resume()
            else:
                member.leave()
        self._measure(self._members)

    def _measure(self, members: list[ActiveQuantity]) -> None:
        """Measure `members` from now on. Find, for each event, those that override its method."""
        self._measured = members
        self._calls = {
            event: [
                (member, getattr(member.quantity, event.__name__), member.slots)
                for member in members
                if getattr(type(member.quantity), event.__name__) is not event
            ]
            for event in _EVENTS
        }
        self._tables = [member.slots for member in members if member.slots is not None]
        self.table.find_unused(self._tables)

    # State.

    @property
    def period(self) -> int:
        """The longest sampling interval of all quantities, in steps; 1 if nothing is sampled any more."""
        return max((member.schedule.period for member in self._members if not member.schedule.is_over), default=1)

    @property
    def is_over(self) -> bool:
        """True if the schedules of all quantities have ended. False on a rank that measures nothing."""
        return bool(self._members) and all(member.schedule.is_over for member in self._members)

    def published(self) -> dict[str, Ops]:
        """Return the names of the statistics that the rank publishes, by kind of tensor.

        The result contains each kind that is or will be measured.
        """
        found: dict[str, Ops] = {}
        for member in self._measured:
            for kind in member.quantity.kinds():
                found[kind] = found.get(kind, NO_OP) | member.ops
        return found

    def quantity(self, name: str) -> Quantity | None:
        return next((member.quantity for member in self._measured if member.quantity.name == name), None)

    # One step.

    def decide_sampling(self, step: int) -> bool:
        """Begin step number `step`; return whether it is a sampled step.

        It is one if any quantity is measured, unless too many sampled steps wait for the publisher.
        """
        is_sampled = False
        for member in self._measured:
            is_sampled |= member.opens(step)
            if member.schedule.is_over and not member.is_retired and member not in self._captured:
                self._boundary.call(member.where, member.retire)
        if is_sampled and self.backlog.measured - self.backlog.published >= MAX_BACKLOG:
            self.unsampled += 1
            is_sampled = False
            for member in self._measured:
                member.is_open = False
        if is_sampled and not self._is_clear:
            self.table.statistics.clear()
        self._is_clear = not is_sampled
        for member in self._attached:
            if member.transient.are_used and (member.is_open or member.transient.may_be_removed):
                self._boundary.call(member.where, member.adjust_hooks)
        return is_sampled

    def notify(self, event: Callable[[Quantity, Table], None]) -> None:
        """Call a method such as `Quantity.on_backward_end` of each quantity that is measured at this step.

        If the method of a quantity raises, only the rows of this quantity are missing at this step.
        """
        with torch.no_grad():
            for member, call, table in self._calls[event]:
                if member.is_open:
                    try:
                        call(table)
                    except Exception as error:  # noqa: BLE001 - as the error boundary does, without another call
                        self._boundary.report(f"{member.quantity.name} ({event.__name__})", error)
            if event is Quantity.on_optimizer_step_end:
                self._expect()

    def _expect(self) -> None:
        for member in self._measured:
            if member.is_open:
                try:
                    self._expected[member.quantity.name] = member.quantity.expected()
                except Exception as error:  # noqa: BLE001 - see above
                    self._boundary.report(f"{member.quantity.name} (expected)", error)

    def forward(self, *, failed: bool = False) -> None:
        """Handle the beginning of a training forward pass of a sampled step; if it `failed`, delete its data."""
        if failed:
            del self.table.deferred[self._deferred_before :]
            self.notify(Quantity.on_forward_failed)
        self._deferred_before = len(self.table.deferred)

    def gradient_ready(self, index: int, holder: GradientSource) -> None:
        """Call the method `on_gradient_ready` of each quantity that reads single gradients.

        `holder` provides the gradient of the model's parameter number `index`.
        """
        for member, call, table in self._calls[Quantity.on_gradient_ready]:
            if member.is_open:
                own = index if member.quantity.monitored.positions is None else member.own_index(index)
                if own is not None:
                    try:
                        call(own, holder, table)
                    except Exception as error:  # noqa: BLE001 - see above
                        self._boundary.report(f"{member.quantity.name} (on_gradient_ready)", error)

    def peek(self) -> tuple[Sequence[PlanEntry], Finished]:
        """Return the plan entries and the statistics that the present step has so far. Waits for the device."""
        plan = self.table.version()
        return plan.entries, self.table.statistics.look(len(plan), carried_ops(plan.ops))

    def end(self, record: StepRecord) -> None:
        """End the sampled step, and start to copy its statistics to the host.

        Add this copy and the rows for other datasets to the record of the step.
        """
        opened = [member for member in self._measured if member.is_open]
        self.notify(Quantity.on_step_end)
        for member in opened:
            member.is_open = False
            member.schedule.sampled()
        measured = [member.slots for member in opened if member.slots is not None]
        is_wasteful = self.table.end_step(measured)
        record.deferred, record.rows = self.table.take_rows()
        record.expected, self._expected = tuple(self._expected.values()), {}
        record.plan = self.table.version()
        record.copy = HostCopy(self.table.statistics, len(self.table))
        if is_wasteful:
            self.table.rebuild(self._tables)
        self._is_clear = True
        self.backlog.measured += 1
