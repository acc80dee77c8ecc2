"""Two real ranks of a gloo group, one of them slower, change at the same step. A dead rank delays no other rank."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.exporter.adapters.observation import begin, outcomes
from tests.exporter.parts import Watched
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope_exporter import Monitor
from rankscope_exporter.serving.config import ServeConfig

MOST_STEPS = 20_000


def settings(path: Path) -> dict[str, Any]:
    return {
        "quantities": ["parameters"],
        "switch_file": str(path),
        "switch_poll_seconds": 0.05,
        "serve": ServeConfig(token="secret", ring_records=MOST_STEPS),
    }


def put(monitor: Monitor, **document: Any) -> int:
    body, headers = json.dumps(document).encode(), {"Authorization": "Bearer secret"}
    request = urllib.request.Request(f"{monitor.address}/config", body, headers, method="PUT")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return int(answer.status)


CASES = {
    "in step, by file": "file",
    "each at its own pace, by request": "request",
    "each at its own pace, by call": "call",
}


def work(rank: int, store: str, _names: list[str], results: Any) -> None:
    begin(rank, store)
    for case, ask in CASES.items():
        model = DistributedDataParallel(nn.Linear(4, 2)) if ask == "file" else nn.Linear(4, 2)
        results.put((case, rank, train(rank, Path(store).with_name(f"{ask}.json"), model, ask)))
        dist.barrier()
    results.put(("survive", rank, survive(rank, Path(store).with_name("survive.json"))))
    results.close()
    results.join_thread()
    os._exit(9 * rank)  # destroying the group would wait for the dead rank


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()


def train(rank: int, path: Path, model: nn.Module, ask: str) -> tuple[Any, ...]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if rank == 0:
        path.write_text("{}")
    dist.barrier()
    watched = Watched(model, optimizer, **settings(path))
    dist.barrier()
    stop = path.with_suffix(".stop")
    changed_at = None
    for step in range(1, MOST_STEPS):
        if step == 20:
            if ask == "call":
                watched.monitor.switch({"every": 2})
            elif rank == 1 and ask == "file":
                path.write_text(json.dumps({"dynamic_on": True, "every": 2}))
            elif rank == 1:
                assert 202 == put(watched.monitor, every=2)
        time.sleep(0.002 + 0.002 * rank)  # the slower rank requests the change
        step_of(model, optimizer)
        if changed_at is None and watched.session.change_queue.sampling.on:
            changed_at = step
            stop.with_suffix(f".{rank}").touch()
        if changed_at is not None and step > changed_at + 8 and stop.with_suffix(f".{1 - rank}").exists():
            break
    else:
        pytest.fail("never changed")
    watched.monitor.detach()
    agreed = [(step, json.loads(event.details or "")["agreed_step"]) for step, event in watched.events("switch")]
    return changed_at, watched.measured(), agreed, watched.faults


def survive(rank: int, path: Path) -> tuple[Any, ...]:
    """Rank 1 is killed before it reads the change that rank 0 requests."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watched = Watched(model, optimizer, **settings(path))
    agreement = watched.session.change_sources._agreement
    assert agreement is not None
    agreement._patience_seconds = 1.0
    dist.barrier()
    if rank == 1:
        return ()
    path.write_text('{"dynamic_on": true}')
    slowest = 0.0
    deadline = time.monotonic() + 30
    while not watched.session.change_queue.sampling.on and time.monotonic() < deadline:
        began = time.monotonic()
        step_of(model, optimizer)
        slowest = max(slowest, time.monotonic() - began)
        time.sleep(0.005)
    began = time.monotonic()
    watched.monitor.detach()
    leaving = time.monotonic() - began
    not_heard = [json.loads(event.details or "")["ranks_not_heard"] for _, event in watched.events("switch")]
    return slowest, leaving, not_heard, watched.faults


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[Any, ...]]:
    return outcomes(tmp_path_factory.mktemp("ranks"), work, (*CASES, "survive"), exit_codes=(0, 9))


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_change_at_the_same_step_although_one_is_slower(case, found):
    (one, measured, events, faults), (other, _, others, other_faults) = found[case, 0], found[case, 1]

    assert one == other
    assert [one] == [step for step, _ in events] == [agreed for _, agreed in others]
    assert [one, one + 2, one + 4] == measured[:3]
    assert 0 == faults == other_faults


def test_pending_change_of_a_dead_rank_delays_no_rank(found):
    slowest, leaving, not_heard, faults = found["survive", 0]

    assert ([[1]], 0) == (not_heard, faults)
    assert slowest < 10.0  # a rank that waits for the dead rank would wait until the deadline
    assert leaving < 20.0
