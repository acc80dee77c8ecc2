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
from rankscope_exporter.measure.kernels.compiled import CHUNK, JOB_FIELDS, PARTIAL_FIELDS, DeviceJobs
from rankscope_exporter.measure.kernels.statistics_table import ROWS

_BLOCK: Final = 1024
_WARPS: Final = 8
_COMBINED: Final = 128  # chunks that one step of the second kernel combines

_FIELDS: Final = tl.constexpr(JOB_FIELDS)
_PARTIALS: Final = tl.constexpr(PARTIAL_FIELDS)


@triton.jit
def _chunk(
    pointer, first, numel, zero, TERM: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr
):
    """Measure a chunk. If `ALIGNED`, it is whole and begins at 16 bytes. 16-bit floats are read as float32."""
    IS_WIDE: tl.constexpr = pointer.dtype.element_ty == tl.float64
    FLOAT: tl.constexpr = tl.float64 if IS_WIDE else tl.float32
    INTEGER: tl.constexpr = tl.int64 if IS_WIDE else tl.int32
    SIGN: tl.constexpr = 63 if IS_WIDE else 31
    MOST: tl.constexpr = 0x7FFFFFFFFFFFFFFF if IS_WIDE else 0x7FFFFFFF
    INFINITE: tl.constexpr = 0x7FF0000000000000 if IS_WIDE else 0x7F800000
    nothing = tl.zeros((BLOCK,), tl.float64)
    none = tl.zeros((BLOCK,), tl.int32)
    squares, total, extra = nothing, nothing, nothing
    nans, infs, zeros = none, none, none
    least = tl.full((BLOCK,), MOST, INTEGER)
    most = tl.full((BLOCK,), -MOST - 1, INTEGER)
    for start in range(0, SIZE, BLOCK):
        place = first + start + tl.arange(0, BLOCK)
        inside = place < numel
        if ALIGNED:
            place = tl.max_contiguous(tl.multiple_of(place, BLOCK), BLOCK)
            x = tl.load(pointer + place).to(FLOAT)
        else:
            x = tl.load(pointer + place, mask=inside, other=0.0).to(FLOAT)
        bits = x.to(INTEGER, bitcast=True)
        magnitude = bits & MOST
        finite = (magnitude < INFINITE) & inside
        nans += (magnitude > INFINITE).to(tl.int32)
        infs += (magnitude == INFINITE).to(tl.int32)
        zeros += ((magnitude < zero.to(INTEGER)) & inside).to(tl.int32)
        ordered = bits ^ ((bits >> SIGN) & MOST)
        least = tl.minimum(least, tl.where(finite, ordered, MOST))
        most = tl.maximum(most, tl.where(finite, ordered, -MOST - 1))
        wide = tl.where(finite, x, 0.0).to(tl.float64)
        squares += wide * wide
        total += wide
        if TERM is not None:
            extra += TERM(wide)
    low = tl.min(least)
    high = tl.max(most)
    lowest = (low ^ ((low >> SIGN) & MOST)).to(FLOAT, bitcast=True).to(tl.float64)
    highest = (high ^ ((high >> SIGN) & MOST)).to(FLOAT, bitcast=True).to(tl.float64)
    has_finite = tl.sum(nans) + tl.sum(infs) < tl.minimum(numel - first, SIZE)
    lowest = tl.where(has_finite, lowest, float("inf"))
    highest = tl.where(has_finite, highest, float("-inf"))
    return tl.sum(squares), lowest, highest, tl.sum(total), tl.sum(nans), tl.sum(infs), tl.sum(zeros), tl.sum(extra)


@triton.jit
def _typed_chunk(
    address, first, numel, zero, TYPE: tl.constexpr, TERM: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr
):
    """Measure a chunk of elements of `TYPE`. A whole chunk that begins at 16 bytes is read in vectors."""
    pointer = address.to(tl.pointer_type(TYPE))
    if (address % 16 == 0) & (first + SIZE <= numel):
        found = _chunk(tl.multiple_of(pointer, 16), first, numel, zero, TERM, True, BLOCK, SIZE)
    else:
        found = _chunk(pointer, first, numel, zero, TERM, False, BLOCK, SIZE)
    return found


@triton.jit
def _store(table, stride, row, numel, squares, least, most, total, nans, infs, zeros, extra, ROW: tl.constexpr):
    """Write the statistics of a tensor to its entry of the table."""
    sums = table.to(tl.pointer_type(tl.float64), bitcast=True) + row
    tl.store(sums, squares)
    tl.store(sums + stride, least)
    tl.store(sums + 2 * stride, most)
    tl.store(sums + 3 * stride, total)
    counts = table + row
    tl.store(counts + 4 * stride, nans.to(tl.int64))
    tl.store(counts + 5 * stride, infs.to(tl.int64))
    tl.store(counts + 6 * stride, zeros.to(tl.int64))
    tl.store(counts + 7 * stride, numel)
    if ROW:
        tl.store(sums + ROW * stride, extra)


