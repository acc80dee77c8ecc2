"""Statistics with torch operations only, for every device and every dtype.

They are computed in float64, without a host synchronisation on accelerators. `masked_sums` counts NaN (isnan) and Inf
(isinf) and excludes them from the sums.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from rankscope_contract.model.kinds import SUMMANDS
from rankscope_exporter.measure.kernels.statistics_table import SUMS, Rows, StatisticsTable, on_device

Sums = tuple[torch.Tensor, ...]
"""Raw statistics of one tensor as scalars on its device.

These are sum of squares, minimum, maximum and sum in float64, and the numbers of NaN, Inf and zeros in int64.
"""

_CPU: Final = torch.device("cpu")  # always named: a script may have set another default device
_CPU_CHUNK: Final = 1 << 15  # elements: their float64 copy fits into the cache
_DEVICE_CHUNK: Final = 1 << 22  # elements: 32 MiB of temporary device memory


def measure(flats: Sequence[torch.Tensor], sizes: Sequence[int], rows: Rows, table: StatisticsTable) -> None:
    """Compute the raw statistics of tensors and write them to the entries `rows` of `table`.

    `flats` has the elements of each tensor in one dimension, and `sizes` has its number of elements. A sparse tensor
    has more elements, and the others are zero. On an accelerator, the function does not synchronise with the host.
    """
    lengths = tuple(flat.numel() for flat in flats)
    columns = [exact_sums(flat, table.zero_below) for flat in flats]
    sums = _stacked([column[: len(SUMS)] for column in columns], table.device)
    counts = _stacked([column[len(SUMS) :] for column in columns], table.device)
    extras = [_stacked([(_extra_sum(name, flat),) for flat in flats], table.device) for name in table.extra_sums]
    numel = on_device(sizes, table.device)
    if lengths != tuple(sizes):
        left_out = numel - on_device(lengths, table.device)
        sums[1] = torch.where(left_out > 0, sums[1].clamp(max=0.0), sums[1])
        sums[2] = torch.where(left_out > 0, sums[2].clamp(min=0.0), sums[2])
        counts[2] += left_out
    table.write(
        rows, torch.cat([sums.view(torch.int64), counts, numel[None], *(extra.view(torch.int64) for extra in extras)])
    )


def _extra_sum(name: str, flat: torch.Tensor) -> torch.Tensor:
    """Return an optional sum over the finite elements of `flat`, in float64 on its device. No host synchronisation."""
    finite = (values.masked_fill(~values.isfinite(), 0.0) for values in _chunks(flat))
    return torch.stack([SUMMANDS[name](values).sum() for values in finite]).sum()


def _chunks(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements of `flat` in float64, in parts of bounded memory. A complex number counts as its modulus."""
    for chunk in torch.split(flat, _CPU_CHUNK if flat.is_cpu else _DEVICE_CHUNK):
        yield chunk.to(torch.complex128).abs() if chunk.is_complex() else chunk.to(torch.float64)


def _stacked(columns: Sequence[Sums], device: torch.device) -> torch.Tensor:
    flat = torch.stack([scalar.to(device, non_blocking=True) for column in columns for scalar in column])
    return flat.view(len(columns), -1).t().contiguous()


def exact_sums(flat: torch.Tensor, zero_below: float) -> Sums:
    """Return the sums of a flat tensor of any dtype on its device, in bounded temporary memory.

    The function does not synchronise with the host.
    """
    parts = [_chunk_sums(values, zero_below) for values in _chunks(flat)]
    if len(parts) == 1:  # on a device, each operation that is left out saves the start of a kernel
        return parts[0]
    squares, least, most, total, nans, infs, zeros = (torch.stack(part) for part in zip(*parts, strict=True))
    return squares.sum(), least.amin(), most.amax(), total.sum(), nans.sum(), infs.sum(), zeros.sum()


def _chunk_sums(values: torch.Tensor, zero_below: float) -> Sums:
    zeros = (values.abs() < zero_below).sum() if zero_below > 0 else values.numel() - torch.count_nonzero(values)
    if values.is_cpu and values.numel():
        least, most = torch.aminmax(values)
        if math.isfinite(least) and math.isfinite(most):
            none = torch.zeros_like(zeros)
            return torch.dot(values, values), least, most, values.sum(), none, none, zeros
    return masked_sums(values, zeros)


def masked_sums(values: torch.Tensor, zeros: torch.Tensor) -> Sums:
    """Return the sums of float64 `values`; NaN and Inf are excluded from the sums and counted.

    The function has no branch that depends on values, so it does not synchronise with the host.
    """
    nan, infinite = values.isnan(), values.isinf()
    odd = nan | infinite
    finite = values.masked_fill(odd, 0.0)
    least, most = values.masked_fill(odd, math.inf), values.masked_fill(odd, -math.inf)
    if not values.numel():  # an empty tensor has no extremes
        least, most = values.new_full((1,), math.inf), values.new_full((1,), -math.inf)
    return (finite.square().sum(), least.amin(), most.amax(), finite.sum(), nan.sum(), infinite.sum(), zeros)


_BITS_OF: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@functools.cache
def zero_bits(zero_below: float, dtype: torch.dtype, of: torch.dtype) -> int:
    """Return the bits, as a number of the dtype `of`, of the smallest magnitude of `dtype` that is no zero."""
    bound = torch.tensor(_round_up(zero_below, dtype) if zero_below > 0 else 0.0, dtype=of, device=_CPU)
    return max(1, int(bound.view(_BITS_OF[of.itemsize])))


def _round_up(bound: float, dtype: torch.dtype) -> float:
    """Return the smallest number of `dtype` that is at least `bound`.

    A number of `dtype` is below it exactly if it is below `bound`; torch rounds the bound to the nearest number.
    """
    nearest = torch.tensor(bound, dtype=torch.float64, device=_CPU).to(dtype)
    if float(nearest) >= bound:
        return float(nearest)
    return float(torch.nextafter(nearest, torch.tensor(math.inf, dtype=dtype, device=_CPU)))
