"""Numbers other than statistics: the device and the CPU compute the same from equal tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.exporter.parts import records_of, session_of
from tests.gpu.device import configured
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from rankscope_exporter import Monitor
from rankscope_exporter.statistics.hashes import Hasher, finished

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int64, torch.bool]


def hashes(tensors: list[torch.Tensor], device: torch.device, words: int | None = None) -> list[int]:
    partials = Hasher(device, words).partials([tensor.to(device) for tensor in tensors])
    return [
        finished(int(partial), tensor.numel() * tensor.element_size())
        for partial, tensor in zip(partials.tolist(), tensors, strict=True)
    ]


@pytest.mark.parametrize("words", [None, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hash_of_equal_bits_is_equal_on_the_device(dtype, words, device):
    generator = torch.Generator().manual_seed(1)
    sizes = (0, 1, 7, 100, 3000, 200_001)
    tensors = [torch.randn(size, generator=generator).mul(10).to(dtype) for size in sizes]
    tensors.append(tensors[-1][:200_000].view(400, 500).t())
    expected = hashes(tensors, torch.device("cpu"), words)

    assert expected == hashes(tensors, device.name, words)


class Attention(nn.Module):
    """A model with attention and linear layers, whose features are known."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96, bias=False)  # the gradient of the bias of keys is 0, and rounding alone
        self.out = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


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
