"""Adapters for DeepSpeed, whose engine wraps the model and updates it.

The engine reduces gradients and, with ZeRO, divides them among the ranks. When all micro-batches of a step are
accumulated, it calls one method, `_take_model_step`, to clip gradients and to step the optimizer. DeepSpeed has no
public hook for this call, and no public access to the parts of tensors that a rank has with ZeRO. The adapters
therefore use private names of DeepSpeed. A test checks them with the pinned version of DeepSpeed.

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

from rankscope_exporter.adapters.base import Framework, FrameworkTraits, TensorSpec
from rankscope_exporter.adapters.hook_context import Hook, HookContext
from rankscope_exporter.adapters.optimizer_wrapping import PatchedMethod, unwrapped
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
        self.inner: torch.optim.Optimizer = optimizer.optimizer
        self.accumulates_in: torch.dtype | None = getattr(optimizer, "gradient_accumulation_dtype", None)
        self.process_groups: dict[int, dist.ProcessGroup] = {}
        """Mapping from the id() of each divided parameter to the process group of the ranks that have its parts."""
        self._parts: Parts = {}

    def parts(self) -> Parts:
        """Return the part of each parameter that this rank updates, by id() of the parameter."""
        groups = zip(self.optimizer.fp16_groups, self.optimizer.fp32_groups, strict=True)
        for group, (models, copies) in enumerate(groups):
            for parameter, copy in zip(models, copies, strict=True):
                self._parts[id(parameter)] = ParameterPartition(copy, self.inner, group)
        return self._parts

    def reduced(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the reduced gradient of this rank's part of `parameter`, before it is unscaled and clipped."""
        return parameter.grad

    def earlier(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the sum of this rank's own gradients of `parameter` over the micro-batches of the step so far."""
        return parameter.grad


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
                mapping = parameter._hp_mapping  # noqa: SLF001 - see the top of the module
                where = None if mapping is None else mapping.hp_fragment_address
                self._parts[id(parameter)] = where and ParameterPartition(
                    flat, self.inner, group, int(where.start), int(where.numel)
                )
        return self._parts


class Zero1And2(MappedPartitions):
    """A DeepSpeed optimizer of ZeRO 1 or 2.

    Its attribute `averaged_gradients` has the reduced gradients of this rank's partition of each group, as consecutive
    pieces.
    """

    attributes = ("bit16_groups", "single_partition_of_fp32_groups")

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.scatters = bool(optimizer.partition_gradients)
        self._places: dict[int, dict[int, int]] = {}  # group -> start of a piece -> its position

    def reduced(self, parameter: nn.Parameter) -> torch.Tensor | None:
        part = self._parts.get(id(parameter))
        if part is None:
            return None
        if getattr(self.optimizer, "cpu_offload", False):
            return part.of(part.tensor.grad)
        pieces = self.optimizer.averaged_gradients.get(part.group)
        if pieces is None:
            return None
        places = self._places.setdefault(part.group, {})
        if not places:
            start = 0
            for position, piece in enumerate(pieces):
                places.setdefault(start, position)
                start += piece.numel()
        found: torch.Tensor = pieces[places[part.start]]
        assert found.numel() == part.count
        return found.detach().view(-1)

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
        self._places = {
            id(parameter): (group, position)
            for group, parameters in enumerate(optimizer.bf16_groups)
            for position, parameter in enumerate(parameters)
        }

    def reduced(self, parameter: nn.Parameter) -> torch.Tensor | None:
        whole = None if self._parts.get(id(parameter)) is None else self._sum(parameter)
        if whole is None:
            return None
        here = parameter._hp_mapping.lp_fragment_address  # type: ignore[attr-defined]  # noqa: SLF001 - see the top
        return whole.detach().view(-1).narrow(0, int(here.start), int(here.numel))

    def earlier(self, parameter: nn.Parameter) -> torch.Tensor | None:
        whole = self._sum(parameter)
        return None if whole is None else whole.view(parameter.shape)

    def _sum(self, parameter: nn.Parameter) -> torch.Tensor | None:
        group, position = self._places[id(parameter)]
        if not self.optimizer.fp32_groups_has_gradients[group][position]:
            return None
        whole: torch.Tensor = self.optimizer.fp32_groups_gradients[group][position]
        return whole


class Zero3(ZeroStage):
    """A DeepSpeed optimizer of ZeRO 3: it divides each parameter evenly among the ranks and pads the last part."""

    scatters = True

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._places: dict[int, tuple[int, int]] = {}  # by id() of the parameter: sub-group and position in it

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

    def reduced(self, parameter: nn.Parameter) -> torch.Tensor | None:
        part, place = self._parts.get(id(parameter)), self._places.get(id(parameter))
        if part is None or part.count is None or place is None:
            return None
        if getattr(self.optimizer, "offload_optimizer", False):
            return part.of(part.tensor.grad)
        pieces = self.optimizer.averaged_gradients.get(place[0])
        return None if pieces is None else pieces[place[1]].detach().view(-1).narrow(0, 0, part.count)


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


def stage_of(optimizer: Any) -> ZeroStage | None:
    """Return an object that reads the parts and gradients of `optimizer`; None for an unknown kind of optimizer."""
    return next((kind(optimizer) for attribute, kind in _KINDS if hasattr(optimizer, attribute)), None)


_UPDATE = "_take_model_step"
_LAST_WHOLE_STAGE = 2


class _Engine(Framework):
    """Base class of two adapters: for DeepSpeed optimizers that step the model's own parameters, and for all others.

    It has the methods that read only the DeepSpeed engine, not its optimizer.
    """

    priority: ClassVar[int] = 30

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._engine: Any = model

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


class DeepSpeed(_Engine):
    """Adapter for ZeRO stage 0 in float32, which all-reduces gradients after the last backward pass of a step.

    `engine.step()` clips gradients without a change of `Tensor._version`.
    """

    name: ClassVar[str] = "deepspeed"
    traits = FrameworkTraits(
        replicated=True, reduces=True, reduces_after_last_backward=True, optimizer_takes_copies=True
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._reduced = False

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return _is_engine(model) and _stage(model) is None

    def reduces_in_backward(self) -> bool:
        # While the beginning of an update is reported, DeepSpeed has reduced all gradients and clipped none.
        return self._reduced

    def optimizers(self, given: Sequence[Any]) -> tuple[torch.optim.Optimizer, ...]:
        # If `given` is empty, return the optimizer of the DeepSpeed engine.
        return super().optimizers(given or _optimizers(self._engine))

    def install(self, hooking: HookContext) -> None:
        # At the beginning of an update, all gradients are reduced, and none is clipped.

        def reduced() -> None:
            self._reduced = True
            hooking.reduced()
            self._reduced = False

        before = Hook(hooking, "reporting the beginning of an update", reduced)

        def update(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            before()
            return original(*args, **kwargs)

        hooking.keep(PatchedMethod(self._engine, _UPDATE, update))


class DeepSpeedZero(_Engine, PartitionedOptimizer):
    """Adapter for ZeRO 1, 2 and 3, and for all modes in which the optimizer steps copies of the parameters.

    The optimizer steps float32 copies of whole parameters, or flat parts of such copies.
    """

    name: ClassVar[str] = "deepspeed_zero"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        stage = _stage(model)
        assert stage is not None
        self._stage = stage
        self.parts = stage.parts()
        # A script may move the engine's accumulation boundary by hand, so one configured micro-batch leaves it open.
        is_single = self._engine.gradient_accumulation_steps() == 1
        self.traits = replace(
            PartitionedOptimizer.traits,
            replicated=True,
            reduces_each_micro_batch=None if stage.scatters and is_single else stage.scatters,
        )

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return _is_engine(model) and _stage(model) is not None

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

    def optimizers(self, given: Sequence[Any]) -> tuple[torch.optim.Optimizer, ...]:  # noqa: ARG002 - all are the same
        # `given` is ignored: all its objects wrap this optimizer.
        return tuple(unwrapped(item) for item in _optimizers(self._engine))

    def install(self, hooking: HookContext) -> None:
        # The beginning and the end of an update are reported separately.
        self.watch(self._engine, _UPDATE, hooking)


def _is_engine(model: nn.Module) -> bool:
    return isinstance(model, loaded("deepspeed.runtime.engine", "DeepSpeedEngine"))


def _stage(engine: Any) -> ZeroStage | None:
    optimizer = engine.optimizer
    return None if optimizer is None or isinstance(optimizer, torch.optim.Optimizer) else stage_of(optimizer)


def _optimizers(engine: Any) -> tuple[Any, ...]:
    return () if engine.optimizer is None else (engine.optimizer,)
