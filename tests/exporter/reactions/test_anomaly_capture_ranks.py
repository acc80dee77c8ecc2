"""Two real ranks under DDP: a NaN in the data of one rank starts a capture of the same steps on both."""

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

STEPS, BAD, LIMIT = 3, 12, 3000

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

def agreed(flag):
    told = torch.tensor([float(flag)])
    dist.all_reduce(told)
    return bool(told == dist.get_world_size())

def main():
    net, optimizer = make()
    anomalies = []
    config = {
        "quantities": ["parameters"], "every": 50, "switch_poll_seconds": 0.02,
        "console": False, "exit_wait_seconds": 0,
        "rules": [{"rule_name": "AnomalyNan"}], "serve": {"ring_records": LIMIT},
        "capture": {"quantities": ["activations"], "steps": STEPS, "cooldown_steps": 10_000},
    }
    monitor = Monitor(config, on_anomaly=lambda a: anomalies.append([a.rule, a.step, a.samples]))
    monitor.attach(net, optimizer)
    session = monitor._session
    ring = session.channel.ring
    step = 0
    done = False
    while not done and step < LIMIT:
        step += 1
        ids = [100 * step + 10 * rank + i for i in range(2)]
        monitor.batch(torch.tensor(ids) if step % 2 else ids)
        loss = train(net, optimizer, step)
        monitor.log(loss=float("nan") if step == BAD and rank == 1 else loss)
        time.sleep(0.002)
        if step % 20 == 0:
            events = [e for r in ring.after(-1, 1 << 30).records for e in r.events]
            done = agreed(any(e.type == "capture" and '"ended"' in e.details for e in events))
    monitor.detach()
    records = ring.after(-1, 1 << 30).records
    captured = []
    for record in records:
        if record.statistics is not None:
            entries = record.statistics.plan.plan.entries
            sizes = record.statistics.counts[-len(entries):]
            if any(e.kind == "act_out" and n.is_valid for e, n in zip(entries, sizes)):
                captured.append(record.step)
    events = [e for r in records for e in r.events]
    bare, bare_optimizer = make()
    for number in range(1, step + 1):
        train(bare, bare_optimizer, number)
    same = all(torch.equal(a, b) for a, b in zip(net.parameters(), bare.parameters()))
    return {
        "rank": rank, "captured": captured, "anomalies": anomalies, "same": same, "faults": monitor.faults,
        "told": [json.loads(e.details) for e in events if e.type == "capture"],
        "flight": [json.loads(e.details)["reason"] for e in events if e.type == "flight_record"],
    }
"""


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """Run both ranks once."""
    return run_two_ranks(PROGRAM)


def told(rank: dict[str, Any], state: str) -> list[dict[str, Any]]:
    return [event for event in rank["told"] if event["state"] == state]


def test_both_ranks_capture_the_same_configured_number_of_steps(ranks):
    one, other = ranks

    assert one["captured"] == other["captured"]
    assert 3 == len(one["captured"])
    assert one["captured"][0] > 12
    assert list(range(one["captured"][0], one["captured"][0] + 3)) == one["captured"]


def test_each_rank_reports_the_firing_rank_and_the_captured_steps(ranks):
    for rank in ranks:
        (began,) = told(rank, "began")
        assert (1, 12) == (began["rank"], began["fired_step"])
        assert (rank["captured"][0], rank["captured"][-1]) == (began["first_step"], began["last_step"])
        assert began["first_step"] == began["agreed_step"]
        assert "loss is nan" in began["reason"]


def test_events_have_samples_of_the_fired_and_the_captured_steps(ranks):
    healthy, fired = ranks

    assert ([], [{"12": [[1210, 1211]]}]) == (
        told(healthy, "asked"),
        [event["samples"] for event in told(fired, "asked")],
    )
    for number, rank in enumerate(ranks):
        (ended,) = told(rank, "ended")
        ids = {str(step): [[100 * step + 10 * number + i for i in range(2)]] for step in rank["captured"]}
        assert ids == ended["samples"]


def test_on_anomaly_is_called_on_the_rank_that_fired(ranks):
    assert [[], [["AnomalyNan", 12, [[1210, 1211]]]]] == [rank["anomalies"] for rank in ranks]


def test_each_rank_has_a_flight_record_and_training_is_bit_identical(ranks):
    assert [["capture"], ["capture"]] == [rank["flight"] for rank in ranks]
    assert [True, True] == [rank["same"] for rank in ranks]
    assert [0, 0] == [rank["faults"] for rank in ranks]
