"""An active quantity: its rows, its schedule, and its hooks, some of which exist at sampled steps only.

Runs on the training thread. Transient hooks are registered when a sampled step begins and removed when the next step
begins that is not sampled.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import nn

from rankscope_exporter.adapters.base import Removable, remove_all
from rankscope_exporter.adapters.parameter_hooks import ParameterHook
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.quantities.base import Hook, ModelHookContext, Quantity, QuantityOptions, SamplingGate
from rankscope_exporter.sampling.plan import StepBuffers, TableView
from rankscope_exporter.sampling.sampling_config import QuantitySampling, Schedule, Timing
from rankscope_exporter.statistics.selection import EVERY_OP, Ops


@dataclass(slots=True)
class _Transient:
    hook: Hook
    register: Callable[[], Removable | None]
    handle: Removable | None
    stays: bool

    def come(self) -> None:
        if self.handle is None:
            self.hook.was_called = False
            self.handle = self.register()
        elif isinstance(self.handle, ParameterHook):
            self.handle.renew_found()

    def go(self) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


class TransientHooks:
    """Knows how each hook is registered, and which are there.

    A hook that was not called since it was registered is not removed before detach: it costs nothing. Its module may be
    part of compiled code, which Dynamo would compile again without the hook.
    """

    def __init__(self) -> None:
        self._all: list[_Transient] = []
        self._some_are_away = False
        self._are_on_parameters = False
        self.some_may_go = False
        """Whether `go` would look for hooks to take away."""

    def add(self, hook: Hook, register: Callable[[], Removable | None], *, stays: bool = False) -> None:
        """Register a hook, now and whenever they come again; `register` returns None where it cannot come this time.

        One that `stays` is also there at the steps that are not measured. Raises what `register` raises, and forgets
        the hook.
        """
        if not stays:
            hook.on_inactive_call = self._on_inactive_call
        handle = register()
        self._all.append(_Transient(hook, register, handle, stays))
        self._are_on_parameters |= isinstance(handle, ParameterHook)
        self.some_may_go = self._some_are_away = True

    def come(self) -> None:
        """Register those that are away, and renew those on parameters."""
        self.some_may_go = True
        if self._some_are_away or self._are_on_parameters:
            for coming in self._all:
                coming.come()
            self._some_are_away = any(coming.handle is None for coming in self._all)

    def go(self) -> None:
        """Take those away that were called since they came."""
        if self.some_may_go:
            self.some_may_go = False
            for coming in self._all:
                if coming.hook.was_called and not coming.stays:
                    coming.go()
                    self._some_are_away = True

    def retire(self) -> None:
        """Remove all that were called, for good; the others stay until `remove`."""
        for coming in self._all:
            if coming.hook.was_called:
                coming.go()
        self._all = [coming for coming in self._all if coming.handle is not None]
        self._some_are_away = self.some_may_go = False

    def remove(self) -> None:
        """Take all away for good."""
        for coming in self._all:
            coming.go()
        self._all.clear()

    def _on_inactive_call(self) -> None:
        self.some_may_go = True


@dataclass(slots=True, eq=False)
class ActiveQuantity:
    """A quantity of a collection. Its hooks may be there before its rows are: it is due only once it is seated."""

    quantity: Quantity
    window: TableView | None = None
    schedule: Schedule = field(default_factory=lambda: Schedule(Timing()))
    ops: Ops = EVERY_OP
    is_open: bool = False
    """Whether the step under way is measured by this quantity. A field: closed hooks ask for it all the time."""
    is_captured: bool = False
    """Whether every step is measured for the time being, whatever the schedule says."""
    is_temporary: bool = False
    """Whether it is here for that alone."""
    is_suspended: bool = False
    """Whether a guest measures in its place: the same quantity with other options."""
    is_due: bool = False
    """Whether the schedule has the step under way measured."""
    is_retired: bool = False
    is_kept_for_next: bool = False
    """Whether a change that is to come goes on with it: its hooks stay."""
    handles: list[Removable] = field(default_factory=list)
    coming: TransientHooks = field(default_factory=TransientHooks)

    @property
    def where(self) -> str:
        """Return what faults of its hooks are said to be of."""
        return f"hooks of {self.quantity.name}"

    @property
    def table(self) -> TableView:
        """Where the quantity writes. Only asked for while it is due."""
        assert self.window is not None
        return self.window

    def own_index(self, index: int) -> int | None:
        """Return where the quantity itself counts parameter `index` of the subject; None when it leaves it out."""
        positions = self.quantity.monitored.positions
        if positions is None:
            return index
        place = bisect.bisect_left(positions, index)
        return place if place < len(positions) and positions[place] == index else None

    def install(self, hooking: ModelHookContext, boundary: ErrorBoundary) -> None:
        """Let the quantity register hooks, which are this member's to remove."""
        for sentence in self.quantity.notices():
            hooking.tell(f"{self.quantity.name}: {sentence}")
        own = ActiveHookContext(hooking, self.handles, self.coming)
        boundary.call(self.where, self.quantity.install, own, self)

    def activate(self, sheet: StepBuffers, terms: QuantitySampling) -> bool:
        """Begin to count steps anew, and find rows of the sheet where there are none yet; return that it is done."""
        self.schedule, self.ops = Schedule(terms.timing), terms.ops
        if self.window is None:
            entries = self.quantity.entries()
            self.window = TableView.create(sheet, entries, self.quantity.owners(len(entries)), terms.ops)
        else:
            self.window.publish(terms.ops)
        return True

    def opens(self, step: int) -> bool:
        """Note that step number `step` begins; return whether it is measured."""
        self.is_due = self.schedule.begins(step)
        self.is_open = self.is_captured or (self.is_due and not self.is_suspended)
        return self.is_open

    def closes(self) -> None:
        """Note that the step under way was measured."""
        self.is_open = False
        if self.is_due:
            self.schedule.taken()

    @property
    def is_done(self) -> bool:
        """Return whether its hooks are of no use any more."""
        return self.schedule.is_over and not (self.is_kept_for_next or self.is_captured or self.is_retired)

    def begins(self) -> None:
        """Have the hooks there that the step needs which begins, and no others."""
        if self.is_open:
            self.coming.come()
        else:
            self.coming.go()

    def retire(self) -> None:
        """Remove the hooks for good: nothing is measured any more, and a quantity hooks a model only once.

        Those that were never called stay until `unhook`, see `TransientHooks`.
        """
        self.is_retired = True
        self.coming.retire()
        handles = list(self.handles)
        self.handles.clear()
        remove_all(handles)

    def unhook(self) -> None:
        """Remove all hooks."""
        handles = [self.coming, *self.handles]
        self.handles.clear()
        remove_all(handles)

    def suspend(self) -> None:
        """Let a guest measure the same quantity, and fill the rows, for the time being."""
        self.is_suspended = True
        if self.window is not None:
            self.window.release()

    def resume(self) -> None:
        """Go on as before."""
        self.is_suspended = False
        if self.window is not None:
            self.window.reclaim()

    def leave(self) -> None:
        """Take the hooks away, and let others fill the rows."""
        self.is_open = False
        self.unhook()
        if self.window is not None and not self.is_suspended:  # else a guest may have them
            self.window.release()

    def measures_as(self, other: Quantity) -> bool:
        """Return whether `other` would measure the same, if on other terms."""
        mine, theirs = self.quantity, other
        return type(mine) is type(theirs) and _bare(mine.options) == _bare(theirs.options)


