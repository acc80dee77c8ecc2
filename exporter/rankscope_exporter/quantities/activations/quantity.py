"""What modules take and return in a training forward, and the gradients of both.

Inputs are read before the forward runs, since it may write over them. Gradients come from hooks on the very tensors:
nothing is put into the graph, so no sum changes its order, and what is written in place later harms nothing. The
gradient of an input is therefore that of the tensor: of all its uses, not of this module's alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch

from rankscope_contract.model.kinds import Kind
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.model.module_names import NamedModule, named_modules, selected, unmatched
from rankscope_exporter.model.pytree import Found, Slot, Specs, received, returned
from rankscope_exporter.quantities.activations.entries import (
    SIDES,
    ActivationEntries,
    Calls,
    Leaves,
    ModuleCall,
    TensorCache,
    TensorSite,
)
from rankscope_exporter.quantities.activations.options import ActivationOptions
from rankscope_exporter.quantities.base import Hook, Hooking, Quantity, QuantityOptions, SamplingGate, Table
from rankscope_exporter.quantities.hook_handles import (
    CallbackHandle,
    CoverageNotes,
    HookHandles,
    hook_after,
    hook_before,
    in_backward,
)
from rankscope_exporter.statistics.tensor_access import why_not_measurable

_GRADIENT: Final[dict[Kind, Kind]] = {Kind.ACT_IN: Kind.ACT_GRAD_IN, Kind.ACT_OUT: Kind.ACT_GRAD_OUT}
_OBJECT: Final[dict[Kind, str]] = {
    kind: side + ("_grad" if kind in _GRADIENT.values() else "") for kind, side in SIDES.items()
}

_UNSEEN: Final = "no gradient of what it was before can be seen"


@dataclass(slots=True)
class _Step:
    """What is known of the sampled step under way."""

    calls: Calls = field(default_factory=Calls)
    micro_step: int = -1
    open: dict[str, list[ModuleCall | None]] = field(
        default_factory=dict
    )  # calls under way, by module; None: not measured
    measured: TensorCache[range] = field(default_factory=TensorCache)
    leaves: Leaves[range] = field(default_factory=Leaves)
    gradients: TensorCache[range] = field(default_factory=TensorCache)  # of the backward pass under way
    watched: TensorCache[list[TensorSite]] = field(default_factory=TensorCache)
    watched_leaves: dict[int, list[TensorSite]] = field(default_factory=dict)  # by the number of our hook on the leaf

    def let_go(self) -> None:
        """Forget all tensors."""
        for memory in (self.measured, self.leaves, self.gradients, self.watched, self.watched_leaves):
            memory.clear()


@dataclass(frozen=True, slots=True)
class _Followed:
    """A module with hooks, and what of it is measured."""

    named: NamedModule
    objects: frozenset[str]
    specs: Specs

    @property
    def name(self) -> str:
        """The name of the module."""
        return self.named.name


class Activations(Quantity):
    """Rows of `act_in`, `act_out`, `act_grad_in`, `act_grad_out`, one for each tensor, micro-batch and call."""

    name: ClassVar[str] = "activations"
    options_class: ClassVar[type[QuantityOptions]] = ActivationOptions
    of_modules: ClassVar[bool] = True
    options: ActivationOptions

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        super().__init__(monitored, options)
        self._step = _Step()
        self._handles = HookHandles(monitored)
        self._rows = ActivationEntries()
        self._gaps = CoverageNotes()
        self._looked_for_silence = False
        self._followed: list[tuple[NamedModule, Hook]] = []
        self._is_compiled = monitored.framework.is_compiled
        self._hooking: Hooking
        self._gate: SamplingGate

    def kinds(self) -> set[str]:
        """Return the kinds of what is measured."""
        return {kind for kind, name in _OBJECT.items() if name in self.options.objects}

    def install(self, hooking: Hooking, gate: SamplingGate) -> None:
        """Register on every module that is measured."""
        self._hooking, self._gate = hooking, gate
        objects = self.options.objects
        if not objects:
            hooking.tell("activations: forward_only and backward_only exclude each other; nothing is measured")
            return
        hooking.keep(CallbackHandle(self._release))
        modules = named_modules(self.monitored.framework.module)
        for sentence in unmatched(modules, self.targets):
            hooking.tell(f"activations: {sentence}")
        for module in modules if self.options.all_modules else selected(modules, self.targets):
            self._follow(module, objects)

    def _follow(self, named: NamedModule, objects: frozenset[str]) -> None:
        specs = self.options.specs_of(named.name, *named.aliases)
        wanted = objects & specs.keys() if specs else objects
        followed, module = _Followed(named, wanted, specs), named.module
        self._rows.vpp_stages[named.name] = None if module is None else self.monitored.framework.vpp_stage(module)
        hooking, gate = self._hooking, self._gate

        def before(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            self._begins(followed, module, args, kwargs)

        def after(module: torch.nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
            self._ended(followed, module, output)

        first = hooking.guarded("inputs of modules", before, gate)
        try:
            hook_before(hooking, named, first)
            last = hooking.guarded("outputs of modules", after, gate)
            hook_after(hooking, named, last)
        except (RuntimeError, AttributeError) as error:  # scripted modules and other things that only look like modules
            self._gaps.add(f"no hook can be registered ({type(error).__name__})", named.name)
        self._followed.append((named, first))

    def on_step_begin(self, table: Table) -> None:  # noqa: ARG002 - the signature of every moment
        """Nothing of this step has been called yet."""
        self._release()
        self._step = _Step()

    def on_optimizer_step_end(self, table: Table) -> None:  # noqa: ARG002 - see above
        """Say what was missing, and let go of leaf tensors."""
        self._note_uncalled()
        self._release()

    def on_backward_end(self, table: Table) -> None:  # noqa: ARG002 - see above
        """Let go of gradients: other ones come by in the next pass."""
        self._step.gradients.clear()

    def on_step_end(self) -> None:
        """Let go of all tensors, also where no optimizer has stepped."""
        self._handles.remove()
        self._step.let_go()

    def _begins(
        self, followed: _Followed, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        if module is not followed.named.module:  # a replica of DataParallel, on a thread of its own
            self._step.calls.called.add(followed.name)
            self._gaps.add("runs as replicas, which are not measured", followed.name)
            return
        again = in_backward()
        frames = self._step.open.setdefault(followed.name, [])
        frames.append(None)
        if not (again or self._hooking.in_forward):
            return
        found = received(args, kwargs)
        call = self._call(followed, found, again=again)
        frames[-1] = call
        if call is not None:
            self._step.leaves.call_begins()
            self._read(followed, Kind.ACT_IN, call, found, again=again)
            self._step.leaves.arguments_read()

    def _call(self, followed: _Followed, found: Found, *, again: bool) -> ModuleCall | None:
        enabled = self._hooking.grad_enabled
        pointer = 0
        if (again or not enabled) and found.slots:
            pointer = _pointer(found.slots[0].tensor)
        if again:
            return self._step.calls.again(followed.name, pointer)
        micro_step = self._hooking.micro_step
        if micro_step != self._step.micro_step:  # calls of a forward that raised have not ended
            self._step.micro_step = micro_step
            self._step.leaves.clear()
        return self._step.calls.begins(followed.name, micro_step, with_gradients=enabled, pointer=pointer)

    def _ended(self, followed: _Followed, module: torch.nn.Module, output: Any) -> None:
        frames = self._step.open.get(followed.name) if module is followed.named.module else None
        call = frames.pop() if frames else None
        if call is not None:
            self._read(followed, Kind.ACT_OUT, call, returned(output), again=in_backward())
            self._step.leaves.call_ended()

    def _read(self, followed: _Followed, kind: Kind, call: ModuleCall, found: Found, *, again: bool) -> None:
        side = SIDES[kind]
        for unknown in found.unknown:
            self._gaps.add(f"{side} holds what is not looked into: {unknown}", followed.name)
        if not again:
            for slot in self._chosen(followed, kind, found):
                memory = self._step.leaves if slot.tensor.is_leaf else self._step.measured
                self._measure(TensorSite.of(kind, call, slot), slot.tensor, memory)
        if self._hooking.grad_enabled:
            for slot in self._chosen(followed, _GRADIENT[kind], found):
                if slot.tensor.requires_grad:
                    self._watch(TensorSite.of(_GRADIENT[kind], call, slot), slot.tensor)

    def _chosen(self, followed: _Followed, kind: Kind, found: Found) -> Sequence[Slot]:
        if _OBJECT[kind] not in followed.objects:
            return ()
        spec = followed.specs.get(_OBJECT[kind])
        slots = found.slots if spec is None else spec.select(found)
        if slots is None or (spec is not None and not slots):
            text = "" if spec is None else spec.text
            self._gaps.add(
                f"{SIDES[kind]} holds {len(found.slots)} tensors in {found.length} elements, which is not {text!r} "
                "as its targets have it",
                followed.name,
            )
            return ()
        return slots

    def _measure(self, site: TensorSite, tensor: torch.Tensor, memory: TensorCache[range] | Leaves[range]) -> None:
        reason = why_not_measurable(tensor)
        if reason is not None:
            self._gaps.add(f"{SIDES[site.kind]}{site.path} is {reason}", site.call.module)
            return
        table = self._gate.table
        row = self._rows.row(table, site, tensor)
        if row is None:
            return
        known = memory.get(tensor)
        if known is None:
            table.measure([tensor], row)
        else:
            table.copy(known, row)
        memory.keep(tensor, row)

    def _watch(self, site: TensorSite, tensor: torch.Tensor) -> None:
        sites = self._watched_leaf(tensor) if tensor.is_leaf else self._step.watched.get(tensor)
        if sites is not None:
            sites.append(site)
            return
        if tensor._is_view():  # noqa: SLF001 - torch has no other name for it
            for lost in self._step.watched.before(tensor) or ():
                self._gaps.add(f"{SIDES[lost.kind]} is a view and written in place: {_UNSEEN}", lost.call.module)
        sites = [site]

        def arrived(gradient: torch.Tensor | None) -> None:
            if gradient is not None:
                self._arrived(sites, gradient)

        hook = self._hooking.guarded("gradients of activations", arrived, self._gate)
        number = self._handles.hook(tensor, hook)
        if tensor.is_leaf:
            self._step.watched_leaves[number] = sites
        else:
            self._step.watched.keep(tensor, sites)

    def _watched_leaf(self, tensor: torch.Tensor) -> list[TensorSite] | None:
        """Return the sites of a leaf that has our hook; only this very tensor has it."""
        hooks: Mapping[int, Any] = tensor._backward_hooks or {}  # noqa: SLF001 - torch has no other name for it
        watched = self._step.watched_leaves
        return next((watched[number] for number in hooks if number in watched), None)

    def _arrived(self, sites: Sequence[TensorSite], gradient: torch.Tensor) -> None:
        self._step.calls.gradient_arrived()
        for site in sites:
            self._measure(site, gradient, self._step.gradients)

    def _release(self) -> None:
        """Take hooks off tensors: those of a leaf outlive the graph."""
        self._handles.remove()
        self._step.let_go()
        if self._step.calls.called:
            self._note_uncalled()
        self._gaps.tell(lambda message: self._hooking.tell(f"activations: {message}"))

    def _note_uncalled(self) -> None:
        """Note, after the first step, the modules that were not called in it."""
        if self._looked_for_silence:
            return
        self._looked_for_silence = True
        for named, hook in self._followed:
            if named.name not in self._step.calls.called:
                compiled = named.compiled or self._is_compiled or hook.is_compiled
                why = "is part of compiled code" if compiled else "was not called in a forward of the model"
                self._gaps.add(f"{why}, so it has no activations", named.name)


def _pointer(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # no memory of its own
        return 0
