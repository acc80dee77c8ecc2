"""FSDP1 (`FullyShardedDataParallel`): parameters live in flat shards, and are views of what is gathered in forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from rankscope_exporter.frameworks.base import Form, Framework, Holder, Hooking, Removable
from rankscope_exporter.frameworks.gathered import Gathered
from rankscope_exporter.frameworks.layout import Layout, sharded_over
from rankscope_exporter.frameworks.loaded import loaded
from rankscope_exporter.naming import NamedParameter
from rankscope_exporter.tracing import uncompiled

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
        self._sharded = model
        self._viewed = {
            id(parameter): _Viewed(unit, unit._handle.flat_param, position)  # noqa: SLF001 - see above
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
        root: Any = self._sharded
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

    def local_form(self, parameter: torch.Tensor) -> Form | None:
        """Return the form of the gathered gradient: whole, in the type of the forward pass."""
        viewed = self._viewed.get(id(parameter))
        if viewed is None:
            return None
        mixed = viewed.unit.mixed_precision
        return Form(tuple(viewed.shape), (mixed and mixed.param_dtype) or parameter.dtype)

    def is_in_place(self, named: NamedParameter) -> bool:
        """Return whether the module holds the parameter, or a view for the moment."""
        current = named.current()
        return current is named.parameter or (id(named.parameter) in self._viewed and _is_view(current))

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
            views = [viewed for viewed in self._viewed.values() if viewed.unit is unit]
            if views:
                hook = hooking.always("hooking gathered parameters", lambda *_, views=views: _hook_all(views))
                hooking.keep(unit.module.register_forward_pre_hook(hook))

    def on_accumulated(self, parameter: nn.Parameter, hook: Callable[[Holder], None]) -> Removable:
        """Hook the views, whose gradient is complete before it joins that of the flat parameter."""
        viewed = self._viewed.get(id(parameter))
        if viewed is None:
            return super().on_accumulated(parameter, hook)
        return viewed.keep(lambda gradient: hook(_Passing(parameter, gradient)))

    def on_gradient(self, parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Removable:
        """Hook the views."""
        viewed = self._viewed.get(id(parameter))
        return super().on_gradient(parameter, hook) if viewed is None else viewed.keep(hook)

    def _units(self) -> Iterator[Any]:
        for module in self._sharded.modules():
            if _is_unit(module) and module._handle is not None:  # noqa: SLF001 - see above
                yield module

    def _unit_of(self, parameter: torch.Tensor) -> Any:
        viewed = self._viewed.get(id(parameter))
        if viewed is not None:
            return viewed.unit
        flat = (unit for unit in self._units() if unit._handle.flat_param is parameter)  # noqa: SLF001 - see above
        return next(flat, None)


class _Viewed:
    """A parameter that is a view of its unit's flat parameter while the unit computes, and the hooks on that view."""

    def __init__(self, unit: Any, flat: Any, position: int) -> None:
        self.unit = unit
        self.shape: torch.Size = flat._shapes[position]  # noqa: SLF001 - see the top of the module
        self._owner = flat._param_infos[position].module  # noqa: SLF001 - see the top of the module
        self._key = flat._param_infos[position].param_name  # noqa: SLF001 - see the top of the module
        self._hooks: dict[int, Callable[[torch.Tensor], None]] = {}
        self._made = 0
        self._last: weakref.ref[torch.Tensor] | None = None

    def keep(self, hook: Callable[[torch.Tensor], None]) -> Removable:
        """Call `hook` with the gradient of every view from now on."""
        self._made += 1
        self._hooks[self._made] = hook
        return _Kept(self._hooks, self._made)

    def hook_view(self) -> None:
        view = getattr(self._owner, self._key)
        if not self._hooks or not _is_view(view) or not view.requires_grad:
            return
        if self._last is None or self._last() is not view:  # checkpointing computes on the same view again
            self._last = weakref.ref(view)
            view.register_hook(self._called)

    @uncompiled
    def _called(self, gradient: torch.Tensor) -> None:
        for hook in list(self._hooks.values()):
            hook(gradient)


class _Kept:
    def __init__(self, hooks: dict[int, Callable[[torch.Tensor], None]], number: int) -> None:
        self._hooks = hooks
        self._number = number

    def remove(self) -> None:
        self._hooks.pop(self._number, None)


class _Passing:
    """A view's gradient on its way to the flat one, with what was accumulated there before."""

    def __init__(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        self._parameter = parameter
        self._gradient = gradient

    @property
    def grad(self) -> torch.Tensor:
        earlier = self._parameter.grad  # inside `no_sync()` a view of the gathered gradient, else a shard or None
        if earlier is None or earlier.shape != self._gradient.shape:
            return self._gradient
        return earlier + self._gradient


def _hook_all(views: list[_Viewed]) -> None:
    if torch.is_grad_enabled():
        for viewed in views:
            viewed.hook_view()


def _is_view(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and not isinstance(tensor, nn.Parameter)


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, loaded("torch.distributed.fsdp", "FullyShardedDataParallel"))