def _bare(options: QuantityOptions) -> QuantityOptions:
    return replace(options, start_step=None, every=None, times=None, ranks=None, ops=None)


class ActiveHookContext:
    """The hooking of a model, with the handles kept apart."""

    def __init__(self, hooking: ModelHookContext, handles: list[Removable], coming: TransientHooks) -> None:
        self._hooking = hooking
        self._handles = handles
        self._coming = coming

    @property
    def micro_step(self) -> int:
        """Which training forward of the step is under way or was the last, from 0 on."""
        return self._hooking.micro_step

    @property
    def in_forward(self) -> bool:
        """Whether a training forward of the whole model is under way."""
        return self._hooking.in_forward

    @property
    def grad_enabled(self) -> bool:
        """Whether training computes gradients where the guarded hook that is running was called."""
        return self._hooking.grad_enabled

    def keep(self, handle: Removable) -> None:
        """Remove `handle` when the quantity leaves."""
        self._handles.append(handle)

    def hook(self, hook: Hook, register: Callable[[], Removable | None], *, stays: bool = False) -> None:
        """Have `register` put `hook` in its place for every step that is measured, or for all if it `stays`."""
        self._coming.add(hook, register, stays=stays)

    def begins_steps(self, module: nn.Module) -> bool:
        """Return whether a step begins with the forward of `module`."""
        return self._hooking.begins_steps(module)

    def tell(self, message: str) -> None:
        """Say something that its reader should know."""
        self._hooking.tell(message)

    def guarded(self, where: str, function: Callable[..., None], gate: SamplingGate) -> Hook:
        """Return `function` as a hook."""
        return self._hooking.guarded(where, function, gate)

    def gradient_arrives(self) -> None:
        """Note that a gradient is on its way to a parameter."""
        self._hooking.gradient_arrives()

    def between(self, function: Callable[[], None]) -> None:
        """Call `function` while no step begins or ends."""
        self._hooking.between(function)
