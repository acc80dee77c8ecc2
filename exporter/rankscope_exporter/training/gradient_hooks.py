"""Hooks on gradients: on all parameters at a sampled step, otherwise on the few that show each backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable

from rankscope_exporter.adapters.base import GradientSource
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.adapters.parameter_hooks import ParameterHook, remove_all
from rankscope_exporter.records.step_events import StepObserver

HookFactory = Callable[[int], Callable[[GradientSource], None]]
"""Returns the hook of a parameter by its position."""


class GradientHooks(StepObserver):
    """Registers hooks on the parameters of one model that require gradients, and removes most of them again.

    A step with a skipped optimizer can only be detected by a backward pass and gradients that are gone. Every
    backward pass must therefore be seen. The first parameter to receive a gradient in a pass is a *witness* of all
    passes that reach it, and keeps its hook. A parameter that has never received a gradient keeps its hook as well: it
    costs nothing until another kind of pass reaches the parameter.
    """

    def __init__(self, monitored: MonitoredModel) -> None:
        self._monitored = monitored
        self._hook_of: HookFactory | None = None
        self._handles: dict[int, ParameterHook] = {}
        self._pass: list[int] = []  # parameters with gradients in this backward pass, in order
        self._last: int | None = None  # the parameter with the latest gradient
        self._seen: set[int] = set()  # parameters with gradients in any pass
        self._witnesses: set[int] = set()
        self._are_few = False
        self.begin_steps = False
        """True if a step has begun with the first gradient of a backward pass."""

    def install(self, hook_of: HookFactory) -> None:
        """Register the hooks that `hook_of` makes on all parameters."""
        self._hook_of = hook_of
        self._hook_all()

    def on_sampling_decided(self, sampled: bool) -> None:  # noqa: FBT001 - an event has positional arguments
        """Hook all parameters for a sampled step; remove most hooks for another one."""
        if sampled:
            self._hook_all()
        else:
            self._keep_few()

    def _hook_all(self) -> None:
        self._are_few = False
        for index, parameter in enumerate(self._monitored.found()):
            if parameter is not None and parameter.requires_grad and self._hook_of is not None:
                if index not in self._handles:
                    self._handles[index] = self._handle_of(index, self._hook_of(index))
                self._handles[index].renew(parameter)

    def _handle_of(self, index: int, hook: Callable[[GradientSource], None]) -> ParameterHook:
        framework = self._monitored.framework
        find = functools.partial(self._monitored.parameter, index)
        return ParameterHook(find, lambda parameter: framework.on_accumulated(parameter, hook))

    def _keep_few(self) -> None:
        self.pass_begins()
        if not (self._are_few or self.begin_steps):
            self._are_few = True
            for index in (self._seen - self._witnesses) & self._handles.keys():
                self._handles.pop(index).remove()
        for handle in self._handles.values():
            handle.renew_found()

    def keep_all(self) -> None:
        """Keep all hooks from now on: steps begin in a backward pass, and their first gradients would be missed."""
        self.begin_steps = True

    def pass_begins(self) -> None:
        """Evaluate the last backward pass: its witness, and the parameters that it has reached."""
        if not self._pass:
            return
        if self._witnesses.isdisjoint(self._pass):
            self._witnesses.add(self._pass[0])
        if not self._seen.issuperset(self._pass):
            self._seen.update(self._pass)
            self._are_few = False
        self._pass.clear()

    def called(self, index: int) -> bool:
        """Note a call of the hook of parameter `index`; return whether the parameter is a witness."""
        self._pass.append(index)
        self._last = index
        return index in self._witnesses

    def are_cleared(self) -> bool:
        """Return whether the parameter that received a gradient last has no gradient any more."""
        if self._last is None:
            return False
        parameter = self._monitored.parameter(self._last)
        return parameter is None or not self._monitored.framework.holds_gradient(parameter)

    def remove(self) -> None:
        """Remove all hooks."""
        handles = list(self._handles.values())
        self._handles.clear()
        self._hook_of = None
        remove_all(handles)
