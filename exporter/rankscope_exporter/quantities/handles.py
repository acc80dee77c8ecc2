"""Hooks of quantities: on modules for the steps that are measured, and on tensors of one step, let go of together."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rankscope_exporter.frameworks.base import Framework, Removable
from rankscope_exporter.quantities.base import Hook, Hooking


class Handles:
    """What was registered on tensors since the last removal: hooks of a leaf would outlive the graph."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def hook(self, tensor: torch.Tensor, hook: Callable[..., None]) -> None:
        """Have `hook` called with the gradient of `tensor`."""
        self._handles.append(tensor.register_hook(hook))  # type: ignore[no-untyped-call]  # untyped in torch

    def remove(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def hook_before(hooking: Hooking, module: nn.Module, hook: Hook) -> None:
    """Have `hook` called with arguments of `module`, before it runs. Raises what torch raises."""
    _hook(hooking, module, hook, lambda: module.register_forward_pre_hook(hook, with_kwargs=True))


def hook_after(hooking: Hooking, module: nn.Module, hook: Hook) -> None:
    """Have `hook` called with arguments and output of `module`. Raises what torch raises."""
    _hook(hooking, module, hook, lambda: module.register_forward_hook(hook, with_kwargs=True))


def hook_gradient(hooking: Hooking, framework: Framework, parameter: nn.Parameter, hook: Hook) -> None:
    """Have `hook` called with what a backward pass adds to a gradient, at steps at which `parameter` is not frozen."""
    hooking.hook(hook, lambda: framework.on_gradient(parameter, hook) if parameter.requires_grad else None)


def _hook(hooking: Hooking, module: nn.Module, hook: Hook, register: Callable[[], Removable]) -> None:
    # A hook of the module with which steps begin would be registered too late if it came with the step.
    hooking.hook(hook, register, stays=hooking.begins_steps(module))
