"""Definitions of statistics, hashes, features and histograms: the device and the CPU compute the same."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.exporter.measure.kernels.conftest import check, check_all  # noqa: F401
from tests.exporter.measure.kernels.test_definitions import *  # noqa: F403 - pytest collects them here with these fixtures
from tests.exporter.parts import records_of, session_of
from tests.gpu.trainings import Device, configured
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from rankscope_contract.model.kinds import VALUE_OPS
from rankscope_exporter import Monitor
from rankscope_exporter.measure.kernels.compiled import kernel_of
from rankscope_exporter.measure.kernels.hashes import Hasher, finished
from rankscope_exporter.measure.kernels.measure_group import MeasureGroup
from rankscope_exporter.measure.kernels.statistics_table import HostCopy, StatisticsTable
from rankscope_exporter.measure.kernels.tensor_access import PLAIN_TYPES, is_freed
from rankscope_exporter.records.plan import Finished


@pytest.fixture(scope="module")
def _kernels(device: Device) -> None:
    """Compile the kernels of the device, with and without sums of fourth powers."""
    for extra_sums in ((), ("sum_of_fourth_powers",)):
        thread = kernel_of(device.name, extra_sums).warm_up()
        if thread is not None:
            thread.join(50)
        assert kernel_of(device.name, extra_sums).kernel is not None, "the kernel of the device cannot be used"


@pytest.fixture(params=["compiled", "torch"])
def compiled(request: pytest.FixtureRequest, _kernels: None) -> bool:
    return bool(request.param == "compiled")


@pytest.fixture
def measured(device: Device, compiled: bool) -> Callable[..., Finished]:
    def run(tensors: Sequence[torch.Tensor | None], zero_below: float = 0.0) -> Finished:
        table = StatisticsTable(len(tensors), device.name, zero_below=zero_below, compiled=compiled)
        table.accumulate(VALUE_OPS)
        own = [moved(tensor, device.name) for tensor in tensors]
        with device.no_waits():
            MeasureGroup(range(len(tensors))).measure(own, table)
            copy = HostCopy(table)
        return copy.finish()

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
    table = StatisticsTable(1, device.name, compiled=compiled)
    MeasureGroup(range(1)).measure([large(device.name)], table)
    finished = HostCopy(table).finish()
    value = float(torch.tensor(3e17, dtype=torch.bfloat16))
    least = float(torch.tensor(-1e-3, dtype=torch.bfloat16))

    assert pytest.approx(value * 50_000_000**0.5, rel=1e-5) == finished.values[VALUE_OPS.index("norm"), 0]
    assert pytest.approx(value / 2, rel=1e-5) == finished.values[VALUE_OPS.index("mean"), 0]
    ends = tuple(finished.values[VALUE_OPS.index(op), 0] for op in ("min", "max"))
    assert (pytest.approx(least), pytest.approx(value)) == ends


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_equal_tensors_have_equal_bits_wherever_they_are(dtype, device, compiled):
    """A tensor that begins at 16 bytes is read in vectors, and another one element by element."""
    tensor = torch.randn(100_003, dtype=dtype, device=device.name)
    shifted = torch.cat([tensor[:1], tensor])[1:]
    table = StatisticsTable(2, device.name, compiled=compiled)
    table.accumulate(VALUE_OPS)
    MeasureGroup(range(2)).measure([tensor, shifted], table)

    assert torch.equal(table.buffer[:, 0], table.buffer[:, 1])


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int64, torch.bool]


def hashes(tensors: list[torch.Tensor], device: torch.device, words: int | None = None) -> list[int]:
    partials = Hasher(device, words).partials([tensor.to(device) for tensor in tensors])
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return [finished(int(partial), size) for partial, size in zip(partials.tolist(), sizes, strict=True)]


@pytest.mark.parametrize("words", [None, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hash_of_equal_bits_is_equal_on_the_device(dtype, words, device):
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(size, generator=generator).mul(10).to(dtype) for size in (0, 1, 7, 100, 3000, 200_001)]
    tensors.append(tensors[-1][:200_000].view(400, 500).t())
    expected = hashes(tensors, torch.device("cpu"), words)

    assert expected == hashes(tensors, device.name, words)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96, bias=False)  # the gradient of the bias of keys is 0, and rounding alone
        self.out = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def rows_of_training(device: torch.device) -> dict[Any, tuple[Any, ...]]:
    """Return features, histograms and the statistics of the first steps of a training in float64."""
    torch.manual_seed(0)
    model = Attention().double()
    batches = [torch.randn(4, 12, 32, dtype=torch.float64) for _ in range(3)]
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    monitor = Monitor(configured("everything")).attach(model, optimizer)
    session = session_of(monitor)
    for batch in batches:
        optimizer.zero_grad()
        model(batch.to(device)).square().sum().backward()
        optimizer.step()
        monitor.log(loss=1.0)
    monitor.detach()

    assert 0 == monitor.faults
    found: dict[Any, tuple[Any, ...]] = {}
    for record in records_of(session):
        for row in record.features:
            found[record.step, row["kind"], row["module"], row.get("index"), row.get("micro_step")] = (row["value"],)
        for row in record.histograms:
            found[record.step, row["kind"], row["tensor"]] = tuple(row["counts"])
        if record.statistics is not None:
            entries = record.statistics.plan.plan.entries
            values = record.statistics.values.to_pylist()
            for place, entry in enumerate(entries):
                key = (record.step, str(entry.kind), entry.tensor, entry.index, entry.micro_step)
                found[key] = tuple(values[place :: len(entries)][:4])
    return found


def test_features_histograms_and_statistics_equal_those_of_the_cpu(device):
    expected, found = rows_of_training(torch.device("cpu")), rows_of_training(device.name)

    assert expected.keys() == found.keys()
    assert [] == [key for key in expected if not is_close(expected[key], found[key])]


def is_close(expected: tuple[Any, ...], found: tuple[Any, ...]) -> bool:
    """Return whether two rows are equal within the rounding of sums."""
    pairs = zip(expected, found, strict=True)
    return all(a == b or (a and b and math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6)) for a, b in pairs)
