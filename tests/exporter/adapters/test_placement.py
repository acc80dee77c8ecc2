"""Conversion of DTensor placements to `placement` and `shard_group`, with a simulated mesh of eight ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rankscope_exporter.adapters.placement import Layout, layout_of, ranks_text

FULL = Layout("full")


@dataclass
class Mesh:
    """The used part of a DeviceMesh, on rank 6 of 8: the third of four pairs, or the coordinate `here`."""

    mesh: torch.Tensor
    here: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return self.mesh.ndim

    def size(self, dim: int | None = None) -> int:
        return self.mesh.numel() if dim is None else self.mesh.shape[dim]

    def get_coordinate(self) -> tuple[int, ...]:
        return self.here


@dataclass
class Tensor:
    device_mesh: Mesh
    placements: tuple[Any, ...]


FLAT = Mesh(torch.arange(8), (6,))
PAIRS = Mesh(torch.arange(8).view(4, 2), (3, 0))
ALONE = Mesh(torch.arange(1), (0,))


@pytest.mark.parametrize(
    ("mesh", "placements", "expected"),
    [
        (FLAT, (Shard(0),), Layout("shard", "0-7")),
        (FLAT, (Replicate(),), Layout("replica")),
        (FLAT, (Partial(),), Layout("partial")),
        # Hybrid sharding: four copies, each in two parts; and two copies, each in four.
        (PAIRS, (Replicate(), Shard(0)), Layout("shard", "6,7")),
        (PAIRS, (Shard(0), Replicate()), Layout("shard", "0-6:2")),
        # Sharded by FSDP and by tensor parallelism: all eight hold a part.
        (PAIRS, (_StridedShard(0, split_factor=2), Shard(0)), Layout("shard", "0-7")),
        (PAIRS, (Replicate(), Replicate()), Layout("replica")),
        (ALONE, (Shard(0),), FULL),
    ],
)
def test_dtensor_names_the_ranks_of_the_other_shards(mesh, placements, expected):
    assert expected == layout_of(Tensor(mesh, placements), FULL)


def test_plain_tensor_has_the_layout_of_its_framework():
    assert Layout("replica") == layout_of(torch.ones(2), Layout("replica"))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "3"),
        ([0, 1], "0,1"),
        ([4, 5, 6, 7], "4-7"),
        ([0, 8, 16, 24], "0-24:8"),
        ([0, 3, 5], "0,3,5"),
        ([2, 1, 0], "2,1,0"),
    ],
)
def test_ranks_are_written_in_short_form(ranks, text):
    assert text == ranks_text(ranks)
