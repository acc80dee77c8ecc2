"""Quantity `activations`: inputs and outputs of modules in training forward passes, and their gradients.

Inputs are read before the forward pass of the module, which may overwrite them. Gradients are read by hooks on the
tensors. Nothing is added to the graph, so the order of sums does not change, and later in-place writes have no effect
on the hooks. The gradient of an input is therefore the gradient of the tensor over all its uses, not only over the use
in this module.

Plan entries of activations, by call, module and tensor; caches of tensors that were read.

Calls are numbered within a micro-batch. Checkpointing computes a part of the forward pass a second time, inside the
backward pass. In the non-reentrant mode, the first computation makes the autograd graph and the second computation is
discarded. In the reentrant mode, the first computation runs without gradients, so only tensors of the second
computation get gradients. The rows of these gradients must get the names of the module calls in the first computation.

If several modules pass on the same tensor, the tensor is measured once. After a tensor was freed, another tensor may
get the same id(), so the cache entry of a tensor is deleted with the tensor. The caches do not keep a tensor alive for
longer than the training does. Leaf tensors are an exception: they are kept until the next call of a module.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from rankscope_contract.model.kinds import Kind
from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.adapters.hook_context import NO_KEYWORDS, Hook, HookContext
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.adapters.parameter_names import NamedModule, Targets, local_tensor
from rankscope_exporter.adapters.placement import FULL, layout_of
from rankscope_exporter.adapters.pytree import Found, Slot, Specs, parse_specs, received, returned
from rankscope_exporter.adapters.torch_private import gradient_hooks, in_place_changes, is_view
from rankscope_exporter.measure.kernels.tensor_access import dtype_name, is_integer, why_not_measurable
from rankscope_exporter.measure.quantities.base import BACKWARD, QuantityOptions, SamplingGate
from rankscope_exporter.measure.quantities.module_quantity import ModuleQuantity, TensorHooks, in_backward
from rankscope_exporter.measure.table import Slots, Table
from rankscope_exporter.process.validation import table
from rankscope_exporter.records.record import ExpectedRows


class ModuleCall(NamedTuple):
    """One call of one module.

    In a micro-batch, `seq` is the number of earlier calls of the module; None for the first call.
    """

    module: str
    micro_step: int
    seq: int | None = None
    pointer: int = 0  # address of the first argument, which checkpointing keeps


class Calls:
    """The module calls of one step, in order. Finds the original call when checkpointing computes a call again."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], int] = {}
        self._waiting: list[ModuleCall | None] = []  # in order: calls without gradients; None after a match
        self._next: int | None = None

    def begins(self, module: str, micro_step: int, *, with_gradients: bool, pointer: int = 0) -> ModuleCall:
        """Add a module call of the forward pass and return it."""
        count = self._counts.get((module, micro_step), 0)
        self._counts[module, micro_step] = count + 1
        call = ModuleCall(module, micro_step, count or None, pointer)
        if not with_gradients:
            self._waiting.append(call)
        return call

    def again(self, module: str, pointer: int) -> ModuleCall | None:
        """Return the original call that checkpointing now computes again; None if the original call ran with gradients.

        The calls of a checkpointed part are recomputed in their original order. The address of the first argument
        identifies the part, because checkpointing keeps this tensor. If no address matches, the latest part is assumed,
        because a backward pass runs in reverse order.
        """
        waiting = {at: call for at, call in enumerate(self._waiting) if call is not None and call.module == module}
        if not waiting:
            return None
        kept = [at for at, call in waiting.items() if pointer and call.pointer == pointer]
        place = self._next if self._next is not None and self._next in waiting else max(kept or waiting)
        call, self._waiting[place] = self._waiting[place], None
        self._next = place + 1
        return call

    def forget(self, micro_step: int) -> None:
        """Delete the calls of a micro-batch, because its forward pass has raised an error."""
        self._counts = {key: count for key, count in self._counts.items() if key[1] != micro_step}
        self._waiting = [call for call in self._waiting if call is None or call.micro_step != micro_step]

    def gradient_arrived(self) -> None:
        """Store that gradients of the last recomputed part have arrived.

        The next call that checkpointing computes again belongs to another part.
        """
        self._next = None


