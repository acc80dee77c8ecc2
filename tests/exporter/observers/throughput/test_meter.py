"""TFLOP/s and MFU of real training loops, compared with FLOPs computed by hand and times measured by the loop."""

from __future__ import annotations

import json
import math
import re
import time
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rankscope_exporter import ConfigError, Monitor, MonitorConfig, count_flops
from rankscope_exporter.adapters import framework_of
from rankscope_exporter.observers.throughput import ThroughputConfig, meter
from rankscope_exporter.observers.throughput.costs import compute_dtype, multiplies_in_tf32

BATCH = 32
IDS = torch.zeros(2, 10, dtype=torch.long)
TOKEN = 6 * 16 * 50
"""FLOPs of a token of `Tokens` by 6 N: the table is looked up, not multiplied."""
SLEEP = 0.05


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))


class Tokens(nn.Module):
    """A token model: an embedding table and an output layer."""

    def __init__(self, vocabulary: int = 50, width: int = 16, **config: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.config = SimpleNamespace(**config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


class Run:
    """Four steps of `model` with the monitor, and their results."""

    def __init__(
        self, reader, eventually, model, batch, *, forwards=1, sleep=0.0, logged=None, **throughput: Any
    ) -> None:
        settings = ThroughputConfig(**throughput)
        config = MonitorConfig(console=False, exit_wait_seconds=0, statistics="torch", throughput=settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        began = time.monotonic()
        with Monitor(config).attach(model, optimizer) as monitor:
            for _ in range(4):
                optimizer.zero_grad()
                for _ in range(forwards):
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


SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "intermediate_size": 40, "vocab_size": 50}
DECODER = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
WEIGHTS, SCORES = 2 * 16 * 16 + 2 * 16 * 8 + 2 * 16 * 40, 2 * 10 * 16
"""Multiplications of a token of `DECODER` in one layer: with the weights, and in attention."""
TWENTY = {"tokens": 20}
FROZEN = 20 * (4 * (3 * WEIGHTS + 16 * 50) + 6 * 3 * SCORES)


def changed(model: Tokens, *, is_frozen: bool = False, is_tied: bool = False) -> Tokens:
    model.head.requires_grad_(requires_grad=not is_frozen)
    model.head.weight = model.table.weight if is_tied else model.head.weight
    return model


@pytest.mark.parametrize(
    ("model", "options", "method", "flops"),
    [
        (Tokens(), {"forwards": 3}, "6n", 3 * 20 * TOKEN),  # no amount is logged
        (Tokens(), {"logged": {"samples": 5}}, "6n", 5 * 10 * TOKEN),
        (Tokens(), {"logged": {"tokens": 30}}, "6n", 30 * TOKEN),
        (Tokens(), {"logged": {"tokens": torch.tensor(20)}}, "6n", 20 * TOKEN),
        (changed(Tokens(), is_tied=True), {"logged": TWENTY, "method": "6n"}, "6n", 20 * TOKEN),  # counts as a matrix
        (Tokens(**DECODER), {"logged": TWENTY}, "formula", 20 * 6 * (3 * (WEIGHTS + SCORES) + 16 * 50)),
        (changed(Tokens(**DECODER), is_frozen=True), {"logged": TWENTY}, "formula", FROZEN),
        (Tokens(n_layer=3, n_embd=16), {"logged": TWENTY, "method": "formula"}, "formula", 20 * (TOKEN + 12 * 3 * 160)),
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
        (lambda: nn.Conv2d(3, 4, 3), IMAGES, {}, "is a convolution"),
        (lambda: nn.Conv2d(3, 4, 3), IMAGES, {"method": "6n", "logged": {"samples": 2}}, "is a convolution"),
        (convolution_of_tokens, IDS, {}, "layer is a convolution"),
        (mlp, torch.zeros(BATCH, 64), {}, "takes no tokens"),
        (
            lambda: named(table=nn.EmbeddingBag(50, 16), head=nn.Linear(16, 2)),
            IDS,
            {},
            "combines many tokens to one row",
        ),
        (with_kernels, IDS, {}, "kernels has 3 dimensions"),
        (
            lambda: named(table=table(), experts=nn.Sequential(nn.Linear(16, 16))),
            IDS,
            {},
            "number of experts per token",
        ),
        (Tokens, IDS, {"method": "formula", "logged": {"samples": 2}}, "describes no decoder"),
        (mlp, torch.zeros(2, 10, 64), {}, None),
        (lambda: nn.Conv2d(3, 4, 3), IMAGES, {"flops_per_token": 1e6}, None),
    ],
)
def test_missing_formula_is_reported_once_with_the_reason(run, make, batch, options, why):
    made = run(make(), batch, **({} if "logged" in options else {"peak_tflops": 1.0}), **options)

    assert [] == made.values("tflops_per_gpu") == made.values("mfu")
    (note,) = made.notes
    assert note.startswith("TFLOP/s and MFU are absent: ")
    assert ("monitor.log(" if why is None else "rankscope.count_flops()") in note
    assert (why or "") in note
    assert len(note) <= 130  # one short sentence


@pytest.mark.parametrize(
    ("make", "batch", "logged"),
    [
        (lambda: nn.Conv2d(3, 4, 3), IMAGES, {}),
        (lambda: nn.Conv2d(3, 4, 3), IMAGES, {"samples": 2}),
        (lambda: nn.Conv2d(3, 4, 3), IMAGES, {"tokens": 20}),  # a model of images cannot have TFLOP/s by a formula
        (convolution_of_tokens, IDS, {"samples": 2}),
        (convolution_of_tokens, IDS, {"tokens": 20}),
    ],
)
def test_missing_formula_is_reported_only_if_tokens_are_logged(run, make, batch, logged):
    made = run(make(), batch, logged=logged)
    is_expected = batch is IDS and "tokens" in logged
    note = "TFLOP/s and MFU are absent: layer is a convolution; use rankscope.count_flops()"

    assert [] == made.values("tflops_per_gpu")
    assert ([note] if is_expected else []) == made.notes


def test_logged_tokens_are_used_for_embedded_inputs(run):
    made = run(mlp(), torch.zeros(2, 10, 64), logged={"tokens": 20})

    assert [20 * 6 * (64 * 128 + 128 + 128 * 8 + 8)] * 4 == pytest.approx(made.flops())


def test_cpu_without_a_peak_setting_has_no_mfu(run):
    made = run(Tokens(), IDS)

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
        monkeypatch.setattr(meter, "device_name", lambda _device, name=name: name)
        found[name] = run(Tokens(), IDS)
    known, unknown = found.values()

    assert [rate / 66.9 for rate in known.values("tflops_per_gpu")] == pytest.approx(known.values("mfu"))
    assert [] == unknown.values("mfu")
    assert 1 == len([note for note in unknown.notes if "Abacus 3000" in note and "peak_tflops" in note])


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"method": "magic"}, "throughput.method must be one of"),
        ({"flops_per_token": 0}, "throughput.flops_per_token must be a number above 0"),
        ({"peak_tflops": math.inf}, "throughput.peak_tflops"),
        ({"peak_tflops": True}, "throughput.peak_tflops"),
        ({"model_parallel": 0}, "throughput.model_parallel must be a number of ranks"),
        ({"peak": 3}, "peak"),
        ({"method": "counted"}, r"rankscope\.count_flops\(\)"),
    ],
)
def test_invalid_throughput_setting_is_refused(setting, why):
    with pytest.raises(ConfigError, match=why):
        Monitor({"throughput": setting})
