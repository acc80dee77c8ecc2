"""Finds float32 parameters and gradients, and this rank's part of them, in each kind of DeepSpeed optimizer.

The range of each part is the one that DeepSpeed itself computed; no tensor is gathered. The attributes that this module
reads from optimizers and parameters are those of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from rankscope_exporter.adapters.partitioned_optimizer import FROZEN, ParameterPartition

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
        """Return the part of each parameter that this rank updates, by id() of the parameter."""
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
        """Return the part of each parameter that this rank updates, by id() of the parameter."""
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
        """Return the reduced gradient of this rank's part of a parameter, which is one piece of the partition."""
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
        """Return the sum of this rank's own gradients of `parameter` over the micro-batches of the step so far.

        A sum with a separate dtype is in the attribute `grad_accum` of the parameter instead of `grad`.
        """
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
        """Return the part of the all-reduced gradient of `parameter` that belongs to this rank."""
        whole = None if self._parts.get(id(parameter)) is None else self._sum(parameter)
        if whole is None:
            return None
        here = parameter._hp_mapping.lp_fragment_address  # type: ignore[attr-defined]  # noqa: SLF001 - see the top
        return whole.detach().view(-1).narrow(0, int(here.start), int(here.numel))

    def earlier(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the sum of this rank's own gradients of `parameter` over the micro-batches of the step so far."""
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
        """Return this rank's part of each parameter, by id() of the parameter.

        For a frozen parameter, this is the part that the rank stores.
        """
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
        """Store that this rank's part of `parameter` consists of the elements of `tensor` from `start` on.

        `padded` is the number of elements of the part with its padding. The padding is left out.
        """
        ranks = self.process_groups[id(parameter)] = parameter.ds_process_group
        count = max(0, min(padded, int(parameter.ds_numel) - padded * dist.get_rank(ranks)))
        self._parts[id(parameter)] = ParameterPartition(tensor, self.inner, group, start, count) if count else None

    def reduced(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the reduced gradient of this rank's part of `parameter`, without the padding of the part."""
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
