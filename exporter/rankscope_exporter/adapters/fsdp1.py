"""Adapter for FSDP1 (`FullyShardedDataParallel`): parameters are views of flat shards that each forward pass gathers.

Norms of shards are not combined here: each rank publishes its own norms, and the view `tensor_global` of the store
combines them. The adapter reads private names (`adapters.torch_private`), because torch has no public access from a
flat parameter to its parameters.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle, unserializable_hook

from rankscope_exporter.adapters import torch_private
from rankscope_exporter.adapters.base import (
    Framework,
    FrameworkTraits,
    GradientSource,
    LazyGradient,
    TensorSpec,
    is_temporarily_replaced,
)
from rankscope_exporter.adapters.hook_context import Hook, HookContext
from rankscope_exporter.adapters.parameter_hooks import Removable
from rankscope_exporter.adapters.parameter_names import NamedParameter
from rankscope_exporter.adapters.placement import Layout, loaded, sharded_over
from rankscope_exporter.adapters.tracing import uncompiled


class FullyShardedData(Framework):
    """Adapter for FSDP1. Each forward pass makes new views of the gathered flat parameter.

    The gradients of the views are this rank's own. With `use_orig_params=True`, parameters have their own names. Each
    rank has a part of each parameter, often an empty one, in its flat shard. With `use_orig_params=False`, the flat
    parameters are named and measured instead.
    """

    name: ClassVar[str] = "fsdp1"
    priority: ClassVar[int] = 20
    traits = FrameworkTraits(
        replicated=True,  # a parameter that is ignored, or too small to be sharded, is equal on all ranks
        reduces=True,
        reduces_each_micro_batch=None,  # each is reduced unless the training loop delays the reduction
        local_until_backward_ends=False,  # the gathered gradient is freed when backward ends
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._views = {
            id(parameter): _View(unit, position)
            for unit in units(self.root)
            for position, parameter in enumerate(torch_private.flat_views(torch_private.flat_parameter(unit)) or ())
        }

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return any(_is_unit(module) for module in model.modules())

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self.root.module if _is_unit(self.root) else self.root
        return module

    def reduces_in_backward(self) -> bool:
        # False inside `no_sync()`, where FSDP accumulates gathered gradients without reducing them.
        return any(map(torch_private.reduces_gradients, units(self.root)))

    def layout(self, parameter: torch.Tensor) -> Layout:
        # With the strategy NO_SHARD, a parameter is whole.
        whole = super().layout(parameter)
        unit = self._unit_of(parameter)
        if unit is None or unit.sharding_strategy.name == "NO_SHARD":
            return whole
        return sharded_over(unit.process_group, whole)

    def replicas(self, parameter: torch.Tensor) -> Sequence[int]:
        # The ranks, including this rank, that have the same part of the flat parameter of `parameter`. These are
        # several ranks with hybrid sharding or no sharding. With full sharding, the result is empty.
        unit = self._unit_of(parameter)
        if unit is None:
            return super().replicas(parameter)
        whole = unit.sharding_strategy.name == "NO_SHARD"
        group = unit.process_group if whole else torch_private.inter_node_group(unit)
        return () if group is None else dist.get_process_group_ranks(group)

    def local_layout(self, parameter: torch.Tensor, world_size: int) -> Layout:
        # If FSDP manages the parameter, the layout is "partial": each rank computes a gradient of every element from
        # its own data.
        is_managed = self._unit_of(parameter) is not None
        return Layout("partial") if is_managed else super().local_layout(parameter, world_size)

    def local_spec(self, parameter: torch.Tensor) -> TensorSpec:
        # The shape of the whole gathered `parameter`, and the dtype in which FSDP computes with it. This rank's own
        # gradient of the parameter has the same shape and dtype.
        view = self._view(parameter)
        if view is None:
            return super().local_spec(parameter)
        mixed = self._unit_of(parameter).mixed_precision
        return TensorSpec(tuple(view.shape), (mixed and mixed.param_dtype) or parameter.dtype)

    def is_in_place(self, named: NamedParameter) -> bool:
        # The model uses it if the module in `named` contains the parameter. While this module computes, it contains a
        # view of the parameter instead, which counts as well.
        current = named.current()
        if id(current) == named.identity:
            return True
        return self.parameter(named) is not None and is_temporarily_replaced(current)

    def parameter(self, named: NamedParameter) -> nn.Parameter | None:
        # While the module of the parameter contains a view of it, the flat parameter of FSDP stores the parameter
        # itself.
        view = self._views.get(named.identity)
        found = None if view is None else view.parameter
        return found if id(found) == named.identity else super().parameter(named)

    def holds_gradient(self, parameter: nn.Parameter) -> bool:
        # All are checked, because this rank's part of a single parameter may be empty.
        unit = self._unit_of(parameter)
        if unit is None:
            return super().holds_gradient(parameter)
        flat = torch_private.flat_parameter(unit)
        return any(item.grad is not None for item in (flat, *(torch_private.flat_views(flat) or ())))

    def install(self, hooking: HookContext) -> None:
        # The forward hooks run in every forward pass, after FSDP has made new views.
        for unit in units(self.root):
            views = [view for view in self._views.values() if view.unit() is unit]
            if views:
                hook = Hook(hooking, "hooking gathered parameters", lambda *_, views=views: _hook_all(views))
                hooking.keep(unit.module.register_forward_pre_hook(hook))

    def on_accumulated(self, parameter: nn.Parameter, hook: Callable[[GradientSource], None]) -> Removable:
        # The gradient of a view is complete before FSDP adds it to the gradient of the flat parameter.
        view = self._view(parameter)
        if view is None:
            return super().on_accumulated(parameter, hook)
        return view.register(lambda gradient: hook(LazyGradient(functools.partial(view.sum_with, gradient))))

    def on_gradient(self, parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Removable:
        view = self._view(parameter)
        return super().on_gradient(parameter, hook) if view is None else view.register(hook)

    def _view(self, tensor: torch.Tensor) -> _View | None:
        view = self._views.get(id(tensor))
        # Another tensor may have the id() of a parameter that was freed.
        return view if view is not None and view.parameter is tensor else None

    def _unit_of(self, parameter: torch.Tensor) -> Any:
        view = self._view(parameter)
        if view is not None:
            return view.unit()
        return next((unit for unit in units(self.root) if torch_private.flat_parameter(unit) is parameter), None)


class _View:
    """A parameter that is a view of a flat parameter while its FSDP unit computes, and the hooks on this view.

    The object has only weak references to the unit and to the module of the parameter, because the training owns both.
    """

    def __init__(self, unit: Any, position: int) -> None:
        flat = torch_private.flat_parameter(unit)
        info = torch_private.flat_infos(flat)[position]
        self.shape: torch.Size = torch_private.flat_shapes(flat)[position]
        self.unit: weakref.ref[Any] = weakref.ref(unit)
        self._owner = weakref.ref(info.module)
        self._key = info.param_name
        self._position = position
        self._hooks: OrderedDict[int, Callable[[torch.Tensor], None]] = OrderedDict()

    @property
    def parameter(self) -> nn.Parameter | None:
        """Return the parameter; None after the FSDP unit replaced it or was freed."""
        unit = self.unit()
        parameters = () if unit is None else torch_private.flat_views(torch_private.flat_parameter(unit)) or ()
        return parameters[self._position] if self._position < len(parameters) else None

    def register(self, hook: Callable[[torch.Tensor], None]) -> Removable:
        """Register `hook` for the gradient of the present view of the parameter, and of all later views."""
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def hook_view(self) -> None:
        """Register the hooks on the present view once: with checkpointing, a module computes twice with one view."""
        view = getattr(self._owner(), self._key, None)
        if self._hooks and is_temporarily_replaced(view) and view.requires_grad:
            present: dict[int, Any] = torch_private.gradient_hooks(view) or {}
            if self._call not in present.values():
                view.register_hook(self._call)  # type: ignore[no-untyped-call]  # untyped in torch

    def sum_with(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return `gradient`, that of a view, plus the sum of earlier ones, to which FSDP adds it afterwards."""
        parameter = self.parameter
        # Inside `no_sync()` this is a view of the gathered gradient, otherwise a shard or None.
        earlier = None if parameter is None else parameter.grad
        return gradient if earlier is None or earlier.shape != gradient.shape else earlier + gradient

    @uncompiled
    @unserializable_hook  # type: ignore[untyped-decorator]  # else torch warns when the view is saved
    def _call(self, gradient: torch.Tensor) -> None:
        for hook in list(self._hooks.values()):
            hook(gradient)


def _hook_all(views: list[_View]) -> None:
    if torch.is_grad_enabled():
        for view in views:
            view.hook_view()


def units(model: nn.Module) -> Iterator[Any]:
    """Yield the FSDP units in `model` that have parameters."""
    return (unit for unit in filter(_is_unit, model.modules()) if torch_private.flat_handle(unit) is not None)


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, loaded("torch.distributed.fsdp", "FullyShardedDataParallel"))
