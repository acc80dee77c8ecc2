"""Statistics with torch operations only, for every device and every dtype.

On accelerators, `exact_sums` computes in float64 without a host synchronisation. On a CPU, where reading a result needs
no synchronisation, `fast_sums` makes four passes in float32. If the sums of a tensor may be inaccurate, for example
with a NaN or an Inf, it is measured again by `exact_sums`. `masked_sums` counts NaN (isnan) and Inf (isinf) and
excludes them from the sums.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

import torch

from rankscope_contract.model.kinds import SUMMANDS
from rankscope_exporter.adapters.torch_private import foreach_norm
from rankscope_exporter.measure.kernels.statistics_table import SUMS, Rows, StatisticsTable, on_device

Sums = tuple[torch.Tensor, ...]
"""Raw statistics of one tensor as scalars on its device.

These are sum of squares, minimum, maximum and sum in float64, and the numbers of NaN, Inf and zeros in int64.
"""

_CPU: Final = torch.device("cpu")  # always named: a script may have set another default device
_LEAN_TYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
# 4096 elements in 16 lanes are 256 additions a lane: a float32 sum of squares cannot lose more than 8e-6 of itself.
_LEAN_ROW: Final = 4096
# Outside of these magnitudes float32 squares overflow, or lose precision that float64 keeps.
_LEAN_SMALLEST, _LEAN_LARGEST = 1e-12, 1e15
_CPU_CHUNK: Final = 1 << 15  # elements: their float64 copy fits into the cache
SMALL: Final = 64
"""Largest number of elements of a tensor that is measured together with all others of its size.

One call of a torch operation takes longer than the operation on so few elements.
"""
_DEVICE_CHUNK: Final = 1 << 22  # elements: 32 MiB of temporary device memory


def measure(
    flats: Sequence[torch.Tensor], sizes: list[int], rows: Rows, table: StatisticsTable, *, zero_below: float
) -> None:
    """Compute the raw statistics of tensors and write them to the entries `rows` of `table`.

    `flats` has the elements of each tensor in one dimension, and `sizes` has its number of elements. A sparse tensor
    has more elements, and the others are zero. On an accelerator, the function does not synchronise with the host.
    """
    if not flats:
        return
    lengths = [flat.numel() for flat in flats]
    if table.device.type == "cpu":
        sums, counts = _on_cpu(flats, lengths, zero_below)
    else:
        sums, counts = _exactly(flats, zero_below, table.device)
    numel = on_device(sizes, table.device)
    if lengths != sizes:
        left_out = numel - on_device(lengths, table.device)
        sums[1] = torch.where(left_out > 0, sums[1].clamp(max=0.0), sums[1])
        sums[2] = torch.where(left_out > 0, sums[2].clamp(min=0.0), sums[2])
        counts[2] += left_out
    table.write(rows, sums, torch.cat([counts, numel.unsqueeze(0)]))
    if table.extra_sums:
        extras = [torch.stack([_extra_sum(name, flat).to(table.device) for flat in flats]) for name in table.extra_sums]
        index = (
            torch.arange(rows.start, rows.stop, device=table.device) if isinstance(rows, range) else table.index(rows)
        )
        table.extras.index_copy_(1, index, torch.stack(extras))


def _extra_sum(name: str, flat: torch.Tensor) -> torch.Tensor:
    """Return an optional sum over the finite elements of `flat`, in float64 on its device. No host synchronisation."""
    chunks = torch.split(flat, _CPU_CHUNK if flat.is_cpu else _DEVICE_CHUNK)
    parts = []
    for chunk in chunks:
        values = chunk.to(torch.complex128).abs() if chunk.is_complex() else chunk.to(torch.float64)
        parts.append(SUMMANDS[name](values.masked_fill(~values.isfinite(), 0.0)).sum())
    return torch.stack(parts).sum()


def _on_cpu(
    flats: Sequence[torch.Tensor], lengths: Sequence[int], zero_below: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sums and counts of each flat tensor in `flats`. `lengths` has their numbers of elements.

    Small tensors are measured together by `small_sums`. Others have fast sums if they are accurate, otherwise exact
    sums. The choice depends on the tensor alone, so that equal tensors have equal sums.
    """
    alike: dict[tuple[torch.dtype, int, bool], list[int]] = {}
    for place, (flat, numel) in enumerate(zip(flats, lengths, strict=True)):
        alike.setdefault((flat.dtype, numel, flat.is_cpu), []).append(place)
    sums = torch.zeros(len(SUMS), len(flats), dtype=torch.float64, device=_CPU)
    counts = torch.zeros(3, len(flats), dtype=torch.int64, device=_CPU)
    lean: list[int] = []
    exact: list[int] = []
    for (dtype, numel, is_on_cpu), places in alike.items():
        if 0 < numel <= SMALL and is_on_cpu and not dtype.is_complex:
            index = torch.tensor(places, device=_CPU)
            sums[:, index], counts[:, index] = small_sums(torch.stack([flats[i] for i in places]), zero_below)
        elif numel and dtype in _LEAN_TYPES and is_on_cpu:
            lean += places
        else:
            exact += places
    if lean:
        sums[:, lean], counts[:, lean], trusted = fast_sums([flats[i] for i in lean], zero_below)
        exact += itertools.compress(lean, (~trusted).tolist())
    if exact:
        sums[:, exact], counts[:, exact] = _exactly([flats[i] for i in exact], zero_below, _CPU)
    return sums, counts


