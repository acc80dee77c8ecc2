"""Measuring does not change training: in every mode, with all kinds of parameters."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.exporter.measure.kernels.conftest import CPU, exact, truth
from tests.exporter.parts import config_of, published
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from rankscope_contract.model.kinds import COUNT_OPS, DEFAULT_OPS
from rankscope_exporter import Monitor
from rankscope_exporter.measure.kernels.measure_group import MeasureGroup
from rankscope_exporter.measure.kernels.statistics_table import HostCopy, StatisticsTable

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64]


def tensors() -> list[torch.Tensor]:
    made = [torch.randn(5000).to(dtype) for dtype in DTYPES]
    made[0][7] = float("nan")
    return [*made, torch.randn(50, 60).t(), torch.nn.Parameter(torch.randn(10)), torch.eye(5).to_sparse()]


def test_measuring_changes_no_tensor_version_or_generator(measured):
    """Measuring again gives the same bits."""
    before = tensors()
    copies = [tensor.detach().clone() for tensor in before]
    versions = [tensor._version for tensor in before]
    generator = torch.get_rng_state()
    first, second = measured(before), measured(before)

    assert versions == [tensor._version for tensor in before]
    for old, new in zip(copies, before, strict=True):
        assert torch.equal(old.to_dense().nan_to_num(), new.detach().to_dense().nan_to_num())
    assert torch.equal(generator, torch.get_rng_state())
    assert np.array_equal(first.values, second.values, equal_nan=True)
    assert np.array_equal(first.counts, second.counts)


def test_measuring_adds_nothing_to_the_autograd_graph(compiled, check):
    """Not even inside of a hook of the backward pass."""
    table = StatisticsTable(3, CPU, compiled=compiled)
    weight = torch.nn.Parameter(torch.randn(100))
    activation = weight.exp()
    MeasureGroup(range(2)).measure([weight, activation], table)
    group = MeasureGroup([2])
    weight.register_post_accumulate_grad_hook(lambda parameter: group.measure([parameter.grad], table))
    activation.sum().backward()

    assert not table.buffer.requires_grad
    assert torch.equal(weight.detach().exp(), weight.grad)
    check(HostCopy(table).finish(), 2, weight.grad, ops=DEFAULT_OPS)


@contextmanager
def setting(change: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


MODES = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "another default device": lambda: torch.device("meta"),
    "anomaly detection": lambda: torch.autograd.detect_anomaly(check_nan=True),
    "float64 as default": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16 as default": lambda: setting(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "deterministic algorithms": lambda: setting(torch.use_deterministic_algorithms, True, False),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("mode", MODES)
def test_measuring_works_in_every_mode(mode, measured, check):
    made = tensors()
    with MODES[mode]():
        finished = measured(made)
    for entry, tensor in enumerate(made):
        check(finished, entry, tensor)


def test_dtensor_is_measured_as_its_shard_without_a_collective(measured, check, monkeypatch, group):
    mesh, whole = init_device_mesh("cpu", (1,)), torch.randn(64, 8)
    made = [distribute_tensor(whole, mesh, [placement]) for placement in (Shard(0), Replicate())]
    made.append(torch.nn.Parameter(made[0]))
    for name in ("all_reduce", "all_gather_into_tensor", "broadcast"):
        monkeypatch.setattr(dist, name, lambda *_, **__: pytest.fail("a collective was started"))
    finished = measured([*made, whole])
    for entry in range(4):
        check(finished, entry, whole)


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
    """A tied weight is one tensor; frozen and unused ones have no gradient. All are trained as without the monitor."""
    bare, model = Museum(), Museum()
    config = config_of("parameters", "gradients", "optimizer_state", "activations", statistics=statistics)
    with Monitor(config).attach(model, model.optimizer) as monitor:
        tensors = {**model.train_step(1), **model.train_step(2)}
        rows = [row for row in published(monitor).rows if not row.entry.kind.startswith("act_")]
        assert 0 == monitor.faults
    bare.train_step(1)
    bare.train_step(2)
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
    for name, tensor in bare.state_dict().items():
        trained = model.state_dict()[name]
        assert not tensor.numel() or torch.equal(tensor.view(torch.uint8), trained.view(torch.uint8)), name
