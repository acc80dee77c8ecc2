"""TFLOP/s and MFU of real training loops and of each rank, compared with FLOPs computed by hand; peaks."""

import json
import math
import re
import time
from collections import OrderedDict
from typing import Any

import pytest
import torch
from tests.programs import run_two_ranks
from tests.properties import THOROUGH
from torch import nn

from rankscope_exporter import Monitor, MonitorConfig, count_flops
from rankscope_exporter.adapters import framework_of
from rankscope_exporter.monitors.throughput import (
    TABLE,
    Throughput,
    ThroughputConfig,
    compute_dtype,
    multiplies_in_tf32,
    peak_tflops,
)

BATCH = 32
IDS = torch.zeros(2, 10, dtype=torch.long)
TOKEN = 6 * 16 * 50
"""FLOPs of a token of `Tokens` by 6 N: the table is looked up, not multiplied."""
SLEEP = 0.05


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 50, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


class Run:
    def __init__(self, reader, eventually, model, batch, *, sleep=0.0, logged=None, **throughput: Any) -> None:
        settings = ThroughputConfig(**throughput)
        config = MonitorConfig(console=False, exit_wait_seconds=0, statistics="torch", throughput=settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        began = time.monotonic()
        with Monitor(config).attach(model, optimizer) as monitor:
            for _ in range(4):
                optimizer.zero_grad()
                model(batch).sum().backward()
                time.sleep(sleep)
                optimizer.step()
                monitor.log(**(logged or {}))
            monitor.end_step()
            self.took = time.monotonic() - began
            seen = reader(monitor)
            eventually(lambda: len(seen.scalars("step_seconds")) == 4)
            self.page = seen.get("/metrics").decode()
            self.notes = [event["message"] for event in seen.events() if event["type"] == "note"]
            self._scalars = [scalar for record in seen.records() for scalar in record["scalars"] or ()]

    def values(self, name: str) -> list[float]:
        return [scalar["value"] for scalar in self._scalars if scalar["name"] == name]

    def methods(self) -> set[str]:
        scalars = (scalar for scalar in self._scalars if scalar["name"] == "tflops_per_gpu")
        return {json.loads(scalar["labels"])["method"] for scalar in scalars}

    def flops(self) -> list[float]:
        """Return the FLOPs of each step: its TFLOP/s times its duration."""
        pairs = zip(self.values("tflops_per_gpu"), self.values("step_seconds"), strict=True)
        return [rate * seconds * 1e12 for rate, seconds in pairs]


@pytest.fixture
def run(reader, eventually):
    return lambda *args, **kwargs: Run(reader, eventually, *args, **kwargs)


def test_rates_of_a_step_with_known_duration(run):
    made = run(Tokens(), IDS, sleep=SLEEP, logged={"samples": BATCH, "tokens": 1000}, peak_tflops=0.001)

    assert SLEEP <= min(made.values("step_seconds"))
    assert sum(made.values("step_seconds")) <= made.took
    rates = zip(made.values("samples_per_second"), made.values("tokens_per_second"), strict=True)
    for (samples, tokens), seconds in zip(rates, made.values("step_seconds"), strict=True):
        assert BATCH / seconds == pytest.approx(samples)
        assert 1000 / BATCH == pytest.approx(tokens / samples)
    assert [1000 * TOKEN] * 4 == pytest.approx(made.flops())
    assert [rate / 0.001 for rate in made.values("tflops_per_gpu")] == pytest.approx(made.values("mfu"))


TWENTY = {"tokens": 20}


def changed(model: Tokens, *, is_frozen: bool = False, is_tied: bool = False) -> Tokens:
    model.head.requires_grad_(requires_grad=not is_frozen)
    model.head.weight = model.table.weight if is_tied else model.head.weight
    return model


@pytest.mark.parametrize(
    ("model", "options", "method", "flops"),
    [
        (Tokens(), {"logged": {"tokens": 30}}, "6n", 30 * TOKEN),
        (Tokens(), {"logged": {"tokens": torch.tensor(20)}}, "6n", 20 * TOKEN),
        (changed(Tokens(), is_tied=True), {"logged": TWENTY, "method": "6n"}, "6n", 20 * TOKEN),  # counts as a matrix
        (changed(Tokens(), is_frozen=True), {"logged": TWENTY}, "6n", 20 * TOKEN * 4 / 6),
        (Tokens(), {"logged": TWENTY, "flops_per_token": 1e6}, "given", 20e6),
        (Tokens(), {"logged": TWENTY, "flops_per_token": 1e6, "model_parallel": 4}, "given", 20e6 / 4),
        (Tokens(), {"logged": {"samples": 2}, "flops_per_sample": 5e5, "method": "given"}, "given", 2 * 5e5),
        (Tokens(), {"logged": {"flops": 7e9}, "model_parallel": 4}, "given", 7e9),  # of this rank and step
    ],
)
def test_flops_and_method_of_each_step(run, model, options, method, flops):
    made = run(model, IDS, **options)

    assert [flops] * 4 == pytest.approx(made.flops())
    assert ({method}, []) == (made.methods(), made.notes)


def test_counted_flops_have_the_method_given(run):
    model, images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 2)), torch.zeros(2, 3, 8, 8)
    counted = count_flops(model, images)
    made = run(model, images, logged={"samples": 2}, flops_per_sample=counted.per_sample())

    # The convolution needs no gradient of its input.
    assert 2 * 2 * (2 * 6 * 6 * 4 * 3 * 9 + 3 * 4 * 6 * 6 * 2) == counted
    assert [counted] * 4 == pytest.approx(made.flops())
    assert ({"given"}, []) == (made.methods(), made.notes)


