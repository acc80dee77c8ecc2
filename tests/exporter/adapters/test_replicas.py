"""Ranks with equal elements by construction: on a simulated mesh of eight ranks, and for wrapped models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.exporter.adapters.test_placement import ALONE, FLAT, PAIRS, Tensor
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from rankscope_exporter.adapters import framework_of
from rankscope_exporter.adapters.placement import replicas_of


@pytest.mark.parametrize(
    ("mesh", "placements", "ranks"),
    [
        (FLAT, (Replicate(),), [0, 1, 2, 3, 4, 5, 6, 7]),
        (FLAT, (Shard(0),), []),
        (FLAT, (Partial(),), []),
        (PAIRS, (Replicate(), Shard(0)), [0, 2, 4, 6]),
        (PAIRS, (Shard(0), Replicate()), [6, 7]),
        (PAIRS, (Replicate(), Replicate()), [0, 1, 2, 3, 4, 5, 6, 7]),
        (PAIRS, (Replicate(), Partial()), []),
        (ALONE, (Replicate(),), []),
    ],
)
def test_replicas_are_along_the_replicating_mesh_dimensions(mesh: Any, placements: Any, ranks: list[int]) -> None:
    tensor: Any = Tensor(mesh, placements)

    assert ranks == list(replicas_of(tensor))


def test_plain_tensor_has_no_replicas() -> None:
    assert [] == list(replicas_of(torch.ones(2)))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_pipeline_stage_has_the_replicas_of_its_wrapper() -> None:
    net = nn.Linear(4, 2)
    stages = [PipelineStage(part, 0, 1, torch.device("cpu")) for part in (net, DistributedDataParallel(net))]
    bare, wrapped = map(framework_of, stages)  # they do not keep the stages alive

    assert ([], [0]) == (list(bare.replicas(net.weight)), list(wrapped.replicas(net.weight)))


@pytest.mark.usefixtures("group")
def test_frozen_parameters_have_replicas_and_ignored_ones_do_not() -> None:
    net = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
    net[1].weight.requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.bias"])
    wrapped = DistributedDataParallel(net)
    framework = framework_of(wrapped)
    found = {name: list(framework.replicas(parameter)) for name, parameter in net.named_parameters()}

    assert {"0.weight": [0], "0.bias": [], "1.weight": [0], "1.bias": [0]} == found
