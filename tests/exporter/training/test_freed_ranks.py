"""Two ranks: the monitor keeps no parameter of a wrapped model alive that torch frees without a monitor."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.exporter.training.freed_models import assign, convert, delete, detach_and_delete, left_after
from tests.programs import warm_processes
from tests.properties import THOROUGH
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


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


def fsdp1(*, use_orig_params: bool) -> nn.Module:
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
    "fsdp1": partial(fsdp1, use_orig_params=True),
    "fsdp1, flat": partial(fsdp1, use_orig_params=False),
    "fsdp2": fsdp2,
}
WAYS = {way.__name__: way for way in (assign, convert, delete, detach_and_delete)}
if not THOROUGH:
    del MODELS["fsdp1, flat"], WAYS["detach_and_delete"]


def work(rank: int, store: str, results: Any) -> None:
    """Run every case on one rank: [left immediately, left after a collection, faults] without a monitor and with it."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    found: Any = {}
    try:
        for (name, make), (way_name, way) in ((model, way) for model in MODELS.items() for way in WAYS.items()):
            found[name, way_name] = [left_after(way, make, watched=watched) for watched in (False, True)]
    except BaseException:
        found = traceback.format_exc()
        raise
    finally:
        results.put(found)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], list[Any]]]:
    context = warm_processes()
    results = context.Queue()
    store = str(tmp_path_factory.mktemp("freed") / "store")
    workers = [context.Process(target=work, args=(rank, store, results), daemon=True) for rank in range(WORLD)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=200) for _ in range(WORLD)]
    for worker in workers:
        worker.join(30)

    assert [dict] * WORLD == [type(item) for item in found], found
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.thorough
def test_parameters_are_freed_as_without_a_monitor(model, way, outcomes):
    for of_rank in outcomes:
        alone, watched = of_rank[model, way]

        assert alone == watched


def test_sharded_parameters_are_freed(outcomes):
    """Without this the other cases prove nothing: torch itself keeps flat parameters and DDP's buckets."""
    for of_rank in outcomes:
        assert [[], [], 0] == of_rank["fsdp2", "assign"][1] == of_rank["fsdp2", "convert"][1]
        assert [] == of_rank["fsdp2", "delete"][1][1] == of_rank["fsdp1", "delete"][1][1]
