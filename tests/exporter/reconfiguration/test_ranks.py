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
from tests.exporter.parts import session_of
from tests.programs import warm_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.serving.config import ServeConfig

WORLD = 2
MOST_STEPS = 20_000


def settings(path: str, **more: Any) -> MonitorConfig:
    return MonitorConfig(
        quantities=("parameters",),
        console=False,
        exit_wait_seconds=0,
        switch_file=path,
        switch_poll_seconds=0.05,
        serve=ServeConfig(token="secret", ring_records=MOST_STEPS),
        **more,
    )


def put(monitor: Monitor, **document: Any) -> int:
    request = urllib.request.Request(
        f"{monitor.address}/config",
        json.dumps(document).encode(),
        {"Authorization": "Bearer secret"},
        method="PUT",
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return int(answer.status)


CASES = {
    "in step, by file": ("ddp", "file"),
    "each at its own pace, by file": ("alone", "file"),
    "each at its own pace, by request": ("alone", "request"),
    "each at its own pace, by call": ("alone", "call"),
}


def work(rank: int, folder: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    for number, (case, (how, ask)) in enumerate(CASES.items()):
        model = DistributedDataParallel(nn.Linear(4, 2)) if how == "ddp" else nn.Linear(4, 2)
        results.put((case, rank, *train(rank, Path(folder) / f"{number}.json", model, ask)))
        dist.barrier()
    survive(rank, Path(folder), results)


def train(rank: int, path: Path, model: nn.Module, ask: str) -> tuple[Any, ...]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if rank == 0:
        path.write_text("{}")
    dist.barrier()
    monitor = Monitor(settings(str(path)))
    monitor.attach(model, optimizer)
    session = session_of(monitor)
    dist.barrier()
    stop = path.with_suffix(".stop")
    changed_at = None
    for step in range(1, MOST_STEPS):
        if step == 20:
            if ask == "call":
                monitor.switch({"every": 2})
            elif rank == 1 and ask == "file":
                path.write_text(json.dumps({"dynamic_on": True, "every": 2}))
            elif rank == 1:
                assert 202 == put(monitor, every=2)
        time.sleep(0.002 + 0.002 * rank)  # the slower rank requests the change
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        if changed_at is None and session.change_queue.sampling.on:
            changed_at = step
            stop.with_suffix(f".{rank}").touch()
        if changed_at is not None and step > changed_at + 8 and stop.with_suffix(f".{1 - rank}").exists():
            break
    else:
        pytest.fail("never changed")
    ring = session.channel.ring
    monitor.detach()
    records = ring.after(-1, 1 << 30).records
    measured = [r.step for r in records if r.statistics is not None]
    events = [json.loads(e.details or "") for r in records for e in r.events if e.type == "switch"]
    return changed_at, measured, events, monitor.faults


def survive(rank: int, folder: Path, results: Any) -> None:
    """Rank 1 is killed before it reads the change that rank 0 requests."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    path = folder / "survive.json"
    monitor = Monitor(settings(str(path)))
    monitor.attach(model, optimizer)
    session = session_of(monitor)
    assert session.change_sources._agreement is not None
    session.change_sources._agreement._patience_seconds = 1.0
    dist.barrier()
    if rank == 1:
        results.close()
        results.join_thread()
        os._exit(9)
    path.write_text('{"dynamic_on": true}')
    slowest = 0.0
    deadline = time.monotonic() + 30
    while not session.change_queue.sampling.on and time.monotonic() < deadline:
        began = time.monotonic()
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        slowest = max(slowest, time.monotonic() - began)
        time.sleep(0.005)
    ring = session.channel.ring
    began = time.monotonic()
    monitor.detach()
    leaving = time.monotonic() - began
    events = [json.loads(e.details or "") for r in ring.after(-1, 1 << 30).records for e in r.events if e.details]
    results.put(("survive", rank, slowest, leaving, [e for e in events if "source" in e], monitor.faults))
    results.close()
    results.join_thread()
    os._exit(0)  # destroying the group would wait for the dead rank


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[Any, ...]]:
    """Run all cases in one pair of processes: starting torch costs more than all of the training."""
    context = warm_processes()
    results = context.Queue()
    folder = str(tmp_path_factory.mktemp("ranks"))
    workers = [context.Process(target=work, args=(rank, folder, results)) for rank in range(WORLD)]
    for worker in workers:
        worker.start()
    rows = [results.get(timeout=150) for _ in range(WORLD * len(CASES) + 1)]
    for worker in workers:
        worker.join(30)

    assert [0, 9] == [worker.exitcode for worker in workers]
    return {(case, rank): tuple(rest) for case, rank, *rest in rows}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usual(1)
def test_all_ranks_change_at_the_same_step_although_one_is_slower(case, outcomes):
    (one, measured, events, faults), (other, _, others, other_faults) = outcomes[case, 0], outcomes[case, 1]

    assert one == other
    assert [one] == [event["step"] for event in events] == [event["agreed_step"] for event in others]
    assert [one, one + 2, one + 4] == measured[:3]
    assert 0 == faults == other_faults


def test_pending_change_of_a_dead_rank_delays_no_rank(outcomes):
    slowest, leaving, events, faults = outcomes["survive", 0]

    assert [[1]] == [event["ranks_not_heard"] for event in events]
    assert 0 == faults
    assert slowest < 10.0  # a rank that waits for the dead rank would wait until the deadline
    assert leaving < 20.0
