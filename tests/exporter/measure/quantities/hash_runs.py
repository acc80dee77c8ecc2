"""Two ranks that train with hashes of replicas; each returns its rows and the expected rows."""

import json
import os
import sys
import traceback
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.exporter.parts import config_of, ended, published
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from rankscope_exporter import Monitor

WORLD, STEPS = 2, 6
EVERY = 2  # steps 1, 3 and 5 are measured
Wrap = Callable[[nn.Module], nn.Module]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.enter = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.leave = nn.Linear(10, 3)
        self.register_buffer("table", torch.arange(5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(torch.tanh(self.norm(self.enter(x))))


@dataclass
class Case:
    """One training. `disturbed` is (step, parameter): rank 1 changes one element of the parameter before that step."""

    wrap: Wrap = DistributedDataParallel
    options: Mapping[str, Any] = field(default_factory=dict)
    disturbed: tuple[int, str] | None = None
    micro_batches: int = 1
    scaled: bool = False
    zero: bool = False
    grouped: bool = False
    two_optimizers: bool = False


def hybrid(net: nn.Module) -> nn.Module:
    return fully_shard(net, mesh=init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("copies", "parts")))


def sharded(net: nn.Module) -> nn.Module:
    return fully_shard(net, mesh=init_device_mesh("cpu", (WORLD,)))


def unsharded(net: nn.Module) -> nn.Module:
    whole = ShardingStrategy.NO_SHARD
    return FullyShardedDataParallel(net, sharding_strategy=whole, use_orig_params=True, device_id=torch.device("cpu"))


CASES: dict[str, Case] = {
    "equal": Case(options={"state": True}),
    "equal, accumulated and scaled": Case(micro_batches=2, scaled=True),
    "disturbed": Case(disturbed=(3, "leave.weight")),
    "disturbed between samples": Case(disturbed=(4, "enter.weight"), grouped=True, options={"state": True}),
    "buffers": Case(options={"buffers": ["*"]}),
    "a constant buffer": Case(options={"buffers": ["table"]}),
    "ZeRO": Case(zero=True, options={"state": True}),
    "two optimizers": Case(two_optimizers=True),
    "hybrid": Case(hybrid),
    "sharded": Case(sharded),
    "unsharded": Case(unsharded),
    "by hand": Case(lambda net: net, options={"everywhere": True}),
    "bare": Case(lambda net: net),
    "all of a bare one": Case(lambda net: net, options={"of": "all"}),
}


def train(case: Case, rank: int) -> dict[str, Any]:
    net = Net()
    model = case.wrap(net)
    parameters = list(model.parameters())
    config = replace(
        config_of("parameters", "hashes", options={"hashes": {"every": EVERY, **case.options}}, statistics="torch"),
        exit_wait_seconds=30.0 if os.environ.get("RANKSCOPE_INGEST_URL") else 0.0,
    )
    optimizers = _optimizers(case, parameters)
    scaler = torch.amp.GradScaler("cpu", enabled=case.scaled)
    monitor = Monitor(config)
    monitor.attach(model, optimizers, dp_group=dist.group.WORLD if case.grouped else None)
    truth: dict[str, dict[str, list[int]]] = {}
    for step in range(1, STEPS + 1):
        for micro in range(case.micro_batches):
            data = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
            scaler.scale(model(data).square().mean()).backward()
        if case.disturbed is not None and case.disturbed[0] == step and rank == 1:
            _disturb(dict(net.named_parameters())[case.disturbed[1]])
        if case.wrap not in (DistributedDataParallel, hybrid, sharded, unsharded):
            for parameter in parameters:
                dist.all_reduce(parameter.grad)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        truth[str(step)] = {name: _bits(value) for name, value in net.named_parameters()}
    monitor.end_step()
    return {**_left(monitor), "truth": truth}


def _optimizers(case: Case, parameters: list[nn.Parameter]) -> list[Any]:
    if case.zero:
        return [ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01)]
    if case.two_optimizers:
        return [torch.optim.Adam(parameters[:2], lr=0.01), torch.optim.SGD(parameters[2:], lr=0.01)]
    return [torch.optim.Adam(parameters, lr=0.01)]


def _disturb(parameter: torch.Tensor) -> None:
    """Change one element to the next float."""
    flat = parameter.data.view(-1)
    flat[1] = torch.nextafter(flat[1], torch.tensor(torch.inf))


def _bits(parameter: Any) -> list[int]:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.detach().contiguous().view(torch.int32).flatten().tolist()


def _left(monitor: Monitor) -> dict[str, Any]:
    published(monitor)
    with urllib.request.urlopen(f"{monitor.address}/metrics", timeout=60) as answer:
        page = answer.read().decode()
    found = ended(monitor)
    told = {"notices": found.notices, "faults": monitor.faults, "page": page}
    return {"rows": found.of("hashes"), "measured": bool(found.norms("param_after")), **told}


def main(folder: Path, cases: Sequence[str] = tuple(CASES)) -> None:
    children = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            try:
                _rank(rank, folder, cases)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(pid)
    sys.exit(max(map(abs, [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children])))


def _rank(rank: int, folder: Path, cases: Sequence[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    found = {}
    for name in cases:
        found[name] = train(CASES[name], rank)
        dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
