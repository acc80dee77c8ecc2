"""Where each kind of DeepSpeed optimizer keeps float32 parameters and gradients, and which part of which is here.

All of it is told by ranges that DeepSpeed itself computed; nothing is gathered. Attributes are DeepSpeed's own.
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
    """An optimizer of DeepSpeed's: copies of whole parameters, as for float16 or bfloat16 without ZeRO."""

    scatters: bool = False
    """Whether each backward pass leaves reduced parts, and no sum of local gradients."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.inner: torch.optim.Optimizer = optimizer.optimizer
        self.accumulates_in: torch.dtype | None = getattr(optimizer, "gradient_accumulation_dtype", None)
        self.process_groups: dict[int, dist.ProcessGroup] = {}
        """By identity of the parameter: who holds the other parts."""
        self._parts: Parts = {}

    def parts(self) -> Parts:
        """Return what this rank updates of each parameter, by identity."""
        for group, (models, copies) in enumerate(
            zip(self.optimizer.fp16_groups, self.optimizer.fp32_groups, strict=True)
        ):
            for parameter, copy in zip(models, copies, strict=True):
                self._parts[id(parameter)] = ParameterPartition(copy, self.inner, group)
        return self._parts

    def reduced(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the reduced gradient of this rank's part, before it is unscaled and clipped."""
        return parameter.grad

    def earlier(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the sum of this rank's own gradients so far."""
        return parameter.grad

    def _part(self, parameter: nn.Parameter) -> ParameterPartition | None:
        return self._parts.get(id(parameter))


class FusedFp16(ZeroStage):
    """The same copies as views of one flat tensor, for fused optimizers."""

    def parts(self) -> Parts:
        """Return what this rank updates of each parameter, by identity."""
        for group, models in enumerate(self.optimizer.fp16_groups):
            start = 0
            for parameter in models:
                flat = self.optimizer.fp32_groups_flat[group]
                self._parts[id(parameter)] = ParameterPartition(flat, self.inner, group, start, parameter.numel())
                start += parameter.numel()
        return self._parts


class MappedPartitions(ZeroStage):
    """DeepSpeed links each parameter to its fragment of this rank's flat partition, where it has one."""

    def partitions(self) -> tuple[list[Any], list[torch.Tensor]]:
        """Return the parameters of each group, and this rank's flat partition of them."""
        raise NotImplementedError

    def parts(self) -> Parts:
        """Return what this rank updates of each parameter, by identity."""
        groups, flats = self.partitions()
        for group, parameters in enumerate(groups):
            for parameter in parameters:
                self.process_groups[id(parameter)] = self.optimizer.real_dp_process_group[group]
                mapping = parameter._hp_mapping  # noqa: SLF001 - see the top of the module
                where = None if mapping is None else mapping.hp_fragment_address
                self._parts[id(parameter)] = where and ParameterPartition(
                    flats[group], self.inner, group, int(where.start), int(where.numel)
                )
        return self._parts


class Zero1And2(MappedPartitions):
    """ZeRO 1 and 2: `averaged_gradients` has, for each group, the pieces of this rank's partition one after another."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.scatters = bool(optimizer.partition_gradients)
        self._places: dict[int, dict[int, int]] = {}  # group -> start of a piece -> its position

    def partitions(self) -> tuple[list[Any], list[torch.Tensor]]:
        """Return the parameters of each group, and this rank's flat partition of them."""
        return self.optimizer.bit16_groups, self.optimizer.single_partition_of_fp32_groups

    def reduced(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the piece that begins where the part begins."""
        part = self._part(parameter)
        if part is None:
            return None
        if getattr(self.optimizer, "cpu_offload", False):
            return part.of(part.tensor.grad)
        pieces = self.optimizer.averaged_gradients.get(part.group)
        if pieces is None:
            return None
        places = self._places.setdefault(part.group, {}) or self._found(part.group, pieces)
        piece: torch.Tensor = pieces[places[part.start]]
        assert piece.numel() == part.count
        return piece.detach().view(-1)

    def _found(self, group: int, pieces: Any) -> dict[int, int]:
        start = 0
        for position, piece in enumerate(pieces):
            self._places[group].setdefault(start, position)
            start += piece.numel()
        return self._places[group]

    def earlier(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the sum, which has a place of its own where it has a type of its own."""
        apart = getattr(self.optimizer, "use_grad_accum_attribute", False)
        found: torch.Tensor | None = parameter.grad_accum if apart else parameter.grad  # type: ignore[attr-defined]
        return found


class Bf16Zero1(MappedPartitions):
    """ZeRO 1 in bfloat16 with sums in float32: all-reduced gradients are whole on each rank, in views of one tensor."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.accumulates_in = getattr(optimizer, "grad_acc_dtype", None)
        self._places = {
            id(parameter): (group, position)
            for group, parameters in enumerate(optimizer.bf16_groups)
            for position, parameter in enumerate(parameters)
        }

    def partitions(self) -> tuple[list[Any], list[torch.Tensor]]:
        """Return the parameters of each group, and this rank's flat partition of them."""
        return self.optimizer.bf16_groups, self.optimizer.fp32_groups_flat_partition

    def reduced(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return this rank's part of the whole."""
        if self._part(parameter) is None:
            return None
        whole = self._sum(parameter)
        here = parameter._hp_mapping.lp_fragment_address  # type: ignore[attr-defined]  # noqa: SLF001 - see the top
        return None if whole is None else whole.detach().view(-1).narrow(0, int(here.start), int(here.numel))

    def earlier(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the sum of this rank's own gradients so far."""
        whole = self._sum(parameter)
        return None if whole is None else whole.view(parameter.shape)

    def _sum(self, parameter: nn.Parameter) -> torch.Tensor | None:
        group, position = self._places[id(parameter)]
        if not self.optimizer.fp32_groups_has_gradients[group][position]:
            return None
        whole: torch.Tensor = self.optimizer.fp32_groups_gradients[group][position]
        return whole


class Zero3(ZeroStage):
    """ZeRO 3: parameters themselves are divided evenly, one by one, the last part padded."""

    scatters = True

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._places: dict[int, tuple[int, int]] = {}  # sub-group and position in it

    def parts(self) -> Parts:
        """Return what this rank updates of each parameter, by identity; of a frozen one what it holds."""
        for number, parameters in enumerate(self.optimizer.fp16_groups):
            group = self.optimizer.sub_group_to_group_id[number]
            flat = self.optimizer.fp32_partitioned_groups_flat[number]
            for position, parameter in enumerate(parameters):
                _, start, padded = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
                count = self._own_elements(parameter, padded)
                self._places[id(parameter)] = number, position
                self._parts[id(parameter)] = (
                    ParameterPartition(flat, self.inner, group, start, count) if count else None
                )
        for parameter in self.optimizer.module.parameters():
            if id(parameter) not in self._parts and hasattr(parameter, "ds_tensor"):
                count = self._own_elements(parameter, parameter.ds_tensor.numel())
                held = ParameterPartition(parameter.ds_tensor, self.inner, FROZEN, 0, count)
                self._parts[id(parameter)] = held if count else None
        return self._parts

    def _own_elements(self, parameter: Any, padded: int) -> int:
        group = parameter.ds_process_group
        self.process_groups[id(parameter)] = group
        return max(0, min(padded, int(parameter.ds_numel) - padded * dist.get_rank(group)))

    def reduced(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the partition without its padding."""
        part, place = self._part(parameter), self._places.get(id(parameter))
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
"""Told apart by what they have, since subclasses bear other names."""


def stage_of(optimizer: Any) -> ZeroStage | None:
    """Return what is known of an optimizer that DeepSpeed made; None of one that is not known."""
    return next((kind(optimizer) for attribute, kind in _KINDS if hasattr(optimizer, attribute)), None)
