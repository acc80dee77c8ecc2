"""FSDP2 (`fully_shard`): parameters are DTensors, gathered for a moment, and gradients reduce-scattered in backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from rankscope_exporter.adapters.base import Framework, GradientSource, Hooking, Removable, TensorSpec, alive
from rankscope_exporter.adapters.placement import Gathered, Layout, loaded
from rankscope_exporter.base.tracing import uncompiled
from rankscope_exporter.model.parameter_names import NamedParameter, local_tensor

# FSDP2 has no public way from a sharded parameter to the gathered one, whose gradient is this rank's own. Its state
# has, and a test runs against the pinned torch. A hook on the sharded parameter would be public, but with offloaded
# gradients it makes FSDP wait for the device.


class FullyShard(Gathered, Framework):
    """The gathered parameter is one tensor for the whole training, made in the first forward pass.

    Its gradient is this rank's own until the group of its module is reduced, still inside the backward pass. So it
    must be read in its own hook. `.grad` of the sharded parameter is complete when FSDP's own callback has run.
    """

    name: ClassVar[str] = "fsdp2"
    priority: ClassVar[int] = 20

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._root = weakref.ref(model)
        self._waiting: list[
            tuple[int, _DeferredHook]
        ] = []  # hooks of sharded parameters, by identity, to be registered
        # Found once: a model has thousands of modules, and this is asked for each parameter.
        self._sources = {
            id(source.sharded_param): (weakref.ref(group), weakref.ref(source))
            for group in self._groups()
            for source in group.fsdp_params
        }

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Return whether `fully_shard` was applied to `model` or to any part of it."""
        return any(_is_sharded(module) for module in model.modules())

    def reduces_in_backward(self) -> bool:
        """Return False where `set_requires_gradient_sync(False)` holds gradients back."""
        return any(group.reduce_grads and group.all_reduce_grads for group in self._groups())

    def local_layout(self, parameter: torch.Tensor, world_size: int) -> Layout:
        """Return that each rank has a share of every element, of its own data."""
        managed = self._source(parameter) is not None
        return Layout("partial") if managed else super().local_layout(parameter, world_size)

    def local_spec(self, parameter: torch.Tensor) -> TensorSpec | None:
        """Return the form of the gathered gradient: whole, in the type of the forward pass."""
        source = self._source(parameter)
        if source is None:
            return None
        policy = getattr(self._sources[id(parameter)][0](), "mp_policy", None)
        shape = getattr(source, "_orig_size", parameter.shape)
        return TensorSpec(tuple(shape), getattr(policy, "param_dtype", None) or parameter.dtype)

    def is_in_place(self, named: NamedParameter) -> bool:
        """Return whether the module holds the parameter, or what FSDP has gathered it to for the moment."""
        return self.parameter(named) is not None or super().is_in_place(named)

    def parameter(self, named: NamedParameter) -> nn.Parameter | None:
        """Return the sharded parameter, which FSDP keeps while the module holds the gathered one."""
        source = self._source_of(named.identity)
        return super().parameter(named) if source is None else source.sharded_param

    def holds_gradient(self, parameter: nn.Parameter) -> bool:
        """Return True also while the gradient is that of the gathered parameter, not reduced yet."""
        source = self._source(parameter)
        gathered = getattr(source, "_unsharded_param", None)
        return parameter.grad is not None or (gathered is not None and _gradient_of(gathered, source) is not None)

    def install(self, hooking: Hooking) -> None:
        """Look for gathered parameters whenever a forward pass has ended, until all are found."""
        look = hooking.always("finding gathered parameters", self._look)
        hooking.keep(self.model.register_forward_hook(look))

    def on_accumulated(self, parameter: nn.Parameter, hook: Callable[[GradientSource], None]) -> Removable:
        """Hook the gathered parameter, whose gradient is this rank's own."""
        if self._source(parameter) is None:
            return super().on_accumulated(parameter, hook)

        def register(gathered: nn.Parameter, source: Any) -> Removable:
            holder = _Gathered(weakref.ref(source))
            accumulated = uncompiled(lambda _gathered: hook(holder))
            handle: Removable = gathered.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
            return handle

        return self._later(parameter, register)

    def on_gradient(self, parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Removable:
        """Hook the gathered parameter."""
        if self._source(parameter) is None:
            return super().on_gradient(parameter, hook)
        base = super().on_gradient
        return self._later(parameter, lambda gathered, _source: base(gathered, hook))

    def _later(self, parameter: nn.Parameter, register: Callable[[nn.Parameter, Any], Removable]) -> _DeferredHook:
        late = _DeferredHook(register)
        self._waiting += self._still_waiting([(id(parameter), late)])
        return late

    def _look(self, *_: Any) -> None:
        self._waiting = self._still_waiting(self._waiting)

    def _still_waiting(self, waiting: list[tuple[int, _DeferredHook]]) -> list[tuple[int, _DeferredHook]]:
        """Register what can be registered, and return the others."""
        left = []
        for number, late in waiting:
            source = self._source_of(number)
            if late.is_removed or source is None:
                continue
            gathered = getattr(source, "_unsharded_param", None)
            if gathered is None or not gathered.requires_grad:
                left.append((number, late))
            else:
                late.register(gathered, source)
        return left

    def _source(self, parameter: torch.Tensor) -> Any:
        """Return FSDP's record of a sharded parameter; None of any other tensor."""
        source = self._source_of(id(parameter))
        # Another tensor may have the id() of a parameter that is gone.
        return source if source is not None and source.sharded_param is parameter else None

    def _source_of(self, identity: int) -> Any:
        _, reference = self._sources.get(identity, (None, None))
        source = None if reference is None else reference()
        return source if source is not None and id(source.sharded_param) == identity else None

    def _groups(self) -> Iterator[Any]:
        for module in alive(self._root).modules():
            if _is_sharded(module):
                state: Any = module._get_fsdp_state()  # type: ignore[operator]  # noqa: SLF001 - see the top of the module
                yield from state._fsdp_param_groups  # noqa: SLF001 - see the top of the module


class _Gathered:
    """The gradient of a gathered parameter, with what FSDP keeps of earlier micro-batches in another type."""

    def __init__(self, source: weakref.ref[Any]) -> None:
        self._source = source

    @property
    def grad(self) -> torch.Tensor | None:
        source = self._source()
        gathered = getattr(source, "_unsharded_param", None)
        return None if gathered is None else _gradient_of(gathered, source)


def _gradient_of(gathered: nn.Parameter, source: Any) -> torch.Tensor | None:
    own, earlier = gathered.grad, source.unsharded_accumulated_grad
    if own is None or earlier is None:
        return earlier if own is None else own
    return local_tensor(earlier) + local_tensor(own).to(earlier.dtype)


class _DeferredHook:
    """A hook that is registered once its tensor exists, unless it was removed before."""

    def __init__(self, register: Callable[[nn.Parameter, Any], Removable]) -> None:
        self._register: Callable[[nn.Parameter, Any], Removable] | None = register
        self._handle: Removable | None = None
        self.is_removed = False

    def register(self, tensor: nn.Parameter, source: Any) -> None:
        if self._register is not None:
            self._handle, self._register = self._register(tensor, source), None

    def remove(self) -> None:
        self.is_removed, self._register = True, None
        if self._handle is not None:
            self._handle.remove()


def _is_sharded(module: nn.Module) -> bool:
    return isinstance(module, loaded("torch.distributed.fsdp", "FSDPModule"))
