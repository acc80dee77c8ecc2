"""Compiled code that computes all statistics of a group of tensors on an accelerator in one pass.

Only a background thread imports this module, because the import and the compilation take seconds and need Triton.

A tensor is split into chunks, and one program measures one chunk. The statistics of a tensor with one chunk go directly
to the table; a second kernel combines the chunks of larger tensors, in the order of the chunks. So a result depends on
the elements and their number alone. Sums are float64. Minimum, maximum, zeros, NaN and Inf are found from the bits, as
in the kernel for CPUs: if the bits of negative numbers are flipped, floats have the order of integers.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl

from rankscope_contract.model.kinds import SUMMANDS
from rankscope_exporter.measure.kernels.device_arguments import CHUNK, JOB_FIELDS, PARTIAL_FIELDS, DeviceJobs
from rankscope_exporter.measure.kernels.statistics_table import ROWS

_BLOCK: Final = 1024
_WARPS: Final = 8
_COMBINED: Final = 128  # chunks that one step of the second kernel combines

_MOST32: Final = tl.constexpr(0x7FFFFFFF)
_INFINITE32: Final = tl.constexpr(0x7F800000)
_MOST64: Final = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_INFINITE64: Final = tl.constexpr(0x7FF0000000000000)
_FIELDS: Final = tl.constexpr(JOB_FIELDS)
_PARTIALS: Final = tl.constexpr(PARTIAL_FIELDS)


@triton.jit
def _chunk32(
    pointer: tl.tensor,
    first: tl.tensor,
    numel: tl.tensor,
    zero: tl.tensor,
    TERM: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Measure a chunk of float32, bfloat16 or float16 elements. If `ALIGNED`, it is whole and begins at 16 bytes."""
    squares = tl.zeros((BLOCK,), tl.float64)
    total = tl.zeros((BLOCK,), tl.float64)
    extra = tl.zeros((BLOCK,), tl.float64)
    least = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    most = tl.full((BLOCK,), -0x80000000, tl.int32)
    nans = tl.zeros((BLOCK,), tl.int32)
    infs = tl.zeros((BLOCK,), tl.int32)
    zeros = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, SIZE, BLOCK):
        place = first + start + tl.arange(0, BLOCK)
        inside = place < numel
        if ALIGNED:
            place = tl.max_contiguous(tl.multiple_of(place, BLOCK), BLOCK)
            x = tl.load(pointer + place).to(tl.float32)
        else:
            x = tl.load(pointer + place, mask=inside, other=0.0).to(tl.float32)
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & _MOST32
        finite = (magnitude < _INFINITE32) & inside
        nans += (magnitude > _INFINITE32).to(tl.int32)
        infs += (magnitude == _INFINITE32).to(tl.int32)
        zeros += ((magnitude < zero) & inside).to(tl.int32)
        ordered = bits ^ ((bits >> 31) & _MOST32)
        least = tl.minimum(least, tl.where(finite, ordered, 0x7FFFFFFF))
        most = tl.maximum(most, tl.where(finite, ordered, -0x80000000))
        wide = tl.where(finite, x, 0.0).to(tl.float64)
        squares += wide * wide
        total += wide
        if TERM is not None:
            extra += TERM(wide)
    low = tl.min(least)
    high = tl.max(most)
    lowest = (low ^ ((low >> 31) & _MOST32)).to(tl.float32, bitcast=True).to(tl.float64)
    highest = (high ^ ((high >> 31) & _MOST32)).to(tl.float32, bitcast=True).to(tl.float64)
    count = tl.minimum(numel - first, SIZE)
    odd = tl.sum(nans) + tl.sum(infs)
    lowest = tl.where(odd < count, lowest, float("inf"))
    highest = tl.where(odd < count, highest, float("-inf"))
    return (
        tl.sum(squares),
        lowest,
        highest,
        tl.sum(total),
        tl.sum(nans).to(tl.int64),
        tl.sum(infs).to(tl.int64),
        tl.sum(zeros).to(tl.int64),
        tl.sum(extra),
    )