SIDES: Final = {Kind.ACT_IN: "input", Kind.ACT_OUT: "output", Kind.ACT_GRAD_IN: "input", Kind.ACT_GRAD_OUT: "output"}


@dataclass(slots=True)
class TensorSite:
    """The tensor of one row: an input or output of a module call, or the gradient of an input or output."""

    kind: Kind
    call: ModuleCall
    index: int | None
    path: str


T = TypeVar("T")


class TensorCache(Generic[T]):
    """A cache with a value per tensor, for tensors of the graph and for gradients.

    A value becomes invalid when its tensor is freed or changed in place. Weak references detect a freed tensor. Leaf
    tensors, such as parameters, must have no weak references, because torch.utils.swap_tensors rejects a tensor with a
    weak reference. The class `Leaves` caches the values of leaf tensors.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[torch.Tensor], int, T]] = {}

    def get(self, tensor: torch.Tensor, *, changed: bool = False) -> T | None:
        """Return the value stored for `tensor` if it was not changed in place since; with `changed`, if it was."""
        known = self._by_id.get(id(tensor))
        is_known = known is not None and known[0]() is tensor
        return known[2] if known and is_known and changed == (known[1] != in_place_changes(tensor)) else None

    def keep(self, tensor: torch.Tensor, value: T) -> None:
        """Store `value`, but not for parameters, and tensors whose in-place changes torch does not count."""
        version = in_place_changes(tensor)
        if version is not None and not isinstance(tensor, nn.Parameter):
            self._by_id[id(tensor)] = weakref.ref(tensor), version, value

    def clear(self) -> None:
        self._by_id.clear()


class Leaves(Generic[T]):
    """A cache with a value per leaf tensor.

    Leaf tensors are inputs, masks, parameters, and all tensors that are computed without gradients. The cache keeps
    them alive, but hardly longer than the training does. It contains the arguments of running calls. Until the next
    call begins, it also contains the arguments and results of the call that ended last, unless no other call is
    running.
    """

    def __init__(self) -> None:
        self._running: list[dict[int, tuple[torch.Tensor, int, T]]] = []
        self._last: dict[int, tuple[torch.Tensor, int, T]] = {}

    def call_begins(self) -> None:
        """Start the cache of a module call that begins. Called before the arguments of the call are read."""
        self._running.append({})

    def arguments_read(self) -> None:
        """Release the tensors of the call that ended last. Called after the arguments of the next call were read."""
        self._last = {}

    def call_ended(self) -> None:
        """End the cache of the innermost call, after its results were read; an outer call keeps it until the next."""
        ended = self._running.pop() if self._running else {}
        self._last = ended if self._running else {}

    def clear(self) -> None:
        """Release all tensors of the cache."""
        self._running.clear()
        self._last = {}

    def get(self, tensor: torch.Tensor) -> T | None:
        """Return the value that was stored for `tensor`.

        Return None if no value was stored, or if the tensor was changed in place after the value was stored.
        """
        for known in (*reversed(self._running), self._last):
            found = known.get(id(tensor))  # the tensor is alive, so no other one has its id()
            if found is not None:
                return found[2] if found[1] == in_place_changes(tensor) else None
        return None

    def keep(self, tensor: torch.Tensor, value: T) -> None:
        """Store `value` in the cache of the innermost call, unless torch does not count the in-place changes."""
        version = in_place_changes(tensor)
        if version is not None and self._running:
            self._running[-1][id(tensor)] = tensor, version, value


_TABLES: Final = table("a table of tables, one for each target")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationOptions(QuantityOptions):
    """Options of the quantity `activations`: the modules and the tensors to measure.

    `targets` may also be a table. In this case, the keys of this table are the targets, and the table is added to
    `parts`.
    """

    inputs: bool = True
    outputs: bool = True
    input_grads: bool = True
    output_grads: bool = True
    forward_only: bool = False
    """True: measure inputs and outputs, but no gradients."""
    backward_only: bool = False
    """True: measure only gradients."""
    all_modules: bool = False
    """True: also measure all tensors of modules that no target selects.

    If `all_modules` is true, a target has an effect only if `parts` has an entry for the target.
    """
    parts: Annotated[Mapping[str, Mapping[str, str]], _TABLES] = field(default_factory=dict)
    """Tensors to measure, by target: {"head": {"input": "tuple[2]:0", "output": "tensor"}}.

    "tuple[2]:0" is the first of two elements. For a target with an entry here, only the tensors that the entry names
    are measured. For a target without an entry, or with an empty entry, all tensors are measured.
    """

    def __post_init__(self) -> None:
        targets: Any = self.targets
        if isinstance(targets, Mapping):
            object.__setattr__(self, "parts", {**targets, **self.parts})
            object.__setattr__(self, "targets", tuple(targets) or ("*",))
        QuantityOptions.__post_init__(self)
        for target, described in self.parts.items():
            parse_specs(target, described)
            if target not in self.targets:
                raise ValueError(f"parts[{target!r}] is not in targets: add {target!r} to targets")
        if not (self.inputs or self.outputs or self.input_grads or self.output_grads):
            raise ValueError("inputs, outputs, input_grads and output_grads are all false: set one of them to true")

    @property
    def objects(self) -> frozenset[str]:
        """Return which tensors of a module are measured: a subset of input, output, input_grad and output_grad."""
        forward, backward = not self.backward_only, not self.forward_only
        chosen = {"input": self.inputs and forward, "output": self.outputs and forward}
        chosen |= {"input_grad": self.input_grads and backward, "output_grad": self.output_grads and backward}
        return frozenset(name for name, wanted in chosen.items() if wanted)

    def specs_of(self, *names: str) -> Specs:
        """Return the entry in `parts` of the first target that selects one of a module's `names`; empty: all."""
        chosen = (target for target in self.parts if Targets((target,)).selects(*names))
        return next((parse_specs(target, self.parts[target]) for target in chosen), {})


