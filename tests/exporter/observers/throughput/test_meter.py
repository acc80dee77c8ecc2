"""TFLOP/s and MFU of real training loops, compared with FLOPs computed by hand and times measured by the loop."""

from __future__ import annotations

import json
import math
import re
import time
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
    """Three steps of `model` with the monitor, and their results."""

    def __init__(
        self, reader, eventually, model, batch, *, forwards=1, sleep=0.0, logged=None, console=False, **throughput
    ) -> None:
        config = MonitorConfig(
            console=console,
            exit_wait_seconds=0,
            statistics="torch",
            throughput=ThroughputConfig(**throughput),
        )
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
            self.records = seen.records()
            self.page = seen.get("/metrics").decode()
            self.events = seen.events()
            self.faults = monitor.faults

    def of(self, name: str) -> list[tuple[float, dict[str, str]]]:
        return [
            (scalar["value"], json.loads(scalar["labels"] or "{}"))
            for record in self.records
            for scalar in record["scalars"] or ()
            if scalar["name"] == name
        ]

    def values(self, name: str) -> list[float]:
        return [value for value, _ in self.of(name)]

    def methods(self, name: str) -> set[str]:
        return {labels["method"] for _, labels in self.of(name)}

    def flops(self) -> list[float]:
        """Return the FLOPs of each step: its TFLOP/s times its duration."""
        pairs = zip(self.values("tflops_per_gpu"), self.values("step_seconds"), strict=True)
        return [rate * seconds * 1e12 for rate, seconds in pairs]

    def notes(self) -> list[str]:
        return [event["message"] for event in self.events if event["type"] == "note"]


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
        assert samples <= BATCH / SLEEP
        assert 1000 / BATCH == pytest.approx(tokens / samples)
    assert [1000 * TOKEN] * 4 == pytest.approx(made.flops())
    assert max(made.values("tflops_per_gpu")) <= 1000 * TOKEN / SLEEP / 1e12
    assert [rate / 0.001 for rate in made.values("tflops_per_gpu")] == pytest.approx(made.values("mfu"))


def test_step_of_double_duration_has_half_the_rate(run):
    slow, fast = (run(Tokens(), IDS, sleep=sleep) for sleep in (1.0, 0.1))

    ratio = min(fast.values("tflops_per_gpu")[1:]) / max(slow.values("tflops_per_gpu")[1:])
    assert 1 < ratio <= 10 * 1.5


def test_forward_passes_count_if_no_amount_is_logged(run):
    made = run(Tokens(), IDS, forwards=3)

    assert [3 * 20 * TOKEN] * 4 == pytest.approx(made.flops())
    assert {"6n"} == made.methods("tflops_per_gpu")


def test_samples_count_if_no_tokens_are_logged(run):
    assert [5 * 10 * TOKEN] * 4 == pytest.approx(run(Tokens(), IDS, logged={"samples": 5}).flops())


def test_steps_with_more_tokens_have_more_flops(run):
    assert [30 * TOKEN] * 4 == pytest.approx(run(Tokens(), IDS, logged={"tokens": 30}).flops())


def test_tokens_may_be_a_tensor(run):
    assert [20 * TOKEN] * 4 == pytest.approx(run(Tokens(), IDS, logged={"tokens": torch.tensor(20)}).flops())


def test_flops_per_token_setting_precedes_the_formula(run):
    made = run(Tokens(), IDS, logged={"tokens": 20}, flops_per_token=1e6)

    assert [20e6] * 4 == pytest.approx(made.flops())
    assert {"given"} == made.methods("tflops_per_gpu")
    assert [] == made.notes()


def test_counted_flops_have_the_method_given(run):
    model, images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 2)), torch.zeros(2, 3, 8, 8)
    counted = count_flops(model, images)
    made = run(model, images, logged={"samples": 2}, flops_per_sample=counted.per_sample())

    # The convolution needs no gradient of its input.
    assert 2 * 2 * (2 * 6 * 6 * 4 * 3 * 9 + 3 * 4 * 6 * 6 * 2) == counted
    assert [counted] * 4 == pytest.approx(made.flops())
    assert ({"given"}, []) == (made.methods("tflops_per_gpu"), made.notes())


def test_flops_per_sample_setting_is_used(run):
    made = run(mlp(), torch.zeros(BATCH, 64), logged={"samples": BATCH}, flops_per_sample=5e5, method="given")

    assert [BATCH * 5e5] * 4 == pytest.approx(made.flops())


