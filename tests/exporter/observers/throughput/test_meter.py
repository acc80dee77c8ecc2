"""TFLOP/s and MFU of real training loops, against FLOPs computed by hand and clocks of the loop's own."""

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
from rankscope_exporter.observers.throughput.parameter_counts import compute_dtype, multiplies_in_tf32

BATCH = 32
IDS = torch.zeros(2, 10, dtype=torch.long)
TOKEN = 6 * 16 * 50
"""FLOPs of a token of `Tokens` by 6 N: the table is looked up, not multiplied."""
SLEEP = 0.05


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))


class Tokens(nn.Module):
    """A model of tokens: a table, and a layer that gives each a score for every one."""

    def __init__(self, vocabulary: int = 50, width: int = 16, **config: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.config = SimpleNamespace(**config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


class Run:
    """Three steps of `model` with the monitor, and what became of them."""

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
        self.took: list[float] = []
        with Monitor(config).attach(model, optimizer) as monitor:
            for _ in range(4):
                optimizer.zero_grad()
                began = time.monotonic()
                for _ in range(forwards):
                    model(batch).sum().backward()
                time.sleep(sleep)
                optimizer.step()
                monitor.log(**(logged or {}))
                self.took.append(time.monotonic() - began)
            monitor.end_step()
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


def test_step_time_samples_tokens_and_flops_per_second_of_a_step_that_sleeps(run):
    made = run(Tokens(), IDS, sleep=SLEEP, logged={"samples": BATCH, "tokens": 1000}, peak_tflops=0.001)

    for seconds, took in zip(made.values("step_seconds"), made.took, strict=True):
        assert SLEEP <= seconds
        assert took * 0.5 <= seconds
    rates = zip(made.values("samples_per_second"), made.values("tokens_per_second"), strict=True)
    for (samples, tokens), seconds in zip(rates, made.values("step_seconds"), strict=True):
        assert BATCH / seconds == pytest.approx(samples)
        assert samples <= BATCH / SLEEP
        assert 1000 / BATCH == pytest.approx(tokens / samples)
    assert [1000 * TOKEN] * 4 == pytest.approx(made.flops())
    assert max(made.values("tflops_per_gpu")) <= 1000 * TOKEN / SLEEP / 1e12
    assert [rate / 0.001 for rate in made.values("tflops_per_gpu")] == pytest.approx(made.values("mfu"))


def test_a_step_that_sleeps_twice_as_long_is_half_as_fast(run):
    slow, fast = (run(Tokens(), IDS, sleep=sleep) for sleep in (1.0, 0.1))

    ratio = min(fast.values("tflops_per_gpu")[1:]) / max(slow.values("tflops_per_gpu")[1:])
    assert 1 < ratio <= 10 * 1.5


def test_forward_passes_of_a_step_count_where_it_logs_no_amounts(run):
    made = run(Tokens(), IDS, forwards=3)

    assert [3 * 20 * TOKEN] * 4 == pytest.approx(made.flops())
    assert {"6n"} == made.methods("tflops_per_gpu")


def test_samples_count_where_a_step_logs_no_tokens(run):
    assert [5 * 10 * TOKEN] * 4 == pytest.approx(run(Tokens(), IDS, logged={"samples": 5}).flops())


def test_steps_of_more_tokens_than_the_first_cost_more(run):
    assert [30 * TOKEN] * 4 == pytest.approx(run(Tokens(), IDS, logged={"tokens": 30}).flops())


def test_tokens_that_are_a_tensor_count_too(run):
    assert [20 * TOKEN] * 4 == pytest.approx(run(Tokens(), IDS, logged={"tokens": torch.tensor(20)}).flops())


def test_given_flops_of_a_token_precede_a_formula(run):
    made = run(Tokens(), IDS, logged={"tokens": 20}, flops_per_token=1e6)

    assert [20e6] * 4 == pytest.approx(made.flops())
    assert {"given"} == made.methods("tflops_per_gpu")
    assert [] == made.notes()


def test_flops_that_were_counted_before_are_given(run):
    model, images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 2)), torch.zeros(2, 3, 8, 8)
    counted = count_flops(model, images)
    made = run(model, images, logged={"samples": 2}, flops_per_sample=counted.per_sample())

    # The convolution needs no gradient of its input.
    assert 2 * 2 * (2 * 6 * 6 * 4 * 3 * 9 + 3 * 4 * 6 * 6 * 2) == counted
    assert [counted] * 4 == pytest.approx(made.flops())
    assert ({"given"}, []) == (made.methods("tflops_per_gpu"), made.notes())


