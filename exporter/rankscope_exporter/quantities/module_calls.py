"""Modules that are read when they are called: their first call in each micro-batch of a training forward pass.

A dataset of features distinguishes micro-batches, but not the calls within one. The weight of a module is described by
where it is held and whether it is a whole matrix on this rank; no element is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from rankscope_exporter.model.module_names import NamedModule, named_modules, selected, unmatched
from rankscope_exporter.model.name_patterns import Targets
from rankscope_exporter.quantities.base import Hook, Hooking, SamplingGate
from rankscope_exporter.quantities.hook_handles import CoverageNotes, hook_after, hook_before, in_backward
from rankscope_exporter.statistics.tensor_access import is_freed, why_not_measurable


@dataclass(frozen=True, slots=True)
class Running:
    """A call of a module that is under way. Not to be kept, because it holds the module."""

    named: NamedModule
    module: nn.Module
    micro_step: int


Received = Callable[[Running, Sequence[Any], Mapping[str, Any]], None]
"""Called with the call and its arguments, before it begins."""

Returned = Callable[[Running, Any], None]
"""Called with the call and its result."""


class ModuleCalls:
    """Finds the modules of a quantity, hooks them, and says what cannot be measured: each thing once."""

    def __init__(self, name: str, hooking: Hooking, gate: SamplingGate) -> None:
        self._name = name
        self._hooking = hooking
        self._gate = gate
        self._gaps = CoverageNotes()
        self._hooked: list[tuple[NamedModule, Hook]] = []
        self._called: set[str] = set()
        self._seen: set[tuple[str, int]] = set()
        self._looked_for_silence = False
        hooking.keep(self)

    def remove(self) -> None:
        """Say at detach what there is left to say."""
        self._tell_gaps()

    def find(self, root: nn.Module, targets: Targets) -> tuple[NamedModule, ...]:
        """Return the modules that `targets` select; a target without one is told, and so are no targets."""
        modules = named_modules(root)
        if not targets.patterns:
            self.tell("targets names no module, so nothing is measured")
        for sentence in unmatched(modules, targets):
            self.tell(sentence)
        return selected(modules, targets)

    def tell(self, message: str) -> None:
        """Say something now."""
        self._hooking.tell(f"{self._name}: {message}")

    def missing(self, reason: str, named: NamedModule) -> None:
        """Note that something of a module cannot be measured: said once, when the step is over."""
        self._gaps.add(reason, named.name)

    def before(self, named: NamedModule, read: Received) -> None:
        """Have `read` called before the first call of a module in each micro-batch."""

        def begins(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            if self._takes(named, module):
                read(Running(named, module, self._hooking.micro_step), args, kwargs)

        hook = self._hooking.guarded(f"{self._name} of modules", begins, self._gate)
        self._hook(named, hook, lambda: hook_before(self._hooking, named, hook))

    def after(self, named: NamedModule, read: Returned) -> None:
        """Have `read` called after the first call of a module in each micro-batch."""

        def ended(module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
            if self._takes(named, module):
                read(Running(named, module, self._hooking.micro_step), output)

        hook = self._hooking.guarded(f"{self._name} of modules", ended, self._gate)
        self._hook(named, hook, lambda: hook_after(self._hooking, named, hook))

    def on_step_begin(self) -> None:
        """Nothing of this step has been called yet."""
        self._tell_gaps()
        self._seen.clear()
        self._called.clear()

    def on_step_end(self) -> None:
        """Say what was missing."""
        if not self._looked_for_silence:
            self._looked_for_silence = True
            for named, hook in self._hooked:
                if named.name not in self._called:
                    compiled = named.compiled or hook.is_compiled
                    why = "is part of compiled code" if compiled else "was not called in a forward of the model"
                    self.missing(f"{why}, so it is not measured", named)
        self._tell_gaps()

    def _takes(self, named: NamedModule, module: nn.Module) -> bool:
        if module is not named.module:  # a replica of DataParallel, on a thread of its own
            self.missing("runs as replicas, which are not measured", named)
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

    def _hook(self, named: NamedModule, hook: Hook, register: Callable[[], None]) -> None:
        try:
            register()
            self._hooked.append((named, hook))
        except (RuntimeError, AttributeError) as error:  # scripted modules and other things that only look like modules
            self.missing(f"no hook can be registered ({type(error).__name__})", named)

    def _tell_gaps(self) -> None:
        self._gaps.tell(self.tell)


_NAMES: Final = ("weight", "wg")
_MATRIX: Final = 2


def weight_of(module: nn.Module) -> torch.Tensor | None:
    """Return the `weight` or `wg` that a module holds itself; None without one, and when it is computed."""
    # The dictionaries themselves: a parametrized weight is a property, which computes and may change its buffers.
    known = {**vars(module), **module._parameters}  # noqa: SLF001 - see above
    held = [known[name] for name in _NAMES if isinstance(known.get(name), torch.Tensor)]
    return next((weight for weight in held if is_matrix(weight)), held[0] if held else None)


def is_matrix(weight: torch.Tensor | None) -> bool:
    """Return whether a weight has two dimensions."""
    return weight is not None and weight.dim() == _MATRIX


def may_be_gathered(weight: torch.Tensor | None) -> bool:
    """Return whether it may be in parts, flat or freed between two calls, as FSDP has it."""
    return weight is None or hasattr(weight, "placements") or weight.dim() != _MATRIX or is_freed(weight)


def local_matrix_or_reason(weight: torch.Tensor | None) -> torch.Tensor | str:
    """Return the matrix that lies on this rank; or why there is none, in words."""
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
        reason = f"{str(weight.dtype).removeprefix('torch.')}{list(weight.shape)}, no matrix of numbers"
    return weight if reason is None else f"has a weight that is {reason}"
