"""Two real DDP ranks, one with a slow forward pass: the phases identify it, although both steps take equally long."""

from __future__ import annotations

import pytest
from tests.programs import run_two_ranks

PROGRAM = """
import time
import torch
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

def main():
    net = Net(is_slow=rank == 1)
    ddp = DistributedDataParallel(net, **OPTIONS)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    published = []
    with Monitor(MonitorConfig(console=False, exit_wait_seconds=0, every=100)).attach(ddp, optimizer) as monitor:
        monitor._session.publisher.publish = published.append
        for step in range(STEPS):
            for micro in range(MICRO):
                ddp.require_backward_grad_sync = micro == MICRO - 1
                ddp(torch.ones(4, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                net.slept = 0.0
        monitor.end_step()
        faults = monitor.faults
    seconds_of = {"slept": net.slept, "faults": faults}
    for scalar in [scalar for record in published for scalar in record.scalars if (record.step or 0) > 1]:
        if scalar.name in ("step_phase_seconds", "pre_collective_seconds", "step_seconds"):
            key = scalar.labels.get("phase", scalar.name)
            seconds_of[key] = seconds_of.get(key, 0.0) + scalar.value
    return seconds_of
"""


@pytest.mark.usual(1)
@pytest.mark.parametrize(
    ("options", "micro"), [({}, 1), ({"gradient_as_bucket_view": True}, 2)], ids=["plain", "bucket views, accumulated"]
)
def test_slow_rank_computes_longer_and_the_other_waits(options, micro):
    fast, slow = run_two_ranks(PROGRAM.replace("OPTIONS", repr(options)).replace("MICRO", str(micro)))

    assert 0 == fast["faults"] == slow["faults"]
    assert slow["slept"] <= slow["pre_collective_seconds"]
    assert slow["slept"] <= slow["forward"]
    # The other rank waits for the sleep, except for its own computing and the load of the machine.
    assert slow["slept"] / 2 <= fast["collective"]
    assert fast["pre_collective_seconds"] < slow["pre_collective_seconds"]
    assert slow["collective"] < fast["collective"]
    for rank in (fast, slow):
        phases = ("forward", "backward", "collective", "optimizer", "data_wait", "other", "monitor")
        assert rank["step_seconds"] == pytest.approx(sum(rank.get(phase, 0.0) for phase in phases), abs=1e-6)
