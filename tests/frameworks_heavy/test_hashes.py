"""Tensors that DeepSpeed and Megatron-Core keep equal have equal hashes; divided tensors have none."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests are imported by path
sys.path.insert(0, str(Path(__file__).parents[2]))  # programs of tests begin elsewhere

import torch.distributed as dist
from heavy_checks import require
from tests.exporter.adapters.loops import WORLD
from tests.exporter.adapters.observation import begin, outcomes
from tests.exporter.parts import session_of

from rankscope_exporter import Monitor, MonitorConfig

pytestmark = [pytest.mark.timeout(900), require("deepspeed", "megatron.core")]

WHOLE = {
    "deepspeed_loops": ("zero 0", "zero 1", "zero 2", "zero 2, bfloat16", "zero 2, infinite"),
    "megatron_loops": ("ddp", "ddp, bfloat16", "tensor parallel"),
}
DIVIDED = {"deepspeed_loops": ("zero 3",), "megatron_loops": ("distributed", "pipeline")}


def hash_all(rank: int, store: str, names: list[str], results: Any, *, loops: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD))
    begin(rank, store)
    module = importlib.import_module(loops)
    getattr(module, "prepare", lambda: None)()
    for name in names:
        results.put((name, rank, hashed(module.LOOPS[name](rank))))
        dist.barrier()
    dist.destroy_process_group()


def hashed(loop: Any) -> tuple[dict[tuple[int, str], tuple[str, int]], int]:
    optimizer = loop.optimizer()
    options = {"hashes": {"every": 1}}
    config = MonitorConfig(quantities=("hashes",), options=options, console=False, exit_wait_seconds=0)
    monitor = Monitor(config).attach(loop.attached, optimizer)
    loop.train(optimizer)
    monitor.end_step()
    session = session_of(monitor)
    assert session.publisher.catch_up(60)
    records = session.channel.ring.after(-1, 1 << 40).records
    monitor.detach()
    rows = {(record.step, row["tensor"]): (row["replicas"], row["hash"]) for record in records for row in record.hashes}
    return rows, monitor.faults


@pytest.mark.parametrize("loops", WHOLE)
def test_replicas_have_equal_hashes_and_parts_have_none(loops: str, tmp_path: Path) -> None:
    names = (*WHOLE[loops], *DIVIDED[loops])
    found = outcomes(tmp_path, functools.partial(hash_all, loops=loops), names, wait_seconds=600)

    for name in names:
        (one, faults), (other, more) = (found[name, rank] for rank in range(WORLD))
        assert (0, 0) == (faults, more), name
        assert one == other, name
        assert ({"0,1"} if name in WHOLE[loops] else set()) == {replicas for replicas, _ in one.values()}, name
