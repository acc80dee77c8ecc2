"""Adapter for tensor parallelism (`parallelize_module`): some parameters are DTensors, the rest are replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from rankscope_exporter.adapters.base import Framework, FrameworkTraits
from rankscope_exporter.adapters.placement import loaded


class TensorParallel(Framework):
    """Adapter for tensor parallelism, where all ranks of the device mesh compute with the same data.

    Nothing is reduced after the backward pass, so the reduced gradient is equal to the rank's own gradient. The
    gradient of a sharded parameter is sharded in the same way.
    """

    name: ClassVar[str] = "tensor_parallel"
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