_GRADIENT: Final[dict[Kind, Kind]] = {Kind.ACT_IN: Kind.ACT_GRAD_IN, Kind.ACT_OUT: Kind.ACT_GRAD_OUT}
_OWN_GRADIENTS: Final = (
    "the optimizer computes gradients inside of its step: gradients of activations are those of backward passes before "
    "this step, and absent without such a pass"
)
_OBJECT: Final[dict[Kind, str]] = {
    kind: side + ("_grad" if kind in _GRADIENT.values() else "") for kind, side in SIDES.items()
}


@dataclass(slots=True)
class _StepTensors:
    """The state of the quantity `activations` during a sampled step: module calls, and caches of tensors."""

    calls: Calls = field(default_factory=Calls)
    slots: defaultdict[int, list[Slots]] = field(default_factory=lambda: defaultdict(list))  # by micro-batch
    open: dict[str, list[ModuleCall | None]] = field(default_factory=dict)  # running calls; None: not measured
    measured: TensorCache[Slots] = field(default_factory=TensorCache)
    leaves: Leaves[Slots] = field(default_factory=Leaves)
    gradients: TensorCache[Slots] = field(default_factory=TensorCache)  # of the current backward pass
    watched: TensorCache[list[TensorSite]] = field(default_factory=TensorCache)
    watched_leaves: dict[int, list[TensorSite]] = field(default_factory=dict)  # by the number of our hook on the leaf

    def release_tensors(self) -> None:
        """Clear the caches of this step, so that they keep no tensor alive."""
        for memory in (self.measured, self.leaves, self.gradients, self.watched, self.watched_leaves):
            memory.clear()


