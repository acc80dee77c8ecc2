"""Arguments of the compiled kernel for CPUs: addresses and sizes of tensors in one array.

It is rebuilt only if a tensor moves.
"""

from __future__ import annotations

import array
import enum
import threading
from collections.abc import Sequence
from typing import Final

import torch

from rankscope_exporter.process.threads import openmp_parallel
from rankscope_exporter.statistics.c_kernel import CKernel
from rankscope_exporter.statistics.table import ROWS, Rows, StatisticsTable
from rankscope_exporter.statistics.tensor_access import PLAIN_TYPES, SUSPICIOUS_BELOW, gathered, is_dense, is_freed
from rankscope_exporter.statistics.torch_backend import round_up

_CHUNK: Final = 1 << 15
"""Elements that one thread measures at a time (CHUNK of kernel.c).

torch divides operations on more elements, too, so its threads exist if a tensor has more.
"""
_MOST_LOCKED: Final = 1 << 24
"""Number of elements up to which the kernel keeps the interpreter lock.

It needs about 5 ms for them, for which Python, too, lets a thread keep the lock.
"""
_JOB_FIELDS: Final = 4  # address, elements, entry, code


class Code(enum.IntEnum):
    """The dtypes of tensors that the compiled kernel can read."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    FLOAT64 = 3


CODES: Final = {
    torch.float32: Code.FLOAT32,
    torch.bfloat16: Code.BFLOAT16,
    torch.float16: Code.FLOAT16,
    torch.float64: Code.FLOAT64,
}
_BITS_OF: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Sight = tuple[int, int, torch.dtype, bool]


class KernelArguments:
    """The kernel arguments of one group of tensors: the tensors that the kernel can read, and their last addresses."""

    def __init__(self, rows: Rows, zero_below: float) -> None:
        self._rows = rows
        self._zero_below = array.array("q", _thresholds(zero_below))
        self._seen: list[Sight | None] = []
        self._permuted: list[tuple[int, torch.Size, tuple[int, ...]]] = []
        self._jobs = array.array("q")
        self._chunks = 0
        self._is_divided = self._is_locked = False
        self._others: list[int] = []
        self.have_moved = False
        """True if a tensor of the last call of `run` had another address, size or dtype than in the call before."""

    def run(self, kernel: CKernel, tensors: Sequence[torch.Tensor | None], table: StatisticsTable) -> Sequence[int]:
        """Measure those of `tensors` that the kernel can read.

        Return the positions of the tensors that it cannot read.
        """
        seen = _fingerprints(tensors)
        tensors = _gathered(tensors, seen)
        self.have_moved = seen != self._seen or not self._permuted_as_before(tensors)
        if self.have_moved:
            self._plan(tensors, seen)
        if self._jobs:
            extras = kernel.extra_sums(table.extra_sums)
            assert extras is not None
            request = array.array(
                "q",
                (  # Request of kernel.c
                    *(self._jobs.buffer_info()[0], len(self._jobs) // _JOB_FIELDS),
                    *(table.buffer.data_ptr(), table.size),
                    self._zero_below.buffer_info()[0],
                    *extras.buffer_info(),
                    _scratch(self._chunks * (ROWS + len(extras))),
                    *((openmp_parallel(), torch.get_num_threads()) if self._is_divided else (0, 1)),
                    0,
                ),
            )
            measure = kernel.measure_locked if self._is_locked else kernel.measure
            measure(request.buffer_info()[0])
        return self._others

    def _plan(self, tensors: Sequence[torch.Tensor | None], seen: list[Sight | None]) -> None:
        self._seen = seen
        self._others = []
        self._permuted = []
        fields: list[int] = []
        sizes: list[int] = []
        for position, (tensor, sight, row) in enumerate(zip(tensors, seen, self._rows, strict=True)):
            if tensor is None:
                continue
            if sight is None or not _readable(tensor, sight):
                self._others.append(position)
                continue
            address, numel, dtype, is_contiguous = sight
            fields += (address, numel, row, CODES[dtype])
            sizes.append(numel)
            if not is_contiguous:
                self._permuted.append((position, tensor.shape, tensor.stride()))
        self._jobs = array.array("q", fields)
        self._chunks = sum(-(-numel // _CHUNK) for numel in sizes)
        self._is_divided = max(sizes, default=0) > _CHUNK
        self._is_locked = sum(sizes) <= _MOST_LOCKED

    def _permuted_as_before(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        return all(
            tensor is not None and tensor.shape == shape and tensor.stride() == stride
            for position, shape, stride in self._permuted
            for tensor in [tensors[position]]
        )


_SCRATCH: Final = threading.local()
"""Temporary memory of the kernel. All groups share it, because a plan may have many thousands of groups."""


def _scratch(size: int) -> int:
    """Return the address of memory for `size` numbers, which the next call on this thread overwrites."""
    memory: array.array[int] | None = getattr(_SCRATCH, "memory", None)
    if memory is None or len(memory) < size:
        memory = _SCRATCH.memory = array.array("q", bytes(8 * size))
    return memory.buffer_info()[0]


def _fingerprints(tensors: Sequence[torch.Tensor | None]) -> list[Sight | None]:
    """Return, for each tensor, the values that must be unchanged so that the kernel argument can be used again.

    They are the address, the number of elements, the dtype, and whether the tensor is contiguous. The result contains
    None for a tensor without memory of its own.
    """
    try:
        return [
            (tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor.is_contiguous())  # type: ignore[union-attr]  # None is not of a plain type
            if type(tensor) in PLAIN_TYPES
            else None
            for tensor in tensors
        ]
    except RuntimeError:  # one of them has no storage: sparse
        return [
            _fingerprints([tensor])[0] if tensor is not None and _has_memory(tensor) else None for tensor in tensors
        ]


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_cpu and not tensor.is_nested


def _gathered(tensors: Sequence[torch.Tensor | None], seen: list[Sight | None]) -> Sequence[torch.Tensor | None]:
    """Return `tensors`, with copies of those that the kernel could not read otherwise. Update `seen` accordingly."""
    scattered = [position for position, sight in enumerate(seen) if sight is not None and not sight[3]]
    if not scattered:
        return tensors
    tensors = list(tensors)
    for position in scattered:
        tensor = tensors[position]
        if tensor is not None and (copy := gathered(tensor)) is not tensor:
            tensors[position], seen[position] = copy, _fingerprints([copy])[0]
    return tensors


def _readable(tensor: torch.Tensor, sight: Sight) -> bool:
    address, numel, dtype, contiguous = sight
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_nested or dtype not in CODES:
        return False
    if tensor.is_neg() or not (contiguous or is_dense(tensor)):
        return False
    return address >= SUSPICIOUS_BELOW or numel == 0 or not (address == 0 or is_freed(tensor))


def _thresholds(zero_below: float) -> list[int]:
    """Return, for each dtype that the kernel can read, the bits of the smallest magnitude that does not count as zero.

    The first half of the list has the bits of this bound in the dtype itself. The second half has the bits of the same
    bound in float64.
    """
    own, wide = [], []
    for dtype in CODES:
        smallest = round_up(zero_below, dtype) if zero_below > 0 else 0.0
        bound = torch.tensor(smallest, dtype=torch.float64, device="cpu")  # whatever default device a script has set
        wide.append(max(1, int(bound.view(torch.int64))))
        own.append(max(1, int(bound.to(dtype).view(_BITS_OF[dtype.itemsize]))))
    return own + wide
