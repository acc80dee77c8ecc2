"""Adapters for FSDP1 (`FullyShardedDataParallel`) and FSDP2 (`fully_shard`), which gather parameters temporarily.

Norms of shards are not combined here: each rank publishes its own norms, and the view `tensor_global` of the store
combines them. The adapters read private names (`adapters.torch_private`), because torch has no public access from a
flat or sharded parameter to the gathered parameters, which have this rank's own gradients. A test checks this access
with the pinned version of torch. A hook on a sharded parameter of FSDP2 would not need the internal state, but with
offloaded gradients it makes FSDP wait for the device.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import unserializable_hook

from rankscope_exporter.adapters import torch_private
from rankscope_exporter.adapters.base import Framework, FrameworkTraits, GradientSource, LazyGradient
from rankscope_exporter.adapters.hook_context import Hook, HookContext
from rankscope_exporter.adapters.parameter_hooks import HookTable, ParameterHook, Removable
from rankscope_exporter.adapters.parameter_names import (
    NamedParameter,
    TensorSpec,
    is_temporarily_replaced,
    local_tensor,
)
from rankscope_exporter.adapters.placement import Layout, loaded, sharded_over
from rankscope_exporter.adapters.tracing import uncompiled


class _Sharded(Framework):
    """Base class of both adapters: gradients of gathered parameters are this rank's own until FSDP reduces them."""

    priority: ClassVar[int] = 20
    traits = FrameworkTraits(
        replicated=True,  # a parameter that is ignored, or too small to be sharded, is equal on all ranks
        reduces=True,
        reduces_each_micro_batch=None,  # each is reduced unless the training loop delays the reduction
        local_until_backward_ends=False,  # the gathered gradient is freed when backward ends
    )

    def gathered(self, parameter: torch.Tensor) -> tuple[Sequence[int], Any] | None:
        """Return shape and mixed precision of the gathered `parameter`; None if FSDP does not manage it."""
        raise NotImplementedError

    def local_layout(self, parameter: torch.Tensor, world_size: int) -> Layout:
        # Each rank computes a gradient of every element from its own data.
        return super().local_layout(parameter, world_size) if self.gathered(parameter) is None else Layout("partial")

    def local_spec(self, parameter: torch.Tensor) -> TensorSpec:
        # The dtype is the one in which FSDP computes with the gathered parameter.
        gathered = self.gathered(parameter)
        if gathered is None:
            return super().local_spec(parameter)
        shape, mixed = gathered
        return TensorSpec(tuple(shape), getattr(mixed, "param_dtype", None) or parameter.dtype)


