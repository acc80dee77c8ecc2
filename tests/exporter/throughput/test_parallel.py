"""FLOPs of each rank where a model is copied, sharded or divided, against counts by hand: a real group of two."""

from __future__ import annotations

import json

import pytest
from tests.programs import run_program

PROGRAM = """
import json, os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from rankscope_exporter import Monitor
from tests.exporter.conftest import Reader, wait_until

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

folder = os.environ["FOLDER"]
rank = 1 if os.fork() == 0 else 0
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)


def measured(kind):
    torch.manual_seed(0)
    first, last = nn.Linear(8, 16), nn.Linear(16, 4)
    model, options, step = nn.Sequential(first, nn.ReLU(), last), {}, None
    config = {"console": False, "exit_wait_seconds": 0, "statistics": "torch", "quantities": ["gradients"]}
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp2":
        fully_shard(last)
        fully_shard(model)
    elif kind == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    elif kind == "tp":
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    elif kind == "groups":
        options = {"tp_group": dist.group.WORLD}
        config["throughput"] = {"flops_per_sample": 1000, "method": "given"}
    elif kind == "pp":
        part = nn.Sequential(first, nn.ReLU()) if rank == 0 else last
        model = PipelineStage(part, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(model, 2, loss_fn=lambda output, target: output.sum())
        arguments, keywords = ((torch.zeros(10, 8),), {}) if rank == 0 else ((), {"target": torch.zeros(10, 4)})
        step = lambda: schedule.step(*arguments, **keywords)
    owner = part if kind == "pp" else model
    optimizer = torch.optim.SGD(owner.parameters(), lr=0.0)
    monitor = Monitor(config).attach(model, optimizer, **options)
    for _ in range(2):
        optimizer.zero_grad()
        step() if step else model(torch.zeros(10, 8)).sum().backward()
        optimizer.step()
        monitor.log(samples=10)
    monitor.end_step()
    reader = Reader(monitor.address)
    wait_until(lambda: len(reader.scalars("step_seconds")) == 2)
    rates, seconds = reader.scalars("tflops_per_gpu"), reader.scalars("step_seconds")
    methods = sorted({json.loads(scalar["labels"])["method"] for record in reader.records()
                      for scalar in record["scalars"] or () if scalar["name"] == "tflops_per_gpu"})
    dist.barrier()
    monitor.detach()
    return [rate * took * 1e12 for (_, rate), (_, took) in zip(rates, seconds)], methods, monitor.faults


found = {kind: measured(kind) for kind in os.environ["KINDS"].split()}
with open(f"{folder}/{rank}", "w") as file:
    json.dump(found, file)
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    os.wait()
"""

BATCH = 10
FIRST, LAST = 2 * BATCH * 8 * 16, 2 * BATCH * 16 * 4
WHOLE = 2 * FIRST + 3 * LAST
PARAMETERS = 8 * 16 + 16 + 16 * 4 + 4


# By kind: the method, and the FLOPs of each rank.
EXPECTED = {
    "ddp": ("counted", (WHOLE, WHOLE)),  # each has a batch of its own
    "fsdp2": ("counted", (WHOLE, WHOLE)),
    "fsdp1": ("6n", (6 * PARAMETERS * BATCH, 6 * PARAMETERS * BATCH)),
    "tp": ("counted", (WHOLE / 2, WHOLE / 2)),  # both have the same batch, each half of the matrices
    "groups": ("given", (1000 * BATCH / 2, 1000 * BATCH / 2)),
    "pp": ("counted", (2 * FIRST, 3 * LAST)),  # each has its stage; the second returns a gradient to the first
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    done = run_program(PROGRAM, seconds=240, FOLDER=str(folder), KINDS=" ".join(EXPECTED))
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / str(rank)).read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", EXPECTED)
def test_each_rank_has_the_flops_of_its_own_device(kind, ranks):
    method, expected = EXPECTED[kind]

    for flops, rank in zip(expected, ranks, strict=True):
        found, methods, faults = rank[kind]
        assert [flops] * 2 == pytest.approx(found)
        assert ([method], 0) == (methods, faults)
