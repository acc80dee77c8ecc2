"""Agreement of the signs of two tensors: in one pass by the compiled kernel for CPUs, otherwise by torch operations."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Final

import torch

from rankscope_exporter.measure.kernels.c_kernel import CODES, c_kernel
from rankscope_exporter.measure.kernels.measure_group import JOB_FIELDS
from rankscope_exporter.measure.kernels.tensor_access import readable_by_kernel
from rankscope_exporter.process.openmp import openmp_parallel

_EXACT_IN_FLOAT32: Final = 1 << 24
"""All whole numbers up to this one are exact in float32, and so are sums of as many terms of -1, 0 and 1."""


def sums_of_signs(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, compiled: bool = True) -> torch.Tensor:
    """Return Σ sign(a)·sign(b) of each pair of tensors with equal shapes, [len(pairs)] on their device.

    The sign of 0 and of NaN is 0. The sums are exact. If `compiled` is false, torch operations are used.
    """
    kernel = c_kernel() if compiled and all(a.is_cpu and b.is_cpu for a, b in pairs) else None
    if kernel is None:
        return torch.stack([_sum(a, b) for a, b in pairs])
    jobs, sums = array.array("q"), torch.zeros(len(pairs), dtype=torch.int64, device="cpu")
    for place, (a, b) in enumerate(pairs):
        is_alike = a.dtype == b.dtype and a.stride() == b.stride()
        if is_alike and all(readable_by_kernel(item, item.device) is item for item in (a, b)):
            jobs.extend((a.data_ptr(), a.numel(), place, CODES[a.dtype], 0, b.data_ptr()))
        else:
            sums[place] = _sum(a, b)
    team, count = (openmp_parallel(), torch.get_num_threads()), len(jobs) // JOB_FIELDS
    request = array.array("q", (sums.data_ptr(), 0, 0, 0, *team, 0, 0, 0, count, jobs.buffer_info()[0], 0, 0))
    kernel.measure(request.buffer_info()[0])
    return sums


def _sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    exact = torch.float32 if a.numel() <= _EXACT_IN_FLOAT32 else torch.float64
    return a.sign().mul_(b.sign()).sum(dtype=exact)