def small_sums(rows: torch.Tensor, zero_below: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float64 sums and int64 counts of tensors of equal size and dtype, which are the rows of `rows`.

    The result for a row does not depend on the other rows.
    """
    values = rows.to(torch.float64)
    nan, infinite = values.isnan(), values.isinf()
    odd = nan | infinite
    finite = values.masked_fill(odd, 0.0)
    zeros = values.abs() < zero_below if zero_below > 0 else values == 0
    least = values.masked_fill(odd, math.inf).amin(1)
    most = values.masked_fill(odd, -math.inf).amax(1)
    sums = torch.stack([_row_sums(finite.square()), least, most, _row_sums(finite)])
    return sums, torch.stack([nan.sum(1), infinite.sum(1), zeros.sum(1)])


def _row_sums(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row, in an order that does not depend on the number of rows."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = torch.cat([rows[:, :half] + rows[:, half : 2 * half], rows[:, 2 * half :]], 1)
    return rows[:, 0]


def _exactly(
    flats: Sequence[torch.Tensor], zero_below: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    columns = [exact_sums(flat, zero_below) for flat in flats]
    return (
        _stacked([column[: len(SUMS)] for column in columns], device),
        _stacked([column[len(SUMS) :] for column in columns], device),
    )


def _stacked(columns: Sequence[Sums], device: torch.device) -> torch.Tensor:
    flat = torch.stack([scalar.to(device, non_blocking=True) for column in columns for scalar in column])
    return flat.view(len(columns), -1).t().contiguous()


def fast_sums(flats: Sequence[torch.Tensor], zero_below: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the float64 sums and int64 counts of flat CPU tensors of a common float dtype, with a column per tensor.

    The third result has a bool per column: True if the sums of this tensor are accurate.
    """
    squares = torch.zeros(len(flats), dtype=torch.float64, device=_CPU)
    total = torch.zeros_like(squares)
    norms: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {torch.float64: [], torch.float32: []}
    totals: list[tuple[int, torch.Tensor]] = []
    for owner, flat in enumerate(flats):
        # A reduction would first widen the whole 16-bit tensor; pieces fit into the cache.
        pieces = (flat,) if flat.dtype is torch.float32 else torch.split(flat, _CPU_CHUNK)
        for piece in pieces:
            wide = piece.to(torch.float32)
            whole = wide.numel() // _LEAN_ROW * _LEAN_ROW
            if whole:
                rows = torch.linalg.vector_norm(wide[:whole].view(-1, _LEAN_ROW), dim=1)
                norms[torch.float64].append((owner, rows))
            if whole < wide.numel():
                norms[torch.float32].append((owner, wide[whole:]))
            totals.append((owner, wide.sum()))
    for precision, parts in norms.items():
        if parts:
            owners, vectors = zip(*parts, strict=True)
            lengths = torch.stack(foreach_norm(vectors, 2, precision))
            squares.index_add_(0, torch.tensor(owners, device=_CPU), lengths.double().square())
    owners, scalars = zip(*totals, strict=True)
    total.index_add_(0, torch.tensor(owners, device=_CPU), torch.stack(scalars).double())
    extremes = [torch.aminmax(flat) for flat in flats]
    least = torch.stack([pair.min for pair in extremes]).double()
    most = torch.stack([pair.max for pair in extremes]).double()
    zeros = torch.stack([count_zeros(flat, zero_below) for flat in flats])
    magnitude = torch.maximum(least.abs(), most.abs())
    # NaN and Inf are excluded here as well: no comparison with NaN is true.
    trusted = (magnitude == 0) | ((magnitude >= _LEAN_SMALLEST) & (magnitude <= _LEAN_LARGEST))
    none = torch.zeros_like(zeros)
    return torch.stack([squares, least, most, total]), torch.stack([none, none, zeros]), trusted


def exact_sums(flat: torch.Tensor, zero_below: float) -> Sums:
    """Return the sums of a flat tensor of any dtype on its device, in bounded temporary memory.

    The function does not synchronise with the host.
    """
    chunks = torch.split(flat, _CPU_CHUNK if flat.is_cpu else _DEVICE_CHUNK)
    parts = [_exact_chunk(chunk, zero_below) for chunk in chunks]
    if len(parts) == 1:  # on a device, each operation that is left out saves the start of a kernel
        return parts[0]
    squares, least, most, total, nans, infs, zeros = (torch.stack(part) for part in zip(*parts, strict=True))
    return squares.sum(), least.amin(), most.amax(), total.sum(), nans.sum(), infs.sum(), zeros.sum()


def _exact_chunk(chunk: torch.Tensor, zero_below: float) -> Sums:
    values = chunk.to(torch.complex128).abs() if chunk.is_complex() else chunk.to(torch.float64)
    zeros = count_zeros(values, zero_below)
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


def count_zeros(flat: torch.Tensor, zero_below: float) -> torch.Tensor:
    """Return the number of elements that are 0, or closer to 0 than `zero_below`. NaN does not count."""
    if not zero_below > 0:
        return flat.numel() - torch.count_nonzero(flat)
    return (flat.abs() < round_up(zero_below, flat.dtype)).sum()


def round_up(bound: float, dtype: torch.dtype) -> float:
    """Return the smallest number of `dtype` that is at least `bound`.

    A number of `dtype` is below it exactly if it is below `bound`; torch rounds the bound to the nearest number.
    """
    nearest = torch.tensor(bound, dtype=torch.float64, device=_CPU).to(dtype)
    if float(nearest) >= bound:
        return float(nearest)
    return float(torch.nextafter(nearest, torch.tensor(math.inf, dtype=dtype, device=_CPU)))
