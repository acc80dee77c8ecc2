"""Placements, ranks of the other shards, and ranks with equal elements: on a simulated mesh, and of wrapped models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from rankscope_exporter.adapters import framework_of
from rankscope_exporter.adapters.placement import Layout, layout_of, ranks_text, replicas_of

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
    ("mesh", "placements", "expected", "replicas"),
    [
        (FLAT, (Shard(0),), Layout("shard", "0-7"), []),
        (FLAT, (Replicate(),), Layout("replica"), [0, 1, 2, 3, 4, 5, 6, 7]),
        (FLAT, (Partial(),), Layout("partial"), []),
        # Hybrid sharding: four copies, each in two parts; and two copies, each in four.
        (PAIRS, (Replicate(), Shard(0)), Layout("shard", "6,7"), [0, 2, 4, 6]),
        (PAIRS, (Shard(0), Replicate()), Layout("shard", "0-6:2"), [6, 7]),
        # Sharded by FSDP and by tensor parallelism: all eight hold a part.
        (PAIRS, (_StridedShard(0, split_factor=2), Shard(0)), Layout("shard", "0-7"), []),
        (PAIRS, (Replicate(), Replicate()), Layout("replica"), [0, 1, 2, 3, 4, 5, 6, 7]),
        (PAIRS, (Replicate(), Partial()), Layout("partial"), []),
        (ALONE, (Shard(0),), FULL, []),
        (ALONE, (Replicate(),), FULL, []),
    ],
)
def test_dtensor_names_the_other_shards_and_its_replicas(mesh, placements, expected, replicas):
    tensor: Any = Tensor(mesh, placements)

    assert (expected, replicas) == (layout_of(tensor, FULL), list(replicas_of(tensor)))


def test_plain_tensor_has_the_layout_of_its_framework_and_no_replicas():
    assert Layout("replica") == layout_of(torch.ones(2), Layout("replica"))
    assert [] == list(replicas_of(torch.ones(2)))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        *(([3], "3"), ([0, 1], "0,1"), ([4, 5, 6, 7], "4-7")),
        *(([0, 8, 16, 24], "0-24:8"), ([0, 3, 5], "0,3,5"), ([2, 1, 0], "2,1,0")),
    ],
)
def test_ranks_are_written_in_short_form(ranks, text):
    assert text == ranks_text(ranks)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_pipeline_stage_has_the_replicas_of_its_wrapper():
    net = nn.Linear(4, 2)
    stages = [PipelineStage(part, 0, 1, torch.device("cpu")) for part in (net, DistributedDataParallel(net))]
    bare, wrapped = map(framework_of, stages)  # they do not keep the stages alive

    assert ([], [0]) == (list(bare.replicas(net.weight)), list(wrapped.replicas(net.weight)))


@pytest.mark.usefixtures("group")
def test_frozen_parameters_have_replicas_and_ignored_ones_do_not():
    net = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
    net[1].weight.requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.bias"])
    wrapped = DistributedDataParallel(net)
    framework = framework_of(wrapped)
    found = {name: list(framework.replicas(parameter)) for name, parameter in net.named_parameters()}

    assert {"0.weight": [0], "0.bias": [], "1.weight": [0], "1.bias": [0]} == found
