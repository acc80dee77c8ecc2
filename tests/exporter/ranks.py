"""Cases that run on two ranks, in one pair of processes: starting torch takes longer than all of their trainings."""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.programs import warm_processes

WORLD = 2
RANKS = range(WORLD)
Cases = Callable[[int], Iterator[tuple[str, Any]]]
"""Yields the name and the outcome of each case on the rank with this number."""


def outcomes_of(cases: Cases, folder: Path) -> dict[tuple[str, int], Any]:
    """Run `cases` on two ranks that are connected by Gloo; return the outcome of each case on each rank."""
    context = warm_processes()
    results = context.Queue()
    workers = [context.Process(target=_work, args=(cases, rank, folder, results), daemon=True) for rank in RANKS]
    for worker in workers:
        worker.start()
    found = {}
    for _ in RANKS:
        while (outcome := results.get(timeout=180)) is not None:
            case, rank, *rest = pickle.loads(outcome)
            found[case, rank] = rest[0]
    for worker in workers:
        worker.join(60)

    assert [0] * WORLD == [worker.exitcode for worker in workers]
    return found


def _work(cases: Cases, rank: int, folder: Path, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    for name, outcome in cases(rank):
        results.put(pickle.dumps((name, rank, outcome)))  # bytes, because tensors would share memory with this process
        dist.barrier()
    dist.destroy_process_group()
    results.put(None)
