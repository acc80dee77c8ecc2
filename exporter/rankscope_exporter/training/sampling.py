"""The quantities of one attached model: the steps at which each is sampled, its hooks, and the table of a step.

Hooks that exist at sampled steps only are registered when a sampled step begins, and removed when the next step begins
that is not sampled. All functions of this module run on the training thread.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.adapters.base import GradientSource
from rankscope_exporter.adapters.hook_context import Hook, HookContext
from rankscope_exporter.adapters.parameter_hooks import ParameterHook, Removable, remove_all
from rankscope_exporter.measure.kernels.statistics_table import HostCopy, StatisticsTable
from rankscope_exporter.measure.quantities.base import Quantity
from rankscope_exporter.measure.table import StepTable, Table
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.records.plan import EVERY_OP, NO_OP, Finished, Ops, carried_ops
from rankscope_exporter.records.record import ExpectedRows, StepBacklog, StepRecord
from rankscope_exporter.training.sampling_config import Part, QuantitySampling


@dataclass(slots=True)
class _Transient:
    """One hook, the function that registers it, and its handle while it is registered."""

    hook: Hook
    register: Callable[[], Removable | None]
    handle: Removable | None
    is_permanent: bool

    def remove(self) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


class TransientHooks:
    """The hooks of one quantity that are registered at sampled steps only.

    A hook that was not called since its registration is not removed before detach. A hook without calls costs nothing.
    If its module is part of compiled code, the removal of the hook would make Dynamo compile that code again.
    """

    def __init__(self) -> None:
        self._all: list[_Transient] = []
        self._some_are_removed = False
        self._are_on_parameters = False
        self.are_used = False
        """True if a hook was added."""
        self.may_be_removed = False
        """True if hooks were registered after the last call of `remove_called`, so that some may have to be removed."""

    def add(self, hook: Hook, register: Callable[[], Removable | None], *, stays: bool = False) -> None:
        """Register a hook now and at each later sampled step.

        The function `register` registers the hook and returns its handle, or None if it cannot be registered at this
        step. If `stays` is true, the hook also exists at steps that are not sampled. If the first call of `register`
        raises, the error is raised and the hook is not registered again.
        """
        if not stays:
            hook.on_inactive_call = self._on_inactive_call
        handle = register()
        self._all.append(_Transient(hook, register, handle, stays))
        self._are_on_parameters |= isinstance(handle, ParameterHook)
        self.are_used = self.may_be_removed = self._some_are_removed = True

    def register(self) -> None:
        """Register again the hooks that were removed.

        Renew the hooks on parameters, because the tensors of the parameters may have changed.
        """
        self.may_be_removed = True
        if self._some_are_removed or self._are_on_parameters:
            for item in self._all:
                if item.handle is None:
                    item.hook.was_called = False
                    item.handle = item.register()
                elif isinstance(item.handle, ParameterHook):
                    item.handle.renew_found()
            self._some_are_removed = any(item.handle is None for item in self._all)

    def remove_called(self) -> None:
        """Remove the hooks that were called since their registration."""
        if self.may_be_removed:
            self.may_be_removed = False
            for item in self._all:
                if item.hook.was_called and not item.is_permanent:
                    item.remove()
                    self._some_are_removed = True

    def remove(self, *, only_called: bool = False) -> None:
        """Remove all hooks permanently, or only those that were called: the others remain until the next call."""
        for item in self._all:
            if item.hook.was_called or not only_called:
                item.remove()
        self._all = [item for item in self._all if item.handle is not None]
        self._some_are_removed = self.may_be_removed = False

    def _on_inactive_call(self) -> None:
        self.may_be_removed = True


class Schedule:
    """Decides at which steps one quantity is sampled. `begins` must be called once for each step, in order.

    The first sampled step is the first one with a number of at least `start_step`. After it, every n-th step is
    sampled.
    """

    def __init__(self, sampling: QuantitySampling) -> None:
        self.stretch = 1
        """Factor by which the sampling interval is multiplied.

        It does not change the number of sampled steps, `times`.
        """
        self._sampling = sampling
        self._seen = 0
        self._sampled = 0
        self._is_due = False  # the present step is selected
        self.is_over = sampling.times == 0
        """True if no further step will be sampled."""

    @property
    def period(self) -> int:
        """The number of steps from one sampled step to the next."""
        return self._sampling.every * self.stretch

    def begins(self, step: int) -> bool:
        """Count step number `step`, which begins; return whether it is selected for sampling.

        Step numbers may have gaps.
        """
        sampling = self._sampling
        if self.is_over or (sampling.start_step is not None and not self._seen and step < sampling.start_step):
            self._is_due = False
        else:
            self._is_due = self._seen % (sampling.every * self.stretch) == 0
            self._seen += 1
        return self._is_due

    def sampled(self) -> None:
        """Count the present step, at which the quantity was measured, if it is selected."""
        if self._is_due:
            self._sampled += 1
            self.is_over = self._sampling.times is not None and self._sampled >= self._sampling.times


class GateState(enum.Enum):
    """The steps at which a quantity with hooks is measured."""

    SCHEDULED = "scheduled"  # those that its schedule selects
    OPEN = "open"  # every step, because of a capture
    CLOSED = "closed"  # none, until a capture or a change of the sampling begins, or until a capture ends


@dataclass(slots=True, eq=False)
class ActiveQuantity:
    """A quantity with its schedule, slots and hooks.

    The hooks may exist before the slots.
    """

    quantity: Quantity
    slots: Table | None = None
    """The slots of the quantity, from `activate` until `leave`."""
    schedule: Schedule = field(default_factory=lambda: Schedule(QuantitySampling()))
    ops: Ops = EVERY_OP
    is_open: bool = False
    """True if this quantity is measured at the present step.

    This is a field instead of a property, because hooks read it at each call.
    """
    gate: GateState = GateState.CLOSED
    is_retired: bool = False
    """True if its hooks were removed permanently, because its schedule has ended."""
    where: str = field(init=False)
    """The name under which the error boundary reports errors in the hooks of this quantity."""
    handles: list[Removable] = field(default_factory=list)
    transient: TransientHooks = field(default_factory=TransientHooks)

    def __post_init__(self) -> None:
        self.where = f"hooks of {self.quantity.name}"

    @property
    def table(self) -> Table:
        """The table of this quantity. Only valid after `activate` was called."""
        assert self.slots is not None
        return self.slots

    def own_index(self, index: int) -> int | None:
        """Return the position of the model's parameter `index` among the parameters that this quantity measures.

        Return None if the quantity does not measure the parameter.
        """
        positions = self.quantity.monitored.positions
        if positions is None:
            return index
        place = bisect.bisect_left(positions, index)
        return place if place < len(positions) and positions[place] == index else None

    def install(self, hooking: HookContext, boundary: ErrorBoundary) -> None:
        """Let the quantity register its hooks, whose handles are kept here, and publish its notices."""
        for sentence in self.quantity.notices():
            hooking.tell(f"{self.quantity.name}: {sentence}")
        boundary.call(self.where, self.quantity.install, hooking, self)

    def keep(self, handle: Removable) -> None:
        self.handles.append(handle)

    def hook(self, hook: Hook, register: Callable[[], Removable | None], *, stays: bool = False) -> None:
        """Register `hook` now and at each later sampled step (see `TransientHooks.add`)."""
        self.transient.add(hook, register, stays=stays)

    def activate(self, table: StepTable, sampling: QuantitySampling) -> bool:
        """Start a new schedule, and add slots to the table if the quantity has none. Return True."""
        self.schedule, self.ops = Schedule(sampling), sampling.ops
        if self.slots is None:
            entries = self.quantity.first_entries
            self.quantity.monitored.descriptions.clear()  # parameters may change until other quantities are built
            self.slots = Table(table, entries, self.quantity.monitored.owners, sampling.ops)
        else:
            self.slots.publish(sampling.ops)
        self.gate = GateState.SCHEDULED
        return True

    def opens(self, step: int) -> bool:
        """Count the step number `step`, which begins; return whether the quantity is measured at this step."""
        is_due = self.schedule.begins(step)
        self.is_open = is_due if self.gate is GateState.SCHEDULED else self.gate is GateState.OPEN
        if self.is_open and self.slots is not None:
            self.slots.begin(step)
        return self.is_open

    def adjust_hooks(self) -> None:
        """Register the hooks that the present step needs if it is measured; otherwise remove unneeded hooks."""
        if self.is_open:
            self.transient.register()
        else:
            self.transient.remove_called()

    def retire(self) -> None:
        """Remove the hooks permanently, because nothing is measured from now on.

        A quantity registers its hooks on a model only once. Hooks that were never called remain until `unhook`, because
        they cost nothing (see `TransientHooks`).
        """
        self.is_retired = True
        self.transient.remove(only_called=True)
        handles, self.handles = self.handles, []
        remove_all(handles)

    def unhook(self) -> None:
        """Remove all hooks of the quantity."""
        handles, self.handles = [self.transient, *self.handles], []
        remove_all(handles)

    def resume(self) -> None:
        """Measure this quantity by its schedule again after a capture, with the statistics that it publishes."""
        if self.gate is GateState.CLOSED and self.slots is not None:
            self.slots.publish(self.ops)  # a captured quantity of the same class had the slots
        self.gate = GateState.SCHEDULED

    def leave(self) -> None:
        """Stop measuring this quantity, and give up its slots. Its hooks remain."""
        self.is_open, self.gate, self.slots = False, GateState.CLOSED, None

    def measures_as(self, other: Quantity) -> bool:
        """Return whether `other` has the same class and options, apart from schedule, ranks and `ops`."""
        mine, theirs = (
            replace(quantity.options, start_step=None, every=None, times=None, ranks=None, ops=None)
            for quantity in (self.quantity, other)
        )
        return type(self.quantity) is type(other) and mine == theirs


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
        zero_below: float = 0.0,
        compiled: bool = True,
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
        # On other devices, the compiled kernel measures from `use_compiled` on.
        table = StatisticsTable(first, device, zero_below=zero_below, compiled=compiled and device.type == "cpu")
        tell = lambda message: None if self._hooking is None else self._hooking.tell(message)  # noqa: E731 - short
        self.table = StepTable(table, tell)
        self._is_clear = True  # the table has no rows of a step that could not be ended
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
        self._members = self._activated(prepared)
        self._measure(self._members)

    def _activated(self, parts: Mapping[ActiveQuantity, QuantitySampling]) -> list[ActiveQuantity]:
        """Start the schedules of the quantities `parts`, and return the quantities without an error."""
        return [
            member
            for member, sampling in parts.items()
            if self._boundary.call(f"rows of {member.quantity.name}", member.activate, self.table, sampling)
        ]

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
        added = self._activated({member: self._captured[member] for member in added})
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
            for member in self._measured if event is Quantity.on_optimizer_step_end else ():
                if member.is_open:
                    try:
                        self._expected[member.quantity.name] = member.quantity.expected()
                    except Exception as error:  # noqa: BLE001 - see above
                        self._boundary.report(f"{member.quantity.name} (expected)", error)

    def forward_failed(self) -> None:
        """Delete the data of a training forward pass of a sampled step that has raised."""
        del self.table.deferred[self.table.deferred_before :]
        self.notify(Quantity.on_forward_failed)

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

    def end(self, record: StepRecord, left_out: AbstractSet[int] = frozenset()) -> None:
        """End the sampled step, and start to copy its statistics to the host.

        Add this copy and the rows for other datasets to the record of the step. Delete the data of the forward passes
        with the numbers `left_out`, the results of which the script did not use.
        """
        self.notify(Quantity.on_step_end)
        table, measured = self.table, []
        for member in self._measured:
            if member.is_open:
                member.is_open = False
                member.schedule.sampled()
                if member.slots is not None:
                    measured.append(member.slots)
        is_wasteful = table.end_step(measured)
        record.deferred, table.deferred = table.deferred, []
        record.expected, self._expected = tuple(self._expected.values()), {}
        record.plan = table.version()
        if left_out:
            record.plan = table.without(left_out, record.deferred)
        record.copy = HostCopy(table.statistics, len(record.plan.items))
        if is_wasteful:
            self.table.rebuild(self._tables)
        self._is_clear = True
        self.backlog.measured += 1
