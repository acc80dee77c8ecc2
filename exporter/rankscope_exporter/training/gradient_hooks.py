"""Gradient hooks: at a sampled step on all parameters, at other steps only on those that reveal each backward pass.

This module selects the parameters. `adapters/parameter_hooks.py` registers the hook of one parameter with torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from rankscope_exporter.adapters.base import GradientSource
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.adapters.parameter_hooks import CallbackHandle, Removable, TensorHook, remove_all, remove_hook
from rankscope_exporter.adapters.torch_private import in_place_changes
from rankscope_exporter.records.record import StepObserver

HookFactory = Callable[[int], Callable[[GradientSource], None]]
"""Function that returns the gradient hook for the parameter at a given position."""


class GradientHooks(StepObserver):
    """Registers hooks on all parameters that require gradients at sampled steps, and keeps only a few at other steps.

    If the optimizer step is skipped, the end of a training step can only be detected from a backward pass and the
    deletion of its gradients. At least one hook must therefore be called in every backward pass. The parameter that
    receives the first gradient of a pass keeps its hook. It is called a *witness* of all passes that reach it. A
    parameter that has never received a gradient keeps its hook as well: such a hook is not called, and costs nothing,
    until a backward pass reaches the parameter.
    """

    def __init__(self, monitored: MonitoredModel) -> None:
        self._monitored = monitored
        self._hook_of: HookFactory | None = None
        self._handles: dict[int, Removable] = {}  # one object per hook: a model may have many thousands of parameters
        self._arrived = monitored.update.arrived
        self._before = 0  # number of elements of it from earlier backward passes
        self._trace: tuple[int | None, ...] | None = None
        self.are_updated_by_hand = not monitored.optimizers
        self._last: int | None = None  # the parameter with the latest gradient of earlier backward passes
        self._seen: set[int] = set()  # parameters with gradients in any pass
        self._witnesses: set[int] = set()
        self._are_few = False
        self.begin_steps = False
        """True if some step of this training began with a backward pass instead of a forward pass.

        All hooks are then kept, because the first gradient of the pass would be missed.
        """

    def install(self, hook_of: HookFactory) -> None:
        """Register hooks on all parameters. `hook_of` returns the hook for the position of a parameter."""
        self._hook_of = hook_of
        self._hook_all()

    def on_sampling_decided(self, sampled: bool) -> None:  # noqa: FBT001 - an event has positional arguments
        self.pass_begins()
        self._arrived.clear()
        self._before = 0
        if sampled:
            self._hook_all()
        else:
            self._keep_few()

    def _hook_all(self) -> None:
        self._are_few = False
        register, frozen = self._monitored.framework.on_accumulated, self._monitored.update.frozen
        frozen.clear()
        for index, parameter in enumerate(self._monitored.found()):
            if parameter is not None and not parameter.requires_grad:
                if parameter.grad is not None:
                    frozen.add(index)
            elif parameter is not None and self._hook_of is not None:
                handle = self._handles.get(index)
                if handle is None:
                    self._handles[index] = register(parameter, self._hook_of(index))
                elif isinstance(handle, TensorHook):
                    handle.renew(parameter)

    def _keep_few(self) -> None:
        if not (self._are_few or self.begin_steps):
            self._are_few = True
            for index in (self._seen - self._witnesses) & self._handles.keys():
                self._remove(index)
        for index, handle in self._handles.items():
            parameter = self._monitored.parameter(index)
            if isinstance(handle, TensorHook) and parameter is not None and parameter.requires_grad:
                handle.renew(parameter)

    def _remove(self, index: int) -> None:
        remove_hook(self._handles.pop(index), self._monitored.parameter(index))

    def pass_begins(self) -> None:
        """Store the witness of the previous backward pass, and the parameters that the previous pass reached.

        A witness is a parameter with a hook that is called in every backward pass that reaches it: this hook is never
        removed.
        """
        arrived = self._arrived[self._before :]
        if not arrived:
            return
        if self._witnesses.isdisjoint(arrived):
            self._witnesses.add(arrived[0])
        if not self._seen.issuperset(arrived):
            self._seen.update(arrived)
            self._are_few = False
        self._last = arrived[-1]
        self._arrived[:] = dict.fromkeys(self._arrived)  # passes of many micro-batches
        self._before = len(self._arrived)

    def pass_ended(self) -> bool:
        """Return whether the parameter that received a gradient last is in the model and has no gradient.

        Store a trace of this gradient, if the loop updates parameters without an optimizer.
        """
        if len(self._arrived) <= self._before:  # no gradient was added to a parameter
            return False
        self._last = self._arrived[-1]
        parameter = self._monitored.parameter(self._last)
        self._trace = _versions(parameter) if parameter is not None and self.are_updated_by_hand else None
        return parameter is not None and not self._monitored.framework.holds_gradient(parameter)

    def are_cleared(self) -> bool:
        """Return whether the gradient that arrived last was deleted, or its parameter replaced, since.

        Without an optimizer, also whether the gradient or its parameter was written in place since the pass.
        """
        if len(self._arrived) > self._before:  # the pass has raised
            self._last = self._arrived[-1]
        parameter = None if self._last is None else self._monitored.parameter(self._last)
        if parameter is None:
            return self._last in self._monitored.missing()
        is_deleted = not self._monitored.framework.holds_gradient(parameter)
        return is_deleted or (self._trace is not None and self._trace != _versions(parameter))

    def remove(self) -> None:
        """Remove the gradient hooks of all parameters."""
        self._hook_of = None
        remove_all([CallbackHandle(functools.partial(self._remove, index)) for index in self._handles])


def _versions(parameter: torch.nn.Parameter) -> tuple[int | None, ...]:
    return tuple(None if item is None else in_place_changes(item) for item in (parameter, parameter.grad))
