"""Two ranks: the monitor keeps no parameter of a wrapped model alive that torch frees without a monitor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.exporter.adapters.loops import WORLD
from tests.exporter.adapters.observation import begin, outcomes
from tests.exporter.training.freed_models import assign, convert, delete, detach_and_delete, left_after
from tests.properties import THOROUGH
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(11, 8), nn.Tanh(), nn.Linear(8, 8))
        self.gate = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        result: torch.Tensor = x * self.gate(x).softmax(-1)[..., :1]
        return result


def ddp() -> nn.Module:
    return DistributedDataParallel(Net())


def fsdp1(*, use_orig_params: bool = True) -> nn.Module:
    wrap = partial(FullyShardedDataParallel, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    net = Net()
    net.first = wrap(net.first)
    return wrap(net)


def fsdp2() -> nn.Module:
    net, mesh = Net(), init_device_mesh("cpu", (WORLD,))
    for part in (net.first, net):
        fully_shard(part, mesh=mesh)
    return net


MODELS: dict[str, Callable[[], nn.Module]] = {
    "ddp": ddp,
    "fsdp1": fsdp1,
    "fsdp1, flat": partial(fsdp1, use_orig_params=False),
    "fsdp2": fsdp2,
}
WAYS = {way.__name__: way for way in (assign, convert, delete, detach_and_delete)}
USUAL = ("ddp: delete", "fsdp1: delete", "fsdp2: assign", "fsdp2: convert", "fsdp2: delete")
CASES = [f"{model}: {way}" for model in MODELS for way in WAYS] if THOROUGH else USUAL


def work(rank: int, store: str, names: list[str], results: Any) -> None:
    """Run the cases on one rank: [left immediately, left after a collection, faults] without a monitor and with it."""
    begin(rank, store)
    for name in names:
        model, _, way = name.partition(": ")
        results.put((name, rank, [left_after(WAYS[way], MODELS[model], watched=watched) for watched in (False, True)]))
    dist.destroy_process_group()


@pytest.mark.timeout(300)
def test_parameters_are_freed_as_without_a_monitor(tmp_path):
    """FSDP2 frees its shards, so that this proves something: torch itself keeps flat parameters and DDP's buckets."""
    found = outcomes(tmp_path, work, CASES)

    assert {} == {case: both for case, both in found.items() if both[0] != both[1]}
    for rank in range(WORLD):
        assert [[], [], 0] == found["fsdp2: assign", rank][1] == found["fsdp2: convert", rank][1]
        assert [] == found["fsdp2: delete", rank][1][1] == found["fsdp1: delete", rank][1][1]
