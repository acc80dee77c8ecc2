"""Adapters for tensor parallelism, for DataParallel, and for DDP, which all-reduces gradients in buckets."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from rankscope_exporter.adapters.base import Framework, FrameworkTraits
from rankscope_exporter.adapters.parameter_hooks import CallbackHandle, Removable, remove_all
from rankscope_exporter.adapters.placement import FULL, REPLICA, Layout, layout_of, loaded
from rankscope_exporter.adapters.torch_private import active_ddp, comm_hooks, compiled_call
from rankscope_exporter.process.inert import NotCopied


class TensorParallel(Framework):
    """Adapter for tensor parallelism, where all ranks of the device mesh compute with the same data.

    Nothing is reduced after the backward pass, so the reduced gradient is equal to the rank's own gradient. The
    gradient of a sharded parameter is sharded in the same way.
    """

    priority: ClassVar[int] = 5
    traits = FrameworkTraits(replicated=True)  # all ranks of the mesh compute the same unsharded parameters

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        largest = max((parameter.device_mesh for parameter in _sharded(model)), key=lambda mesh: mesh.size())
        self._mesh_size: int = largest.size()
        self._mesh_ranks: list[int] = sorted(largest.mesh.reshape(-1).tolist())

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return bool(_sharded(model))

    def replicas(self, parameter: torch.Tensor) -> Sequence[int]:
        # The ranks that have the same elements of a parameter. These are all ranks of the mesh for a plain tensor,
        # and the ranks with the same shard for a DTensor.
        return super().replicas(parameter) if hasattr(parameter, "device_mesh") else self._mesh_ranks

    def copies(self, world_size: int) -> int:
        # A training loop may train each device mesh on different data.
        return max(1, world_size // self._mesh_size)


def _sharded(model: nn.Module) -> list[Any]:
    distributed = loaded("torch.distributed.tensor", "DTensor")
    return [parameter for parameter in model.parameters() if isinstance(parameter, distributed)] if distributed else []


class DataParallelModel(Framework):
    """Adapter for `DataParallel`, which copies the model to each GPU of the process for a forward pass."""

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return isinstance(model, DataParallel)

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self.root.module
        return module


class DistributedData(DataParallelModel):
    """Adapter for DDP, which copies each gradient into a bucket and reduces the bucket.

    At the end of the backward pass, DDP copies the reduced gradients back.

    Between the last gradient hook and DDP's own callback at the end of the backward pass, `.grad` therefore still has
    the rank's own gradient. With `gradient_as_bucket_view` the gradient *is* the bucket and must be read in its hook,
    which runs before the reduction.
    """

    priority: ClassVar[int] = 10

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        assert isinstance(model, DistributedDataParallel)
        self._ignored = _ignored_by(model)
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet([model])
        self._handles: list[Removable] = []
        self._begins: Callable[..., None]
        self._ends: Callable[..., None]
        self._is_first = False  # the first forward pass of another DDP is running
        self.traits = _traits_of(model)

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return isinstance(model, DistributedDataParallel)

    def on_forward(self, hook: Callable[..., None]) -> Removable:
        self._begins, handle = hook, super().on_forward(hook)
        if self.announced is not None or self.model is not self.root or compiled_call(self.module) is not None:
            return handle
        inner = self.module.register_forward_pre_hook(NotCopied(self._inner_begins), with_kwargs=True)
        inner_end = self.module.register_forward_hook(NotCopied(self._inner_ends), always_call=True)
        self._handles = [handle, inner, inner_end]
        return CallbackHandle(lambda: remove_all(self._handles))

    def on_forward_end(self, hook: Callable[..., None]) -> Removable:
        self._ends = hook
        return super().on_forward_end(hook)

    def _inner_begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Observe another DDP, which the script has made around the same module, in its first forward pass."""
        wrapper = active_ddp()
        if wrapper is None or wrapper.module is not module or wrapper in self._known:
            return
        self._known.add(wrapper)
        self.model = self.root = wrapper
        self.traits = _traits_of(wrapper)
        self._ignored = _ignored_by(wrapper)
        self._handles.append(super().on_forward(self._begins))
        self._handles.append(super().on_forward_end(self._ends))
        self._is_first = True
        self._begins(wrapper, args, kwargs)

    def _inner_ends(self, _module: nn.Module, args: Any, output: Any) -> None:
        if self._is_first:  # torch does not call hooks that were registered during the forward pass
            self._is_first = False
            self._ends(self.root, args, output)

    def layout(self, parameter: torch.Tensor) -> Layout:
        # A parameter that DDP ignores is different on each rank.
        return layout_of(parameter, FULL if id(parameter) in self._ignored else REPLICA)

    def is_same_on(self, parameter: torch.Tensor, ranks: Sequence[int]) -> bool:
        # Return False for a frozen parameter, for a parameter that DDP ignores, and if a communication hook of the
        # user reduces gradients.
        # DDP would not reduce a parameter that is frozen now and trained later.
        return parameter.requires_grad and set(ranks) <= set(self.replicas(parameter))

    def replicas(self, parameter: torch.Tensor) -> Sequence[int]:
        # The ranks on which `parameter` is equal: all ranks of DDP's process group. This includes frozen parameters:
        # DDP has broadcast them, and nothing changes them. The result is empty for a parameter that DDP ignores. It
        # is empty for all parameters if the user registered a communication hook.
        if comm_hooks(self.root) or id(parameter) in self._ignored:
            return ()
        return dist.get_process_group_ranks(self.root.process_group)

    def reduces_in_backward(self) -> bool:
        # False inside `no_sync()`, where DDP accumulates gradients without reducing them.
        return bool(self.root.require_backward_grad_sync)


def _traits_of(model: DistributedDataParallel) -> FrameworkTraits:
    return FrameworkTraits(
        replicated=True,  # all ranks start from rank 0's parameters and apply equal updates
        reduces=True,
        reduces_each_micro_batch=None,  # it does without `no_sync()`
        waits_for_reductions=True,
        # With a static graph, DDP's callback runs before the hook of the monitor.
        local_until_backward_ends=not (model.gradient_as_bucket_view or model.static_graph),
    )


def _ignored_by(wrapper: DistributedDataParallel) -> frozenset[int]:
    """Return the id() of each parameter that the script has excluded from DDP."""
    ignored = wrapper.parameters_to_ignore
    named = wrapper.module.named_parameters() if ignored else ()
    return frozenset(id(parameter) for name, parameter in named if name in ignored)
