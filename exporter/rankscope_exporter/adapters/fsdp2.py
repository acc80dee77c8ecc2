"""Adapter for FSDP2 (`fully_shard`): parameters are DTensors that FSDP gathers temporarily.

Gradients are reduce-scattered. Norms of shards are not combined here: each rank publishes its own norms, and the view
`tensor_global` of the store combines them. FSDP2 has no public access from a sharded parameter to the gathered
parameter, which has this rank's own gradient. The adapter therefore reads internal state of FSDP. A test checks
this access with the pinned version of torch. A hook on the sharded parameter would not need the internal state, but
with offloaded gradients it makes FSDP wait for the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from rankscope_exporter.adapters.base import Framework, FrameworkTraits, GradientSource, LazyGradient, TensorSpec
from rankscope_exporter.adapters.hook_context import Hook, HookContext
from rankscope_exporter.adapters.parameter_hooks import Removable
from rankscope_exporter.adapters.parameter_names import NamedParameter, local_tensor
from rankscope_exporter.adapters.placement import Layout, loaded
from rankscope_exporter.adapters.torch_private import gathered_parameter, gathered_shape, parameter_groups
from rankscope_exporter.adapters.tracing import uncompiled


class FullyShard(Framework):
    """Adapter for FSDP2. A gathered parameter is made in the first forward pass and is the same tensor in all steps.

    The gradient of a gathered parameter is this rank's own until FSDP reduces the gradients of FSDP's parameter group
    that contains the parameter. This happens inside the backward pass. The gradient must therefore be read in the
    gradient hook of the gathered parameter. `.grad` of the sharded parameter is complete after FSDP's own callback at
    the end of the backward pass.
    """

    name: ClassVar[str] = "fsdp2"
    priority: ClassVar[int] = 20
    traits = FrameworkTraits(
        replicated=True,  # a parameter that is ignored, or too small to be sharded, is equal on all ranks
        reduces=True,
        reduces_each_micro_batch=None,  # each is reduced unless the training loop delays the reduction
        local_until_backward_ends=False,  # the gathered gradient is freed when backward ends
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._waiting: list[tuple[int, _DeferredHook]] = []  # hooks to be registered, by id() of the sharded parameter
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

    def local_layout(self, parameter: torch.Tensor, world_size: int) -> Layout:
        # If FSDP manages the parameter, the layout is "partial": each rank computes a gradient of every element from
        # its own data.
        is_managed = self._source(parameter) is not None
        return Layout("partial") if is_managed else super().local_layout(parameter, world_size)

    def local_spec(self, parameter: torch.Tensor) -> TensorSpec:
        # The shape of the whole gathered `parameter`, and the dtype in which FSDP computes with it. This rank's own
        # gradient of the parameter has the same shape and dtype.
        source = self._source(parameter)
        if source is None:
            return super().local_spec(parameter)
        policy = getattr(self._sources[id(parameter)][0](), "mp_policy", None)
        shape = gathered_shape(source) or parameter.shape
        return TensorSpec(tuple(shape), getattr(policy, "param_dtype", None) or parameter.dtype)

    def is_in_place(self, named: NamedParameter) -> bool:
        # The model uses it if the module in `named` contains the sharded parameter. While this module computes, it
        # contains the gathered parameter instead, which counts as well.
        return self.parameter(named) is not None or super().is_in_place(named)

    def parameter(self, named: NamedParameter) -> nn.Parameter | None:
        # While the module in `named` contains the gathered parameter, the sharded parameter is in FSDP's internal
        # state, and is returned from there.
        source = self._source_of(named.identity)
        return super().parameter(named) if source is None else source.sharded_param

    def holds_gradient(self, parameter: nn.Parameter) -> bool:
        # The gradient of the gathered parameter is not reduced yet.
        source = self._source(parameter)
        return parameter.grad is not None or (source is not None and _local_gradient(source) is not None)

    def install(self, hooking: HookContext) -> None:
        # Install a forward hook on the model that registers the monitor's gradient hooks on gathered parameters. It
        # runs after each forward pass, because FSDP makes the gathered parameters in the first forward pass that uses
        # them.
        register = Hook(hooking, "finding gathered parameters", self._register_waiting)
        hooking.keep(self.model.register_forward_hook(register))

    def on_accumulated(self, parameter: nn.Parameter, hook: Callable[[GradientSource], None]) -> Removable:
        if self._source(parameter) is None:
            return super().on_accumulated(parameter, hook)

        def register(gathered: nn.Parameter, source: Any) -> Removable:
            reference = weakref.ref(source)
            gradient = LazyGradient(lambda: _local_gradient(reference()))
            accumulated = uncompiled(lambda _gathered: hook(gradient))
            handle: Removable = gathered.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
            return handle

        return self._later(parameter, register)

    def on_gradient(self, parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Removable:
        if self._source(parameter) is None:
            return super().on_gradient(parameter, hook)
        base = super().on_gradient
        return self._later(parameter, lambda gathered, _source: base(gathered, hook))

    def _later(self, parameter: nn.Parameter, register: Callable[[nn.Parameter, Any], Removable]) -> _DeferredHook:
        deferred = _DeferredHook(register)
        self._waiting += self._still_waiting([(id(parameter), deferred)])
        return deferred

    def _register_waiting(self, *_: Any) -> None:
        self._waiting = self._still_waiting(self._waiting)

    def _still_waiting(self, waiting: list[tuple[int, _DeferredHook]]) -> list[tuple[int, _DeferredHook]]:
        """Register each hook in `waiting` if the gathered parameter for it exists.

        Return the hooks that must still wait.
        """
        left = []
        for number, deferred in waiting:
            source = self._source_of(number)
            if deferred.is_removed or source is None:
                continue
            gathered = gathered_parameter(source)
            if gathered is None or not gathered.requires_grad:
                left.append((number, deferred))
            else:
                deferred.register(gathered, source)
        return left

    def _source(self, parameter: torch.Tensor) -> Any:
        """Return FSDP's internal object for a sharded parameter; None for any other tensor."""
        source = self._source_of(id(parameter))
        # Another tensor may have the id() of a parameter that was freed.
        return source if source is not None and source.sharded_param is parameter else None

    def _source_of(self, identity: int) -> Any:
        _, reference = self._sources.get(identity, (None, None))
        source = None if reference is None else reference()
        return source if source is not None and id(source.sharded_param) == identity else None

    def _groups(self) -> Iterator[Any]:
        return (group for module in filter(is_sharded, self.root.modules()) for group in parameter_groups(module))


def _local_gradient(source: Any) -> torch.Tensor | None:
    """Return the gradient of a gathered parameter plus the sum of its gradients in earlier micro-batches of the step.

    If there is a sum of earlier gradients, the result has the dtype of the sum.
    """
    gathered = gathered_parameter(source)
    if gathered is None:
        return None
    own: torch.Tensor | None = gathered.grad
    earlier: torch.Tensor | None = source.unsharded_accumulated_grad
    # Since torch 2.15, both are the same tensor, which has the sum.
    if own is None or earlier is None or own is earlier:
        return earlier if own is None else own
    return local_tensor(earlier) + local_tensor(own).to(earlier.dtype)


class _DeferredHook:
    """A hook for a tensor that may not exist yet.

    The hook is registered once the tensor exists, unless the hook was removed before.
    """

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


def is_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called with `module`."""
    return isinstance(module, loaded("torch.distributed.fsdp", "FSDPModule"))
