"""Tensor parallelism (`parallelize_module`): some parameters are DTensors, the others the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from rankscope_exporter.adapters.base import Framework
from rankscope_exporter.adapters.placement import loaded


class TensorParallel(Framework):
    """All ranks of the mesh compute on the same data, so each gradient is what it will be when backward ends.

    Gradients of shards are shards. Nothing is reduced: the reduced gradient is the local one.
    """

    name: ClassVar[str] = "tensor_parallel"
    priority: ClassVar[int] = 5

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        largest = max((parameter.device_mesh for parameter in _sharded(model)), key=lambda mesh: mesh.size())
        self._mesh_size: int = largest.size()
        self._mesh_ranks: list[int] = sorted(largest.mesh.reshape(-1).tolist())

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Return whether any parameter is a DTensor."""
        return bool(_sharded(model))

    @property
    def replicated(self) -> bool:
        """Return True: what is not sharded is computed alike on every rank of the mesh."""
        return True

    def replicas(self, parameter: torch.Tensor) -> Sequence[int]:
        """Return the ranks of the mesh for what is no DTensor: all of them compute on it alike."""
        return super().replicas(parameter) if hasattr(parameter, "device_mesh") else self._mesh_ranks

    def copies(self, world_size: int) -> int:
        """Return how many meshes there are, which a loop may train on different data."""
        return max(1, world_size // self._mesh_size)


def _sharded(model: nn.Module) -> list[Any]:
    distributed = loaded("torch.distributed.tensor", "DTensor")
    return [parameter for parameter in model.parameters() if isinstance(parameter, distributed)]