_RUNTIME: Final = ("stride",)


@triton.jit(do_not_specialize=_RUNTIME)
def _measure_chunks(
    jobs, chunks, table, parts, stride, TERM: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr
):
    """Measure one chunk of one tensor. `chunks` has the job, the first element and the partial result of each chunk."""
    chunk = tl.program_id(0)
    job = jobs + tl.load(chunks + 3 * chunk) * _FIELDS
    first = tl.load(chunks + 3 * chunk + 1)
    part = tl.load(chunks + 3 * chunk + 2)
    address = tl.load(job)
    numel = tl.load(job + 1)
    row = tl.load(job + 2)
    code = tl.load(job + 3)
    zero = tl.load(job + 4)
    if code == 0:
        found = _typed_chunk(address, first, numel, zero, tl.float32, TERM, BLOCK, SIZE)
    elif code == 1:
        found = _typed_chunk(address, first, numel, zero, tl.bfloat16, TERM, BLOCK, SIZE)
    elif code == 2:
        found = _typed_chunk(address, first, numel, zero, tl.float16, TERM, BLOCK, SIZE)
    else:
        found = _typed_chunk(address, first, numel, zero, tl.float64, TERM, BLOCK, SIZE)
    squares, least, most, total, nans, infs, zeros, extra = found
    if part < 0:
        _store(table, stride, row, numel, squares, least, most, total, nans, infs, zeros, extra, ROW)
    else:
        to = parts + part * _PARTIALS
        tl.store(to, squares)
        tl.store(to + 1, least)
        tl.store(to + 2, most)
        tl.store(to + 3, total)
        tl.store(to + 4, nans.to(tl.float64))
        tl.store(to + 5, infs.to(tl.float64))
        tl.store(to + 6, zeros.to(tl.float64))
        tl.store(to + 7, extra)


@triton.jit(do_not_specialize=_RUNTIME)
def _combine_chunks(jobs, large, table, parts, stride, ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Combine the chunks of one tensor. `large` has the job, the first partial result and the number of these."""
    tensor = tl.program_id(0)
    job = jobs + tl.load(large + 3 * tensor) * _FIELDS
    first = tl.load(large + 3 * tensor + 1)
    count = tl.load(large + 3 * tensor + 2)
    nothing = tl.zeros((BLOCK,), tl.float64)
    squares, total, extra, nans, infs, zeros = nothing, nothing, nothing, nothing, nothing, nothing
    least = tl.full((BLOCK,), float("inf"), tl.float64)
    most = tl.full((BLOCK,), float("-inf"), tl.float64)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < count
        at = parts + (first + place) * _PARTIALS
        squares += tl.load(at, mask=inside, other=0.0)
        least = tl.minimum(least, tl.load(at + 1, mask=inside, other=float("inf")))
        most = tl.maximum(most, tl.load(at + 2, mask=inside, other=float("-inf")))
        total += tl.load(at + 3, mask=inside, other=0.0)
        nans += tl.load(at + 4, mask=inside, other=0.0)
        infs += tl.load(at + 5, mask=inside, other=0.0)
        zeros += tl.load(at + 6, mask=inside, other=0.0)
        if ROW:
            extra += tl.load(at + 7, mask=inside, other=0.0)
    squares, least, most, total = tl.sum(squares), tl.min(least), tl.max(most), tl.sum(total)
    nans, infs, zeros, extra = tl.sum(nans), tl.sum(infs), tl.sum(zeros), tl.sum(extra)
    row, numel = tl.load(job + 2), tl.load(job + 1)
    _store(table, stride, row, numel, squares, least, most, total, nans, infs, zeros, extra, ROW)


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
    parts = table.new_empty((max(1, jobs.partials), PARTIAL_FIELDS), dtype=torch.float64)
    to = table, parts, table.shape[1]
    # Triton uses the current device of the thread, which a script with tensors on another device need not set.
    with torch.cuda.device_of(table):  # type: ignore[no-untyped-call]  # untyped in torch
        for row, term in terms.items():
            if count := len(jobs.chunks):
                settings = {"TERM": term, "SIZE": CHUNK, "num_warps": _WARPS}
                _measure_chunks[(count,)](jobs.fields, jobs.chunks, *to, ROW=row, BLOCK=_BLOCK, **settings)
            if count := len(jobs.large):
                _combine_chunks[(count,)](jobs.fields, jobs.large, *to, ROW=row, BLOCK=_COMBINED)
