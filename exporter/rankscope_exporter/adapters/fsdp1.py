"""FSDP1 (`FullyShardedDataParallel`): parameters live in flat shards, and are views of what is gathered in forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import unserializable_hook

from rankscope_exporter.adapters.base import (
    Framework,
    GradientSource,
    Hooking,
    Removable,
    TensorSpec,
    alive,
    is_stood_in_for,
)
from rankscope_exporter.adapters.placement import Gathered, Layout, loaded, sharded_over
from rankscope_exporter.base.tracing import uncompiled
from rankscope_exporter.model.parameter_names import NamedParameter

# The flat parameter knows which parameters are views of it; there is no public way to ask.


class FullyShardedData(Gathered, Framework):
    """Each forward pass makes new views of the gathered flat parameter, whose gradients are this rank's own.

    With `use_orig_params=True` parameters have their names, and each rank holds the part of them that lies in its flat
    shard: often nothing. Without it, what is named and measured are the flat parameters.
    """

    name: ClassVar[str] = "fsdp1"
    priority: ClassVar[int] = 20

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._root = weakref.ref(model)
        self._views = {
            id(parameter): _Viewed(unit, position)
            for unit in self._units()
            for position, parameter in enumerate(unit._handle.flat_param._params or ())  # noqa: SLF001 - see above
        }

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Return whether `model` or any part of it is wrapped."""
        return any(_is_unit(module) for module in model.modules())

    @property
    def module(self) -> nn.Module:
        """Return the outermost module that is no wrapper of FSDP."""
        root: Any = alive(self._root)
        module: nn.Module = root.module if _is_unit(root) else root
        return module

    def reduces_in_backward(self) -> bool:
        """Return False inside `no_sync()`, where gathered gradients only accumulate."""
        return any(unit._sync_gradients for unit in self._units())  # noqa: SLF001 - see above

    def layout(self, parameter: torch.Tensor) -> Layout:
        """Return the ranks among which the flat parameter of its unit is divided."""
        whole = super().layout(parameter)
        unit = self._unit_of(parameter)
        if unit is None or unit.sharding_strategy.name == "NO_SHARD":
            return whole
        return sharded_over(unit.process_group, whole)

    def replicas(self, parameter: torch.Tensor) -> Sequence[int]:
        """Return the ranks with the same part of its flat parameter: those of hybrid sharding, or without sharding."""
        unit = self._unit_of(parameter)
        if unit is None:
            return super().replicas(parameter)
        if unit.sharding_strategy.name == "NO_SHARD":
            return dist.get_process_group_ranks(unit.process_group)
        between = getattr(unit, "_inter_node_pg", None)
        return () if between is None else dist.get_process_group_ranks(between)

    def local_layout(self, parameter: torch.Tensor, world_size: int) -> Layout:
        """Return that each rank has a share of every element, of its own data."""
        managed = self._unit_of(parameter) is not None
        return Layout("partial") if managed else super().local_layout(parameter, world_size)

    def local_spec(self, parameter: torch.Tensor) -> TensorSpec | None:
        """Return the form of the gathered gradient: whole, in the type of the forward pass."""
        viewed = self._viewed(parameter)
        if viewed is None:
            return None
        mixed = viewed.unit.mixed_precision
        return TensorSpec(tuple(viewed.shape), (mixed and mixed.param_dtype) or parameter.dtype)

    def is_in_place(self, named: NamedParameter) -> bool:
        """Return whether the module holds the parameter, or a view for the moment."""
        current = named.current()
        if id(current) == named.identity:
            return True
        return self.parameter(named) is not None and is_stood_in_for(current)

    def parameter(self, named: NamedParameter) -> nn.Parameter | None:
        """Return the parameter, which its flat parameter keeps while the module holds a view."""
        viewed = self._views.get(named.identity)
        found = None if viewed is None else viewed.parameter
        return found if id(found) == named.identity else super().parameter(named)

    def holds_gradient(self, parameter: nn.Parameter) -> bool:
        """Return whether any parameter of its unit has one: this rank may hold nothing of `parameter` itself."""
        unit = self._unit_of(parameter)
        if unit is None:
            return super().holds_gradient(parameter)
        flat = unit._handle.flat_param  # noqa: SLF001 - see above
        return any(item.grad is not None for item in (flat, *(flat._params or ())))  # noqa: SLF001 - see above

    def install(self, hooking: Hooking) -> None:
        """Hook the views of each unit in every forward pass, once FSDP has made them."""
        for unit in self._units():
            views = [viewed for viewed in self._views.values() if viewed.is_of(unit)]
            if views:
                hook = hooking.always("hooking gathered parameters", lambda *_, views=views: _hook_all(views))
                hooking.keep(unit.module.register_forward_pre_hook(hook))

    def on_accumulated(self, parameter: nn.Parameter, hook: Callable[[GradientSource], None]) -> Removable:
        """Hook the views, whose gradient is complete before it joins that of the flat parameter."""
        viewed = self._viewed(parameter)
        if viewed is None:
            return super().on_accumulated(parameter, hook)
        return viewed.keep(lambda gradient: hook(_Passing(viewed, gradient)))

    def on_gradient(self, parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Removable:
        """Hook the views."""
        viewed = self._viewed(parameter)
        return super().on_gradient(parameter, hook) if viewed is None else viewed.keep(hook)

    def _units(self) -> Iterator[Any]:
        for module in alive(self._root).modules():
            if _is_unit(module) and module._handle is not None:  # noqa: SLF001 - see above
                yield module

    def _viewed(self, tensor: torch.Tensor) -> _Viewed | None:
        viewed = self._views.get(id(tensor))
        # Another tensor may have the id() of a parameter that is gone.
        return viewed if viewed is not None and viewed.parameter is tensor else None

    def _unit_of(self, parameter: torch.Tensor) -> Any:
        viewed = self._viewed(parameter)
        if viewed is not None:
            return viewed.unit
        flat = (unit for unit in self._units() if unit._handle.flat_param is parameter)  # noqa: SLF001 - see above
        return next(flat, None)


class _Viewed:
    """A parameter that is a view of its unit's flat parameter while the unit computes, and the hooks on that view.

    Holds neither: the unit and the owner are modules of the training.
    """

    def __init__(self, unit: Any, position: int) -> None:
        flat = unit._handle.flat_param  # noqa: SLF001 - see the top of the module
        info = flat._param_infos[position]  # noqa: SLF001 - see the top of the module
        self.shape: torch.Size = flat._shapes[position]  # noqa: SLF001 - see the top of the module
        self._unit = weakref.ref(unit)
        self._owner = weakref.ref(info.module)
        self._key = info.param_name
        self._position = position
        self._hooks: dict[int, Callable[[torch.Tensor], None]] = {}
        self._made = 0

    @property
    def unit(self) -> Any:
        """The FSDP module that manages the parameter."""
        return alive(self._unit)

    def is_of(self, unit: nn.Module) -> bool:
        """Return whether `unit` manages the parameter."""
        return self._unit() is unit

    @property
    def parameter(self) -> nn.Parameter | None:
        """The parameter; None once the unit has no such parameter any more."""
        unit: Any = self._unit()
        flat = None if unit is None else unit._handle.flat_param  # noqa: SLF001 - see the top of the module
        parameters = getattr(flat, "_params", None) or ()
        return parameters[self._position] if self._position < len(parameters) else None

    def keep(self, hook: Callable[[torch.Tensor], None]) -> Removable:
        """Call `hook` with the gradient of every view from now on."""
        self._made += 1
        self._hooks[self._made] = hook
        return _Kept(self._hooks, self._made)

    def hook_view(self) -> None:
        """Hook the view that the module holds now, once: checkpointing computes on the same view again."""
        view = getattr(self._owner(), self._key, None)
        if self._hooks and is_stood_in_for(view) and view.requires_grad and self._called not in _hooks_on(view):
            view.register_hook(self._called)  # type: ignore[no-untyped-call]  # untyped in torch

    @uncompiled
    @unserializable_hook  # type: ignore[untyped-decorator]  # else torch warns when the view is saved
    def _called(self, gradient: torch.Tensor) -> None:
        for hook in list(self._hooks.values()):
            hook(gradient)


def _hooks_on(view: torch.Tensor) -> Collection[Any]:
    hooks: dict[int, Any] | None = view._backward_hooks  # noqa: SLF001 - no public name tells which hooks a tensor has
    return () if hooks is None else hooks.values()


class _Kept:
    def __init__(self, hooks: dict[int, Callable[[torch.Tensor], None]], number: int) -> None:
        self._hooks = hooks
        self._number = number

    def remove(self) -> None:
        self._hooks.pop(self._number, None)


class _Passing:
    """A view's gradient on its way to the flat one, with what was accumulated there before."""

    def __init__(self, viewed: _Viewed, gradient: torch.Tensor) -> None:
        self._viewed = viewed
        self._gradient = gradient

    @property
    def grad(self) -> torch.Tensor:
        parameter = self._viewed.parameter
        # Inside `no_sync()` a view of the gathered gradient, else a shard or None.
        earlier = None if parameter is None else parameter.grad
        if earlier is None or earlier.shape != self._gradient.shape:
            return self._gradient
        return earlier + self._gradient


def _hook_all(views: list[_Viewed]) -> None:
    if torch.is_grad_enabled():
        for viewed in views:
            viewed.hook_view()


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, loaded("torch.distributed.fsdp", "FullyShardedDataParallel"))
