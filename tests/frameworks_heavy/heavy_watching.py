"""Runs every loop of one package with and without the monitor, on two ranks; only these import the package."""

from __future__ import annotations

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


def train_all(rank: int, store: str, names: list[str], results: Any, *, loops: str) -> None:
    """One rank: train each loop of the module `loops` in turn."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD))
    begin(rank, store)
    module = importlib.import_module(loops)
    getattr(module, "prepare", lambda: None)()
    for name in names:
        results.put((name, rank, watched_twice(module.LOOPS[name], rank)))
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