def test_logged_flops_are_those_of_this_rank_and_step(run):
    made = run(mlp(), torch.zeros(BATCH, 64), logged={"flops": 7e9}, model_parallel=4)

    assert [7e9] * 4 == pytest.approx(made.flops())
    assert {"given"} == made.methods("tflops_per_gpu")


def test_flops_setting_is_divided_by_the_ranks_of_a_copy(run):
    made = run(Tokens(), IDS, logged={"tokens": 20}, flops_per_token=1e6, model_parallel=4)

    assert [20e6 / 4] * 4 == pytest.approx(made.flops())


DECODER = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 50,
}


def test_formula_for_a_configured_decoder(run):
    made = run(Tokens(**DECODER), IDS, logged={"tokens": 20})

    layer = 2 * 16 * 16 + 2 * 16 * 8 + 2 * 10 * 16 + 2 * 16 * 40
    assert [20 * 6 * (3 * layer + 16 * 50)] * 4 == pytest.approx(made.flops())
    assert ({"formula"}, []) == (made.methods("tflops_per_gpu"), made.notes())


def test_formula_for_a_decoder_with_frozen_weights(run):
    model = Tokens(**DECODER)
    model.head.requires_grad_(requires_grad=False)
    made = run(model, IDS, logged={"tokens": 20})

    layer, scores = 2 * 16 * 16 + 2 * 16 * 8 + 2 * 16 * 40, 2 * 10 * 16
    assert [20 * (4 * (3 * layer + 16 * 50) + 6 * 3 * scores)] * 4 == pytest.approx(made.flops())


def test_formula_for_a_model_with_only_layers_and_width(run):
    made = run(Tokens(n_layer=3, n_embd=16), IDS, logged={"tokens": 20}, method="formula")

    assert [20 * (TOKEN + 12 * 3 * 16 * 10)] * 4 == pytest.approx(made.flops())
    assert [] == made.notes()


def test_six_n_is_used_without_a_configuration(run):
    made = run(Tokens(), IDS, logged={"tokens": 20})

    assert [20 * TOKEN] * 4 == pytest.approx(made.flops())
    assert ({"6n"}, []) == (made.methods("tflops_per_gpu"), made.notes())


def test_tied_embedding_counts_as_a_matrix(run):
    model = Tokens()
    model.head.weight = model.table.weight

    made = run(model, IDS, logged={"tokens": 20}, method="6n")

    assert [20 * TOKEN] * 4 == pytest.approx(made.flops())


class Classifier(nn.Module):
    """A convolution over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(50, 16), nn.Conv1d(16, 2, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(ids).transpose(1, 2))


class Bag(nn.Module):
    """Combines all tokens of a sample to one row."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(50, 16), nn.Linear(16, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


class Kernels(Tokens):
    """Has a parameter of three dimensions, like a convolution kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = nn.Parameter(torch.ones(16, 16, 3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.conv1d(self.table(ids).transpose(1, 2), self.kernels, padding=1).transpose(1, 2))


class Routed(Tokens):
    """Has experts, and no configuration with the number of experts per token."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return self.head(sum(expert(x) for expert in self.experts))


IMAGES = torch.zeros(2, 3, 8, 8)


@pytest.mark.usual(4)
@pytest.mark.parametrize(
    ("make", "batch", "options", "why"),
    [
        (lambda: nn.Conv2d(3, 4, 3), IMAGES, {}, "is a convolution"),
        (lambda: nn.Conv2d(3, 4, 3), IMAGES, {"method": "6n"}, "is a convolution"),
        (Classifier, IDS, {}, "layer is a convolution"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), IMAGES, {}, "takes no tokens"),
        (mlp, torch.zeros(BATCH, 64), {}, "takes no tokens"),
        (Bag, IDS, {}, "combines many tokens to one row"),
        (Kernels, IDS, {}, "kernels has 3 dimensions"),
        (Routed, IDS, {}, "number of experts per token"),
        (Tokens, IDS, {"method": "formula"}, "describes no decoder"),
        (mlp, torch.zeros(2, 10, 64), {}, None),
        (lambda: nn.Conv2d(3, 4, 3), IMAGES, {"flops_per_token": 1e6}, None),
    ],
    ids=[
        "convolution",
        "convolution by 6n",
        "convolution of tokens",
        "images",
        "rows",
        "bag",
        "kernels",
        "experts",
        "no configuration",
        "embeddings without tokens",
        "given without tokens",
    ],
)
@pytest.mark.parametrize(
    ("logged", "peak_tflops"), [({}, 1.0), ({"samples": 2}, None)], ids=["a peak is set", "samples are logged"]
)
def test_missing_formula_is_reported_once_with_the_reason(run, make, batch, options, why, logged, peak_tflops):
    made = run(make(), batch, logged=logged, peak_tflops=peak_tflops, **options)

    assert [] == made.of("tflops_per_gpu") == made.of("mfu")
    if peak_tflops is None and not options:  # the user does not expect TFLOP/s
        assert [] == made.notes()
        return
    (note,) = made.notes()
    assert note.startswith("TFLOP/s and MFU are absent: ")
    assert ("monitor.log(" if why is None else "rankscope.count_flops()") in note
    assert (why or "") in note
    assert len(note) <= 120  # one short sentence


