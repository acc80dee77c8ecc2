"""FLOPs of each rank for copied, sharded and divided models, compared with 6 N by hand, on two real ranks."""

from __future__ import annotations

import pytest
from tests.programs import run_two_ranks
from tests.properties import THOROUGH

PROGRAM = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from rankscope_exporter import Monitor
from tests.exporter.conftest import Reader, wait_until

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def measured(kind):
    torch.manual_seed(0)
    table, first, last = nn.Embedding(50, 8), nn.Linear(8, 16), nn.Linear(16, 4)
    model, options, step = nn.Sequential(table, first, nn.ReLU(), last), {}, None
    ids = torch.zeros(2, 5, dtype=torch.long)
    config = {"console": False, "exit_wait_seconds": 0, "statistics": "torch", "quantities": ["gradients"]}
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp2":
        fully_shard(last)
        fully_shard(model)
    elif kind == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    elif kind == "tp":
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"1": ColwiseParallel(), "3": RowwiseParallel()})
    elif kind == "groups":
        options = {"tp_group": dist.group.WORLD}
        config["throughput"] = {"flops_per_sample": 1000, "method": "given"}
    elif kind == "images":
        model, ids = DistributedDataParallel(nn.Conv2d(3, 4, 3)), torch.zeros(2, 3, 8, 8)
        config["throughput"] = {"peak_tflops": 1.0}  # so that values are expected
    elif kind == "pp":
        part = nn.Sequential(table, first, nn.ReLU()) if rank == 0 else last
        model = PipelineStage(part, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(model, 2, loss_fn=lambda output, target: output.sum())
        arguments, keywords = ((ids,), {}) if rank == 0 else ((), {"target": ids})
        step = lambda: schedule.step(*arguments, **keywords)
    owner = part if kind == "pp" else model
    optimizer = torch.optim.SGD(owner.parameters(), lr=0.0)
    monitor = Monitor(config).attach(model, optimizer, **options)
    for _ in range(2):
        optimizer.zero_grad()
        step() if step else model(ids).sum().backward()
        optimizer.step()
        monitor.log(**({"samples": 2} if kind == "images" else {"tokens": ids.numel(), "samples": 2}))
    monitor.end_step()
    reader = Reader(monitor.address)
    wait_until(lambda: len(reader.scalars("step_seconds")) == 2)
    rates, seconds = reader.scalars("tflops_per_gpu"), reader.scalars("step_seconds")
    methods = sorted({json.loads(scalar["labels"])["method"] for record in reader.records()
                      for scalar in record["scalars"] or () if scalar["name"] == "tflops_per_gpu"})
    notes = [event["message"] for event in reader.events() if "TFLOP/s" in event["message"]]
    dist.barrier()
    monitor.detach()
    return [rate * took * 1e12 for (_, rate), (_, took) in zip(rates, seconds)], methods, monitor.faults, notes

def main():
    return {kind: measured(kind) for kind in KINDS}
"""

TOKENS = 10
FIRST, LAST = 8 * 16 + 16, 16 * 4 + 4
WHOLE = 6 * (FIRST + LAST) * TOKENS
"""The table is looked up, not multiplied."""


# By kind: the method, and the FLOPs of each rank.
EXPECTED = {
    "ddp": ("6n", (WHOLE, WHOLE)),  # each rank has a different batch
    "fsdp2": ("6n", (WHOLE, WHOLE)),
    "fsdp1": ("6n", (WHOLE, WHOLE)),
    "tp": ("6n", (WHOLE / 2, WHOLE / 2)),  # both ranks have the same batch and half of the matrices
    "groups": ("given", (1000 * 2 / 2, 1000 * 2 / 2)),
    "pp": ("6n", (6 * FIRST * TOKENS, 6 * LAST * TOKENS)),  # each rank has one stage
}


@pytest.fixture(scope="module")
def ranks():
    kinds = [*EXPECTED, "images"] if THOROUGH else ["images"]
    return run_two_ranks(PROGRAM.replace("KINDS", repr(kinds)))


@pytest.mark.parametrize("kind", EXPECTED)
@pytest.mark.thorough
def test_each_rank_has_the_flops_of_its_own_device(kind, ranks):
    method, expected = EXPECTED[kind]

    for flops, rank in zip(expected, ranks, strict=True):
        found, methods, faults, notes = rank[kind]
        assert [flops] * 2 == pytest.approx(found)
        assert ([method], 0, []) == (methods, faults, notes)


def test_only_rank_0_reports_absent_values(ranks):
    assert [[], []] == [rank["images"][0] for rank in ranks]
    assert [1, 0] == [len(rank["images"][-1]) for rank in ranks]