def test_given_flops_of_a_sample(run):
    made = run(mlp(), torch.zeros(BATCH, 64), logged={"samples": BATCH}, flops_per_sample=5e5, method="given")

    assert [BATCH * 5e5] * 4 == pytest.approx(made.flops())


def test_flops_that_training_logs_are_those_of_this_rank_in_this_step(run):
    made = run(mlp(), torch.zeros(BATCH, 64), logged={"flops": 7e9}, model_parallel=4)

    assert [7e9] * 4 == pytest.approx(made.flops())
    assert {"given"} == made.methods("tflops_per_gpu")


def test_given_flops_of_the_whole_model_are_shared_by_the_ranks_that_compute_it(run):
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


def test_formula_for_a_decoder_that_the_configuration_names(run):
    made = run(Tokens(**DECODER), IDS, logged={"tokens": 20})

    layer = 2 * 16 * 16 + 2 * 16 * 8 + 2 * 10 * 16 + 2 * 16 * 40
    assert [20 * 6 * (3 * layer + 16 * 50)] * 4 == pytest.approx(made.flops())
    assert ({"formula"}, []) == (made.methods("tflops_per_gpu"), made.notes())


def test_frozen_weights_need_no_gradient_in_the_formula_for_a_decoder(run):
    model = Tokens(**DECODER)
    model.head.requires_grad_(requires_grad=False)
    made = run(model, IDS, logged={"tokens": 20})

    layer, scores = 2 * 16 * 16 + 2 * 16 * 8 + 2 * 16 * 40, 2 * 10 * 16
    assert [20 * (4 * (3 * layer + 16 * 50) + 6 * 3 * scores)] * 4 == pytest.approx(made.flops())


def test_with_layers_and_width_alone_the_parameters_count_and_attention(run):
    made = run(Tokens(n_layer=3, n_embd=16), IDS, logged={"tokens": 20}, method="formula")

    assert [20 * (TOKEN + 12 * 3 * 16 * 10)] * 4 == pytest.approx(made.flops())
    assert [] == made.notes()


def test_without_a_configuration_six_for_each_parameter_that_a_token_meets(run):
    made = run(Tokens(), IDS, logged={"tokens": 20})

    assert [20 * TOKEN] * 4 == pytest.approx(made.flops())
    assert ({"6n"}, []) == (made.methods("tflops_per_gpu"), made.notes())


def test_a_table_that_is_the_last_layer_too_is_multiplied(run):
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
    """Makes one row of all tokens of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(50, 16), nn.Linear(16, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


class Kernels(Tokens):
    """Has a parameter of three dimensions, as kernels of a convolution have."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = nn.Parameter(torch.ones(16, 16, 3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.conv1d(self.table(ids).transpose(1, 2), self.kernels, padding=1).transpose(1, 2))


