"""Base class of quantities that read tensors when modules are called; and access to the weight of a module.

The dataset `features` has a column for the micro-batch, but none for the call. The methods `before` and
`after` of the base class therefore read only the first call of a module in each micro-batch of a training forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import nn

from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.adapters.parameter_hooks import CallbackHandle
from rankscope_exporter.model.module_names import NamedModule, named_modules, selected, unmatched
from rankscope_exporter.model.parameter_names import entry
from rankscope_exporter.quantities.base import (
    BACKWARD,
    REMEDY,
    Hook,
    Hooking,
    Quantity,
    QuantityOptions,
    SamplingGate,
    Table,
)
from rankscope_exporter.quantities.hook_handles import CoverageNotes, hook_after, hook_before, in_backward
from rankscope_exporter.records.pending_step import ExpectedRows
from rankscope_exporter.statistics.tensor_access import is_freed, why_not_measurable


@dataclass(frozen=True, slots=True)
class Running:
    """A call of a module while the call runs. This object refers to the module, so users must not store the object."""

    named: NamedModule
    module: nn.Module
    micro_step: int


class ModuleQuantity(Quantity):
    """A quantity whose targets are modules.

    It registers hooks on modules, and reports each tensor that is not measured.
    """

    of_modules: ClassVar[bool] = True
    measures_tensors: ClassVar[bool] = False
    missing_result: ClassVar[str] = "it is not measured"
    """Text at the end of the notice about a module that was not called: the consequence for this module."""

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        super().__init__(monitored, options)
        self._notes = CoverageNotes()
        self._hooked: dict[str, tuple[NamedModule, Hook]] = {}
        self._called: set[str] = set()
        self._seen: set[tuple[str, int]] = set()  # module and micro-batch
        self._has_noted_uncalled = False
        self._lost: set[str] = set()  # modules whose hooks were removed by other code
        self._hooking: Hooking
        self._gate: SamplingGate

    def install(self, hooking: Hooking, gate: SamplingGate) -> None:
        """Find the modules that the targets select, and register hooks on them."""
        self._hooking, self._gate = hooking, gate
        hooking.keep(CallbackHandle(self._release))
        for named in self._find():
            self._follow(named)

    def _follow(self, named: NamedModule) -> None:
        """Register hooks on one module that the targets select."""
        raise NotImplementedError

    def _release(self) -> None:
        """Release the state of the last sampled step, and publish new notices about modules that are not measured.

        Called before each sampled step and at detach.
        """
        self._notes.report(self.tell)

    def _find(self, *, all_modules: bool = False) -> Sequence[NamedModule]:
        """Return the modules that the targets select, or all modules if `all_modules` is true.

        Publish one notice for each target that selects no module, and one if there are no targets.
        """
        modules = named_modules(self.monitored.framework.module)
        if not (self.targets.patterns or all_modules):
            self.tell("targets names no module, so nothing is measured")
        for sentence in unmatched(modules, self.targets):
            self.tell(sentence)
        return modules if all_modules else selected(modules, self.targets)

    def tell(self, message: str) -> None:
        """Publish a notice for the user immediately."""
        self._hooking.tell(f"{self.name}: {message}")

    def missing(self, reason: str, named: NamedModule) -> None:
        """Store that a module, or a tensor of it, is not measured. This is reported once, when the step ends."""
        self._notes.add(reason, named.name)

    def before(self, named: NamedModule, read: Callable[[Running, Sequence[Any], Mapping[str, Any]], None]) -> None:
        """Register a hook that calls the function `read` before the first call of a module in each micro-batch.

        `read` gets this call and its positional and keyword arguments.
        """

        def begins(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            if self._is_first_call(named, module):
                read(Running(named, module, self._hooking.micro_step), args, kwargs)

        self._register(named, hook_before, f"{self.name} of modules", begins)

    def after(self, named: NamedModule, read: Callable[[Running, Any], None]) -> None:
        """Register a hook that calls the function `read` after the first call of a module in each micro-batch.

        `read` gets this call and the result of the module.
        """

        def ended(module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
            if self._is_first_call(named, module):
                read(Running(named, module, self._hooking.micro_step), output)

        self._register(named, hook_after, f"{self.name} of modules", ended)

    def on_step_begin(self, table: Table) -> None:  # noqa: ARG002 - the signature of every event
        """Delete the stored module calls of the last sampled step."""
        self._note_lost_hooks()
        self._release()
        self._seen.clear()
        self._called.clear()

    def on_forward_failed(self, table: Table) -> None:  # noqa: ARG002 - see above
        """Delete the stored module calls of the micro-batch."""
        micro_step = self._hooking.micro_step
        self._seen = {key for key in self._seen if key[1] != micro_step}

    def on_optimizer_step_end(self, table: Table) -> None:  # noqa: ARG002 - see above
        """Publish notices about the modules that were not measured in this step."""
        self._note_uncalled(self._called)
        self._notes.report(self.tell)

    def _is_first_call(self, named: NamedModule, module: nn.Module) -> bool:
        if module is not named.module:  # a replica of DataParallel, on another thread
            self.missing("runs as replicas of DataParallel, which are not measured", named)
            return False
        if not self._hooking.in_forward or in_backward():
            return False
        key = named.name, self._hooking.micro_step
        if key in self._seen:
            self.missing("is called more than once in a micro-batch, of which only the first call is measured", named)
            return False
        self._seen.add(key)
        self._called.add(named.name)
        return True

    def _register(
        self,
        named: NamedModule,
        register: Callable[[Hooking, NamedModule, Hook], None],
        where: str,
        function: Callable[..., None],
    ) -> None:
        """Register a hook on a module. The hook calls `function` and catches the errors of `function`.

        The function `register` gets the hook and registers it on the module.

        If torch raises an error, as for a scripted module, store that the module is not measured.
        """
        hook = self._hooking.guarded(where, function, self._gate)
        try:
            register(self._hooking, named, hook)
            self._hooked.setdefault(named.name, (named, hook))
        except (RuntimeError, AttributeError) as error:  # scripted modules and other objects that are no real modules
            self.missing(f"no hook can be registered ({type(error).__name__})", named)

    def expected_of(self, kinds: AbstractSet[str]) -> ExpectedRows:
        """Return `kinds` as expected rows; none if hooks were lost, or do not run in the backward pass.

        Both have notices of their own.
        """
        is_explained = self._lost or BACKWARD in self.monitored.compiled
        return ExpectedRows(self.name, frozenset() if is_explained else frozenset(kinds), names_unmeasured=True)

    def _note_lost_hooks(self) -> None:
        """Store which modules have lost their hooks, so that they are reported.

        Called when a sampled step begins: the hooks of this step are registered then.
        """
        for named, hook in self._hooked.values():
            module = named.module
            if module is not None and named.name not in self._lost and not _is_registered(module, hook):
                self._lost.add(named.name)
                self.missing(f"other code has removed the hooks, so {self.missing_result}: {REMEDY}", named)

    def _note_uncalled(self, called: AbstractSet[str]) -> None:
        """Store which modules were not called in the first sampled step, so that they are reported.

        `called` contains the modules that were called.
        """
        if self._has_noted_uncalled:
            return
        self._has_noted_uncalled = True
        for named, hook in self._hooked.values():
            if named.name not in called:
                compiled = named.compiled or self.monitored.framework.traits.is_compiled or hook.is_compiled
                reason = "is part of compiled code" if compiled else "was not called in a forward of the model"
                self.missing(f"{reason}, so {self.missing_result}", named)


def _is_registered(module: nn.Module, hook: Hook) -> bool:
    # The tables themselves: other code also replaces them by new ones, and the handle of a hook does not show this.
    tables = module._forward_pre_hooks, module._forward_hooks  # noqa: SLF001 - torch has no public name for it
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
    parameters, attributes = module._parameters, vars(module)  # noqa: SLF001 - see above
    found = [entry(parameters if name in parameters else attributes, name) for name in _NAMES]
    held = [weight for weight in found if isinstance(weight, torch.Tensor)]
    return next(filter(is_matrix, held), held[0] if held else None)


def is_matrix(weight: torch.Tensor | None) -> bool:
    """Return whether a weight has two dimensions."""
    return weight is not None and weight.dim() == _MATRIX


def may_be_gathered(weight: torch.Tensor | None) -> bool:
    """Return whether a weight may be sharded, flat or freed between two calls of its module, as with FSDP."""
    return weight is None or hasattr(weight, "placements") or weight.dim() != _MATRIX or is_freed(weight)


def local_matrix_or_reason(weight: torch.Tensor | None) -> torch.Tensor | str:
    """Return the weight if it is a whole matrix on this rank; otherwise the reason why it is not, as text.

    Reads no element of the weight.
    """
    if weight is None:
        return "has a weight that is computed, or none"
    placements = getattr(weight, "placements", None)
    if placements is not None:
        if not all(placement.is_replicate() for placement in placements):
            return "has a weight in parts on several ranks"
        weight = weight.to_local()  # type: ignore[attr-defined]  # a DTensor
    reason = why_not_measurable(weight)
    if reason is None and is_freed(weight):
        reason = "freed while it is not used"
    if reason is None and (weight.dim() != _MATRIX or not weight.is_floating_point()):
        reason = f"{str(weight.dtype).removeprefix('torch.')}{list(weight.shape)}, not a matrix of floats"
    return weight if reason is None else f"has a weight that is {reason}"


def unusable_reason(tensor: torch.Tensor) -> str | None:
    """Return the reason why a tensor cannot be read as a whole on this rank, as text; None if it can be read."""
    if hasattr(tensor, "placements"):
        return "a distributed tensor, which is not whole on any rank"
    return why_not_measurable(tensor)
