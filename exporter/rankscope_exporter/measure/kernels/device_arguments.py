"""Arguments of the kernel for accelerators: addresses, sizes and chunks of tensors in arrays on the device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from rankscope_exporter.measure.kernels.c_kernel import CODES
from rankscope_exporter.measure.kernels.statistics_table import DeviceKernel, Rows, StatisticsTable, on_device
from rankscope_exporter.measure.kernels.tensor_access import readable_by_kernel
from rankscope_exporter.measure.kernels.torch_backend import round_up

CHUNK: Final = 16_384
"""Elements that one program of the kernel measures. Larger tensors have several chunks."""
JOB_FIELDS: Final = 5  # address, elements, entry, code, bits of the smallest magnitude that is no zero
PARTIAL_FIELDS: Final = 8  # four sums, three counts, and an optional sum; all float64


@dataclass(frozen=True, slots=True)
class DeviceJobs:
    """The tensors that one call of the kernel measures, as int64 tensors on their device."""

    fields: torch.Tensor
    """[tensors, JOB_FIELDS]"""
    chunks: torch.Tensor
    """[chunks, 3]: the job, the first element, and the place of the partial result; -1 if the tensor has one chunk."""
    large: torch.Tensor
    """[tensors with several chunks, 3]: the job, the first partial result, and the number of partial results."""
    partials: int


Sight = tuple[int, int, torch.dtype]


class DeviceArguments:
    """The kernel arguments of one group of tensors. They are kept as long as the tensors have the same addresses.

    The chunks are kept as long as the tensors have the same sizes: gradients move at each step and keep their sizes.
    Both are made again in another stream. The allocator of torch reuses freed memory in the order of the stream in
    which it was allocated, so memory of one stream could be overwritten before a kernel in another one has read it.
    """

    def __init__(self, rows: Rows, zero_below: float) -> None:
        self._rows = rows
        self._zero_below = zero_below
        self._seen: list[Sight | None] | None = None
        self._sizes: list[int] | None = None
        self._jobs: DeviceJobs | None = None
        self._stream = 0
        self._others: list[int] = []
        self.have_moved = False
        """True if a tensor of the last call of `run` had another address, size or dtype than in the call before."""

    def run(
        self, kernel: DeviceKernel, tensors: Sequence[torch.Tensor | None], table: StatisticsTable
    ) -> Sequence[int]:
        """Measure those of `tensors` that the kernel can read. Return the positions of the others.

        Does not wait for the device.
        """
        found = [readable_by_kernel(tensor, table.device) for tensor in tensors]
        seen = [None if own is None else (own.data_ptr(), own.numel(), own.dtype) for own in found]
        stream = stream_of(table.device)
        if stream != self._stream:
            self._stream, self._seen, self._jobs = stream, None, None
        self.have_moved = seen != self._seen
        if self.have_moved:
            self._plan(tensors, seen, table.device)
        if self._jobs is not None:
            kernel(self._jobs, table.buffer, extra_sums=table.extra_sums)
        return self._others

    def _plan(self, tensors: Sequence[torch.Tensor | None], seen: list[Sight | None], device: torch.device) -> None:
        self._seen = None  # if memory for the arguments is missing, the next call plans again
        self._others = [place for place, tensor in enumerate(tensors) if tensor is not None and seen[place] is None]
        found = [(sight, row) for sight, row in zip(seen, self._rows, strict=True) if sight is not None]
        if not found:
            self._jobs, self._seen = None, seen
            return
        bits = functools.partial(_zero_bits, self._zero_below)
        fields = [(address, numel, row, CODES[dtype], bits(dtype)) for (address, numel, dtype), row in found]
        sizes = [numel for (_, numel, _), _ in found]
        if self._jobs is None or sizes != self._sizes:
            self._jobs = _with_chunks(on_device(fields, device), sizes, device)
            self._sizes = sizes
        else:
            self._jobs = replace(self._jobs, fields=on_device(fields, device))
        self._seen = seen


def _with_chunks(fields: torch.Tensor, sizes: Sequence[int], device: torch.device) -> DeviceJobs:
    chunks: list[tuple[int, int, int]] = []
    large: list[tuple[int, int, int]] = []
    partials = 0
    for job, numel in enumerate(sizes):
        count = max(1, -(-numel // CHUNK))  # a tensor without elements has counts too
        if count > 1:
            large.append((job, partials, count))
        chunks += [(job, CHUNK * place, partials + place if count > 1 else -1) for place in range(count)]
        partials += count if count > 1 else 0
    return DeviceJobs(fields, on_device(chunks, device), on_device(large, device), partials)


def stream_of(device: torch.device) -> int:
    """Return the number of the current stream of `device`; 0 for a device other than CUDA."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


@functools.cache
def _zero_bits(zero_below: float, dtype: torch.dtype) -> int:
    """Return the bits of the smallest magnitude that does not count as zero, in float64 or float32.

    Smaller dtypes are converted to float32.
    """
    if not zero_below > 0:
        return 1
    wide, bits = (torch.float64, torch.int64) if dtype is torch.float64 else (torch.float32, torch.int32)
    bound = torch.tensor(round_up(zero_below, dtype), dtype=wide, device="cpu")
    return max(1, int(bound.view(bits)))
