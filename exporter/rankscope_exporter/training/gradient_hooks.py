"""Hooks on gradients: of all parameters at a step that is measured, else of the few that show a backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable

from rankscope_exporter.adapters.base import GradientSource
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.adapters.parameter_hooks import ParameterHook, remove_all


class GradientHooks:
    """Registers on the parameters of one model that take gradients, and takes most of that back.

    The end of a step whose optimizer is skipped shows in nothing but a backward pass and gradients that are gone, so
    every backward pass must be seen. Which parameters one reaches is learnt from those that were seen: the first to get
    a gradient is a *witness* of all passes that reach it, and keeps its hook. A parameter that has had no gradient yet
    keeps its own, which costs nothing until a pass of another kind reaches it.
    """

    def __init__(self, monitored: MonitoredModel, hook_of: Callable[[int], Callable[[GradientSource], None]]) -> None:
        self._monitored = monitored
        self._hook_of = hook_of
        self._handles: dict[int, ParameterHook] = {}
        self._pass: list[int] = []  # whose hooks were called in the backward pass under way, in this order
        self._seen: set[int] = set()  # whose hooks were called in any
        self._witnesses: set[int] = set()
        self._are_few = False
        self.begin_steps = False
        """Whether a step was seen to begin with the first gradient of a backward pass."""

    def hook_all(self) -> None:
        """Register on every parameter that takes gradients now and has no hook."""
        self._are_few = False
        for index, parameter in enumerate(self._monitored.found()):
            if parameter is not None and parameter.requires_grad:
                if index not in self._handles:
                    self._handles[index] = self._handle_of(index)
                self._handles[index].renew(parameter)

    def _handle_of(self, index: int) -> ParameterHook:
        framework, hook = self._monitored.framework, self._hook_of(index)
        find = functools.partial(self._monitored.parameter, index)
        return ParameterHook(find, lambda parameter: framework.on_accumulated(parameter, hook))

    def keep_few(self) -> None:
        """Take away what a step that is not measured does not need; called when one begins."""
        self._learn()
        if not (self._are_few or self.begin_steps):
            self._are_few = True
            for index in (self._seen - self._witnesses) & self._handles.keys():
                self._handles.pop(index).remove()
        for handle in self._handles.values():
            handle.renew_found()

    def stay(self) -> None:
        """Keep all hooks from now on: steps begin in a backward pass, whose first gradients would be missed."""
        self.begin_steps = True

    def pass_begins(self) -> None:
        """Note that another backward pass is under way."""
        self._learn()

    def called(self, index: int) -> bool:
        """Note that the hook of parameter `index` was called; return whether it stands for the whole pass."""
        self._pass.append(index)
        return index in self._witnesses

    def remove(self) -> None:
        """Take all hooks away."""
        handles = list(self._handles.values())
        self._handles.clear()
        remove_all(handles)

    def _learn(self) -> None:
        """Learn from the last backward pass."""
        if not self._pass:
            return
        if self._witnesses.isdisjoint(self._pass):
            self._witnesses.add(self._pass[0])
        if not self._seen.issuperset(self._pass):
            self._seen.update(self._pass)
            self._are_few = False
        self._pass.clear()
