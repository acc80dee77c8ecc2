"""Handles of hooks of quantities, on modules for sampled steps and on tensors of one step; and notes on coverage."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch import nn
from torch.utils.hooks import unserializable_hook

from rankscope_exporter.adapters.base import Removable
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.adapters.parameter_hooks import GRADIENT, ParameterHook, TensorHook
from rankscope_exporter.model.module_names import NamedModule
from rankscope_exporter.quantities.base import Hook, Hooking

NAMES_SHOWN: Final = 3
MODEL: Final = "the model"


class CoverageNotes:
    """Reasons, each with the modules it holds for; a module is named once for a reason."""

    def __init__(self) -> None:
        self._new: dict[str, list[str]] = {}
        self._told: set[tuple[str, str]] = set()

    def add(self, reason: str, module: str) -> None:
        """Note that something of `module` cannot be collected."""
        if (reason, module) not in self._told:
            self._told.add((reason, module))
            self._new.setdefault(reason, []).append(module or MODEL)

    def tell(self, say: Callable[[str], None]) -> None:
        """Say what is new since the last time: a line for each reason."""
        new, self._new = self._new, {}
        for reason, modules in new.items():
            say(f"{listed(modules)}: {reason}")


def listed(names: Iterable[str]) -> str:
    """Return the first of `names`, and how many more there are."""
    names = list(names)
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


class HookHandles:
    """What was registered on tensors since the last removal: hooks of a leaf would outlive the graph."""

    def __init__(self, monitored: MonitoredModel) -> None:
        self._monitored = monitored
        self._positions = {named.identity: index for index, named in enumerate(monitored.parameters)}
        self._handles: list[Removable] = []

    def hook(self, tensor: torch.Tensor, hook: Callable[..., None]) -> int:
        """Have `hook` called with the gradient of `tensor`, which is not kept; return the number of the hook."""
        if not tensor.is_leaf:
            unserializable_hook(hook)  # type: ignore[no-untyped-call]  # else torch warns when the tensor is saved
            handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # untyped in torch
            self._handles.append(handle)
            return int(handle.id)
        own = TensorHook(tensor, hook, table=GRADIENT)
        position = self._positions.get(id(tensor))
        if position is not None and self._monitored.parameter(position) is tensor:
            hook_of_parameter = ParameterHook(functools.partial(self._monitored.parameter, position), lambda _: own)
            hook_of_parameter.renew(tensor)
            self._handles.append(hook_of_parameter)
        else:
            self._handles.append(own)
        return own.number

    def remove(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def hook_before(hooking: Hooking, named: NamedModule, hook: Hook) -> None:
    """Have `hook` called with arguments of a module, before it runs. Raises what torch raises."""
    _hook(hooking, named, hook, lambda module: module.register_forward_pre_hook(hook, with_kwargs=True))


def hook_after(hooking: Hooking, named: NamedModule, hook: Hook) -> None:
    """Have `hook` called with arguments and output of a module. Raises what torch raises."""
    _hook(hooking, named, hook, lambda module: module.register_forward_hook(hook, with_kwargs=True))


def hook_gradient(hooking: Hooking, monitored: MonitoredModel, index: int, hook: Hook) -> None:
    """Have `hook` called with each summand of the gradient of parameter `index`, unless the parameter is frozen."""
    find = functools.partial(monitored.parameter, index)
    handle = ParameterHook(find, lambda parameter: monitored.framework.on_gradient(parameter, hook))
    hooking.hook(hook, lambda: handle if handle.renew_found() else None)


def _hook(hooking: Hooking, named: NamedModule, hook: Hook, register: Callable[[nn.Module], Removable]) -> None:
    def registered() -> Removable | None:
        module = named.module
        return None if module is None else register(module)

    module = named.module
    if module is not None:
        # A hook of the module with which steps begin would be registered too late if it came with the step.
        hooking.hook(hook, registered, stays=hooking.begins_steps(module))


class CallbackHandle:
    """A handle among those of hooks whose `remove` calls a function, when the monitor detaches or a quantity ends."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self.remove = remove


def in_backward() -> bool:
    """Return whether a backward pass runs on this thread; a forward pass inside of it is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001 - it has no public name
