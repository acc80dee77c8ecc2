"""Registration of hooks on modules and tensors for quantities, and notices about modules that are not measured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch import nn
from torch.utils.hooks import unserializable_hook

from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.adapters.parameter_hooks import GRADIENT, ParameterHook, Removable, TensorHook
from rankscope_exporter.base.torch_names import torch_name
from rankscope_exporter.model.module_names import NamedModule
from rankscope_exporter.quantities.base import Hook, Hooking, SamplingGate

NO_PASS: Final = -1
current_pass: Final = torch_name(
    "torch._C._current_graph_task_id", lambda: NO_PASS, "gradients are read when the optimizer steps"
)
"""Function that returns the number of the backward pass of this thread, nested passes included; NO_PASS if none."""

NAMES_SHOWN: Final = 3
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
        """Call `notice` once for each reason to which modules were added since the last report.

        The text of a notice contains the new modules and the reason.
        """
        new, self._new = self._new, {}
        for reason, modules in new.items():
            notice(f"{listed(modules)}: {reason}")


def listed(names: Iterable[str]) -> str:
    """Return the first few of `names` as text, and the number of the remaining names."""
    names = list(names)
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


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
        hooking: Hooking,
        gate: SamplingGate,
        where: str,
        hook_of: Callable[[int, nn.Parameter], Callable[[torch.Tensor], None]],
    ) -> None:
        self._monitored, self._hooking, self._gate = monitored, hooking, gate
        self._where, self._hook_of = where, hook_of
        self.hooked: set[int] = set()
        """Positions of the parameters that have a hook."""

    def register(self) -> None:
        """Register hooks on the parameters that require gradients and have no hook yet.

        Called at several steps, because parameters may be unfrozen during training.
        """
        for index, parameter in enumerate(self._monitored.tensors()):
            if parameter is not None and parameter.requires_grad and index not in self.hooked:
                self.hooked.add(index)
                hook = self._hooking.guarded(self._where, self._hook_of(index, parameter), self._gate)
                self._hooking.hook(hook, functools.partial(self._registered, index, hook))

    def _registered(self, index: int, hook: Hook) -> Removable | None:
        framework = self._monitored.framework
        find = functools.partial(self._monitored.parameter, index)
        handle = ParameterHook(find, lambda parameter: framework.on_gradient(parameter, hook))
        return handle if handle.renew_found() else None


def hook_before(hooking: Hooking, named: NamedModule, hook: Hook) -> None:
    """Register `hook`, which torch calls before each call of the module, with the arguments of this call.

    An error that torch raises during the registration is not caught.
    """
    _hook(hooking, named, hook, lambda module: module.register_forward_pre_hook(hook, with_kwargs=True))


def hook_after(hooking: Hooking, named: NamedModule, hook: Hook) -> None:
    """Register `hook`, which torch calls after each call of the module, with the arguments and the output of this call.

    An error that torch raises during the registration is not caught.
    """
    _hook(hooking, named, hook, lambda module: module.register_forward_hook(hook, with_kwargs=True))


def _hook(hooking: Hooking, named: NamedModule, hook: Hook, register: Callable[[nn.Module], Removable]) -> None:
    def registered() -> Removable | None:
        module = named.module
        return None if module is None else register(module)

    module = named.module
    if module is not None:
        # If the forward of this module begins the step, a hook that is registered per sampled step would be too late.
        hooking.hook(hook, registered, stays=hooking.begins_steps(module))


def in_backward() -> bool:
    """Return whether a backward pass runs on this thread. A forward pass inside a backward pass is a recomputation."""
    return bool(current_pass() != NO_PASS)
