"""Modules that are read when they are called: their first call in each micro-batch of a training forward.

A dataset of features tells micro-batches apart, and not the calls within one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rankscope_exporter.modules import NamedModule, named_modules, selected, unmatched
from rankscope_exporter.quantities.activations_gaps import Gaps
from rankscope_exporter.quantities.base import Gate, Hook, Hooking
from rankscope_exporter.quantities.handles import hook_after, hook_before
from rankscope_exporter.sampling.targets import Targets


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

    def __init__(self, name: str, hooking: Hooking, gate: Gate) -> None:
        self._name = name
        self._hooking = hooking
        self._gate = gate
        self._gaps = Gaps()
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

    def step_begins(self) -> None:
        """Nothing of this step has been called yet."""
        self._tell_gaps()
        self._seen.clear()
        self._called.clear()

    def step_ended(self) -> None:
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
        if not self._hooking.in_forward or _in_backward():
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


def _in_backward() -> bool:
    """Return whether a backward pass is under way: a forward inside of it is a recomputation. It has no public name."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001 - see above
