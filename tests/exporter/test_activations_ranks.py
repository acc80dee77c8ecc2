"""Two real ranks under DDP: each has the activations of its own batches, and training is the same bit for bit."""

from __future__ import annotations

import multiprocessing as mp
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))  # tests are imported by path

from activation_runs import Key, Notes, equal_bits, same, train
from test_activations import Blocks, blocks

WORLD, STEPS, MICRO_BATCHES = 2, 3, 2
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "without reentrance": {"mode": "without reentrance"},
    "reentrant": {"mode": "reentrant", "static_graph": True},
}


def work(rank: int, store: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    for case, options in CASES.items():
        results.put((case, rank, *both(rank, **options)))
        dist.barrier()
    dist.destroy_process_group()


def loss(model: nn.Module, step: int, micro: int, rank: int, note: Any = None) -> torch.Tensor:
    seed = 1000 * step + 10 * micro + rank
    torch.manual_seed(seed)  # of dropout
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    if isinstance(model, DistributedDataParallel) and not model.static_graph:
        model.require_backward_grad_sync = micro == MICRO_BATCHES - 1
    return (model(x) if note is None else model(x, note)).square().mean()


def both(rank: int, mode: str = "plain", **options: Any) -> tuple[Any, ...]:
    """Train without and with the monitor; return what differs from the references, and how the run went."""
    micro_losses = [lambda model, step, micro=micro: loss(model, step, micro, rank) for micro in range(MICRO_BATCHES)]
    make = lambda: DistributedDataParallel(blocks(mode), **options)  # noqa: E731 - twins
    bare = train(make(), micro_losses, STEPS, None)
    run = train(make(), micro_losses, STEPS, {})
    differs = []
    for step, tensors in enumerate(references(rank), 1):
        try:
            same(tensors, run.rows[step], rtol=1e-4)
        except AssertionError as error:
            differs.append((step, str(error)))
    return differs, list(run.rows), equal_bits(bare, run), run.faults, run.said, run.placements


def references(rank: int) -> list[dict[Key, torch.Tensor]]:
    """Return what one process sees that computes the batches of all ranks, and averages their gradients by itself."""
    model, found = blocks(inplace=False), []
    for step in range(1, STEPS + 1):
        gradients = []
        for one in range(WORLD):
            notes = Notes()
            for micro in range(MICRO_BATCHES):
                notes.micro_step = micro
                loss(model, step, micro, one, notes).backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
            model.zero_grad()
            if one == rank:
                found.append({key: tensor.detach().clone() for key, tensor in notes.tensors().items()})
        update(model, gradients)
    return found


def update(model: Blocks, gradients: list[list[Any]]) -> None:
    with torch.no_grad():
        for parameter, parts in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.sub_(0.1 * sum(parts) / WORLD)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[Any, ...]]:
    """Run all cases in one pair of processes: starting torch costs more than all of the training."""
    context = mp.get_context("spawn")
    results = context.Queue()
    store = str(tmp_path_factory.mktemp("ddp") / "store")
    workers = [context.Process(target=work, args=(rank, store, results), daemon=True) for rank in range(WORLD)]
    for worker in workers:
        worker.start()
    rows = [results.get(timeout=120) for _ in range(WORLD * len(CASES))]
    for worker in workers:
        worker.join(30)

    assert [0] * WORLD == [worker.exitcode for worker in workers]
    return {(case, rank): rest for case, rank, *rest in rows}


@pytest.mark.parametrize("case", CASES)
def test_every_rank_has_the_activations_of_its_own_batches(case, outcomes):
    for rank in range(WORLD):
        differs, steps, is_equal, faults, said, placements = outcomes[case, rank]

        assert [] == differs
        assert [1, 2, 3] == steps
        assert (True, 0, [], {"full"}) == (is_equal, faults, said, placements)
