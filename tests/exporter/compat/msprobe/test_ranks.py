"""Tests with msprobe's configuration on two DDP ranks: names of wrapped models, groups, a folder per rank."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.exporter.compat.msprobe.monitored_runs import LONG_SECONDS, QUIET, adam, batch, left, model, train, write
from tests.programs import warm_processes
from torch.nn.parallel import DistributedDataParallel

from rankscope_exporter.compat.msprobe import TrainerMon

pytestmark = pytest.mark.timeout(400)  # the first test waits for the training

WORLD = 2
DOCUMENT = {"wg_distribution": True, "targets": {"0:module.layers.1": {}, "module.head.bias": {}}, "format": "csv"}
NAMES = {f"layers.1.{layer}.{kind}" for layer in ("first", "second") for kind in ("weight", "bias")} | {"head.bias"}


def all_reduced(rank: int, number: int) -> torch.Tensor:
    tensor = given(rank, number)
    dist.all_reduce(tensor)
    return tensor


def given(rank: int, number: int) -> torch.Tensor:
    return torch.arange(4.0) + 10 * rank + 100 * number


COLLECTIVES: dict[str, dict[str, Any]] = {
    "enable": {},
    "off": {"enable": False, "cc_pre_hook": True},
    "cc_pre_hook": {"cc_pre_hook": True},
    "cc_codeline": {"cc_codeline": [r"test_ranks\.py\[\d+\] all_reduced"]},
    "cc_log_only": {"cc_log_only": True, "cc_pre_hook": True},
}


def collectives(rank: int, folder: Path) -> dict[str, tuple[Any, ...]]:
    """Return the rows of the script's own collective calls with each key of cc_distribution."""

    def during(_step: int, _monitor: TrainerMon) -> None:
        all_reduced(rank, 0)
        dist.broadcast(given(rank, 1), 1)

    found = {}
    for case, keys in COLLECTIVES.items():
        own = folder / f"{case}{rank}"
        own.mkdir()
        os.environ["MONITOR_OUTPUT_DIR"] = str(own / "out")
        run = train(own, {"cc_distribution": {"enable": True, **keys}, "format": "csv"}, during=during)
        norms = {(row.step, row.entry.kind, row.entry.tensor.split("@")[0]): row.numbers["norm"] for row in run.rows}
        found[case] = norms, run.said(), run.faults
    return found


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
    calls = collectives(rank, Path(folder))
    results.put((rank, run.names("grad_unreduced"), run.names("grad_reduced"), tags, run.faults, calls))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: Any) -> tuple[Path, dict[int, tuple[Any, ...]]]:
    folder = tmp_path_factory.mktemp("ranks")
    context = warm_processes()
    results = context.Queue()
    processes = [context.Process(target=work, args=(rank, str(folder), results), daemon=True) for rank in range(WORLD)]
    for process in processes:
        process.start()
    found = {rank: told for rank, *told in (results.get(timeout=2 * LONG_SECONDS) for _ in processes)}
    for process in processes:
        process.join(LONG_SECONDS)
    return folder, {rank: tuple(told) for rank, told in found.items()}


def test_targets_with_a_ddp_prefix_match_and_one_rank_reduces_gradients(ranks):
    for rank, (unreduced, reduced, tags, faults, _) in ranks[1].items():
        assert (NAMES, set() if rank else NAMES, 0) == (unreduced, reduced, faults)
        assert {f"0:{name}/rank{rank}/acc_grad" for name in NAMES} == tags


def test_each_rank_writes_its_own_folder(ranks):
    rows = {
        path.parent.name.split("-rank")[1][0]: {row["name"] for row in csv.DictReader(path.open())}
        for path in ranks[0].glob("out/*/grad_unreduced_1-1.csv")
    }

    assert {"0": NAMES, "1": NAMES} == rows


def norm(rank: int | None, number: int) -> float:
    """Return the norm of the tensor that a rank sends, or of the sum over ranks."""
    parts = [given(one, number) for one in range(WORLD)]
    return float((sum(parts, torch.zeros(4)) if rank is None else parts[rank]).norm())


def expected(rank: int, *, inputs: bool = False, broadcast: bool = True) -> dict[tuple[int, str, str], float]:
    one = {("comm_out", "all_reduce"): norm(None, 0)}
    if inputs:
        one["comm_in", "all_reduce"] = norm(rank, 0)
        one |= {("comm_in", "broadcast"): norm(1, 1)} if rank == 1 else {}
    if broadcast:
        one["comm_out", "broadcast"] = norm(1, 1)
    return {(step, *key): pytest.approx(value) for step in (1, 2) for key, value in one.items()}


@pytest.mark.parametrize(
    ("case", "choice"), [("enable", {}), ("cc_pre_hook", {"inputs": True}), ("cc_codeline", {"broadcast": False})]
)
def test_cc_distribution_measures_the_selected_calls(case, choice, ranks):
    for rank, (*_, calls) in ranks[1].items():
        assert (expected(rank, **choice), [], 0) == calls[case]


def test_disabled_cc_distribution_measures_nothing(ranks):
    for *_, calls in ranks[1].values():
        norms, said, faults = calls["off"]

        assert ({}, 0) == (norms, faults)
        assert ["no quantity is measured: enable wg_distribution, xy_distribution or a similar setting"] == said


def test_cc_log_only_logs_the_calls_of_the_first_step(ranks):
    for *_, calls in ranks[1].values():
        norms, (remark, *told), faults = calls["cc_log_only"]

        assert ({}, 0) == (norms, faults)
        assert "cc_log_only: training continues after the calls of the first step are logged" == remark
        assert ["all_reduce", "broadcast"] == [text.removeprefix("collectives: ").split("@")[0] for text in told]
        assert "float32[4] -> float32[4], group default_pg of 2 ranks, called from" in told[0]
        assert told[0].endswith("all_reduced")


def test_calls_have_separate_files_with_a_row_per_call(ranks):
    for rank in range(WORLD):
        (path,) = ranks[0].glob(f"cc_pre_hook{rank}/out/*-rank{rank}-*/comm_out_0-0.csv")
        rows = {row["name"].split("@")[0]: row for row in csv.DictReader(path.open())}

        assert ["all_reduce", "broadcast"] == sorted(rows)
        assert pytest.approx(norm(None, 0), rel=1e-5) == float(rows["all_reduce"]["norm"])
        assert ("[4]", "torch.float32", "0") == tuple(rows["all_reduce"][name] for name in ("shape", "dtype", "step"))