def named(**modules: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(modules))


def table() -> nn.Module:
    return nn.Embedding(50, 16)


def with_kernels() -> nn.Module:
    """Return a token model with a parameter of three dimensions, like a convolution kernel."""
    model = Tokens()
    model.register_parameter("kernels", nn.Parameter(torch.ones(16, 16, 3)))
    return model


def convolution_of_tokens() -> nn.Module:
    return named(table=table(), layer=nn.Conv1d(10, 2, 3))


IMAGES = torch.zeros(2, 3, 8, 8)


@pytest.mark.usual(5)
@pytest.mark.parametrize(
    ("make", "batch", "options", "why"),
    [
        (convolution_of_tokens, IDS, {}, "layer is a convolution"),
        (Tokens, IDS, {"logged": {"samples": 2}, "method": "6n"}, None),
        (
            lambda: named(table=nn.EmbeddingBag(50, 16), head=nn.Linear(16, 2)),
            IDS,
            {},
            "combines many tokens to one row",
        ),
        (with_kernels, IDS, {}, "kernels has 3 dimensions"),
        (lambda: named(table=table(), experts=nn.Sequential(nn.Linear(16, 16))), IDS, {}, "only some of the experts"),
        (lambda: nn.Conv2d(3, 4, 3), IMAGES, {"flops_per_token": 1e6, "logged": {}}, None),
    ],
)
def test_missing_formula_is_reported_once_with_the_reason(run, make, batch, options, why):
    made = run(make(), batch, **({} if "logged" in options else {"peak_tflops": 1.0, "logged": TWENTY}), **options)

    assert [] == made.values("tflops_per_gpu") == made.values("mfu")
    (note,) = made.notes
    assert note.startswith("TFLOP/s and MFU are absent: ")
    assert ("monitor.log(" if why is None else "rankscope.count_flops()") in note
    assert (why or "") in note
    assert len(note) <= 130  # one short sentence


@pytest.mark.parametrize(
    ("make", "batch", "logged"),
    [
        *((lambda: nn.Conv2d(3, 4, 3), IMAGES, {}), (lambda: nn.Conv2d(3, 4, 3), IMAGES, {"samples": 2})),
        *((convolution_of_tokens, IDS, {"samples": 2}), (convolution_of_tokens, IDS, {"tokens": 20})),
    ],
)
def test_missing_formula_is_reported_only_if_tokens_are_logged(run, make, batch, logged):
    made = run(make(), batch, logged=logged)
    is_expected = batch is IDS and "tokens" in logged
    note = "TFLOP/s and MFU are absent: layer is a convolution; use rankscope.count_flops()"

    assert [] == made.values("tflops_per_gpu")
    assert ([note] if is_expected else []) == made.notes


def test_cpu_without_a_peak_setting_has_no_mfu(run):
    made = run(Tokens(), IDS, logged=TWENTY)

    assert [] == made.values("mfu")
    assert "rankscope_mfu_ratio" not in made.page
    assert re.search(r'rankscope_tflops_per_gpu\{[^}]*method="6n"[^}]*\} [0-9.e-]+\n', made.page)
    assert all(math.isfinite(value) and value > 0 for value in made.values("tflops_per_gpu"))


@pytest.mark.parametrize("options", [{"logged": {"tokens": 0}}, {"logged": {"tokens": math.nan}}, {"method": "off"}])
def test_nothing_is_published_without_tokens_or_with_the_method_off(run, options):
    made = run(Tokens(), IDS, peak_tflops=1, **options)

    assert [] == made.values("tflops_per_gpu") == made.values("mfu") == made.notes


