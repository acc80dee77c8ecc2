"""Two real ranks under DDP, one of them slowed in its forward: which one shows, although both steps take as long."""

from __future__ import annotations

import json

import pytest
from tests.programs import run_program

PROGRAM = """
import json, multiprocessing, os, sys, time
sys.path.insert(0, {folder!r})
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from rankscope_exporter import Monitor, MonitorConfig

STEPS, SLEEP = 6, 0.15

class Net(nn.Module):
    def __init__(self, is_slow):
        super().__init__()
        self.linear, self.is_slow, self.slept = nn.Linear(64, 64), is_slow, 0.0

    def forward(self, x):
        if self.is_slow:
            began = time.monotonic()
            time.sleep(SLEEP)
            self.slept += time.monotonic() - began
        return self.linear(x)

def work(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{{store}}", rank=rank, world_size=2)
    net = Net(is_slow=rank == 1)
    ddp = DistributedDataParallel(net, **{options!r})
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    published, took = [], 0.0
    with Monitor(MonitorConfig(console=False, exit_wait_seconds=0, every=100)).attach(ddp, optimizer) as monitor:
        monitor._session.publisher.publish = published.append
        for step in range(STEPS):
            net.slept = net.slept if step else 0.0
            for micro in range({micro}):
                ddp.require_backward_grad_sync = micro == {micro} - 1
                ddp(torch.ones(4, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                net.slept = 0.0
        monitor.end_step()
        faults = monitor.faults
    scalars = [scalar for record in published for scalar in record.scalars if (record.step or 0) > 1]
    told = {{}}
    for scalar in scalars:
        if scalar.name in ("step_phase_seconds", "pre_collective_seconds", "step_seconds"):
            key = scalar.labels.get("phase", scalar.name)
            told[key] = told.get(key, 0.0) + scalar.value
    with open(os.path.join({folder!r}, f"{{rank}}.json"), "w") as file:
        json.dump({{"slept": net.slept, "faults": faults, **told}}, file)
    dist.destroy_process_group()

store = os.path.join({folder!r}, "store")
ranks = [multiprocessing.get_context("fork").Process(target=work, args=(rank, store)) for rank in range(2)]
for rank in ranks: rank.start()
for rank in ranks: rank.join()
sys.exit(max(rank.exitcode != 0 for rank in ranks))
"""


@pytest.mark.parametrize(
    ("options", "micro"), [({}, 1), ({"gradient_as_bucket_view": True}, 2)], ids=["plain", "bucket views, accumulated"]
)
def test_a_slow_rank_computes_for_long_and_the_other_one_waits(tmp_path, options, micro):
    done = run_program(PROGRAM.format(folder=str(tmp_path), options=options, micro=micro))
    assert 0 == done.returncode, done.stderr
    fast, slow = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))

    assert 0 == fast["faults"] == slow["faults"]
    assert slow["slept"] <= slow["pre_collective_seconds"]
    assert slow["slept"] <= slow["forward"]
    # What one sleeps the other waits, but for the little that it does meanwhile, and what the machine takes from it.
    assert slow["slept"] / 2 <= fast["collective"]
    assert fast["pre_collective_seconds"] < slow["pre_collective_seconds"]
    assert slow["collective"] < fast["collective"]
    for rank in (fast, slow):
        phases = ("forward", "backward", "collective", "optimizer", "data_wait", "other", "monitor")
        assert rank["step_seconds"] == pytest.approx(sum(rank.get(phase, 0.0) for phase in phases), abs=1e-6)
