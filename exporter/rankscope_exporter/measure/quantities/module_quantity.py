"""Base class of quantities that read tensors when modules are called; and access to the weight of a module.

The dataset `features` has a column for the micro-batch, but none for the call. The method
`at_first_call` of the base class therefore reads the first call of a module in each micro-batch of a forward pass only.

The module also registers hooks on modules and tensors for quantities, and publishes notices about modules that are
not measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Final

import torch
from torch import nn
from torch.utils.hooks import unserializable_hook

from rankscope_exporter.adapters import torch_private
from rankscope_exporter.adapters.hook_context import Hook, HookContext
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.adapters.parameter_hooks import (
    CallbackHandle,
    ParameterHook,
    Removable,
    TensorHook,
    has_foreign_hooks,
)
from rankscope_exporter.adapters.parameter_names import NamedModule, local_tensor, named_modules, target_notices
from rankscope_exporter.adapters.tracing import on_compilation
from rankscope_exporter.measure.kernels.isolation import some_of
from rankscope_exporter.measure.kernels.tensor_access import is_freed, why_not_measurable
from rankscope_exporter.measure.quantities.base import REMEDY, Quantity, QuantityOptions, SamplingGate
from rankscope_exporter.measure.table import Table

MODEL: Final = "the model"


class CoverageNotes:
    """Stores why modules are not measured: reasons, each with the names of the modules to which it applies.

    Each module is reported once per reason.
    """

    def __init__(self) -> None:
        self._new: dict[str, list[str]] = {}
        self._known: set[tuple[str, str]] = set()

    def add(self, reason: str, module: str) -> None:
        """Store that `module`, or a tensor of it, is not measured for the reason `reason`."""
        if (reason, module) not in self._known:
            self._known.add((reason, module))
            self._new.setdefault(reason, []).append(module or MODEL)

    def report(self, notice: Callable[[str], None]) -> None:
        """Call `notice` once for each reason to which modules were added since the last report."""
        new, self._new = self._new, {}
        for reason, modules in new.items():
            notice(f"{some_of(modules)}: {reason}")


class Unreadable(Exception):  # noqa: N818 - the reason why a module has no rows
    """A tensor of a module cannot be read. The text is the reason for the notice about the module."""


class TensorHooks:
    """Gradient hooks on tensors of one step.

    The hooks must be removed explicitly, because hooks on leaf tensors outlive the graph.
    """

    def __init__(self, monitored: MonitoredModel) -> None:
        self._monitored = monitored
        self._positions = {named.identity: index for index, named in enumerate(monitored.parameters)}
        self._handles: list[Removable] = []

    def hook(self, tensor: torch.Tensor, hook: Callable[..., None]) -> int:
        """Register a gradient hook on `tensor`, and return the number that torch gives the hook.

        The tensor is not kept alive.
        """
        if not tensor.is_leaf:
            unserializable_hook(hook)  # type: ignore[no-untyped-call]  # else torch warns when the tensor is saved
            handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # untyped in torch
            self._handles.append(handle)
            return int(handle.id)
        own = TensorHook(tensor, hook, table=torch_private.GRADIENT)
        position, handle = self._positions.get(id(tensor)), None
        if position is not None and self._monitored.parameter(position) is tensor:
            handle = ParameterHook(functools.partial(self._monitored.parameter, position), lambda _: own)
            handle.renew(tensor)
        self._handles.append(handle or own)
        return own.number

    def remove(self) -> None:
        """Remove all hooks that were registered since the last call of this method."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class MicroGradientHooks:
    """Gradient hooks on all parameters that require gradients. They are called before a gradient is accumulated.

    The function `hook_of` gets the position of a parameter and the parameter. It returns the function that the hook of
    this parameter calls with the gradient.
    """

    def __init__(
        self,
        monitored: MonitoredModel,
        hooking: HookContext,
        gate: SamplingGate,
        where: str,
        hook_of: Callable[[int, nn.Parameter], Callable[[torch.Tensor], None]],
    ) -> None:
        self._monitored, self._hooking, self._gate = monitored, hooking, gate
        self._where, self._hook_of = where, hook_of
        self.hooked: set[int] = set()
        """Positions of the parameters that have a hook."""
        self._reduced_by_loop = monitored.copies > 1 and not monitored.framework.traits.reduces

    def register(self) -> None:
        """Register hooks on the parameters that require gradients and have no hook yet.

        Called at several steps, because parameters may be unfrozen during training.
        """
        for index, parameter in enumerate(self._monitored.tensors()):
            if parameter is not None and parameter.requires_grad and index not in self.hooked:
                self.hooked.add(index)
                hook = Hook(self._hooking, self._where, self._hook_of(index, parameter), gate=self._gate)
                self._gate.hook(hook, functools.partial(self._registered, index, hook))

    def may_be_reduced(self, index: int) -> bool:
        """Return whether hooks of other code may have reduced the gradient that a hook of this object has received."""
        parameter = self._monitored.parameter(index) if self._reduced_by_loop else None
        return parameter is not None and has_foreign_hooks(parameter, (torch_private.GRADIENT,))

    def _registered(self, index: int, hook: Hook) -> Removable | None:
        framework = self._monitored.framework
        find = functools.partial(self._monitored.parameter, index)
        handle = ParameterHook(find, lambda parameter: framework.on_gradient(parameter, hook))
        return handle if handle.renew_found() else None


