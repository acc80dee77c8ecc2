"""Megatron-Core: its DDP sums gradients in its own buffers, and its optimizers update copies or parts of parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from rankscope_exporter.adapters.base import Hooking, Removable, TensorSpec
from rankscope_exporter.adapters.monitored_model import as_one, numbers_of
from rankscope_exporter.adapters.optimizer_wrapping import unwrapped
from rankscope_exporter.adapters.partitioned_optimizer import ParameterPartition, PartitionedOptimizer
from rankscope_exporter.adapters.placement import Layout, loaded, sharded_over

# Nothing of Megatron is imported, and of its buckets, which change from release to release, nothing is read: what is
# needed are attributes of parameters and optimizers, and of the optimizer that the script steps its `step`.


class Megatron(PartitionedOptimizer):
    """Gradients of micro-batches are summed in `main_grad`, reduced when the last is through, clipped in `step`.

    With the distributed optimizer `main_grad` is reduced only in the range of a parameter that this rank updates.
    A rank of an interleaved pipeline has several chunks of the model, and each its own count of micro-batches.
    """

    name: ClassVar[str] = "megatron"
    priority: ClassVar[int] = 30
    takes_chunks: ClassVar[bool] = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._list = model  # a list of chunks that framework_of() has made belongs to nobody else
        self._chunks: list[Any] = list(model) if isinstance(model, nn.ModuleList) else [model]
        modules = [_unwrapped(chunk.module) for chunk in self._chunks]
        self._module = as_one(modules)
        self._numbers = numbers_of(modules)
        stages = _group("get_pipeline_model_parallel_group")
        self.pp_stage = dist.get_rank(stages) if stages is not None and dist.get_world_size(stages) > 1 else None
        self._outer: tuple[Any, ...] = ()
        self._ranges: dict[int, tuple[int, int]] = {}  # by identity of the parameter: which elements this rank updates
        self._divided: dict[int, dist.ProcessGroup] = {}  # by identity: who updates the other elements

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Return whether `model` is wrapped by Megatron's own DDP, or is a list of such chunks."""
        wrapper = loaded("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel")
        chunks = list(model) if type(model) is nn.ModuleList else [model]
        return bool(chunks) and all(isinstance(chunk, wrapper) for chunk in chunks)

    @property
    def module(self) -> nn.Module:
        """Return the user's own module, or a list of those of all chunks."""
        self._module.training = self._chunks[0].training  # a list is not told
        return self._module

    @property
    def numbers_of_chunks(self) -> Mapping[int, int]:
        """Return the chunk of each parameter and module by identity; nothing where there is one only."""
        return self._numbers

    @property
    def chunks(self) -> Sequence[nn.Module]:
        """Return all chunks: which of them is called when is the schedule's affair."""
        return self._chunks

    # How tensors lie on the ranks.

    @property
    def replicated(self) -> bool:
        """Return whether there are other ranks than those of a pipeline, which hold other parameters."""
        return dist.is_initialized() and max(map(_size, ("get_data_parallel_group", _ACROSS_MODEL))) > 1

    def copies(self, world_size: int) -> int:  # noqa: ARG002 - Megatron has groups
        """Return how many ranks train on different data."""
        return _size("get_data_parallel_group")

    def layout(self, parameter: torch.Tensor) -> Layout:
        """Return the ranks that hold the other parts, of tensor parallelism and of the distributed optimizer."""
        whole = super().layout(parameter)
        divided = self._divided.get(id(parameter))
        alone = divided is None or dist.get_world_size(divided) == 1
        if not _is_tensor_parallel(parameter):
            return whole if alone else sharded_over(divided, whole)
        return self._across_model(parameter) if alone else sharded_over(_group(_ACROSS_BOTH), whole)

    def local_layout(self, parameter: torch.Tensor, world_size: int) -> Layout:
        """Return that each rank has a share of every element that it computes with, of its own data."""
        layout = self._across_model(parameter)
        return Layout("partial", layout.shard_group) if self.copies(world_size) > 1 else layout

    def replicas(self, parameter: torch.Tensor) -> Sequence[int]:
        """Return the ranks that train on other data, and those of tensor parallelism where it divides nothing.

        None for what the distributed optimizer divides: it may be gathered as late as in the next forward pass.
        """
        if id(parameter) in self._divided or getattr(parameter, "allreduce", True) is False:
            return ()
        group = _group("get_data_parallel_group" if _is_tensor_parallel(parameter) else _ACROSS_BOTH)
        return () if group is None else dist.get_process_group_ranks(group)

    def _across_model(self, parameter: torch.Tensor) -> Layout:
        whole = super().layout(parameter)
        return sharded_over(_group(_ACROSS_MODEL), whole) if _is_tensor_parallel(parameter) else whole

    def local_spec(self, parameter: torch.Tensor) -> TensorSpec | None:
        """Return the form of what this rank computes with."""
        return TensorSpec(tuple(parameter.shape), parameter.dtype)

    def reduced_spec(self, parameter: torch.Tensor) -> TensorSpec:
        """Return the form of the part, in the type that gradients are summed in."""
        return TensorSpec(self.form(parameter).shape, getattr(parameter, "main_grad", parameter).dtype)

    @property
    def interleaves_micro_batches(self) -> bool:
        """Return whether this is a stage of a pipeline."""
        return _size("get_pipeline_model_parallel_group") > 1

    # Where gradients stand.

    def reduced_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the range of `main_grad` that this rank updates."""
        if self.parts.get(id(parameter)) is None:
            return None
        whole: torch.Tensor | None = getattr(parameter, "main_grad", parameter.grad)
        if whole is None or id(parameter) not in self._ranges:
            return whole
        start, end = self._ranges[id(parameter)]
        return whole.detach().view(-1)[start:end]

    def earlier_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return `main_grad`, to which this micro-batch is added later."""
        found: torch.Tensor | None = getattr(parameter, "main_grad", parameter.grad)
        return found

    def local_sum(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the sum with `gradient`, which a fused kernel has added already."""
        if not _is_fused(parameter):
            return super().local_sum(parameter, gradient)
        summed: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]  # Megatron's
        return summed

    def on_gradient(self, parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Removable:
        """Hook the gradient, unless a fused kernel has left an empty tensor in its place."""

        def call(gradient: torch.Tensor) -> None:
            if not _is_fused(parameter):
                hook(gradient)

        return super().on_gradient(parameter, call)

    # Tensors of the optimizer.

    def optimizers(self, given: Sequence[Any]) -> tuple[torch.optim.Optimizer, ...]:
        """Return the torch optimizers inside of Megatron's, chained or not."""
        self._outer = tuple(given)
        members = [member for item in given for member in getattr(item, "chained_optimizers", None) or (item,)]
        members = [member for member in members if not getattr(member, "is_stub_optimizer", False)]
        for member in members:
            self._learn(member)
        return tuple(dict.fromkeys(unwrapped(member) for member in members))

    def _learn(self, member: Any) -> None:
        inner = unwrapped(member)
        groups = {id(item): place for place, group in enumerate(inner.param_groups) for item in group["params"]}
        if hasattr(member, "model_param_gbuf_map"):
            for parameter in (item for buffer in member.buffers for item in buffer.params):
                self._divided[id(parameter)] = member.data_parallel_group
                self.parts[id(parameter)] = None
        for parameter, own in _pairs(member, inner):
            if id(own) in groups:
                self.parts[id(parameter)] = ParameterPartition(own, inner, groups[id(own)])
            if hasattr(member, "model_param_gbuf_map"):
                here = member._get_model_param_range_map(parameter)["param"]  # noqa: SLF001 - Megatron's own ranges
                self._ranges[id(parameter)] = here.start, here.end

    def install(self, hooking: Hooking) -> None:
        """Learn when an update begins and ends."""
        for optimizer in self._outer:
            self.watch(optimizer, "step", hooking)


_ACROSS_MODEL = "get_tensor_model_parallel_group"
_ACROSS_BOTH = "get_tensor_and_data_parallel_group"

# Attributes of each kind of optimizer: lists, group by group, of parameters, and of what it updates in their place.
_PAIRED = (
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
    ("float16_groups", "fp32_from_float16_groups"),
    ("fp32_from_fp32_groups", "fp32_from_fp32_groups"),
)


def _pairs(member: Any, inner: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    found = [names for names in _PAIRED if hasattr(member, names[0]) and hasattr(member, names[1])]
    for models, owns in found:
        for parameters, tensors in zip(getattr(member, models), getattr(member, owns), strict=True):
            yield from zip(parameters, tensors, strict=True)
    if not found:  # it updates the parameters themselves
        yield from ((item, item) for group in inner.param_groups for item in group["params"])


def _group(getter: str) -> dist.ProcessGroup | None:
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None
    group: dist.ProcessGroup = getattr(state, getter)()
    return group


def _size(getter: str) -> int:
    group = _group(getter)
    return 1 if group is None else dist.get_world_size(group)


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return what a wrapper for float16 and bfloat16 is around."""
    halved = loaded("megatron.core.transformer.module", "Float16Module")
    inner: nn.Module = module.module if isinstance(module, halved) else module
    return inner


def _is_tensor_parallel(parameter: torch.Tensor) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def _is_fused(parameter: torch.Tensor) -> bool:
    return bool(getattr(parameter, "grad_added_to_main_grad", False))
