"""Groups of tensors that are measured together at every step, by a compiled kernel or by torch operations.

Agreement of the signs of two tensors: in one pass by the compiled kernel for CPUs, otherwise by torch operations.
"""

from __future__ import annotations

import array
import functools
from collections.abc import Callable, Sequence
from typing import Final

import torch

from rankscope_exporter.adapters.parameter_names import local_tensor
from rankscope_exporter.measure.kernels import torch_backend
from rankscope_exporter.measure.kernels.c_kernel import CODES, CKernel, Read, c_kernel
from rankscope_exporter.measure.kernels.compiled import DeviceArguments, ready_kernel
from rankscope_exporter.measure.kernels.statistics_table import DeviceKernel, Rows, StatisticsTable, contiguous_rows
from rankscope_exporter.measure.kernels.tensor_access import PLAIN_TYPES, elements_of, readable_by_kernel
from rankscope_exporter.process.openmp import openmp_parallel

_CHUNK: Final = 1 << 15
"""Elements that one thread measures at a time (CHUNK of kernel.c).

torch divides operations on more elements, too, so its threads exist if a tensor has more.
"""
_MOST_LOCKED: Final = 1 << 24
"""Number of elements up to which the kernel keeps the interpreter lock.

It needs about 5 ms for them, for which Python, too, lets a thread keep the lock.
"""
_TABLE: Final = slice(4)  # the fields of `Request` in kernel.c that are those of the table
_TEAM: Final = slice(4, 6)
_REQUEST_FIELDS: Final = 13
_JOB_FIELDS: Final = 6
_SIZE, _DTYPE, _SHAPE = 1, 3, 4

_Spec = tuple[tuple[int, ...], torch.dtype]
_is_neg = torch.Tensor.is_neg
_IRREGULAR: Final = Read.RESHAPED | Read.ABSENT | Read.UNREAD
_PLAIN: Final = PLAIN_TYPES | {type(None)}