def in_backward() -> bool:
    """Return whether a backward pass runs on this thread. A forward pass inside a backward pass is a recomputation."""
    return bool(torch_private.current_pass() != torch_private.NO_PASS)


class ModuleQuantity(Quantity):
    """A quantity whose targets are modules.

    It registers hooks on modules, and reports each tensor that is not measured.
    """

    of_modules: ClassVar[bool] = True
    measures_tensors: ClassVar[bool] = False
    all_modules = False
    """True if all modules have hooks. Otherwise, those that the targets select have."""
    missing_result: ClassVar[str] = "it is not measured"
    """Text at the end of the notice about a module that was not called: the consequence for this module."""

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        super().__init__(monitored, options)
        self._notes = CoverageNotes()
        self._hooked: dict[str, tuple[NamedModule, Hook]] = {}
        self._called: set[str] = set()
        self.is_first_in_step = False  # the call that is read now is the first one of its module in the step
        self._compiled: set[str] = set()  # modules whose hooks Dynamo compiled, where the hooks have no effect
        self._seen: set[tuple[str, int]] = set()  # module and micro-batch
        self._has_noted_uncalled = False
        self._lost: set[str] = set()  # modules whose hooks were removed by other code
        self._hooking: HookContext
        self._gate: SamplingGate

    def install(self, hooking: HookContext, gate: SamplingGate) -> None:
        self._hooking, self._gate = hooking, gate
        gate.keep(CallbackHandle(self._release))
        modules = named_modules(self.monitored.framework.module)
        if not (self.targets.patterns or self.all_modules):
            self.tell("targets names no module, so nothing is measured")
        names = (name for item in modules for name in (item.name, *item.aliases))
        for sentence in target_notices(self.targets, names, "module"):
            self.tell(sentence)
        for named in modules if self.all_modules else filter(self.targets.chooses, modules):
            self._follow(named)

    def _follow(self, named: NamedModule) -> None:
        """Register hooks on one module that the targets select."""
        raise NotImplementedError

    def _release(self) -> None:
        """Release the state of the last sampled step, and publish new notices: before each one and at detach."""
        self._notes.report(self.tell)

    def tell(self, message: str) -> None:
        self._hooking.tell(f"{self.name}: {message}")

    def missing(self, reason: str, named: NamedModule) -> None:
        """Store that a module, or a tensor of it, is not measured. This is reported once, when the step ends."""
        self._notes.add(reason, named.name)

    def at_first_call(self, named: NamedModule, read: Callable[..., None], *, before: bool) -> None:
        """Register a hook that calls `read` after the first call of a module in each micro-batch, or `before` it.

        `read` gets the module and the result of the call or, before it, its positional and keyword arguments. If it
        raises `Unreadable`, this is stored as the reason why the module is not measured.
        """
        hook = functools.partial(self._called_first, named, read, before)
        self._register(named, f"{self.name} of modules", hook, before=before)

    def _called_first(
        self, named: NamedModule, read: Callable[..., None], before: object, module: nn.Module, args: Any, *others: Any
    ) -> None:
        # `others`: the keyword arguments, unless other code has registered the hook without them, and the output.
        if self._is_first_call(named, module):
            found = (args, *(others or ({},))) if before else others[-1:]
            try:
                read(module, *found)
            except Unreadable as reason:
                self.missing(str(reason), named)

    def on_step_begin(self, table: Table) -> None:  # noqa: ARG002 - the signature of every event
        self._note_lost_hooks()
        self._release()
        self._seen.clear()
        self._called.clear()

    def on_forward_failed(self, table: Table) -> None:  # noqa: ARG002 - see above
        micro_step = self._hooking.micro_step
        self._seen = {key for key in self._seen if key[1] != micro_step}

    def on_optimizer_step_end(self, table: Table) -> None:  # noqa: ARG002 - see above
        self._note_uncalled()
        self._notes.report(self.tell)

    def _is_first_call(self, named: NamedModule, module: nn.Module) -> bool:
        if module is not named.module:
            self._other_called(named, module)
            return False
        if not self._hooking.in_forward or in_backward():
            return False
        key = named.name, self._hooking.micro_step
        if key in self._seen:
            self.missing("is called more than once in a micro-batch, of which only the first call is measured", named)
            return False
        self._seen.add(key)
        self.is_first_in_step = named.name not in self._called
        self._called.add(named.name)
        return True

    def _other_called(self, named: NamedModule, module: nn.Module) -> None:
        """Store that a copy with the table of hooks is called, as on threads of DataParallel, or do nothing.

        Other code may have copied the hooks alone to `module`.
        """
        original = named.module
        if original is not None and torch_private.forward_hooks(module) is torch_private.forward_hooks(original):
            self._called.add(named.name)
            self.missing("runs as copies, such as replicas of DataParallel, which are not measured", named)

    def _register(
        self, named: NamedModule, where: str, hook: Callable[..., None], *, before: bool = False, always: bool = False
    ) -> None:
        """Register a hook that torch calls after each call of a module, or `before` it, and that raises no errors.

        `always`: also after a call that raises. The output is then None.

        If torch raises an error, as for a scripted module, store that the module is not measured.
        """
        was_compiled = on_compilation(functools.partial(self._compiled.add, named.name))
        hook = Hook(self._hooking, where, hook, gate=self._gate, was_compiled=was_compiled)

        def registered() -> Removable | None:
            if (module := named.module) is None:
                return None
            if before:
                return module.register_forward_pre_hook(hook, with_kwargs=True)
            return module.register_forward_hook(hook, with_kwargs=True, always_call=always)

        try:
            module = named.module
            if module is not None:
                # If the forward of this module begins the step, a hook per sampled step would be registered too late.
                stays = any(module is chunk for chunk in self.monitored.framework.chunks)
                self._gate.hook(hook, registered, stays=stays)
            self._hooked.setdefault(named.name, (named, hook))
        except (RuntimeError, AttributeError) as error:  # scripted modules and other objects that are no real modules
            self.missing(f"no hook can be registered ({type(error).__name__})", named)

    def _note_lost_hooks(self) -> None:
        """Store which modules have left the model or lost their hooks, so that they are reported.

        Called when a sampled step begins: the hooks of this step are registered then.
        """
        held = self.monitored.modules
        for named, hook in self._hooked.values():
            module = named.module
            if module is None or (held and id(module) not in held):
                removed = "module"
            else:
                removed = "" if _is_registered(module, hook) else "hooks"
            if removed and named.name not in self._lost:
                self._lost.add(named.name)
                self.missing(f"other code has removed the {removed}, so {self.missing_result}: {REMEDY}", named)

    def _note_uncalled(self) -> None:
        """Store which modules were not called in the first sampled step, so that they are reported."""
        if self._has_noted_uncalled:
            return
        self._has_noted_uncalled = True
        for named, _ in self._hooked.values():
            if named.name not in self._called:
                is_compiled = named.compiled or self.monitored.framework.traits.is_compiled
                compiled = is_compiled or named.name in self._compiled
                reason = "is part of compiled code" if compiled else "was not called in a forward of the model"
                self.missing(f"{reason}, so {self.missing_result}", named)