class FullyShardedData(_Sharded):
    """Adapter for FSDP1. Each forward pass makes new views of the gathered flat parameter.

    The gradients of the views are this rank's own. With `use_orig_params=True`, parameters have their own names. Each
    rank has a part of each parameter, often an empty one, in its flat shard. With `use_orig_params=False`, the flat
    parameters are named and measured instead.
    """

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

    def gathered(self, parameter: torch.Tensor) -> tuple[Sequence[int], Any] | None:
        view, unit = self._view(id(parameter)), self._unit_of(parameter)
        if view is None:
            return None if unit is None else (parameter.shape, None)
        return view.shape, unit.mixed_precision

    def is_in_place(self, named: NamedParameter) -> bool:
        # While its module computes, the module contains a view of the parameter instead.
        return super().is_in_place(named) and self.parameter(named) is not None

    def parameter(self, named: NamedParameter) -> nn.Parameter | None:
        # While the module of the parameter contains a view of it, the flat parameter of FSDP stores the parameter
        # itself.
        view = self._view(named.identity)
        return super().parameter(named) if view is None else view.parameter

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
        view = self._view(id(parameter))
        if view is None:
            return super().on_accumulated(parameter, hook)
        return view.hooks.register(lambda gradient: hook(LazyGradient(functools.partial(view.sum_with, gradient))))

    def on_gradient(self, parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Removable:
        view = self._view(id(parameter))
        return super().on_gradient(parameter, hook) if view is None else view.hooks.register(hook)

    def _view(self, identity: int) -> _View | None:
        view = self._views.get(identity)
        # Another tensor may have the id() of a parameter that was freed.
        return view if view is not None and id(view.parameter) == identity else None

    def _unit_of(self, parameter: torch.Tensor) -> Any:
        view = self._view(id(parameter))
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
        self.hooks = HookTable()
        """Hooks for the gradient of the present view of the parameter, and of all later views."""

    @property
    def parameter(self) -> nn.Parameter | None:
        """Return the parameter; None after the FSDP unit replaced it or was freed."""
        unit = self.unit()
        parameters = () if unit is None else torch_private.flat_views(torch_private.flat_parameter(unit)) or ()
        return parameters[self._position] if self._position < len(parameters) else None

    def hook_view(self) -> None:
        """Register the hooks on the present view once: with checkpointing, a module computes twice with one view."""
        view = getattr(self._owner(), self._key, None)
        if self.hooks and is_temporarily_replaced(view) and view.requires_grad:
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
        for hook in list(self.hooks.values()):
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


class FullyShard(_Sharded):
    """Adapter for FSDP2. A gathered parameter is made in the first forward pass and is the same tensor in all steps.

    The gradient of a gathered parameter is this rank's own until FSDP reduces the gradients of FSDP's parameter group
    that contains the parameter. This happens inside the backward pass. The gradient must therefore be read in the
    gradient hook of the gathered parameter. `.grad` of the sharded parameter is complete after FSDP's own callback at
    the end of the backward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._waiting: list[ParameterHook] = []  # hooks on parameters that FSDP has not gathered yet
        # Computed once: a model has thousands of modules, and every parameter is looked up.
        self._sources = {
            id(source.sharded_param): (weakref.ref(group), weakref.ref(source))
            for group in self._groups()
            for source in group.fsdp_params
        }

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return any(is_sharded(module) for module in model.modules())

    def reduces_in_backward(self) -> bool:
        # False while `set_requires_gradient_sync(False)` delays the reduction.
        return any(group.reduce_grads and group.all_reduce_grads for group in self._groups())

    def gathered(self, parameter: torch.Tensor) -> tuple[Sequence[int], Any] | None:
        source = self._source(id(parameter))
        if source is None:
            return None
        group = self._sources[id(parameter)][0]()
        return torch_private.gathered_shape(source) or parameter.shape, getattr(group, "mp_policy", None)

    def is_in_place(self, named: NamedParameter) -> bool:
        # The model uses it if the module in `named` contains the sharded parameter. While this module computes, it
        # contains the gathered parameter instead, which counts as well.
        return self.parameter(named) is not None or super().is_in_place(named)

    def parameter(self, named: NamedParameter) -> nn.Parameter | None:
        # While the module in `named` contains the gathered parameter, the sharded parameter is in FSDP's internal
        # state, and is returned from there.
        source = self._source(named.identity)
        return super().parameter(named) if source is None else source.sharded_param

    def holds_gradient(self, parameter: nn.Parameter) -> bool:
        # The gradient of the gathered parameter is not reduced yet.
        return parameter.grad is not None or _local_gradient(self._source(id(parameter))) is not None

    def install(self, hooking: HookContext) -> None:
        # Install a forward hook on the model that registers the monitor's gradient hooks on gathered parameters. It
        # runs after each forward pass, because FSDP makes the gathered parameters in the first forward pass that uses
        # them.
        register = Hook(hooking, "finding gathered parameters", self._register_waiting)
        hooking.keep(self.model.register_forward_hook(register))

    def on_accumulated(self, parameter: nn.Parameter, hook: Callable[[GradientSource], None]) -> Removable:
        identity, on_accumulated = id(parameter), super().on_accumulated
        if self._source(identity) is None:
            return on_accumulated(parameter, hook)
        gradient = LazyGradient(lambda: _local_gradient(self._source(identity)))
        accumulated = uncompiled(lambda _gathered: hook(gradient))
        return self._on_gathered(identity, lambda gathered: on_accumulated(gathered, accumulated))

    def on_gradient(self, parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Removable:
        identity, on_gradient = id(parameter), super().on_gradient
        if self._source(identity) is None:
            return on_gradient(parameter, hook)
        return self._on_gathered(identity, lambda gathered: on_gradient(gathered, hook))

    def _on_gathered(self, identity: int, register: Callable[[nn.Parameter], Removable]) -> Removable:
        """Register a hook on the gathered parameter by `register`, as soon as the gathered parameter exists."""
        hook = ParameterHook(lambda: torch_private.gathered_parameter(self._source(identity)), register)
        if not hook.renew_found():
            self._waiting.append(hook)
        return hook

    def _register_waiting(self, *_: Any) -> None:
        self._waiting = [hook for hook in self._waiting if not (hook.is_removed or hook.renew_found())]

    def _source(self, identity: int) -> Any:
        """Return FSDP's internal object for the sharded parameter with this id(); None for any other tensor."""
        _, reference = self._sources.get(identity, (None, None))
        source = None if reference is None else reference()
        # Another tensor may have the id() of a parameter that was freed.
        return source if source is not None and id(source.sharded_param) == identity else None

    def _groups(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(
            map(torch_private.parameter_groups, filter(is_sharded, self.root.modules()))
        )


def _local_gradient(source: Any) -> torch.Tensor | None:
    """Return the gradient of a gathered parameter plus the sum of its gradients in earlier micro-batches of the step.

    If there is a sum of earlier gradients, the result has the dtype of the sum.
    """
    gathered = torch_private.gathered_parameter(source)
    if gathered is None:
        return None
    own: torch.Tensor | None = gathered.grad
    earlier: torch.Tensor | None = source.unsharded_accumulated_grad
    # Since torch 2.15, both are the same tensor, which has the sum.
    if own is None or earlier is None or own is earlier:
        return earlier if own is None else own
    return local_tensor(earlier) + local_tensor(own).to(earlier.dtype)


def is_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called with `module`."""
    return isinstance(module, loaded("torch.distributed.fsdp", "FSDPModule"))