class Activations(ModuleQuantity):
    """Measures `act_in`, `act_out`, `act_grad_in` and `act_grad_out`: one row per tensor, micro-batch and call.

    Tensors of integers or truth values, such as token ids and masks, are measured only if `parts` names them.
    """

    name: ClassVar[str] = "activations"
    options_class: ClassVar[type[QuantityOptions]] = ActivationOptions
    measures_tensors: ClassVar[bool] = True
    missing_result: ClassVar[str] = "it has no activations"
    options: ActivationOptions

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        super().__init__(monitored, options)
        self._step = _StepTensors()
        self._handles = TensorHooks(monitored)
        self._objects, self.all_modules = self.options.objects, self.options.all_modules
        self._specs: dict[str, Specs] = {}  # by name of the module
        self._vpp_stages: dict[str, int | None] = {}
        self._gradient_hook: Hook

    def kinds(self) -> set[str]:
        return {kind for kind, name in _OBJECT.items() if name in self._objects}

    def install(self, hooking: HookContext, gate: SamplingGate) -> None:
        if self._objects:
            self._gradient_hook = Hook(hooking, "gradients of activations", self._arrived, gate=gate)
            super().install(hooking, gate)
        else:
            hooking.tell("activations: forward_only and backward_only exclude each other; nothing is measured")

    def _follow(self, named: NamedModule) -> None:
        module, self._specs[named.name] = named.module, self.options.specs_of(named.name, *named.aliases)
        self._vpp_stages[named.name] = None if module is None else self.monitored.framework.vpp_stage(module)
        self._register(named, "inputs of modules", functools.partial(self._begins, named), before=True)
        self._register(named, "outputs of modules", functools.partial(self._ended, named), always=True)

    def on_step_begin(self, table: Table) -> None:
        super().on_step_begin(table)
        self._step = _StepTensors()

    def expected(self) -> ExpectedRows:
        # Lost hooks, and a backward pass in which no hooks run, have notices of their own, as have unmeasured modules.
        is_explained = self._lost or BACKWARD in self.monitored.compiled
        return ExpectedRows(self.name, frozenset(() if is_explained else self.kinds()), names_unmeasured=True)

    def on_forward_failed(self, table: Table) -> None:
        micro_step, step = self._hooking.micro_step, self._step
        for slot in step.slots.pop(micro_step, ()):
            table.forget(slot)
        step.calls.forget(micro_step)
        for memory in (step.open, step.measured, step.leaves, step.watched):
            memory.clear()

    def on_optimizer_step_end(self, table: Table) -> None:  # noqa: ARG002 - the signature of every event
        self._note_uncalled()
        self._release()

    def on_backward_end(self, table: Table) -> None:  # noqa: ARG002 - see above
        self._step.gradients.clear()  # the next backward pass computes new gradients

    def on_step_end(self, table: Table) -> None:  # noqa: ARG002 - see above
        self._handles.remove()
        self._step.release_tensors()

    def _begins(
        self, named: NamedModule, module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any] = NO_KEYWORDS
    ) -> None:
        name = named.name
        if module is not named.module:
            self._other_called(named, module)
            return
        again = in_backward()
        frames = self._step.open.setdefault(name, [])
        frames.append(None)
        if not (again or self._hooking.in_forward):
            return
        found = received(args, kwargs)
        call = self._call(name, found, again=again)
        frames[-1] = call
        if call is not None:
            self._step.leaves.call_begins()
            self._read(named, Kind.ACT_IN, call, found, again=again)
            self._step.leaves.arguments_read()

    def _call(self, name: str, found: Found, *, again: bool) -> ModuleCall | None:
        enabled = self._hooking.grad_enabled
        pointer = _pointer(found.slots[0].tensor) if (again or not enabled) and found.slots else 0
        if again:
            return self._step.calls.again(name, pointer)
        self._called.add(name)
        return self._step.calls.begins(name, self._hooking.micro_step, with_gradients=enabled, pointer=pointer)

    def _ended(self, named: NamedModule, module: torch.nn.Module, *arguments_and_output: Any) -> None:
        frames = self._step.open.get(named.name) if module is named.module else None
        call = frames.pop() if frames else None
        if call is not None:
            self._read(named, Kind.ACT_OUT, call, returned(arguments_and_output[-1]), again=in_backward())
            self._step.leaves.call_ended()

    def _read(self, named: NamedModule, kind: Kind, call: ModuleCall, found: Found, *, again: bool) -> None:
        for unknown in found.unknown:
            self.missing(f"{SIDES[kind]} contains an object that is not searched for tensors: {unknown}", named)
        if not again:
            for slot in self._chosen(named, kind, found):
                memory = self._step.leaves if slot.tensor.is_leaf else self._step.measured
                self._measure(TensorSite(kind, call, slot.index, slot.path), slot.tensor, memory)
        if self._hooking.grad_enabled:
            for slot in self._chosen(named, _GRADIENT[kind], found):
                if slot.tensor.requires_grad:
                    self._watch(TensorSite(_GRADIENT[kind], call, slot.index, slot.path), slot.tensor)

    def _chosen(self, named: NamedModule, kind: Kind, found: Found) -> Sequence[Slot]:
        specs = self._specs[named.name]
        spec = specs.get(_OBJECT[kind])
        if _OBJECT[kind] not in self._objects or (specs and spec is None):
            return ()
        if spec is None:
            return [slot for slot in found.slots if not is_integer(slot.tensor)]
        slots = spec.select(found)
        if not slots:
            content = f"{SIDES[kind]} has {len(found.slots)} tensors in {found.length} elements"
            self.missing(f"{content}, which does not match pattern {spec.text!r} of its target", named)
        return slots or ()

    def _measure(self, site: TensorSite, tensor: torch.Tensor, memory: TensorCache[Slots] | Leaves[Slots]) -> None:
        reason = why_not_measurable(tensor)
        if reason is not None:
            self._notes.add(f"{SIDES[site.kind]}{site.path} is {reason}", site.call.module)
            return
        table, call = self._gate.table, site.call
        key = site.kind, call.module, site.index, call.micro_step, call.seq
        slot = table.add(key, lambda: [_entry(site, tensor, self._vpp_stages.get(call.module))])
        if slot is None:
            return
        self._step.slots[call.micro_step].append(slot)
        known = memory.get(tensor)
        if known is None:
            table.measure([tensor], slot)
        else:
            table.copy(known, slot)
        if known is None or memory is self._step.leaves:  # a leaf is kept for each running call
            memory.keep(tensor, slot)

    def _watch(self, site: TensorSite, tensor: torch.Tensor) -> None:
        """Measure the gradient of `tensor` for `site`, the input or output of a module call to which it belongs.

        If the tensor has no gradient hook of the monitor yet, register one. Otherwise add `site` to the sites for which
        the existing hook measures the gradient.
        """
        sites = _watched_leaf(self._step.watched_leaves, tensor) if tensor.is_leaf else self._step.watched.get(tensor)
        if sites is not None:
            sites.append(site)
            return
        if is_view(tensor):
            for lost in self._step.watched.get(tensor, changed=True) or ():
                reason = "is a view that was written in place: its gradient before the write is not measured"
                self._notes.add(f"{SIDES[lost.kind]} {reason}", lost.call.module)
        sites = [site]
        number = self._handles.hook(tensor, functools.partial(self._gradient_hook, sites))
        if tensor.is_leaf:
            self._step.watched_leaves[number] = sites
        else:
            self._step.watched.keep(tensor, sites)

    def _arrived(self, sites: Sequence[TensorSite], gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        if self.monitored.update.is_running:
            self._hooking.tell_once(_OWN_GRADIENTS)
            return
        self._step.calls.gradient_arrived()
        for site in sites:
            self._measure(site, gradient, self._step.gradients)

    def _release(self) -> None:
        self._handles.remove()  # explicitly, because hooks on leaf tensors outlive the graph
        self._step.release_tensors()
        if self._called:
            self._note_uncalled()
        super()._release()


def _entry(site: TensorSite, tensor: torch.Tensor, vpp_stage: int | None) -> PlanEntry:
    call, aliases = site.call, () if site.index is None else (f"{SIDES[site.kind]}{site.path}",)
    place = site.index, vpp_stage, call.micro_step, call.seq, layout_of(tensor, FULL).placement, None
    form = dtype_name(tensor.dtype), tuple(local_tensor(tensor).shape)
    return PlanEntry(site.kind, call.module, *place, *form, call.module, aliases)


def _pointer(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # the tensor has no memory
        return 0


def _watched_leaf(watched: Mapping[int, list[TensorSite]], tensor: torch.Tensor) -> list[TensorSite] | None:
    """Return the sites of calls that share the monitor's gradient hook on the leaf `tensor`, if it has one."""
    return next((watched[number] for number in gradient_hooks(tensor) or () if number in watched), None)
