"""The definition of each statistic, by the tests of the CPU, on tensors that were moved to the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from tests.exporter.statistics.conftest import assert_is_true, check_all, exact, truth  # noqa: F401 - a fixture
from tests.exporter.statistics.test_definitions import *  # noqa: F403 - pytest collects them here with these fixtures
from tests.gpu.device import Device

from rankscope_contract.model.kinds import VALUE_OPS
from rankscope_exporter.statistics import Finished, HostCopy, MeasureGroup, StatisticsTable, finish
from rankscope_exporter.statistics.kernels import kernel_of
from rankscope_exporter.statistics.tensor_access import PLAIN_TYPES, is_freed


@pytest.fixture(scope="module")
def _kernels(device: Device) -> None:
    """Compile the kernels of the device, with and without sums of fourth powers."""
    for fourths in (False, True):
        thread = kernel_of(device.name, fourths=fourths).warm_up()
        if thread is not None:
            thread.join(50)
        assert kernel_of(device.name, fourths=fourths).kernel is not None, "the kernel of the device cannot be used"


@pytest.fixture(params=["compiled", "torch"])
def compiled(request: pytest.FixtureRequest, _kernels: None) -> bool:
    """Run the test with the compiled kernel, then with torch operations alone."""
    return bool(request.param == "compiled")


@pytest.fixture
def measured(device: Device, compiled: bool) -> Callable[..., Finished]:
    """Return a function that measures tensors on the device, with group, table and host copy."""

    def run(tensors: Sequence[torch.Tensor | None], zero_below: float = 0.0) -> Finished:
        table = StatisticsTable(len(tensors), device.name)
        table.accumulate(VALUE_OPS)
        own = [moved(tensor, device.name) for tensor in tensors]
        with device.no_waits():
            MeasureGroup(range(len(tensors)), zero_below=zero_below, compiled=compiled).measure(own, table)
            copy = HostCopy(table)
        return finish(copy)

    return run


@pytest.fixture
def check() -> Callable[..., None]:
    """Return a function that compares an entry with the reference of a CPU tensor."""

    def run(finished: Finished, entry: int, tensor: torch.Tensor, zero_below: float = 0.0) -> None:
        assert_is_true(finished, entry, truth(exact(tensor), zero_below), VALUE_OPS)

    return run


def moved(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """Return a copy of `tensor` on `device` with the same strides, also if elements share memory or leave gaps."""
    if type(tensor) not in PLAIN_TYPES or tensor is None or tensor.is_meta or tensor.is_nested or tensor.is_quantized:
        return tensor
    if type(tensor) is torch.nn.UninitializedParameter:
        return tensor
    if tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj():
        return tensor.to(device)
    if is_freed(tensor):
        other = torch.ones(tensor.storage_offset() + tensor.numel(), device=device)[tensor.storage_offset() :]
        other.untyped_storage().resize_(0)
        return other
    storage = tensor.detach().untyped_storage().to(device=device)
    whole = torch.empty(0, dtype=tensor.dtype, device=device)
    return whole.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


@functools.cache
def large(device: torch.device) -> torch.Tensor:
    """Return 100 million bfloat16 numbers whose sum of squares exceeds float32."""
    tensor = torch.full((100_000_000,), 3e17, dtype=torch.bfloat16, device=device)
    tensor[50_000_000:] = -1e-3
    return tensor


def test_norm_of_a_hundred_million_elements_does_not_overflow(device, compiled):
    finished = finish_of(large(device.name), device, compiled=compiled)
    value = float(torch.tensor(3e17, dtype=torch.bfloat16))
    least = float(torch.tensor(-1e-3, dtype=torch.bfloat16))

    assert pytest.approx(value * 50_000_000**0.5, rel=1e-5) == finished.values[VALUE_OPS.index("norm"), 0]
    assert pytest.approx(value / 2, rel=1e-5) == finished.values[VALUE_OPS.index("mean"), 0]
    assert (pytest.approx(least), pytest.approx(value)) == tuple(
        finished.values[VALUE_OPS.index(op), 0] for op in ("min", "max")
    )


def finish_of(tensor: torch.Tensor, device: Device, *, compiled: bool) -> Finished:
    table = StatisticsTable(1, device.name)
    MeasureGroup(range(1), compiled=compiled).measure([tensor], table)
    return finish(HostCopy(table))


def test_denormal_numbers_are_not_zeros(device, compiled):
    """A device may flush them to zero; statistics are computed in float64, where they are normal."""
    tensor = torch.tensor([1e-45, -1e-40, 1e-39, 0.0])
    finished = finish_of(tensor.to(device.name), device, compiled=compiled)

    assert_is_true(finished, 0, truth(exact(tensor)), ("norm", "min", "max", "mean"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_equal_tensors_have_equal_bits_wherever_they_are(dtype, device, compiled):
    """A tensor that begins at 16 bytes is read in vectors, and another one element by element."""
    tensor = torch.randn(100_003, dtype=dtype, device=device.name)
    shifted = torch.cat([tensor[:1], tensor])[1:]
    table = StatisticsTable(2, device.name)
    table.accumulate(VALUE_OPS)
    MeasureGroup(range(2), compiled=compiled).measure([tensor, shifted], table)

    assert torch.equal(table.buffer[:, 0], table.buffer[:, 1])
