"""Two real ranks under DDP: local and reduced gradients, each against a gradient computed without any wrapper."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.exporter.parts import session_of
from tests.programs import warm_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope_exporter import Monitor, MonitorConfig

STEPS = 3
WORLD = 2


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 3))


def batch(rank: int, step: int, micro: int = 0) -> torch.Tensor:
    return torch.randn(6, 12, generator=torch.Generator().manual_seed(1000 * step + 10 * rank + micro))


def local_gradients(model: nn.Module, rank: int, step: int, micro_batches: int) -> dict[str, torch.Tensor]:
    """Return the gradients of one rank's data, computed on a bare copy in float64."""
    alone = copy.deepcopy(model).double()
    for micro in range(micro_batches):
        alone(batch(rank, step, micro).double()).square().mean().backward()
    return {name: parameter.grad for name, parameter in alone.named_parameters() if parameter.grad is not None}


CASES: dict[str, dict[str, Any]] = {
    "copied into buckets": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "accumulation": {"micro_batches": 3},
    "many buckets": {"bucket_cap_mb": 0.0005},
    "static graph": {"static_graph": True},
    "accumulation without no_sync": {"micro_batches": 2, "always_sync": True},
}
ABSENT: dict[str, set[tuple[int, str]]] = {
    # A sum of a reduced micro-batch and a local one is no local gradient: once it was seen, ours is summed up apart.
    "accumulation without no_sync": {(1, "grad_unreduced")},
}


def work(rank: int, store: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    for case, options in CASES.items():
        results.put((case, rank, *train(rank, **options)))
        dist.barrier()
    dist.destroy_process_group()


def train(rank: int, micro_batches: int = 1, *, always_sync: bool = False, **options: Any) -> tuple[Any, ...]:
    ddp = DistributedDataParallel(net(), **options)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    references: dict[tuple[int, str, str], float] = {}
    monitor = Monitor(MonitorConfig(console=False, exit_wait_seconds=0))
    monitor.attach(ddp, optimizer)
    for step in range(1, STEPS + 1):
        per_rank = [local_gradients(ddp.module, other, step, micro_batches) for other in range(WORLD)]
        for name, own in per_rank[rank].items():
            references[step, "grad_unreduced", name] = own.norm().item()
            mean = torch.stack([gradients[name] for gradients in per_rank]).mean(dim=0)
            references[step, "grad_reduced", name] = mean.norm().item()
        for micro in range(micro_batches):
            ddp.require_backward_grad_sync = always_sync or micro == micro_batches - 1
            ddp(batch(rank, step, micro)).square().mean().backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    monitor.end_step()
    session = session_of(monitor)
    deadline = time.monotonic() + 60
    found = measured(session.channel.ring)
    while len({step for step, *_ in found}) < STEPS and time.monotonic() < deadline:
        time.sleep(0.01)
        found = measured(session.channel.ring)
    run = monitor.run
    monitor.detach()
    return run, monitor.faults, references, found


def measured(ring: Any) -> dict[tuple[int, str, str], float]:
    found = {}
    for record in ring.after(-1, 1 << 30).records:
        if record.statistics is None:
            continue
        entries = record.statistics.plan.plan.entries
        norms = record.statistics.values.to_pylist()[: len(entries)]
        found.update({(record.step, e.kind, e.tensor): norm for e, norm in zip(entries, norms, strict=True)})
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[Any, ...]]:
    """Run all cases in one pair of processes: starting torch costs more than all of the training."""
    context = warm_processes()
    results = context.Queue()
    store = str(tmp_path_factory.mktemp("ddp") / "store")
    workers = [context.Process(target=work, args=(rank, store, results)) for rank in range(WORLD)]
    for worker in workers:
        worker.start()
    rows = [results.get(timeout=150) for _ in range(WORLD * len(CASES))]
    for worker in workers:
        worker.join(30)

    assert [0] * WORLD == [worker.exitcode for worker in workers]
    return {(case, rank): rest for case, rank, *rest in rows}


@pytest.mark.parametrize("case", CASES)
def test_local_and_reduced_gradients_equal_a_bare_reference(
    case: str, outcomes: dict[tuple[str, int], tuple[Any, ...]]
) -> None:
    assert 1 == len({outcomes[case, rank][0] for rank in range(WORLD)})
    for rank in range(WORLD):
        _, faults, references, found = outcomes[case, rank]
        other = outcomes[case, 1 - rank][3]
        assert 0 == faults, rank
        assert {1, 2, 3} == {step for step, *_ in found}
        absent = ABSENT.get(case, set())
        assert absent == {key[:2] for key in references if found[key] is None}
        for key, norm in references.items():
            if key[:2] in absent:
                continue
            # Training runs in float32, the reference in float64: their gradients differ by float32 rounding.
            assert found[key] == pytest.approx(norm, rel=2e-5), (rank, key)
        for (step, kind, name), norm in found.items():
            if kind == "grad_reduced" and norm is not None:
                assert abs(norm - other[step, kind, name]) <= 1e-6 * norm
