"""Measuring does not change training: no tensor, graph or random number, in every mode."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from rankscope_contract.model.kinds import DEFAULT_OPS, VALUE_OPS
from rankscope_exporter.statistics import HostCopy, MeasureGroup, StatisticsTable, finish

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64]


def tensors():
    made = [torch.randn(5000).to(dtype) for dtype in DTYPES]
    made[0][7] = float("nan")
    return [*made, torch.randn(50, 60).t(), torch.nn.Parameter(torch.randn(10)), torch.eye(5).to_sparse()]


def test_measuring_changes_no_tensor_and_no_version(measured):
    before = tensors()
    copies = [tensor.detach().clone() for tensor in before]
    versions = [tensor._version for tensor in before]
    measured(before)

    assert versions == [tensor._version for tensor in before]
    for old, new in zip(copies, before, strict=True):
        assert torch.equal(old.to_dense().nan_to_num(), new.detach().to_dense().nan_to_num())


def test_measuring_draws_no_random_number(measured):
    before = torch.get_rng_state()
    measured(tensors()[1:])
    torch.set_rng_state(before)
    measured([torch.ones(10_000), torch.tensor([float("inf")])])

    assert torch.equal(before, torch.get_rng_state())


def test_measuring_adds_nothing_to_the_autograd_graph(compiled):
    weight = torch.randn(100, requires_grad=True)
    activation = weight.exp()
    table = StatisticsTable(2, CPU)
    MeasureGroup(range(2), compiled=compiled).measure([weight, activation], table)
    activation.sum().backward()

    assert not table.buffer.requires_grad
    assert torch.equal(weight.detach().exp(), weight.grad)


def test_measuring_works_inside_an_autograd_hook(compiled, check):
    table = StatisticsTable(1, CPU)
    group = MeasureGroup([0], compiled=compiled)
    weight = torch.nn.Parameter(torch.randn(300))
    weight.register_post_accumulate_grad_hook(lambda parameter: group.measure([parameter.grad], table))
    (weight**3).sum().backward()

    check(finish(HostCopy(table)), 0, weight.grad, ops=DEFAULT_OPS)


MODES = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "another default device": lambda: torch.device("meta"),
    "anomaly detection": lambda: torch.autograd.detect_anomaly(check_nan=True),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("mode", MODES)
def test_measuring_works_in_every_mode(mode, measured, check):
    made = tensors()
    with MODES[mode]():
        finished = measured(made)
    for entry, tensor in enumerate(made):
        check(finished, entry, tensor.detach().to_dense())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_measuring_works_with_every_default_dtype(dtype, measured, check):
    made = tensors()
    torch.set_default_dtype(dtype)
    try:
        finished = measured(made)
    finally:
        torch.set_default_dtype(torch.float32)
    for entry, tensor in enumerate(made):
        check(finished, entry, tensor.detach().to_dense())


def test_measuring_works_with_deterministic_algorithms(measured, check):
    made = tensors()
    torch.use_deterministic_algorithms(True)
    try:
        finished = measured(made)
    finally:
        torch.use_deterministic_algorithms(False)
    check(finished, 0, made[0])


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


def test_measuring_twice_gives_the_same_bits(measured):
    made = tensors()
    first, second = measured(made), measured(made)

    assert np.array_equal(first.values, second.values, equal_nan=True)
    assert np.array_equal(first.counts, second.counts)


@pytest.fixture
def mesh():
    """Return a mesh of this one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_dtensor_is_measured_as_its_shard_without_a_collective(mesh, measured, check, monkeypatch):
    whole = torch.randn(64, 8)
    made = [distribute_tensor(whole, mesh, [placement]) for placement in (Shard(0), Replicate())]
    made.append(torch.nn.Parameter(made[0]))
    for name in ("all_reduce", "all_gather_into_tensor", "broadcast"):
        monkeypatch.setattr(dist, name, lambda *_, **__: pytest.fail("a collective was started"))
    finished = measured([*made, whole])
    for entry in range(4):
        check(finished, entry, whole)