class Routed(Tokens):
    """Has experts, and no configuration that says how many a token is sent to."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return self.head(sum(expert(x) for expert in self.experts))


IMAGES = torch.zeros(2, 3, 8, 8)


@pytest.mark.parametrize(
    ("make", "batch", "options", "why"),
    [
        (lambda: nn.Conv2d(3, 4, 3), IMAGES, {}, "is a convolution"),
        (lambda: nn.Conv2d(3, 4, 3), IMAGES, {"method": "6n"}, "is a convolution"),
        (Classifier, IDS, {}, "layer is a convolution"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), IMAGES, {}, "takes no tokens"),
        (mlp, torch.zeros(BATCH, 64), {}, "takes no tokens"),
        (Bag, IDS, {}, "makes one row of many tokens"),
        (Kernels, IDS, {}, "kernels has 3 dimensions"),
        (Routed, IDS, {}, "how many experts"),
        (Tokens, IDS, {"method": "formula"}, "names no decoder"),
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
def test_without_a_fitting_formula_one_event_names_the_reason(run, make, batch, options, why, logged, peak_tflops):
    made = run(make(), batch, logged=logged, peak_tflops=peak_tflops, **options)

    (note,) = made.notes()
    assert [] == made.of("tflops_per_gpu") == made.of("mfu")
    assert note.startswith("TFLOP/s and MFU are absent: ")
    assert ("monitor.log(" if why is None else "rankscope.count_flops()") in note
    assert (why or "") in note


@pytest.mark.parametrize(("make", "batch"), [(lambda: nn.Conv2d(3, 4, 3), IMAGES), (Classifier, IDS)], ids=["2d", "1d"])
def test_six_n_is_not_applied_to_a_convolution_where_tokens_are_logged(run, make, batch):
    made = run(make(), batch, logged={"tokens": 20})

    assert [] == made.of("tflops_per_gpu")
    assert 1 == len(made.notes())


def test_console_names_the_reason_where_no_numbers_are_expected(run, capfd):
    made = run(nn.Conv2d(3, 4, 3), IMAGES, console=True)
    lines = [line for line in capfd.readouterr().err.splitlines() if "TFLOP/s" in line]

    assert ([], 1) == (made.notes(), len(lines))
    assert "rankscope.count_flops()" in lines[0]


def test_embedded_tokens_are_known_where_they_are_logged(run):
    made = run(mlp(), torch.zeros(2, 10, 64), logged={"tokens": 20})

    assert [20 * 6 * (64 * 128 + 128 + 128 * 8 + 8)] * 4 == pytest.approx(made.flops())


def test_on_a_cpu_there_is_no_mfu_without_a_peak(run):
    made = run(Tokens(), IDS)

    assert [] == made.of("mfu")
    assert "rankscope_mfu_ratio" not in made.page
    assert re.search(r'rankscope_tflops_per_gpu\{[^}]*method="6n"[^}]*\} [0-9.e-]+\n', made.page)
    assert all(math.isfinite(value) and value > 0 for value in made.values("tflops_per_gpu"))


@pytest.mark.parametrize("tokens", [0, math.nan])
def test_a_step_without_tokens_says_nothing(run, tokens):
    assert [] == run(Tokens(), IDS, logged={"tokens": tokens}).of("tflops_per_gpu")


def test_float32_counts_as_tf32_where_training_lets_it():
    before, found = torch.backends.cuda.matmul.fp32_precision, []
    try:
        for precision in ("tf32", "ieee"):
            torch.backends.cuda.matmul.fp32_precision = precision
            found.append(multiplies_in_tf32())
    finally:
        torch.backends.cuda.matmul.fp32_precision = before

    assert [True, False] == found


def test_products_are_of_the_type_that_autocast_says_else_of_most_parameters():
    model = mlp().to(torch.bfloat16)
    model.register_parameter("scale", nn.Parameter(torch.ones(3)))
    framework = framework_of(model)

    assert torch.float16 is compute_dtype(framework, torch.float16)
    assert torch.bfloat16 is compute_dtype(framework, None)


def test_mfu_is_of_the_peak_of_the_device_by_its_name(monkeypatch, run):
    """No accelerator is here: the name is that of a double."""
    monkeypatch.setattr(meter, "device_name", lambda _device: "NVIDIA H100 80GB HBM3")

    made = run(Tokens(), IDS)

    assert [rate / 66.9 for rate in made.values("tflops_per_gpu")] == pytest.approx(made.values("mfu"))


def test_a_device_that_is_not_in_the_table_is_named_once_and_has_no_mfu(monkeypatch, run):
    monkeypatch.setattr(meter, "device_name", lambda _device: "Abacus 3000")

    made = run(Tokens(), IDS)

    assert [] == made.of("mfu")
    assert 1 == len([note for note in made.notes() if "Abacus 3000" in note and "peak_tflops" in note])


def test_off_publishes_nothing(run):
    made = run(mlp(), torch.zeros(BATCH, 64), method="off", peak_tflops=1)

    assert [] == made.of("tflops_per_gpu") == made.of("mfu") == made.notes()


def test_training_is_bit_for_bit_the_same_with_and_without():
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
        ({"method": "magic"}, "throughput.method is one of"),
        ({"flops_per_token": 0}, "throughput.flops_per_token is a number above 0"),
        ({"peak_tflops": math.inf}, "throughput.peak_tflops"),
        ({"peak_tflops": True}, "throughput.peak_tflops"),
        ({"model_parallel": 0}, "throughput.model_parallel is a number of ranks"),
        ({"peak": 3}, "peak"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(setting, why):
    with pytest.raises(ConfigError, match=why):
        Monitor({"throughput": setting})
