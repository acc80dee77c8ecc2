"""Tests with a model that has all kinds of parameters: its statistics, and its training as without a monitor."""

from __future__ import annotations

import math

import pytest
import torch
from tests.exporter.runs import config_of, published
from tests.exporter.statistics.conftest import exact, truth
from torch import nn

from rankscope_contract.model.kinds import COUNT_OPS, DEFAULT_OPS
from rankscope_exporter import Monitor


def fixed(values: list[float], dtype: torch.dtype) -> nn.Parameter:
    """Return a parameter that is not trained, because most dtypes have no gradient."""
    return nn.Parameter(torch.tensor(values, dtype=torch.float64).to(dtype), requires_grad=False)


class Museum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(9, 4, sparse=True)
        self.short = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.first, self.tied = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.unused = nn.Linear(2, 2)
        self.scale8 = fixed([1.0, 0.0, -2.0, math.nan], torch.float8_e4m3fn)
        self.wide8 = fixed([1.0, math.inf, 0.0], torch.float8_e5m2)
        self.codes = fixed([0.0, 3.0, -4.0], torch.int8)
        self.mask = fixed([0.0, 1.0, 1.0], torch.bool)
        self.small = fixed([6e4, 6e4, 6e4, 6e4], torch.float16)  # the norm exceeds the largest number of its dtype
        self.optimizer = torch.optim.SGD([item for item in self.parameters() if item.requires_grad], lr=0.01)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        x = self.short(x.to(torch.bfloat16)).float()
        x = torch.view_as_real(x * self.phase).sum(-1)
        return self.tied(torch.tanh(self.first(x))).square().sum() + self.empty.sum()

    def train_step(self, step: int) -> dict[tuple[int, str, str], torch.Tensor]:
        """Train one step, and return its tensors."""
        held = {(step, "param_before", name): item.detach().clone() for name, item in self.named_parameters()}
        self.optimizer.zero_grad()
        self(torch.tensor([step, 3, step])).backward()
        for name, item in self.named_parameters():
            if item.grad is not None:
                held[step, "grad_reduced", name] = item.grad.clone()
        self.optimizer.step()
        return held


@pytest.mark.parametrize("statistics", ["auto", "torch"])
def test_each_tensor_has_one_row_with_the_statistics_of_its_dtype(statistics):
    """A tied weight is one tensor; frozen and unused ones have no gradient."""
    model = Museum()
    with Monitor(config_of("parameters", "gradients", statistics=statistics)).attach(model, model.optimizer) as monitor:
        tensors = {**model.train_step(1), **model.train_step(2)}
        rows = published(monitor).rows
        assert 0 == monitor.faults
    found = {(row.step, row.entry.kind, row.entry.tensor): row.numbers for row in rows}

    assert tensors.keys() == {key for key in found if key[1] in ("param_before", "grad_reduced")}
    for key, tensor in tensors.items():
        expected = truth(exact(tensor))
        assert expected.counts == {op: found[key][op] for op in COUNT_OPS}, key
        for op in set(DEFAULT_OPS) - set(COUNT_OPS):
            value = math.nan if found[key][op] is None else found[key][op]
            assert expected.values[op] == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), (key, op)
    assert "tied.weight" not in {row.entry.tensor for row in rows}
    assert {"words.weight", "short.weight", "short.bias", "phase", "first.weight", "empty"} == {
        row.entry.tensor for row in rows if row.entry.kind == "grad_unreduced"
    }


def test_unusual_parameters_are_trained_as_without_the_monitor():
    bare, model = Museum(), Museum()
    config = config_of("parameters", "gradients", "optimizer_state", "activations")
    with Monitor(config).attach(model, model.optimizer) as monitor:
        for step in range(1, 4):
            model.train_step(step)
            bare.train_step(step)
        assert 0 == monitor.faults

    for name, tensor in bare.state_dict().items():
        bits = torch.uint8
        assert torch.equal(tensor.view(bits), model.state_dict()[name].view(bits)) if tensor.numel() else True, name