def _is_registered(module: nn.Module, hook: Hook) -> bool:
    # The tables themselves: other code also replaces them by new ones, and the handle of a hook does not show this.
    tables = torch_private.forward_pre_hooks(module), torch_private.forward_hooks(module)
    return any(hook is known for table in tables for known in table.values())


_NAMES: Final = ("weight", "wg")
_MATRIX: Final = 2


def weight_of(module: nn.Module | None) -> torch.Tensor | None:
    """Return the attribute `weight` or `wg` of a module; if it has both, preferably a matrix.

    Return None if the module has no weight, or if the weight is computed by a property.
    """
    if module is None:
        return None
    # The dictionaries themselves: a parametrized weight is a property, which computes and may change its buffers.
    parameters, attributes = torch_private.parameters_of(module), vars(module)
    found = [torch_private.entry(parameters if name in parameters else attributes, name) for name in _NAMES]
    held = [weight for weight in found if isinstance(weight, torch.Tensor)]
    return next(filter(is_matrix, held), held[0] if held else None)


def is_matrix(weight: torch.Tensor | None) -> bool:
    """Return whether a weight has two dimensions."""
    return weight is not None and weight.dim() == _MATRIX


def may_be_gathered(weight: torch.Tensor | None) -> bool:
    """Return whether a weight may be sharded, flat or freed between two calls of its module, as with FSDP."""
    return weight is None or hasattr(weight, "placements") or weight.dim() != _MATRIX or is_freed(weight)


def local_matrix(weight: torch.Tensor | None) -> torch.Tensor:
    """Return the weight if it is a whole matrix on this rank; otherwise raise `Unreadable`.

    Reads no element of the weight.
    """
    if weight is None:
        raise Unreadable("has a weight that is computed, or none")
    placements = getattr(weight, "placements", None)
    if placements is not None:
        if not all(placement.is_replicate() for placement in placements):
            raise Unreadable("has a weight in parts on several ranks")
        weight = local_tensor(weight)
    reason = why_not_measurable(weight)
    if reason is None and is_freed(weight):
        reason = "freed while it is not used"
    if reason is None and (weight.dim() != _MATRIX or not weight.is_floating_point()):
        reason = f"{str(weight.dtype).removeprefix('torch.')}{list(weight.shape)}, not a matrix of floats"
    if reason is not None:
        raise Unreadable(f"has a weight that is {reason}")
    return weight


def check_readable(tensor: torch.Tensor, what: str) -> None:
    """Raise `Unreadable` if a tensor cannot be read as a whole on this rank. `what` begins the reason."""
    is_divided = hasattr(tensor, "placements")
    reason = "a distributed tensor, which is not whole on any rank" if is_divided else why_not_measurable(tensor)
    if reason is not None:
        raise Unreadable(f"{what} is {reason}")