def test_float32_peak_is_tf32_if_it_is_enabled():
    before, found = torch.backends.cuda.matmul.fp32_precision, []
    try:
        for precision in ("tf32", "ieee"):
            torch.backends.cuda.matmul.fp32_precision = precision
            found.append(multiplies_in_tf32())
    finally:
        torch.backends.cuda.matmul.fp32_precision = before

    assert [True, False] == found


def test_compute_dtype_is_that_of_autocast_or_parameters():
    model = mlp().to(torch.bfloat16)
    model.register_parameter("scale", nn.Parameter(torch.ones(3)))
    framework = framework_of(model)

    assert torch.float16 is compute_dtype(framework, torch.float16)
    assert torch.bfloat16 is compute_dtype(framework, None)


def test_mfu_uses_the_peak_of_the_device_name(monkeypatch, run):
    """No accelerator is needed: the device name is that of a double."""
    found = {}
    for name in ("NVIDIA H100 80GB HBM3", "Abacus 3000"):
        monkeypatch.setattr(f"{Throughput.__module__}.device_name", lambda _device, name=name: name)
        found[name] = run(Tokens(), IDS, logged=TWENTY)
    known, unknown = found.values()

    assert [rate / 66.9 for rate in known.values("tflops_per_gpu")] == pytest.approx(known.values("mfu"))
    assert [] == unknown.values("mfu")
    assert 1 == len([note for note in unknown.notes if "Abacus 3000" in note and "peak_tflops" in note])


