"""Measuring does not change training: no tensor, graph or random number, in every mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.exporter.statistics.conftest import CPU
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from rankscope_contract.model.kinds import DEFAULT_OPS, VALUE_OPS
from rankscope_exporter.statistics import HostCopy, MeasureGroup, StatisticsTable, finish

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
    table = StatisticsTable(3, CPU)
    weight = torch.nn.Parameter(torch.randn(100))
    activation = weight.exp()
    MeasureGroup(range(2), compiled=compiled).measure([weight, activation], table)
    group = MeasureGroup([2], compiled=compiled)
    weight.register_post_accumulate_grad_hook(lambda parameter: group.measure([parameter.grad], table))
    activation.sum().backward()

    assert not table.buffer.requires_grad
    assert torch.equal(weight.detach().exp(), weight.grad)
    check(finish(HostCopy(table)), 2, weight.grad, ops=DEFAULT_OPS)


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


def test_table_created_in_inference_mode_works_in_training(compiled):
    with torch.inference_mode():
        table = StatisticsTable(1, CPU)
        group = MeasureGroup([0], compiled=compiled)
        group.measure([torch.ones(3)], table)
        HostCopy(table)
    group.measure([torch.full((3,), 2.0)], table)
    copy = HostCopy(table)
    with torch.inference_mode():
        finished = finish(copy)

    assert 2.0 == float(finished.values[VALUE_OPS.index("max"), 0])


def test_dtensor_is_measured_as_its_shard_without_a_collective(measured, check, monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, whole = init_device_mesh("cpu", (1,)), torch.randn(64, 8)
        made = [distribute_tensor(whole, mesh, [placement]) for placement in (Shard(0), Replicate())]
        made.append(torch.nn.Parameter(made[0]))
        for name in ("all_reduce", "all_gather_into_tensor", "broadcast"):
            monkeypatch.setattr(dist, name, lambda *_, **__: pytest.fail("a collective was started"))
        finished = measured([*made, whole])
        for entry in range(4):
            check(finished, entry, whole)
    finally:
        dist.destroy_process_group()
