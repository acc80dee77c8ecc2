"""One of two real ranks exceeds `max_overhead`: both sample less often, at the same steps, and return together."""

from __future__ import annotations

from typing import Any

import pytest
from tests.programs import run_two_ranks

PROGRAM = """
import time
import torch
from torch import nn
from rankscope_exporter import Monitor

LIMIT, STEP = 4000, 1.0
now = cost = 0.0  # of this rank: a clock and a cost that the program moves

def main():
    global now, cost
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    config = {
        "quantities": ["parameters"], "max_overhead": 0.2, "switch_poll_seconds": 0.02, "console": False,
        "exit_wait_seconds": 0, "serve": {"ring_records": 3 * LIMIT},
    }
    monitor = Monitor(config).attach(net, optimizer)
    session = monitor._session
    governor, ring = session.reactions.overhead_controller, session.channel.ring
    governor._clock, governor._cost = lambda: now, lambda: cost
    seen = set()
    for step in range(1, LIMIT):
        net(torch.ones(2, 3)).sum().backward()
        if rank == 1 and 2 not in seen and session.current_step.is_sampled:
            now, cost = now + STEP, cost + STEP  # half of the time
        optimizer.step()
        optimizer.zero_grad()
        now += STEP
        time.sleep(0.003 - 0.002 * rank)  # they do not keep pace
        if step % 10 == 0:  # but for looking whether both have come so far
            told = torch.tensor([float(governor.stretch >= 4), float(governor.stretch == 1)])
            dist.all_reduce(told)
            if told[0] == 2:
                seen.add(2)
            if told[1] == 2 and 2 in seen:
                break
    monitor.detach()
    records = ring.after(-1, 1 << 30).records
    return {
        "measured": [r.step for r in records if r.statistics is not None],
        "events": [json.loads(e.details) for r in records for e in r.events if e.type == "budget"],
        "late": [e.message for r in records for e in r.events if e.type in ("fault", "note")],
        "faults": monitor.faults, "steps": step,
    }
"""


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """Run both ranks once."""
    return run_two_ranks(PROGRAM)


def test_all_ranks_sample_the_same_steps_throughout(ranks):
    one, other = ranks

    assert one["measured"] == other["measured"]
    assert len(one["measured"]) < one["steps"]
    assert [0, 0] == [rank["faults"] for rank in ranks]


def test_rank_above_max_overhead_stretches_all_ranks(ranks):
    for rank in ranks:
        up = [event for event in rank["events"] if event["now"] > event["was"]]
        assert up
        assert {1} == {event["rank"] for event in up}
        assert all(event["share"] > 0.2 for event in up)


def test_all_ranks_return_to_the_interval_when_all_overheads_are_low(ranks):
    one, other = (rank["events"] for rank in ranks)

    assert one == other
    assert 1 == one[-1]["now"]
    assert all(event["step"] == event["agreed_step"] for event in one)
