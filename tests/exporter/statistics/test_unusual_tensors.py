"""Tests with a model that has all kinds of parameters: its statistics, and its training as without a monitor."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rankscope_exporter import Monitor, MonitorConfig

SPARSE = "words.weight"


def fixed(values: list[float], dtype: torch.dtype) -> nn.Parameter:
    """Return a parameter that is not trained, because most dtypes have no gradient."""
    return nn.Parameter(torch.tensor(values, dtype=torch.float64).to(dtype), requires_grad=False)


class Museum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4, sparse=True)
        self.short = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.first = nn.Linear(4, 4, bias=False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.unused = nn.Linear(2, 2)
        self.scale8 = fixed([1.0, 0.0, -2.0, math.nan], torch.float8_e4m3fn)
        self.wide8 = fixed([1.0, math.inf, 0.0], torch.float8_e5m2)
        self.codes = fixed([0.0, 3.0, -4.0], torch.int8)
        self.mask = fixed([0.0, 1.0, 1.0], torch.bool)
        self.small = fixed([6e4, 6e4, 6e4, 6e4], torch.float16)  # the norm exceeds the largest number of its dtype

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        x = self.short(x.to(torch.bfloat16)).float()
        x = torch.view_as_real(x * self.phase).sum(-1)
        return self.tied(torch.tanh(self.first(x))).square().sum() + self.empty.sum()


def truth(tensor: torch.Tensor) -> dict[str, float | None]:
    tensor = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    wide = tensor.to(torch.complex128).abs() if tensor.is_complex() else tensor.to(torch.float64)
    numbers = wide.numpy().reshape(-1)
    finite = numbers[np.isfinite(numbers)]
    values = (
        {"norm": math.sqrt(float((finite**2).sum())), "min": finite.min(), "max": finite.max(), "mean": finite.mean()}
        if finite.size
        else dict.fromkeys(("norm", "min", "max", "mean"))
    )
    counts = {"nans": np.isnan(numbers).sum(), "infs": np.isinf(numbers).sum(), "zeros": (numbers == 0).sum()}
    return {**values, **{op: int(count) for op, count in counts.items()}, "numel": numbers.size}


def train(model: Museum, optimizer: torch.optim.Optimizer, step: int) -> dict[tuple[str, str], torch.Tensor]:
    """Train one step, and return its tensors."""
    held = {("param_before", name): item.detach().clone() for name, item in model.named_parameters()}
    optimizer.zero_grad()
    model(torch.tensor([step, 3, step])).backward()
    for name, item in model.named_parameters():
        if item.grad is not None:
            held["grad_reduced", name] = item.grad.clone()
    optimizer.step()
    return held


def make() -> tuple[Museum, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Museum()
    return model, torch.optim.SGD([item for item in model.parameters() if item.requires_grad], lr=0.01)


@pytest.mark.parametrize("statistics", ["auto", "torch"])
def test_each_tensor_has_the_statistics_of_its_dtype(statistics, reader, eventually):
    model, optimizer = make()
    config = MonitorConfig(
        quantities=("parameters", "gradients"), statistics=statistics, console=False, exit_wait_seconds=0
    )
    with Monitor(config).attach(model, optimizer) as monitor:
        read = reader(monitor)
        expected = {step: train(model, optimizer, step) for step in (1, 2)}
        monitor.end_step()
        rows = eventually(lambda: (found := read.rows()) and found[-1].step == 2 and found)
        assert 0 == monitor.faults
    found = {(row.step, row.kind, row.tensor): row.numbers for row in rows}
    wanted = {(step, *key): truth(tensor) for step, held in expected.items() for key, tensor in held.items()}

    assert wanted.keys() == {key for key in found if key[1] in ("param_before", "grad_reduced")}
    for key, numbers in wanted.items():
        for op, value in numbers.items():
            assert found[key][op] == (None if value is None else pytest.approx(value, rel=1e-5, abs=1e-6)), (key, op)


def test_tied_weight_is_one_row_and_frozen_or_unused_have_no_gradient(reader, eventually):
    model, optimizer = make()
    config = MonitorConfig(quantities=("parameters", "gradients"), console=False, exit_wait_seconds=0)
    with Monitor(config).attach(model, optimizer) as monitor:
        train(model, optimizer, 1)
        monitor.end_step()
        rows = eventually(reader(monitor).rows)
    tensors = {kind: [row.tensor for row in rows if row.kind == kind] for kind in ("param_after", "grad_unreduced")}

    assert [name for name, _ in model.named_parameters()] == tensors["param_after"]
    assert "tied.weight" not in tensors["param_after"]
    assert {SPARSE, "short.weight", "short.bias", "phase", "first.weight", "empty"} == set(tensors["grad_unreduced"])


def test_unusual_parameters_are_trained_as_without_the_monitor():
    states: list[dict[str, Any]] = []
    for watched in (False, True):
        model, optimizer = make()
        config = MonitorConfig(
            quantities=("parameters", "gradients", "optimizer_state", "activations"), console=False, exit_wait_seconds=0
        )
        with Monitor(config) as monitor:
            if watched:
                monitor.attach(model, optimizer)
            for step in range(1, 4):
                train(model, optimizer, step)
            assert 0 == monitor.faults
        states.append(model.state_dict())

    for name, tensor in states[0].items():
        bits = torch.uint8
        assert torch.equal(tensor.view(bits), states[1][name].view(bits)) if tensor.numel() else True, name
