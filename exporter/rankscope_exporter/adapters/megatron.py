"""Adapter for Megatron-Core, which has its own DDP and its own optimizers.

Its DDP sums gradients in buffers, and its optimizers update copies or parts of parameters.

Nothing of Megatron is imported. The adapter reads attributes of parameters and optimizers, and replaces the method
`step` of the optimizer that the script uses. It does not read Megatron's buckets, because they change from release to
release.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from rankscope_exporter.adapters.hook_context import HookContext
from rankscope_exporter.adapters.monitored_model import as_one, numbers_of
from rankscope_exporter.adapters.optimizer_wrapping import unwrapped
from rankscope_exporter.adapters.parameter_hooks import Removable
from rankscope_exporter.adapters.parameter_names import TensorSpec
from rankscope_exporter.adapters.partitioned_optimizer import ParameterPartition, PartitionedOptimizer
from rankscope_exporter.adapters.placement import Layout, loaded, sharded_over

_DATA = "get_data_parallel_group"
_TENSOR = "get_tensor_model_parallel_group"
_TENSOR_AND_DATA = "get_tensor_and_data_parallel_group"
_PIPELINE = "get_pipeline_model_parallel_group"


class Megatron(PartitionedOptimizer):
    """Adapter for Megatron-Core, which sums gradients of micro-batches in the attribute `main_grad` of parameters.

    Gradients are reduced after the last micro-batch, and clipped in the method `step` of the optimizer.

    With the distributed optimizer, only the range of `main_grad` that this rank updates is reduced. A rank of an
    interleaved pipeline has several chunks of the model. Micro-batches are counted per chunk.
    """

    priority: ClassVar[int] = 30
    takes_chunks: ClassVar[bool] = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._list = model  # keeps the list of chunks alive that framework_of() made
        self._chunks: list[Any] = list(model) if isinstance(model, nn.ModuleList) else [model]
        self._modules = [_without_float16_wrapper(chunk.module) for chunk in self._chunks]
        self.chunk_numbers = numbers_of(self._modules)
        stages = _group(_PIPELINE)
        self.pp_stage = dist.get_rank(stages) if stages is not None and dist.get_world_size(stages) > 1 else None
        self._outer: tuple[Any, ...] = ()
        self._ranges: dict[int, tuple[int, int]] = {}  # by id() of the parameter: the elements that this rank updates
        self._divided: dict[int, dist.ProcessGroup] = {}  # by id() of the parameter: the ranks that share its update
        self.traits = replace(
            self.traits,
            # The other ranks of a pipeline hold other parameters.
            replicated=dist.is_initialized() and max(_size(_DATA), _size(_TENSOR)) > 1,
            interleaves_micro_batches=_size(_PIPELINE) > 1,
            parameters_are_local_parts=True,
        )

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        wrapper = loaded("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel")
        chunks = list(model) if type(model) is nn.ModuleList else [model]
        return bool(chunks) and all(isinstance(chunk, wrapper) for chunk in chunks)

    @property
    def module(self) -> nn.Module:
        return as_one(self._modules)

    @property
    def chunks(self) -> Sequence[nn.Module]:
        return self._chunks

    # Distribution of tensors over the ranks.

    def copies(self, world_size: int) -> int:  # noqa: ARG002 - Megatron has groups
        return _size(_DATA)

    def layout(self, parameter: torch.Tensor) -> Layout:
        # Tensor parallelism and the distributed optimizer divide parameters among ranks.
        whole = super().layout(parameter)
        divided = self._divided.get(id(parameter))
        alone = divided is None or dist.get_world_size(divided) == 1
        if not _is_tensor_parallel(parameter):
            return whole if alone else sharded_over(divided, whole)
        return self._tensor_layout(parameter) if alone else sharded_over(_group(_TENSOR_AND_DATA), whole)

    def local_layout(self, parameter: torch.Tensor, world_size: int) -> Layout:
        # The layout is "partial" if several ranks compute gradients of the same elements from different data.
        # Otherwise, it is the layout that the parameter has with tensor parallelism.
        layout = self._tensor_layout(parameter)
        return Layout("partial", layout.shard_group) if self.copies(world_size) > 1 else layout

    def replicas(self, parameter: torch.Tensor) -> Sequence[int]:
        # The ranks that have the same elements of a parameter. These are the data-parallel ranks, and the
        # tensor-parallel ranks if the parameter is not divided among them. Empty for parameters of experts, and for a
        # parameter that the distributed optimizer divides, because it may be gathered as late as in the next forward
        # pass.
        if id(parameter) in self._divided or getattr(parameter, "allreduce", True) is False:
            return ()
        group = _group(_DATA if _is_tensor_parallel(parameter) else _TENSOR_AND_DATA)
        return () if group is None else dist.get_process_group_ranks(group)

    def _tensor_layout(self, parameter: torch.Tensor) -> Layout:
        whole = super().layout(parameter)
        return sharded_over(_group(_TENSOR), whole) if _is_tensor_parallel(parameter) else whole

    def local_spec(self, parameter: torch.Tensor) -> TensorSpec:
        # Shape and dtype of this rank's own gradient of `parameter`. They are those of the parameter on this rank.
        return TensorSpec(tuple(parameter.shape), parameter.dtype)

    def reduced_spec(self, parameter: torch.Tensor) -> TensorSpec:
        # The dtype is the one in which Megatron sums gradients.
        return TensorSpec(self.spec(parameter).shape, getattr(parameter, "main_grad", parameter).dtype)

    # Location of gradients.

    def reduced_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        # The reduced gradient of this rank's part of `parameter`. It is the range of `main_grad` that this rank
        # updates.
        if self.parts.get(id(parameter)) is None:
            return None
        whole = self.earlier_gradient(parameter)
        if whole is None or id(parameter) not in self._ranges:
            return whole
        start, end = self._ranges[id(parameter)]
        return whole.detach().view(-1)[start:end]

    def earlier_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        # Megatron adds the gradient of the current micro-batch later.
        found: torch.Tensor | None = getattr(parameter, "main_grad", parameter.grad)
        return found

    def local_sum(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor | None:
        # The sum includes `gradient`, the gradient of the latest micro-batch. If a fused kernel computes the
        # gradient, the kernel has already added it to `main_grad`.
        if not _is_fused(parameter):
            return super().local_sum(parameter, gradient)
        summed: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]  # Megatron's
        return summed

    def on_gradient(self, parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Removable:
        # `hook` is not called if a fused kernel adds the gradient to `main_grad` and leaves an empty tensor in its
        # place.

        def call(gradient: torch.Tensor) -> None:
            if not _is_fused(parameter):
                hook(gradient)

        return super().on_gradient(parameter, call)

    # The tensors that the optimizer updates.

    def optimizers(self, given: Sequence[Any]) -> tuple[torch.optim.Optimizer, ...]:
        # A chained optimizer of Megatron contains several of them.
        self._outer = tuple(given)
        members = [member for item in given for member in getattr(item, "chained_optimizers", None) or (item,)]
        members = [member for member in members if not getattr(member, "is_stub_optimizer", False)]
        return tuple(dict.fromkeys(map(self._add_parts, members)))

    def _add_parts(self, member: Any) -> torch.optim.Optimizer:
        """Store the parts that `member` updates, and return the torch optimizer inside of it."""
        inner = unwrapped(member)
        groups = {id(item): place for place, group in enumerate(inner.param_groups) for item in group["params"]}
        is_distributed = hasattr(member, "model_param_gbuf_map")
        if is_distributed:
            for parameter in (item for buffer in member.buffers for item in buffer.params):
                self._divided[id(parameter)] = member.data_parallel_group
                self.parts[id(parameter)] = None
        for parameter, own in _pairs(member, inner):
            if id(own) in groups:
                self.parts[id(parameter)] = ParameterPartition(own, inner, groups[id(own)])
            if is_distributed:
                here = member._get_model_param_range_map(parameter)["param"]  # noqa: SLF001 - Megatron's own ranges
                self._ranges[id(parameter)] = here.start, here.end
        return inner

    def install(self, hooking: HookContext) -> None:
        # An update is a call of the method `step` of an optimizer that the script uses.
        for optimizer in self._outer:
            self.watch(optimizer, "step", hooking)


# Two attributes for each kind of optimizer: lists, one per group, of parameters and of the tensors that it updates.
_PAIRED = (
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
    ("float16_groups", "fp32_from_float16_groups"),
    ("fp32_from_fp32_groups", "fp32_from_fp32_groups"),
)


def _pairs(member: Any, inner: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yield each parameter of the model with the tensor that the optimizer updates for it."""
    found = [names for names in _PAIRED if hasattr(member, names[0]) and hasattr(member, names[1])]
    for models, owns in found:
        for parameters, tensors in zip(getattr(member, models), getattr(member, owns), strict=True):
            yield from zip(parameters, tensors, strict=True)
    if not found:  # the optimizer updates the parameters themselves
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


def _without_float16_wrapper(module: nn.Module) -> nn.Module:
    wrapper = loaded("megatron.core.transformer.module", "Float16Module")
    inner: nn.Module = module.module if isinstance(module, wrapper) else module
    return inner


def _is_tensor_parallel(parameter: torch.Tensor) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def _is_fused(parameter: torch.Tensor) -> bool:
    return bool(getattr(parameter, "grad_added_to_main_grad", False))
