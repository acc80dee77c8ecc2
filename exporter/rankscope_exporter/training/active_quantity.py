"""An active quantity: its rows in the statistics table, its schedule, and its hooks.

Some hooks exist at sampled steps only. All functions of this module run on the training thread. Hooks that exist at
sampled steps only are registered when a sampled step begins. They are removed when the next step begins that is not
sampled.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rankscope_exporter.adapters.hook_context import Hook, HookContext
from rankscope_exporter.adapters.parameter_hooks import ParameterHook, Removable, remove_all
from rankscope_exporter.measure.quantities.base import Quantity, QuantityOptions
from rankscope_exporter.measure.table import StepTable, Table
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.records.selection import EVERY_OP, Ops
from rankscope_exporter.training.sampling_config import QuantitySampling, Timing


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

    def retire(self) -> None:
        """Remove all hooks that were called, permanently. Hooks that were never called remain until `remove`."""
        for item in self._all:
            if item.hook.was_called:
                item.remove()
        self._all = [item for item in self._all if item.handle is not None]
        self._some_are_removed = self.may_be_removed = False

    def remove(self) -> None:
        """Remove all hooks permanently."""
        for item in self._all:
            item.remove()
        self._all.clear()

    def _on_inactive_call(self) -> None:
        self.may_be_removed = True


class Schedule:
    """Decides at which steps one quantity is sampled. `begins` must be called once for each step, in order.

    The first sampled step is the first one with a number of at least `start_step`. After it, every n-th step is
    sampled.
    """

    def __init__(self, timing: Timing) -> None:
        self.stretch = 1
        """Factor by which the sampling interval is multiplied.

        It does not change the number of sampled steps, `times`.
        """
        self._timing = timing
        self._seen = 0
        self._sampled = 0
        self._is_due = False  # the present step is selected
        self.is_over = timing.times == 0
        """True if no further step will be sampled."""

    @property
    def period(self) -> int:
        """The number of steps from one sampled step to the next."""
        return self._timing.every * self.stretch

    def begins(self, step: int) -> bool:
        """Count step number `step`, which begins; return whether it is selected for sampling.

        Step numbers may have gaps.
        """
        timing = self._timing
        if self.is_over or (timing.start_step is not None and not self._seen and step < timing.start_step):
            self._is_due = False
        else:
            self._is_due = self._seen % (timing.every * self.stretch) == 0
            self._seen += 1
        return self._is_due

    def sampled(self) -> None:
        """Count the present step, at which the quantity was measured, if it is selected."""
        if self._is_due:
            self._sampled += 1
            self.is_over = self._timing.times is not None and self._sampled >= self._timing.times


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
    schedule: Schedule = field(default_factory=lambda: Schedule(Timing()))
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

    def activate(self, table: StepTable, sampling: QuantitySampling, boundary: ErrorBoundary) -> bool:
        """Start a new schedule, and add slots to the table if the quantity has none; return whether this succeeded."""
        return boundary.call(f"rows of {self.quantity.name}", self._activate, table, sampling) is not None

    def _activate(self, table: StepTable, sampling: QuantitySampling) -> bool:
        self.schedule, self.ops = Schedule(sampling.timing), sampling.ops
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
        self.transient.retire()
        handles = list(self.handles)
        self.handles.clear()
        remove_all(handles)

    def unhook(self) -> None:
        """Remove all hooks of the quantity."""
        handles = [self.transient, *self.handles]
        self.handles.clear()
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
        mine, theirs = self.quantity, other
        return type(mine) is type(theirs) and _without_schedule(mine.options) == _without_schedule(theirs.options)


def _without_schedule(options: QuantityOptions) -> QuantityOptions:
    return replace(options, start_step=None, every=None, times=None, ranks=None, ops=None)