@pytest.mark.parametrize(("make", "batch"), [(lambda: nn.Conv2d(3, 4, 3), IMAGES), (Classifier, IDS)], ids=["2d", "1d"])
def test_six_n_is_not_used_for_a_convolution(run, make, batch):
    """A model of images cannot have TFLOP/s by a formula: no note names the reason."""
    made = run(make(), batch, logged={"tokens": 20})
    about_tokens = ["TFLOP/s and MFU are absent: layer is a convolution; use rankscope.count_flops()"]

    assert [] == made.of("tflops_per_gpu")
    assert (about_tokens if batch is IDS else []) == made.notes()


@pytest.mark.parametrize("logged", [{}, {"samples": 2}])
def test_convolution_without_a_setting_has_no_line_about_tflops(run, capfd, logged):
    made = run(nn.Conv2d(3, 4, 3), IMAGES, console=True, logged=logged)

    assert [] == made.notes()
    assert "TFLOP" not in capfd.readouterr().err


def test_logged_tokens_are_used_for_embedded_inputs(run):
    made = run(mlp(), torch.zeros(2, 10, 64), logged={"tokens": 20})

    assert [20 * 6 * (64 * 128 + 128 + 128 * 8 + 8)] * 4 == pytest.approx(made.flops())


def test_cpu_without_a_peak_setting_has_no_mfu(run):
    made = run(Tokens(), IDS)

    assert [] == made.of("mfu")
    assert "rankscope_mfu_ratio" not in made.page
    assert re.search(r'rankscope_tflops_per_gpu\{[^}]*method="6n"[^}]*\} [0-9.e-]+\n', made.page)
    assert all(math.isfinite(value) and value > 0 for value in made.values("tflops_per_gpu"))


@pytest.mark.parametrize("tokens", [0, math.nan])
def test_step_without_tokens_publishes_nothing(run, tokens):
    assert [] == run(Tokens(), IDS, logged={"tokens": tokens}).of("tflops_per_gpu")


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
    monkeypatch.setattr(meter, "device_name", lambda _device: "NVIDIA H100 80GB HBM3")

    made = run(Tokens(), IDS)

    assert [rate / 66.9 for rate in made.values("tflops_per_gpu")] == pytest.approx(made.values("mfu"))


def test_unknown_device_is_named_once_and_has_no_mfu(monkeypatch, run):
    monkeypatch.setattr(meter, "device_name", lambda _device: "Abacus 3000")

    made = run(Tokens(), IDS)

    assert [] == made.of("mfu")
    assert 1 == len([note for note in made.notes() if "Abacus 3000" in note and "peak_tflops" in note])


def test_off_publishes_nothing(run):
    made = run(mlp(), torch.zeros(BATCH, 64), method="off", peak_tflops=1)

    assert [] == made.of("tflops_per_gpu") == made.of("mfu") == made.notes()


def test_training_is_bit_identical_with_throughput():
    def train(method: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 4))
        optimizer = torch.optim.AdamW(model.parameters())
        config = {"console": False, "exit_wait_seconds": 0, "throughput": {"method": method}}
        with Monitor(config).attach(model, optimizer) as monitor:
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.randn(8, 16)).square().sum().backward()
                optimizer.step()
            assert monitor.faults == 0
        return [*model.parameters(), torch.get_rng_state(), torch.rand(3)]

    pairs = zip(train("auto"), train("off"), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"method": "magic"}, "throughput.method must be one of"),
        ({"flops_per_token": 0}, "throughput.flops_per_token must be a number above 0"),
        ({"peak_tflops": math.inf}, "throughput.peak_tflops"),
        ({"peak_tflops": True}, "throughput.peak_tflops"),
        ({"model_parallel": 0}, "throughput.model_parallel must be a number of ranks"),
        ({"peak": 3}, "peak"),
    ],
)
def test_invalid_throughput_setting_is_refused(setting, why):
    with pytest.raises(ConfigError, match=why):
        Monitor({"throughput": setting})
