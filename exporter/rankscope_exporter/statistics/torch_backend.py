"""Statistics with torch operations alone: for every device and every type of number.

`exact_sums` is one formula without a host sync, in float64: the way on accelerators. On a CPU, where looking at a
result costs nothing, `lean_sums` makes four passes at float32 speed, and tensors whose sums look unsafe are measured
again with the exact formula.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch

from rankscope_exporter.statistics.table import Rows, StatisticsTable
from rankscope_exporter.statistics.tensors import Held

Sums = tuple[torch.Tensor, ...]
"""Sum of squares, min, max, sum in float64, then nans, infs, zeros in int64: scalars on the device."""

_LEAN_TYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
# 4096 elements in 16 lanes are 256 additions a lane: a float32 sum of squares cannot lose more than 8e-6 of itself.
_LEAN_ROW: Final = 4096
# Outside of these magnitudes float32 squares overflow, or lose what float64 would keep.
_LEAN_SMALLEST, _LEAN_LARGEST = 1e-12, 1e15
_EXACT_CHUNK: Final = {"cpu": 1 << 15}  # elements: their float64 image stays in the cache
_EXACT_CHUNK_ELSEWHERE: Final = 1 << 22  # 32 MiB of device memory at a time


def measure(items: Sequence[Held], rows: Rows, table: StatisticsTable, *, zero_below: float) -> None:
    """Write the sums of `items` to the entries `rows` of `table`. No host sync on an accelerator."""
    if not items:
        return
    sums = [_sums(item.elements, zero_below, table.device) for item in items]
    columns = list(zip(*sums, strict=True))
    floats = torch.stack([torch.stack(column) for column in columns[:4]])
    counts = torch.stack([torch.stack(column) for column in columns[4:]])
    sizes = torch.tensor([[item.elements.numel(), item.implicit_zeros] for item in items], dtype=torch.int64)
    numel, implicit = sizes.t().to(table.device, non_blocking=True)
    nothing = torch.zeros((), dtype=torch.float64, device=table.device)
    if any(item.implicit_zeros for item in items):
        floats[1] = torch.where(implicit > 0, torch.minimum(floats[1], nothing), floats[1])
        floats[2] = torch.where(implicit > 0, torch.maximum(floats[2], nothing), floats[2])
    counts[2] += implicit
    table.write(rows, floats, torch.cat([counts, (numel + implicit).unsqueeze(0)]))


def _sums(elements: torch.Tensor, zero_below: float, device: torch.device) -> Sums:
    if elements.device.type == "cpu" and elements.dtype in _LEAN_TYPES and elements.numel():
        lean = lean_sums(elements, zero_below)
        if lean is not None:
            return lean
    sums = exact_sums(elements, zero_below)
    return sums if elements.device == device else tuple(part.to(device, non_blocking=True) for part in sums)


def lean_sums(elements: torch.Tensor, zero_below: float) -> Sums | None:
    """Return the sums of a non-empty CPU tensor of a common float type, or None where only the exact way is safe."""
    flat = elements.reshape(-1)
    least, most = torch.aminmax(flat)
    smallest, largest = least.double(), most.double()
    magnitude = max(abs(float(smallest)), abs(float(largest)))
    # NaN and Inf show here as well: no comparison with NaN is true.
    if not (magnitude == 0 or _LEAN_SMALLEST <= magnitude <= _LEAN_LARGEST):
        return None
    whole = flat.numel() // _LEAN_ROW * _LEAN_ROW
    parts = [flat[:whole].view(-1, _LEAN_ROW)] if whole else []
    parts += [flat[whole:].unsqueeze(0)] if whole < flat.numel() else []
    norms = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float32).double() for part in parts]
    squares = sum((norm.square().sum() for norm in norms), start=torch.zeros((), dtype=torch.float64))
    none = torch.zeros((), dtype=torch.int64)
    return squares, smallest, largest, flat.sum(dtype=torch.float32).double(), none, none, count_zeros(flat, zero_below)


def exact_sums(elements: torch.Tensor, zero_below: float) -> Sums:
    """Return the sums of any strided tensor, on its device, without a host sync and with bounded temporary memory."""
    flat = elements.reshape(-1)
    chunks = torch.split(flat, _EXACT_CHUNK.get(flat.device.type, _EXACT_CHUNK_ELSEWHERE))
    parts = [_exact_chunk(chunk, zero_below) for chunk in chunks]
    squares, least, most, total, nans, infs, zeros = (torch.stack(part) for part in zip(*parts, strict=True))
    return squares.sum(), least.amin(), most.amax(), total.sum(), nans.sum(), infs.sum(), zeros.sum()


def _exact_chunk(chunk: torch.Tensor, zero_below: float) -> Sums:
    values = chunk.to(torch.complex128).abs() if chunk.is_complex() else chunk.to(torch.float64)
    nan, infinite = values.isnan(), values.isinf()
    odd = nan | infinite
    finite = values.masked_fill(odd, 0.0)
    edge = torch.full((1,), math.inf, dtype=torch.float64, device=chunk.device)  # an empty tensor has no extremes
    return (
        finite.square().sum(),
        torch.cat([values.masked_fill(odd, math.inf), edge]).amin(),
        torch.cat([values.masked_fill(odd, -math.inf), -edge]).amax(),
        finite.sum(),
        nan.sum(),
        infinite.sum(),
        (values.abs() < zero_below).sum() if zero_below > 0 else (values == 0).sum(),
    )


def count_zeros(flat: torch.Tensor, zero_below: float) -> torch.Tensor:
    """Return how many elements are 0, or closer to 0 than `zero_below`; NaN is neither."""
    if not zero_below > 0:
        return flat.numel() - torch.count_nonzero(flat)
    return (flat.abs() < round_up(zero_below, flat.dtype)).sum()


def round_up(bound: float, dtype: torch.dtype) -> float:
    """Return the smallest number of `dtype` that is not below `bound`; any x of `dtype` is below both or neither.

    torch would round the bound to the tensor's type, in whichever direction is nearer.
    """
    nearest = torch.tensor(bound, dtype=torch.float64).to(dtype)
    if float(nearest) >= bound:
        return float(nearest)
    return float(torch.nextafter(nearest.to(dtype), torch.tensor(math.inf, dtype=dtype)))