class MeasureGroup:
    """A fixed set of table entries that are measured together.

    Their tensors may differ, move or be absent at each step.

    The function `described` is called with the entry and the tensor when a tensor is measured for the first time, and
    when its shape or dtype has changed. If it returns False, it is called again for the next tensor of this entry.
    """

    def __init__(self, rows: Sequence[int], described: Callable[[int, torch.Tensor], bool] | None = None) -> None:
        self.rows: Rows = contiguous_rows(rows)
        self._request: array.array[int] | None = None  # `Request` of kernel.c, followed by its jobs
        self._address = 0
        self._device_arguments = DeviceArguments(self.rows)
        self._described = described
        self._known: list[_Spec | None] = [None] * len(self.rows)

    def measure(self, tensors: Sequence[torch.Tensor | None], table: StatisticsTable) -> None:
        """Compute the raw statistics of `tensors` and write them to the entries of the group in `table`.

        For a tensor that is absent, the entry is not changed.
        """
        if len(tensors) != len(self.rows):
            raise ValueError(f"{len(tensors)} tensors for {len(self.rows)} entries: pass None for an absent tensor")
        kernel = table.kernel if table.is_decided else table.decide(ready_kernel)
        if not isinstance(kernel, CKernel):
            self._measure_without(kernel, tensors, table)
            return
        request = self._request or self._new_request(kernel, table.zero_below)
        request[_TABLE] = table.arguments
        found = kernel.read(self._address, tensors)
        if found & Read.UNREAD:  # some may be DTensors
            tensors = _locals(tensors)
            found = kernel.read(self._address, tensors) | (found & (Read.MOVED | Read.RESHAPED | Read.ABSENT))
        # The kernel does not see whether elements are negated. All tensors are plain here, and none is absent.
        if found & _IRREGULAR or (found & Read.MOVED and True in map(_is_neg, tensors)):  # type: ignore[arg-type]
            self._complete(kernel, request, found, tensors, table)
        elif found & Read.LARGE:
            self._measure_read(kernel, request)

    def _new_request(self, kernel: CKernel, zero_below: float) -> array.array[int]:
        jobs = [field for row in self.rows for field in (0, -1, row, -1, 0, 0)]
        request = self._request = array.array("q", [0] * _REQUEST_FIELDS + jobs)
        self._address = request.buffer_info()[0]
        request[_TEAM.stop : _REQUEST_FIELDS] = array.array(
            "q",
            (
                *(kernel.python.buffer_info()[0], _thresholds(zero_below).buffer_info()[0], _MOST_LOCKED),
                *(len(self.rows), self._address + request.itemsize * _REQUEST_FIELDS, 0, 0),
            ),
        )
        return request

    def _complete(
        self,
        kernel: CKernel,
        request: array.array[int],
        found: int,
        tensors: Sequence[torch.Tensor | None],
        table: StatisticsTable,
    ) -> None:
        """Measure the tensors that the kernel could not read, and describe all of them."""
        with torch.no_grad():
            others, copies = [], []
            for position, tensor in enumerate(tensors):
                job = _REQUEST_FIELDS + _JOB_FIELDS * position
                if tensor is None or (request[job + _SIZE] >= 0 and not tensor.is_neg()):
                    continue
                if (readable := readable_by_kernel(tensor, table.device)) is None:
                    others.append(position)
                    request[job + _SIZE], request[job + _DTYPE], request[job + _SHAPE] = -1, -1, 0
                else:
                    copies.append(readable)
                    request[job], request[job + _SIZE] = readable.data_ptr(), readable.numel()
                    request[job + _DTYPE], request[job + _SHAPE] = CODES[readable.dtype], 0
            if found & (Read.UNREAD | Read.LARGE):
                self._measure_read(kernel, request)
            if others:
                self._with_torch(tensors, others, table)
            if found & ~(Read.MOVED | Read.ABSENT | Read.LARGE):
                self._describe(tensors)

    def _measure_read(self, kernel: CKernel, request: array.array[int]) -> None:
        sizes = request[_REQUEST_FIELDS + _SIZE :: _JOB_FIELDS]
        if max(sizes) > _CHUNK:
            request[_TEAM] = array.array("q", (openmp_parallel(), torch.get_num_threads()))
        measure = kernel.measure_locked if sum(sizes) <= _MOST_LOCKED else kernel.measure
        measure(self._address)

    def _measure_without(
        self, kernel: DeviceKernel | None, tensors: Sequence[torch.Tensor | None], table: StatisticsTable
    ) -> None:
        """Measure with torch operations or, for an accelerator, with its kernel."""
        with torch.no_grad():
            local = _locals(tensors)
            others: Sequence[int] = range(len(local))
            has_changed = True
            if kernel is not None:
                others = self._device_arguments.run(kernel, local, table)
                # An activation is measured alone. It may have another shape at the same address.
                has_changed = self._device_arguments.have_moved or len(local) == 1
            self._with_torch(local, others, table)
            if has_changed:
                self._describe(local)

    def _describe(self, tensors: Sequence[torch.Tensor | None]) -> None:
        if self._described is None:
            return
        specs: dict[_Spec, _Spec] = {}  # one object for all tensors with the same shape and dtype
        for position, (known, tensor) in enumerate(zip(self._known, tensors, strict=True)):
            if tensor is None:
                continue
            spec = tensor.shape, tensor.dtype
            if known == spec:
                continue
            if self._described(self.rows[position], tensor):
                self._known[position] = specs.setdefault(spec, spec)
            elif self._request is not None:
                self._request[_REQUEST_FIELDS + _JOB_FIELDS * position + _SHAPE] = 0

    def _with_torch(
        self, tensors: Sequence[torch.Tensor | None], positions: Sequence[int], table: StatisticsTable
    ) -> None:
        items = ((self.rows[position], tensors[position]) for position in positions)
        read = ((row, tensor, elements_of(tensor)) for row, tensor in items if tensor is not None)
        found = [(row, flat, tensor.numel()) for row, tensor, flat in read if flat is not None]
        if found:
            rows, flats, sizes = zip(*found, strict=True)
            torch_backend.measure(flats, sizes, contiguous_rows(rows), table)


def _locals(tensors: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
    """Return `tensors` with the local shards of DTensors in their places."""
    if _PLAIN.issuperset(map(type, tensors)):
        return tensors
    with torch.no_grad():
        return [None if tensor is None else local_tensor(tensor) for tensor in tensors]


@functools.cache
def _thresholds(zero_below: float) -> array.array[int]:
    """Return, for each dtype that the kernel can read, the bits of the smallest magnitude that does not count as zero.

    The first half of the list has the bits of this bound in the dtype itself. The second half has the bits of the same
    bound in float64.
    """
    own = [torch_backend.zero_bits(zero_below, dtype, dtype) for dtype in CODES]
    return array.array("q", own + [torch_backend.zero_bits(zero_below, dtype, torch.float64) for dtype in CODES])


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
    team, count = (openmp_parallel(), torch.get_num_threads()), len(jobs) // _JOB_FIELDS
    request = array.array("q", (sums.data_ptr(), 0, 0, 0, *team, 0, 0, 0, count, jobs.buffer_info()[0], 0, 0))
    kernel.measure(request.buffer_info()[0])
    return sums


def _sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    exact = torch.float32 if a.numel() <= _EXACT_IN_FLOAT32 else torch.float64
    return a.sign().mul_(b.sign()).sum(dtype=exact)
