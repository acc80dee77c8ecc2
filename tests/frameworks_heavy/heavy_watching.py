"""Runs every loop of one package on two ranks, which alone import it, and has the formulas of clipping."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # tests are imported by path
sys.path.insert(0, str(Path(__file__).parents[2]))  # programs of tests begin elsewhere

import torch.distributed as dist
from tests.exporter.adapters.loops import WORLD, Loop
from tests.exporter.adapters.observation import Outcome, begin, watched
from tests.exporter.adapters.training import Gradients

LONGEST = 0.05
"""Limit for gradient norms."""


def clipped_by_deepspeed(reduced: Gradients) -> float:
    return 1 / max(1.0, (_norm(reduced) + 1e-6) / LONGEST)


def clipped_by_megatron(reduced: Gradients) -> float:
    return min(1.0, LONGEST / (_norm(reduced) + 1e-6))


def _norm(gradients: Gradients) -> float:
    return float(sum(float(gradient.square().sum()) for gradient in gradients.values())) ** 0.5


def train_all(rank: int, store: str, names: list[str], results: Any, *, loops: str, result: Any = None) -> None:
    """One rank: train each loop of the module `loops` in turn, by default with `watched_twice`."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD))
    begin(rank, store)
    module = importlib.import_module(loops)
    getattr(module, "prepare", lambda: None)()
    for name in names:
        results.put((name, rank, (result or watched_twice)(module.LOOPS[name], rank)))
        dist.barrier()
    dist.destroy_process_group()


def watched_twice(make: Any, rank: int) -> Outcome:
    """Train with and without the monitor, and check that replaced methods are restored."""
    made: list[Loop] = []

    def kept(rank: int) -> Loop:
        made.append(make(rank))
        return made[-1]

    outcome = watched(kept, rank)
    outcome.left += [name for loop in made for owner, name in loop.replaced() if name in vars(owner)]
    return outcome