@triton.jit
def _typed_chunk(
    address: tl.tensor,
    first: tl.tensor,
    numel: tl.tensor,
    zero: tl.tensor,
    TYPE: tl.constexpr,
    TERM: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Measure a chunk of elements of `TYPE`. A whole chunk that begins at 16 bytes is read in vectors."""
    pointer = address.to(tl.pointer_type(TYPE))
    if (address % 16 == 0) & (first + SIZE <= numel):
        found = _chunk32(tl.multiple_of(pointer, 16), first, numel, zero, TERM, True, BLOCK, SIZE)
    else:
        found = _chunk32(pointer, first, numel, zero, TERM, False, BLOCK, SIZE)
    return found


@triton.jit
def _chunk64(
    pointer: tl.tensor,
    first: tl.tensor,
    numel: tl.tensor,
    zero: tl.tensor,
    TERM: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Measure a chunk of float64 elements."""
    squares = tl.zeros((BLOCK,), tl.float64)
    total = tl.zeros((BLOCK,), tl.float64)
    extra = tl.zeros((BLOCK,), tl.float64)
    least = tl.full((BLOCK,), float("inf"), tl.float64)
    most = tl.full((BLOCK,), float("-inf"), tl.float64)
    nans = tl.zeros((BLOCK,), tl.int32)
    infs = tl.zeros((BLOCK,), tl.int32)
    zeros = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, SIZE, BLOCK):
        place = first + start + tl.arange(0, BLOCK)
        inside = place < numel
        x = tl.load(pointer + place, mask=inside, other=0.0)
        magnitude = x.to(tl.int64, bitcast=True) & _MOST64
        finite = (magnitude < _INFINITE64) & inside
        nans += (magnitude > _INFINITE64).to(tl.int32)
        infs += (magnitude == _INFINITE64).to(tl.int32)
        zeros += ((magnitude < zero) & inside).to(tl.int32)
        least = tl.minimum(least, tl.where(finite, x, float("inf")))
        most = tl.maximum(most, tl.where(finite, x, float("-inf")))
        wide = tl.where(finite, x, 0.0)
        squares += wide * wide
        total += wide
        if TERM is not None:
            extra += TERM(wide)
    return (
        tl.sum(squares),
        tl.min(least),
        tl.max(most),
        tl.sum(total),
        tl.sum(nans).to(tl.int64),
        tl.sum(infs).to(tl.int64),
        tl.sum(zeros).to(tl.int64),
        tl.sum(extra),
    )


@triton.jit
def _store(
    table: tl.tensor,
    stride: tl.tensor,
    row: tl.tensor,
    numel: tl.tensor,
    squares: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    nans: tl.tensor,
    infs: tl.tensor,
    zeros: tl.tensor,
    extra: tl.tensor,
    ROW: tl.constexpr,
):
    """Write the statistics of a tensor to its entry of the table."""
    sums = table.to(tl.pointer_type(tl.float64), bitcast=True) + row
    tl.store(sums, squares)
    tl.store(sums + stride, least)
    tl.store(sums + 2 * stride, most)
    tl.store(sums + 3 * stride, total)
    counts = table + row
    tl.store(counts + 4 * stride, nans)
    tl.store(counts + 5 * stride, infs)
    tl.store(counts + 6 * stride, zeros)
    tl.store(counts + 7 * stride, numel)
    if ROW:
        tl.store(sums + ROW * stride, extra)


_RUNTIME: Final = ("stride",)


