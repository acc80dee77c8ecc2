"""TFLOP/s and MFU of real training loops, against FLOPs counted by hand and clocks of the loop's own."""

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

from rankscope_exporter import ConfigError, Monitor, MonitorConfig
from rankscope_exporter.frameworks import framework_of
from rankscope_exporter.throughput import ThroughputConfig, meter
from rankscope_exporter.throughput.parameters import compute_dtype, multiplies_in_tf32

BATCH = 32
LAYERS = 64 * 128, 128 * 8
FLOPS = 2 * BATCH * (2 * LAYERS[0] + 3 * LAYERS[1])
"""Of one forward and backward by hand: the input needs no gradient."""
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


class Deciding(Tokens):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores = super().forward(ids)
        return scores if scores.sum().item() > 0 else -scores


class Run:
    """Three steps of `model` with the monitor, and what became of them."""

    def __init__(self, reader, eventually, model, batch, *, forwards=1, sleep=0.0, logged=None, **throughput) -> None:
        config = MonitorConfig(
            console=False,
            exit_wait_seconds=0,
            statistics="torch",
            throughput=ThroughputConfig(**throughput),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self.took: list[float] = []
        with Monitor(config).attach(model, optimizer) as monitor:
            for _ in range(4):
                began = time.monotonic()
                optimizer.zero_grad()
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
            self.overhead = monitor.overhead_seconds()

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
    made = run(mlp(), torch.zeros(BATCH, 64), sleep=SLEEP, logged={"samples": BATCH, "tokens": 1000}, peak_tflops=0.001)

    for seconds, took in zip(made.values("step_seconds"), made.took, strict=True):
        assert SLEEP <= seconds
        assert took * 0.5 <= seconds
    rates = zip(made.values("samples_per_second"), made.values("tokens_per_second"), strict=True)
    for (samples, tokens), seconds in zip(rates, made.values("step_seconds"), strict=True):
        assert BATCH / seconds == pytest.approx(samples)
        assert samples <= BATCH / SLEEP
        assert 1000 / BATCH == pytest.approx(tokens / samples)
    assert [FLOPS] * 4 == pytest.approx(made.flops())
    assert max(made.values("tflops_per_gpu")) <= FLOPS / SLEEP / 1e12
    assert [rate / 0.001 for rate in made.values("tflops_per_gpu")] == pytest.approx(made.values("mfu"))


def test_a_step_that_sleeps_twice_as_long_is_half_as_fast(run):
    slow, fast = (run(mlp(), torch.zeros(BATCH, 64), sleep=sleep, logged={"samples": BATCH}) for sleep in (1.0, 0.1))

    ratio = min(fast.values("tflops_per_gpu")[1:]) / max(slow.values("tflops_per_gpu")[1:])
    assert 1 < ratio <= 10 * 1.5


def test_without_logged_amounts_the_forwards_that_were_seen_count(run):
    made = run(mlp(), torch.zeros(BATCH, 64), forwards=3)

    assert [3 * FLOPS] * 4 == pytest.approx(made.flops())
    assert {"counted"} == made.methods("tflops_per_gpu")


def test_steps_of_more_tokens_than_the_first_cost_more(run):
    ids = torch.zeros(2, 10, dtype=torch.long)

    made = run(Tokens(), ids, logged={"tokens": 30})

    assert [30 * 2 * 3 * 16 * 50] * 4 == pytest.approx(made.flops())


def test_tokens_that_are_a_tensor_count_too(run):
    made = run(Tokens(), torch.zeros(2, 10, dtype=torch.long), logged={"tokens": torch.tensor(20)})

    assert [20 * 2 * 3 * 16 * 50] * 4 == pytest.approx(made.flops())


def test_given_flops_of_a_token_go_before_counting(run):
    made = run(Tokens(), torch.zeros(2, 10, dtype=torch.long), logged={"tokens": 20}, flops_per_token=1e6)

    assert [20e6] * 4 == pytest.approx(made.flops())
    assert {"given"} == made.methods("tflops_per_gpu")
    assert made.overhead["throughput"] == 0


def test_given_flops_of_a_sample(run):
    made = run(mlp(), torch.zeros(BATCH, 64), logged={"samples": BATCH}, flops_per_sample=5e5, method="given")

    assert [BATCH * 5e5] * 4 == pytest.approx(made.flops())


def test_flops_that_training_logs_are_those_of_this_rank_in_this_step(run):
    made = run(mlp(), torch.zeros(BATCH, 64), logged={"flops": 7e9}, model_parallel=4)

    assert [7e9] * 4 == pytest.approx(made.flops())
    assert {"given"} == made.methods("tflops_per_gpu")


def test_given_flops_of_the_whole_model_are_shared_by_the_ranks_that_compute_it(run):
    made = run(
        Tokens(), torch.zeros(2, 10, dtype=torch.long), logged={"tokens": 20}, flops_per_token=1e6, model_parallel=4
    )

    assert [20e6 / 4] * 4 == pytest.approx(made.flops())


DECODER = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 50,
}