PROGRAM = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from rankscope_exporter import Monitor
from tests.exporter.conftest import Reader, wait_until

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def measured(kind):
    torch.manual_seed(0)
    table, first, last = nn.Embedding(50, 8), nn.Linear(8, 16), nn.Linear(16, 4)
    model, options, step = nn.Sequential(table, first, nn.ReLU(), last), {}, None
    ids = torch.zeros(2, 5, dtype=torch.long)
    config = {"console": False, "exit_wait_seconds": 0, "statistics": "torch", "quantities": ["gradients"]}
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp2":
        fully_shard(last)
        fully_shard(model)
    elif kind == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    elif kind == "tp":
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"1": ColwiseParallel(), "3": RowwiseParallel()})
    elif kind == "groups":
        options = {"tp_group": dist.group.WORLD}
        config["throughput"] = {"flops_per_sample": 1000, "method": "given"}
    elif kind == "images":
        model, ids = DistributedDataParallel(nn.Conv2d(3, 4, 3)), torch.zeros(2, 3, 8, 8)
        config["throughput"] = {"peak_tflops": 1.0}  # so that values are expected
    elif kind == "pp":
        part = nn.Sequential(table, first, nn.ReLU()) if rank == 0 else last
        model = PipelineStage(part, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(model, 2, loss_fn=lambda output, target: output.sum())
        arguments, keywords = ((ids,), {}) if rank == 0 else ((), {"target": ids})
        step = lambda: schedule.step(*arguments, **keywords)
    owner = part if kind == "pp" else model
    optimizer = torch.optim.SGD(owner.parameters(), lr=0.0)
    monitor = Monitor(config).attach(model, optimizer, **options)
    for _ in range(2):
        optimizer.zero_grad()
        step() if step else model(ids).sum().backward()
        optimizer.step()
        monitor.log(**({"samples": 2} if kind == "images" else {"tokens": ids.numel(), "samples": 2}))
    monitor.end_step()
    reader = Reader(monitor.address)
    wait_until(lambda: len(reader.scalars("step_seconds")) == 2)
    rates, seconds = reader.scalars("tflops_per_gpu"), reader.scalars("step_seconds")
    methods = sorted({json.loads(scalar["labels"])["method"] for record in reader.records()
                      for scalar in record["scalars"] or () if scalar["name"] == "tflops_per_gpu"})
    notes = [event["message"] for event in reader.events() if "TFLOP/s" in event["message"]]
    dist.barrier()
    monitor.detach()
    return [rate * took * 1e12 for (_, rate), (_, took) in zip(rates, seconds)], methods, monitor.faults, notes

def main():
    return {kind: measured(kind) for kind in KINDS}
"""

TOKENS = 10
FIRST, LAST = 8 * 16 + 16, 16 * 4 + 4
WHOLE = 6 * (FIRST + LAST) * TOKENS
"""The table is looked up, not multiplied."""


# By kind: the method, and the FLOPs of each rank.
EXPECTED = {
    "ddp": ("6n", (WHOLE, WHOLE)),  # each rank has a different batch
    "fsdp2": ("6n", (WHOLE, WHOLE)),
    "fsdp1": ("6n", (WHOLE, WHOLE)),
    "tp": ("6n", (WHOLE / 2, WHOLE / 2)),  # both ranks have the same batch and half of the matrices
    "groups": ("given", (1000 * 2 / 2, 1000 * 2 / 2)),
    "pp": ("6n", (6 * FIRST * TOKENS, 6 * LAST * TOKENS)),  # each rank has one stage
}


@pytest.fixture(scope="module")
def ranks():
    return run_two_ranks(PROGRAM.replace("KINDS", repr([*EXPECTED, "images"] if THOROUGH else ["images"])))


@pytest.mark.parametrize("kind", EXPECTED)
@pytest.mark.thorough
def test_each_rank_has_the_flops_of_its_own_device(kind, ranks):
    method, expected = EXPECTED[kind]

    for flops, rank in zip(expected, ranks, strict=True):
        found, methods, faults, notes = rank[kind]
        assert [flops] * 2 == pytest.approx(found)
        assert ([method], 0, []) == (methods, faults, notes)


def test_only_rank_0_reports_absent_values(ranks):
    assert [[], []] == [rank["images"][0] for rank in ranks]
    assert [1, 0] == [len(rank["images"][-1]) for rank in ranks]


# The dense bfloat16 TFLOP/s of data sheets, and the results of torch.cuda.get_device_name() of machines.
NAMES = {
    2500: ["NVIDIA GB200"],
    2250: ["NVIDIA B200"],
    1307.4: ["AMD Instinct MI300X", "AMD Instinct MI325X"],
    989.4: ["NVIDIA H100 80GB HBM3", "NVIDIA H800", "NVIDIA H200", "NVIDIA GH200 480GB"],
    835.5: ["NVIDIA H100 NVL", "NVIDIA H200 NVL"],
    756.5: ["NVIDIA H100 PCIe"],
    364.2: ["NVIDIA RTX 6000 Ada Generation"],
    362.05: ["NVIDIA L40S"],
    312: ["NVIDIA A100-SXM4-80GB", "A100-SXM4-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA A800-SXM4-80GB"],
    312 * 3 / 7: ["NVIDIA A100-SXM4-80GB MIG 3g.40gb"],
    209.5: ["NVIDIA GeForce RTX 5090"],
    191.5: ["AMD Instinct MI250X"],
    181.05: ["NVIDIA L40", "AMD Instinct MI250"],
    181: ["AMD Instinct MI210"],
    165.2: ["NVIDIA GeForce RTX 4090"],
    165: ["NVIDIA A30"],
    154.8: ["NVIDIA RTX A6000"],
    149.7: ["NVIDIA A40"],
    148: ["NVIDIA H20"],
    125: ["NVIDIA A10"],
    121: ["NVIDIA L4"],
    71: ["NVIDIA GeForce RTX 3090"],
    70: ["NVIDIA A10G"],
}
# Devices without bfloat16 units, with their float16 TFLOP/s.
OLDER = {125: ["Tesla V100-SXM2-32GB"], 112: ["Tesla V100-PCIE-16GB"], 65: ["Tesla T4"]}
UNKNOWN = ["NVIDIA GeForce GTX 1080", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA T400", "A1000", "cpu", ""]


@pytest.mark.parametrize(
    ("name", "half", "bfloat16"),
    [
        *((name, peak, peak) for peak, names in NAMES.items() for name in names),
        *((name, peak, None) for peak, names in OLDER.items() for name in names),
        *((name, None, None) for name in UNKNOWN),
    ],
)
def test_device_is_found_by_the_name_of_torch(name, half, bfloat16):
    found = [peak_tflops(name, dtype, tf32=True) for dtype in (torch.float16, torch.bfloat16)]

    assert [half, bfloat16] == pytest.approx(found)


def test_float32_peak_depends_on_tf32():
    assert 494.7 == peak_tflops("NVIDIA H100 80GB HBM3", torch.float32, tf32=True)
    assert 66.9 == peak_tflops("NVIDIA H100 80GB HBM3", torch.float32, tf32=False)
    assert 15.7 == peak_tflops("Tesla V100-SXM2-16GB", torch.float32, tf32=True)


def test_wider_type_is_never_faster():
    for pattern, peaks in TABLE:
        assert peaks.float32 <= (peaks.tf32 or peaks.half) <= peaks.half, pattern