@triton.jit(do_not_specialize=_RUNTIME)
def _measure_chunks(
    jobs: tl.tensor,
    chunks: tl.tensor,
    table: tl.tensor,
    partials: tl.tensor,
    stride: tl.tensor,
    TERM: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Measure one chunk of one tensor. `chunks` has the job, the first element and the partial result of each chunk."""
    chunk = tl.program_id(0)
    job = jobs + tl.load(chunks + 3 * chunk) * _FIELDS
    first = tl.load(chunks + 3 * chunk + 1)
    partial = tl.load(chunks + 3 * chunk + 2)
    address = tl.load(job)
    numel = tl.load(job + 1)
    row = tl.load(job + 2)
    code = tl.load(job + 3)
    zero = tl.load(job + 4)
    if code == 0:
        found = _typed_chunk(address, first, numel, zero.to(tl.int32), tl.float32, TERM, BLOCK, SIZE)
    elif code == 1:
        found = _typed_chunk(address, first, numel, zero.to(tl.int32), tl.bfloat16, TERM, BLOCK, SIZE)
    elif code == 2:
        found = _typed_chunk(address, first, numel, zero.to(tl.int32), tl.float16, TERM, BLOCK, SIZE)
    else:
        found = _chunk64(address.to(tl.pointer_type(tl.float64)), first, numel, zero, TERM, BLOCK, SIZE)
    squares, least, most, total, nans, infs, zeros, extra = found
    if partial < 0:
        _store(table, stride, row, numel, squares, least, most, total, nans, infs, zeros, extra, ROW)
    else:
        to = partials + partial * _PARTIALS
        tl.store(to, squares)
        tl.store(to + 1, least)
        tl.store(to + 2, most)
        tl.store(to + 3, total)
        tl.store(to + 4, nans.to(tl.float64))
        tl.store(to + 5, infs.to(tl.float64))
        tl.store(to + 6, zeros.to(tl.float64))
        tl.store(to + 7, extra)


@triton.jit(do_not_specialize=_RUNTIME)
def _combine_chunks(
    jobs: tl.tensor,
    large: tl.tensor,
    table: tl.tensor,
    partials: tl.tensor,
    stride: tl.tensor,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Combine the chunks of one tensor. `large` has the job, the first partial result and the number of these."""
    tensor = tl.program_id(0)
    job = jobs + tl.load(large + 3 * tensor) * _FIELDS
    first = tl.load(large + 3 * tensor + 1)
    count = tl.load(large + 3 * tensor + 2)
    squares = tl.zeros((BLOCK,), tl.float64)
    total = tl.zeros((BLOCK,), tl.float64)
    extra = tl.zeros((BLOCK,), tl.float64)
    least = tl.full((BLOCK,), float("inf"), tl.float64)
    most = tl.full((BLOCK,), float("-inf"), tl.float64)
    nans = tl.zeros((BLOCK,), tl.float64)
    infs = tl.zeros((BLOCK,), tl.float64)
    zeros = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < count
        at = partials + (first + place) * _PARTIALS
        squares += tl.load(at, mask=inside, other=0.0)
        least = tl.minimum(least, tl.load(at + 1, mask=inside, other=float("inf")))
        most = tl.maximum(most, tl.load(at + 2, mask=inside, other=float("-inf")))
        total += tl.load(at + 3, mask=inside, other=0.0)
        nans += tl.load(at + 4, mask=inside, other=0.0)
        infs += tl.load(at + 5, mask=inside, other=0.0)
        zeros += tl.load(at + 6, mask=inside, other=0.0)
        if ROW:
            extra += tl.load(at + 7, mask=inside, other=0.0)
    _store(
        table,
        stride,
        tl.load(job + 2),
        tl.load(job + 1),
        tl.sum(squares),
        tl.min(least),
        tl.max(most),
        tl.sum(total),
        tl.sum(nans).to(tl.int64),
        tl.sum(infs).to(tl.int64),
        tl.sum(zeros).to(tl.int64),
        tl.sum(extra),
        ROW,
    )


IS_COMPILED: Final = isinstance(_measure_chunks, triton.JITFunction)
"""False if TRITON_INTERPRET is set: the interpreter runs on the host, which cannot read the memory of a device."""


@functools.cache
def _term(name: str) -> object:
    return triton.jit(SUMMANDS[name]) if IS_COMPILED else SUMMANDS[name]


def measure_jobs(jobs: DeviceJobs, table: torch.Tensor, *, extra_sums: Sequence[str]) -> None:
    """Measure the tensors of `jobs`, and write their statistics to `table`, int64 [rows, entries] on the device.

    The optional sums `extra_sums` are in the last rows. For each of them but the first, the tensors are read again.
    """
    terms = {ROWS + place: _term(name) for place, name in enumerate(extra_sums)} or {0: None}
    stride = table.shape[1]
    partials = table.new_empty((max(1, jobs.partials), PARTIAL_FIELDS), dtype=torch.float64)
    # Triton uses the current device of the thread, which a script with tensors on another device need not set.
    with torch.cuda.device_of(table):  # type: ignore[no-untyped-call]  # untyped in torch
        for row, term in terms.items():
            if jobs.chunk_count:
                _measure_chunks[(jobs.chunk_count,)](
                    jobs.fields,
                    jobs.chunks,
                    table,
                    partials,
                    stride,
                    TERM=term,
                    ROW=row,
                    BLOCK=_BLOCK,
                    SIZE=CHUNK,
                    num_warps=_WARPS,
                )
            if jobs.large_count:
                _combine_chunks[(jobs.large_count,)](
                    jobs.fields, jobs.large, table, partials, stride, ROW=row, BLOCK=_COMBINED
                )