def test_what_cannot_be_counted_goes_by_the_formula_for_its_configuration_and_says_so_once(run):
    made = run(Deciding(**DECODER), torch.zeros(2, 10, dtype=torch.long), logged={"tokens": 20})

    layer = 2 * 16 * 16 + 2 * 16 * 8 + 2 * 10 * 16 + 2 * 16 * 40
    assert [20 * 6 * (3 * layer + 16 * 50)] * 4 == pytest.approx(made.flops())
    assert {"formula"} == made.methods("tflops_per_gpu")
    assert 1 == len([note for note in made.notes() if "the formula for its configuration" in note and "item()" in note])


def test_with_layers_and_width_alone_the_parameters_count_and_attention(run):
    made = run(
        Deciding(n_layer=3, n_embd=16), torch.zeros(2, 10, dtype=torch.long), logged={"tokens": 20}, method="formula"
    )

    assert [20 * (6 * 16 * 50 + 12 * 3 * 16 * 10)] * 4 == pytest.approx(made.flops())
    assert [] == made.notes()


def test_without_a_configuration_six_for_each_parameter_that_a_token_meets(run):
    made = run(Deciding(), torch.zeros(2, 10, dtype=torch.long), logged={"tokens": 20})

    assert [20 * 6 * 16 * 50] * 4 == pytest.approx(made.flops())  # the table is looked up, not multiplied
    assert {"6n"} == made.methods("tflops_per_gpu")
    assert 1 == len([note for note in made.notes() if "6 FLOPs for each parameter" in note and "item()" in note])


def test_a_table_that_is_the_last_layer_too_is_multiplied(run):
    model = Deciding()
    model.head.weight = model.table.weight

    made = run(model, torch.zeros(2, 10, dtype=torch.long), logged={"tokens": 20}, method="6n")

    assert [20 * 6 * 16 * 50] * 4 == pytest.approx(made.flops())


def test_on_a_cpu_there_is_no_mfu_without_a_peak(run):
    made = run(mlp(), torch.zeros(BATCH, 64))

    assert [] == made.of("mfu")
    assert "rankscope_mfu_ratio" not in made.page
    assert re.search(r'rankscope_tflops_per_gpu\{[^}]*method="counted"[^}]*\} [0-9.e-]+\n', made.page)
    assert all(math.isfinite(value) and value > 0 for value in made.values("tflops_per_gpu"))


@pytest.mark.parametrize("tokens", [0, math.nan])
def test_a_step_without_tokens_says_nothing(run, tokens):
    assert [] == run(Tokens(), torch.zeros(2, 10, dtype=torch.long), logged={"tokens": tokens}).of("tflops_per_gpu")


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

    made = run(mlp(), torch.zeros(BATCH, 64))

    assert [rate / 66.9 for rate in made.values("tflops_per_gpu")] == pytest.approx(made.values("mfu"))


def test_a_device_that_is_not_in_the_table_is_named_once_and_has_no_mfu(monkeypatch, run):
    monkeypatch.setattr(meter, "device_name", lambda _device: "Abacus 3000")

    made = run(mlp(), torch.zeros(BATCH, 64))

    assert [] == made.of("mfu")
    assert 1 == len([note for note in made.notes() if "Abacus 3000" in note and "peak_tflops" in note])


def test_off_publishes_nothing(run):
    made = run(mlp(), torch.zeros(BATCH, 64), method="off", peak_tflops=1)

    assert [] == made.of("tflops_per_gpu") == made.of("mfu")


def test_where_no_amount_is_known_nothing_is_claimed(run):
    """Six FLOPs for each parameter and token say nothing of images whose model cannot be counted."""

    class Images(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            y = self.layer(x)
            return y if y.sum().item() > 0 else -y

    made = run(Images(), torch.zeros(2, 3, 8, 8))

    assert [] == made.of("tflops_per_gpu") == made.notes()


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
