"""Adapter for DeepSpeed, whose engine wraps the model and updates it.

The engine reduces gradients and, with ZeRO, divides them among the ranks. When all micro-batches of a step are
accumulated, it calls one method, `_take_model_step`, to clip gradients and to step the optimizer. DeepSpeed has no
public hook for this call, and no public access to the parts of tensors that a rank has with ZeRO. The adapter
therefore uses private names of DeepSpeed. A test checks them with the pinned version of DeepSpeed.

Finds float32 parameters and gradients, and this rank's part of them, in each kind of DeepSpeed optimizer.

The range of each part is the one that DeepSpeed itself computed; no tensor is gathered. The attributes that this module
reads from optimizers and parameters are those of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch import nn

from rankscope_exporter.adapters.hook_context import HookContext
from rankscope_exporter.adapters.optimizer_wrapping import inner_optimizers
from rankscope_exporter.adapters.parameter_names import TensorSpec
from rankscope_exporter.adapters.partitioned_optimizer import FROZEN, ParameterPartition, PartitionedOptimizer
from rankscope_exporter.adapters.placement import Layout, loaded, sharded_over

Parts = dict[int, ParameterPartition | None]


class ZeroStage:
    """A DeepSpeed optimizer with float32 copies of whole parameters, as for float16 or bfloat16 without ZeRO."""

    scatters: bool = False
    """True if the optimizer keeps no sum of this rank's own gradients.

    A backward pass then leaves only this rank's parts of reduced gradients.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.inner: Any = next(iter(inner_optimizers(optimizer)), None)
        self.accumulates_in: torch.dtype | None = getattr(optimizer, "gradient_accumulation_dtype", None)
        self.process_groups: dict[int, dist.ProcessGroup] = {}
        """Mapping from the id() of each divided parameter to the process group of the ranks that have its parts."""
        self._parts: Parts = {}
        self._places: dict[int, tuple[int, int]] = {}
        """Place of the reduced gradient of each divided parameter, by id() of the parameter.

        A place is the number of a list of tensors, and the position in this list.
        """

    def parts(self) -> Parts:
        """Return the part of each parameter that this rank updates, by id() of the parameter."""
        groups = zip(self.optimizer.fp16_groups, self.optimizer.fp32_groups, strict=True)
        for group, (models, copies) in enumerate(groups):
            for parameter, copy in zip(models, copies, strict=True):
                self._parts[id(parameter)] = ParameterPartition(copy, self.inner, group)
        return self._parts

    def reduced(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the reduced gradient of this rank's part of `parameter`, before it is unscaled and clipped."""
        part, place = self._parts.get(id(parameter)), self._places.get(id(parameter))
        if part is None or place is None:
            return parameter.grad if place is None else None
        if getattr(self.optimizer, "offload_optimizer", False) or getattr(self.optimizer, "cpu_offload", False):
            return part.of(part.tensor.grad)
        pieces = self.optimizer.averaged_gradients.get(place[0])
        return None if pieces is None else pieces[place[1]].detach().view(-1).narrow(0, 0, part.count)

    def earlier(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the sum of this rank's own gradients of `parameter` over the micro-batches of the step so far."""
        return parameter.grad


class WholeParameters(ZeroStage):
    """An optimizer that steps the parameters of the model, as for ZeRO stage 0 in float32; None without one."""

    def parts(self) -> Parts:
        for number, group in enumerate(getattr(self.inner, "param_groups", ())):
            for parameter in group["params"]:
                self._parts[id(parameter)] = ParameterPartition(parameter, self.inner, number)
        return self._parts


class FusedFp16(ZeroStage):
    """A DeepSpeed optimizer whose float32 copies of parameters are views of one flat tensor, for fused optimizers."""

    def parts(self) -> Parts:
        for group, models in enumerate(self.optimizer.fp16_groups):
            start = 0
            for parameter in models:
                flat = self.optimizer.fp32_groups_flat[group]
                self._parts[id(parameter)] = ParameterPartition(flat, self.inner, group, start, parameter.numel())
                start += parameter.numel()
        return self._parts


class MappedPartitions(ZeroStage):
    """A DeepSpeed optimizer that has, on each rank, one flat partition of the parameters of each parameter group.

    An attribute of a parameter refers to the fragment of the parameter in this rank's partition. This attribute is None
    for a parameter without elements in the partition.
    """

    attributes: tuple[str, str]
    """Names of two attributes of the DeepSpeed optimizer, each a list with one element per parameter group.

    An element of the first list contains the parameters of the group. An element of the second list is this rank's flat
    partition of the group.
    """

    def parts(self) -> Parts:
        groups, flats = (getattr(self.optimizer, name) for name in self.attributes)
        for group, (parameters, flat) in enumerate(zip(groups, flats, strict=True)):
            for parameter in parameters:
                self.process_groups[id(parameter)] = self.optimizer.real_dp_process_group[group]
                # A parameter without elements in the partition may have no index.
                self._places[id(parameter)] = group, getattr(parameter, "_index_in_param_group", -1)
                mapping = parameter._hp_mapping  # noqa: SLF001 - see the top of the module
                where = None if mapping is None else mapping.hp_fragment_address
                self._parts[id(parameter)] = where and ParameterPartition(
                    flat, self.inner, group, int(where.start), int(where.numel)
                )
        return self._parts


class Zero1And2(MappedPartitions):
    """A DeepSpeed optimizer of ZeRO 1 or 2."""

    attributes = ("bit16_groups", "single_partition_of_fp32_groups")

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.scatters = bool(optimizer.partition_gradients)

    def earlier(self, parameter: nn.Parameter) -> torch.Tensor | None:
        # A sum with a separate dtype is in the attribute `grad_accum` of the parameter instead of `grad`.
        is_separate = getattr(self.optimizer, "use_grad_accum_attribute", False)
        found: torch.Tensor | None = parameter.grad_accum if is_separate else parameter.grad  # type: ignore[attr-defined]
        return found


class Bf16Zero1(MappedPartitions):
    """A DeepSpeed optimizer of ZeRO 1 that sums the gradients of bfloat16 parameters in float32.

    Each rank has whole all-reduced gradients, which are views of one tensor.
    """

    attributes = ("bf16_groups", "fp32_groups_flat_partition")

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.accumulates_in = getattr(optimizer, "grad_acc_dtype", None)

    def reduced(self, parameter: nn.Parameter) -> torch.Tensor | None:
        whole = None if self._parts.get(id(parameter)) is None else self.earlier(parameter)
        if whole is None:
            return None
        here = parameter._hp_mapping.lp_fragment_address  # type: ignore[attr-defined]  # noqa: SLF001 - see the top
        return whole.detach().view(-1).narrow(0, int(here.start), int(here.numel))

    def earlier(self, parameter: nn.Parameter) -> torch.Tensor | None:
        group, position = self._places[id(parameter)]
        if not self.optimizer.fp32_groups_has_gradients[group][position]:
            return None
        whole: torch.Tensor = self.optimizer.fp32_groups_gradients[group][position]
        return whole.view(parameter.shape)


class Zero3(ZeroStage):
    """A DeepSpeed optimizer of ZeRO 3: it divides each parameter evenly among the ranks and pads the last part."""

    scatters = True

    def parts(self) -> Parts:
        # For a frozen parameter, this is the part that the rank stores.
        for number, parameters in enumerate(self.optimizer.fp16_groups):
            group = self.optimizer.sub_group_to_group_id[number]
            flat = self.optimizer.fp32_partitioned_groups_flat[number]
            for position, parameter in enumerate(parameters):
                _, start, padded = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
                self._places[id(parameter)] = number, position
                self._add(parameter, flat, group, start, padded)
        for parameter in self.optimizer.module.parameters():
            if id(parameter) not in self._parts and hasattr(parameter, "ds_tensor"):
                self._add(parameter, parameter.ds_tensor, FROZEN, 0, parameter.ds_tensor.numel())
        return self._parts

    def _add(self, parameter: Any, tensor: torch.Tensor, group: int, start: int, padded: int) -> None:
        """Store that this rank's part of `parameter` consists of the elements of `tensor` from `start` on."""
        # `padded` is the number of elements of the part with its padding. The padding is left out.
        ranks = self.process_groups[id(parameter)] = parameter.ds_process_group
        count = max(0, min(padded, int(parameter.ds_numel) - padded * dist.get_rank(ranks)))
        self._parts[id(parameter)] = ParameterPartition(tensor, self.inner, group, start, count) if count else None


_KINDS: Final[tuple[tuple[str, Callable[[Any], ZeroStage]], ...]] = (
    ("fp32_partitioned_groups_flat", Zero3),
    ("single_partition_of_fp32_groups", Zero1And2),
    ("fp32_groups_flat_partition", Bf16Zero1),
    ("fp32_groups_flat", FusedFp16),
    ("fp32_groups", ZeroStage),
)
"""For each kind of DeepSpeed optimizer: the name of an attribute that identifies the kind, and the class that reads it.

The kind of an optimizer is the first one in this order with an attribute that the optimizer has.

The names of optimizer classes cannot identify the kinds, because subclasses have other names.
"""


_LAST_WHOLE_STAGE = 2


class DeepSpeed(PartitionedOptimizer):
    """Adapter for DeepSpeed, whose engine clips gradients without a change of `Tensor._version`.

    The optimizer steps the parameters of the model, float32 copies of them, or flat parts of such copies.
    """

    priority: ClassVar[int] = 30

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._engine = model
        kinds = (kind for attribute, kind in _KINDS if hasattr(model.optimizer, attribute))
        self._stage = next(kinds, WholeParameters)(model.optimizer)
        self.parts = self._stage.parts()
        scatters, is_whole = self._stage.scatters, isinstance(self._stage, WholeParameters)
        # A script may move the engine's accumulation boundary by hand, so one configured micro-batch leaves it open.
        is_single = model.gradient_accumulation_steps() == 1
        self.traits = replace(
            PartitionedOptimizer.traits,
            replicated=True,
            reduces_each_micro_batch=None if scatters and is_single else scatters,
            local_until_backward_ends=is_whole,
            updates_in_parts=not is_whole,
        )

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return isinstance(model, loaded("deepspeed.runtime.engine", "DeepSpeedEngine"))

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self._engine.module
        return module

    def copies(self, world_size: int) -> int:
        return int(getattr(self._engine, "dp_world_size", world_size))

    def replicas(self, parameter: torch.Tensor) -> Sequence[int]:
        # The result is empty for ZeRO stage 3 and for parameters of experts.
        group = getattr(self._engine, "seq_data_parallel_group", None)
        is_expert = getattr(parameter, "allreduce", True) is False
        if group is None or is_expert or self._engine.zero_optimization_stage() > _LAST_WHOLE_STAGE:
            return ()
        return dist.get_process_group_ranks(group)

    def layout(self, parameter: torch.Tensor) -> Layout:
        # A parameter that ZeRO does not divide is whole.
        whole = super().layout(parameter)
        groups = self._stage.process_groups
        return sharded_over(groups[id(parameter)], whole) if id(parameter) in groups else whole

    def local_layout(self, parameter: torch.Tensor, world_size: int) -> Layout:
        # With data parallelism, the layout is "partial": each rank computes a gradient of every element from its own
        # data.
        return Layout("partial") if self.copies(world_size) > 1 else super().layout(parameter)

    def local_spec(self, parameter: torch.Tensor) -> TensorSpec:
        # Shape and dtype of this rank's own gradient of `parameter`. They are the shape of the whole parameter and
        # its dtype.
        return TensorSpec(tuple(getattr(parameter, "ds_shape", parameter.shape)), parameter.dtype)

    def reduced_spec(self, parameter: torch.Tensor) -> TensorSpec:
        # The dtype is the one in which DeepSpeed accumulates gradients.
        return TensorSpec(self.spec(parameter).shape, self._stage.accumulates_in or parameter.dtype)

    def reduced_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return self._stage.reduced(parameter)

    def earlier_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        # Return None if the ZeRO stage keeps no such sum.
        return None if self._stage.scatters else self._stage.earlier(parameter)

    def optimizers(self, given: Sequence[Any]) -> tuple[torch.optim.Optimizer, ...]:
        # All objects in `given` wrap the optimizer of the engine.
        return tuple(inner_optimizers(self._engine.optimizer)) or super().optimizers(given)

    def install(self, hooking: HookContext) -> None:
        self.watch(self._engine, "_take_model_step", hooking)
