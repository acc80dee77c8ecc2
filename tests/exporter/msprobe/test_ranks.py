"""Two ranks under DDP with the tool's configuration: names of wrapped models, groups, a folder for each rank."""

from __future__ import annotations

import csv
import multiprocessing as mp
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.exporter.msprobe.tool_runs import LONG_SECONDS, QUIET, adam, batch, left, model, write
from torch.nn.parallel import DistributedDataParallel

from rankscope_exporter.msprobe import TrainerMon

pytestmark = pytest.mark.timeout(400)  # the first test waits for the training

WORLD = 2
DOCUMENT = {"wg_distribution": True, "targets": {"0:module.layers.1": {}, "module.head.bias": {}}, "format": "csv"}
NAMES = {f"layers.1.{layer}.{kind}" for layer in ("first", "second") for kind in ("weight", "bias")} | {"head.bias"}


def work(rank: int, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ["MONITOR_OUTPUT_DIR"] = f"{folder}/out"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    ddp = DistributedDataParallel(model(), find_unused_parameters=False)
    optimizer = adam(ddp)
    monitor = TrainerMon(write(Path(folder, f"config{rank}.json"), {**QUIET, **DOCUMENT}), dist.group.WORLD, False)
    monitor.set_monitor(ddp, 1, optimizer, dist.group.WORLD, None, 0)
    tags = set()
    for step in (1, 2):
        ddp(batch(10 * rank + step)).square().mean().backward()
        tags |= set(monitor.generate_wgrad_metrics()[1])
        optimizer.step()
        optimizer.zero_grad()
    assert monitor.monitor is not None
    run = left(monitor.monitor, ddp, Path(folder), monitor.faults)
    results.put((rank, run.names("grad_unreduced"), run.names("grad_reduced"), tags, run.faults))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: Any) -> tuple[Path, dict[int, tuple[Any, ...]]]:
    folder = tmp_path_factory.mktemp("ranks")
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=work, args=(rank, str(folder), results), daemon=True) for rank in range(WORLD)]
    for process in processes:
        process.start()
    found = {rank: told for rank, *told in (results.get(timeout=2 * LONG_SECONDS) for _ in processes)}
    for process in processes:
        process.join(LONG_SECONDS)
    return folder, {rank: tuple(told) for rank, told in found.items()}


def test_targets_with_the_wrappers_level_are_found_on_every_rank(ranks):
    for unreduced, _, _, faults in ranks[1].values():
        assert (NAMES, 0) == (unreduced, faults)


def test_reduced_gradients_are_those_of_the_first_rank_of_the_group(ranks):
    assert [NAMES, set()] == [ranks[1][rank][1] for rank in range(WORLD)]


def test_getters_name_the_rank(ranks):
    for rank, (_, _, tags, _) in ranks[1].items():
        assert {f"0:{name}/rank{rank}/acc_grad" for name in NAMES} == tags


def test_each_rank_has_a_folder(ranks):
    rows = {
        path.parent.name.split("-rank")[1][0]: {row["name"] for row in csv.DictReader(path.open())}
        for path in ranks[0].glob("out/*/grad_unreduced_1-1.csv")
    }

    assert {"0": NAMES, "1": NAMES} == rows
