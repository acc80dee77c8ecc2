"""Two real ranks: a NaN on one rank starts a capture on both, and the overhead of one rank stretches both."""

from __future__ import annotations

from typing import Any

import pytest
from tests.programs import run_two_ranks

PROGRAM = """
import time
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from rankscope_exporter import Monitor

LIMIT, STEP = 4000, 1.0
QUIET = {
    "quantities": ["parameters"], "switch_poll_seconds": 0.02, "console": False, "exit_wait_seconds": 0,
    "serve": {"ring_records": 3 * LIMIT},
}

def make():
    torch.manual_seed(7)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    return net, torch.optim.SGD(net.parameters(), lr=0.01)

def train(net, optimizer, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    loss = net(torch.randn(6, 4, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()

def agreed(*flags):
    told = torch.tensor([float(flag) for flag in flags])
    dist.all_reduce(told)
    return (told == dist.get_world_size()).tolist()

def details(records, kind):
    return [json.loads(e.details) for r in records for e in r.events if e.type == kind]

def captures():
    net, optimizer = make()
    anomalies = []
    config = {
        **QUIET, "every": 50, "rules": [{"rule_name": "AnomalyNan"}],
        "capture": {"quantities": ["activations"], "steps": 3, "cooldown_steps": 10_000},
    }
    monitor = Monitor(config, on_anomaly=lambda a: anomalies.append([a.rule, a.step, a.samples]))
    monitor.attach(net, optimizer)
    ring = monitor._session.channel.ring
    step, done = 0, False
    while not done and step < LIMIT:
        step += 1
        ids = [100 * step + 10 * rank + i for i in range(2)]
        monitor.batch(torch.tensor(ids) if step % 2 else ids)
        loss = train(net, optimizer, step)
        monitor.log(loss=float("nan") if step == 12 and rank == 1 else loss)
        time.sleep(0.002)
        if step % 20 == 0:
            told = details(ring.after(-1, 1 << 30).records, "capture")
            (done,) = agreed(any(one["state"] == "ended" for one in told))
    monitor.detach()
    records = ring.after(-1, 1 << 30).records
    captured = []
    for record in records:
        if record.statistics is not None:
            entries = record.statistics.plan.plan.entries
            sizes = record.statistics.counts[-len(entries):]
            if any(e.kind == "act_out" and n.is_valid for e, n in zip(entries, sizes)):
                captured.append(record.step)
    bare, bare_optimizer = make()
    for number in range(1, step + 1):
        train(bare, bare_optimizer, number)
    same = all(torch.equal(a, b) for a, b in zip(net.parameters(), bare.parameters()))
    return {
        "captured": captured, "anomalies": anomalies, "same": same, "faults": monitor.faults,
        "told": details(records, "capture"), "flight": [one["reason"] for one in details(records, "flight_record")],
    }

now = cost = 0.0  # of this rank: a clock and a cost that the program moves

def stretches():
    global now, cost
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    monitor = Monitor({**QUIET, "max_overhead": 0.2}).attach(net, optimizer)
    session = monitor._session
    controller, ring = session.reactions.overhead_controller, session.channel.ring
    controller._clock, controller._cost = lambda: now, lambda: cost
    was_high = done = False
    for step in range(1, LIMIT):
        net(torch.ones(2, 3)).sum().backward()
        if rank == 1 and not was_high and session.current_step.is_sampled:
            now, cost = now + STEP, cost + STEP  # half of the time
        optimizer.step()
        optimizer.zero_grad()
        now += STEP
        time.sleep(0.003 - 0.002 * rank)  # the ranks do not keep pace
        if step % 10 == 0:  # except for a comparison of their states
            is_high, is_low = agreed(controller.stretch >= 4, controller.stretch == 1)
            was_high |= is_high
            if was_high and is_low:
                break
    monitor.detach()
    records = ring.after(-1, 1 << 30).records
    measured = [r.step for r in records if r.statistics is not None]
    return {"measured": measured, "events": details(records, "budget"), "faults": monitor.faults, "steps": step}

def main():
    return {"captures": captures(), "stretches": stretches()}
"""


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """Run both ranks once."""
    return run_two_ranks(PROGRAM)


def test_both_ranks_capture_the_same_configured_number_of_steps(ranks):
    """Each reports the firing rank and the captured steps, and has a flight record. Training is bit-identical."""
    one, other = (rank["captures"] for rank in ranks)
    first = one["captured"][0]

    assert [first, first + 1, first + 2] == one["captured"] == other["captured"]
    assert first > 12
    for number, rank in enumerate((one, other)):
        (began,), (ended,) = ([told for told in rank["told"] if told["state"] == state] for state in ("began", "ended"))
        ids = {str(step): [[100 * step + 10 * number + i for i in range(2)]] for step in rank["captured"]}
        assert (1, 12, first, first + 2) == tuple(began[k] for k in ("rank", "fired_step", "first_step", "last_step"))
        assert first == began["agreed_step"]
        assert "loss is nan" in began["reason"]
        assert ids == ended["samples"]
        assert (["capture"], True, 0) == (rank["flight"], rank["same"], rank["faults"])


def test_on_anomaly_is_called_on_the_rank_that_fired(ranks):
    """Its event has the samples of the step that fired."""
    events = [[told for told in rank["captures"]["told"] if told["state"] == "asked"] for rank in ranks]

    assert [[], [{"12": [[1210, 1211]]}]] == [[told["samples"] for told in asked] for asked in events]
    assert [[], [["AnomalyNan", 12, [[1210, 1211]]]]] == [rank["captures"]["anomalies"] for rank in ranks]


def test_rank_above_max_overhead_stretches_all_ranks(ranks):
    """All ranks sample the same steps throughout, and return to the interval when all overheads are low."""
    one, other = (rank["stretches"] for rank in ranks)
    up = [event for event in one["events"] if event["now"] > event["was"]]

    assert one["measured"] == other["measured"]
    assert len(one["measured"]) < one["steps"]
    assert (one["events"], 0, 0) == (other["events"], one["faults"], other["faults"])
    assert {1} == {event["rank"] for event in up}
    assert all(event["share"] > 0.2 for event in up)
    assert 1 == one["events"][-1]["now"]
    assert all(event["step"] == event["agreed_step"] for event in one["events"])
