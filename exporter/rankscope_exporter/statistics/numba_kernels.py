"""Compiled code that computes all statistics of a tensor in one pass.

Only the warm-up thread imports this module, because the import takes seconds and needs numba.

Sums run in float32 lanes over blocks that fit into the first-level cache, and are added up in float64. Minimum, maximum
and zeros are computed from the bits. If the bits of negative numbers are flipped, floats have the order of integers,
and integer comparisons are vectorized while float comparisons are not. The minimum and maximum also show whether a
block contains a NaN, an Inf, or a magnitude with a square outside of the range of float32 (isnan, isfinite). Such a
block is summed again after scaling by a power of two, or widened to float64 and measured again.

All arguments are addresses and sizes, so nothing is boxed. Kernels hold no GIL and start no threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rankscope_exporter.statistics.kernel_arguments import BLOCK, JOB_FIELDS
from rankscope_exporter.statistics.kernel_arguments import Code as _Code

P = ParamSpec("P")
R = TypeVar("R")
Number = Any
"""A machine number in compiled code: an address, a count, bits or a float. Numba infers its type."""
Block = tuple[Number, Number, Number, Number, Number, Number, Number]
"""The raw statistics of a block: sum of squares, sum, minimum, maximum, and the numbers of NaN, Inf and zeros."""

_FLOAT32: Final = int(_Code.FLOAT32)
_BFLOAT16: Final = int(_Code.BFLOAT16)
_FLOAT16: Final = int(_Code.FLOAT16)

_MOST16: Final = 0x7FFF
_LEAST16: Final = -0x8000
_MOST32: Final = 0x7FFFFFFF
_LEAST32: Final = -0x80000000
_MOST64: Final = 0x7FFFFFFFFFFFFFFF
_LEAST64: Final = -0x8000000000000000
_INFINITE32: Final = 0x7F800000
_INFINITE64: Final = 0x7FF0000000000000
# Bits of 1e-14 and 1e17: between them 4096 squares neither overflow float32 nor lose more than 4e-7 of their sum.
_SAFE_FROM: Final = 0x283424DC
_SAFE_TO: Final = 0x5BB1A2BC
_UP, _DOWN = float(2**100), float(2**-100)  # scale numbers into these bounds without rounding
_LARGEST_HALF: Final = 0x7BFF
_HALF_TO_FLOAT: Final = float(2**112)  # between the exponent biases of float16 and float32

# Sums may be reordered, as vectorization requires; NaN and Inf keep their meaning.
_OPTIONS: Final[dict[str, Any]] = {
    "nogil": True,
    "boundscheck": False,
    "error_model": "numpy",
    "fastmath": {"reassoc", "contract", "nsz"},
}


def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` compiled so that numba inlines it into the functions that call it."""
    compiled: Callable[P, R] = numba.njit(**_OPTIONS)(function)
    return compiled


def _pointer(target: Any) -> Any:
    """Return a compiled function that casts an integer address to a pointer to numbers of the type `target`."""
    pointer = types.CPointer(target)  # type: ignore[no-untyped-call]  # numba leaves it untyped

    def cast(_typing: Any, _address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return pointer(types.int64), generate

    return intrinsic(cast)


def _reinterpret(source: Any, target: Any, llvm: Any) -> Any:
    """Return a compiled function that reads the bits of a number of type `source` as a number of type `target`."""

    def cast(_typing: Any, _value: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], llvm)

        return target(source), generate

    return intrinsic(cast)


# Names of compiled code. In numba's type hints, mypy sees numpy's names.
carray: Final[Any] = numba.carray  # type: ignore[attr-defined]  # documented, yet not among numba's typed names
int16: Final[Any] = types.int16
int32: Final[Any] = types.int32
int64: Final[Any] = types.int64
float32: Final[Any] = types.float32
float64: Final[Any] = types.float64

_int16s, _int32s, _int64s = _pointer(types.int16), _pointer(types.int32), _pointer(types.int64)
_float32s, _float64s = _pointer(types.float32), _pointer(types.float64)
_as_float32 = _reinterpret(types.int32, types.float32, ir.FloatType())
_as_float64 = _reinterpret(types.int64, types.float64, ir.DoubleType())


@_compiled
def _bits(ordered: Number) -> Number:
    """Return the bits of a float32, given the integer `ordered` that represents the number in comparisons.

    Two of these integers compare in the same way as their float32 numbers. The function is its own inverse.
    """
    return int32(ordered ^ int32(int32(ordered >> 31) & int32(_MOST32)))


@_compiled
def _half_bits(ordered: Number) -> Number:
    """Return the bits of a 16-bit float, given the integer `ordered` that represents the number in comparisons.

    Two of these integers compare in the same way as their 16-bit floats.
    """
    return int16(ordered ^ int16(int16(ordered >> 15) & int16(_MOST16)))


@_compiled
def _half(bits: Number) -> Number:
    """Return a finite float16 as float32, given its bits. The shifted bits are scaled to correct the exponent bias."""
    wide = int32(bits)
    moved = int32(int32(int32(wide & int32(_MOST16)) << 13) | int32(wide & int32(_LEAST32)))
    return _as_float32(moved) * float32(_HALF_TO_FLOAT)


@_compiled
def _scale(least: Number, most: Number) -> Number:
    """Return the power of two by which a block is scaled so that float32 sums have no overflow or underflow.

    The arguments are the bits of the minimum and the maximum. Return 0 if one of them is not finite.
    """
    magnitude = max(int32(least & int32(_MOST32)), int32(most & int32(_MOST32)))
    if magnitude >= _INFINITE32:
        return 0.0
    if magnitude == 0 or (magnitude >= _SAFE_FROM and magnitude <= _SAFE_TO):
        return 1.0
    return _UP if magnitude < _SAFE_FROM else _DOWN


@_compiled
def _block_float64(address: Number, size: Number, zero64: Number) -> Block:
    """Measure float64 elements. NaN and Inf are counted, and excluded from sums and extremes."""
    values, patterns = carray(_float64s(address), size), carray(_int64s(address), size)
    squares, total = 0.0, 0.0
    least, most = int64(_MOST64), int64(_LEAST64)
    nans, infs, zeros = 0, 0, 0
    for i in range(size):
        pattern = patterns[i]
        magnitude = pattern & _MOST64
        finite = magnitude < _INFINITE64
        x = values[i] if finite else 0.0
        squares += x * x
        total += x
        ordered = pattern ^ ((pattern >> 63) & _MOST64)
        least = min(least, ordered if finite else int64(_MOST64))
        most = max(most, ordered if finite else int64(_LEAST64))
        nans += magnitude > _INFINITE64
        infs += magnitude == _INFINITE64
        zeros += magnitude < zero64
    if nans + infs == size:
        return squares, total, math.inf, -math.inf, nans, infs, zeros
    lowest = _as_float64(least ^ ((least >> 63) & _MOST64))
    highest = _as_float64(most ^ ((most >> 63) & _MOST64))
    return squares, total, lowest, highest, nans, infs, zeros


@_compiled
def _widened(address: Number, size: Number, code: Number, scratch: Number) -> None:
    """Convert elements of a dtype smaller than float64 to float64 and write them to `scratch`."""
    wide = carray(_float64s(scratch), size)
    if code == _FLOAT32:
        floats = carray(_float32s(address), size)
        for i in range(size):
            wide[i] = float64(floats[i])
        return
    shorts = carray(_int16s(address), size)
    if code == _BFLOAT16:
        for i in range(size):
            wide[i] = float64(_as_float32(int32(int32(shorts[i]) << 16)))
        return
    for i in range(size):
        bits = shorts[i]
        if int16(bits & int16(_MOST16)) <= _LARGEST_HALF:
            wide[i] = float64(_half(bits))
        else:  # a NaN has payload bits and remains a NaN; an Inf has none
            wide[i] = float64(_as_float32(int32(int32(int32(bits) << 13) | int32(_INFINITE32))))


@_compiled
def _float32_block(address: Number, size: Number, zero: Number) -> tuple[Number, Number, Number, Number, Number]:
    """Measure float32 elements with float32 sums. The minimum and maximum are returned as bits."""
    values, patterns = carray(_float32s(address), size), carray(_int32s(address), size)
    bound = int32(zero)  # a wider one would widen every comparison
    squares, total = float32(0.0), float32(0.0)
    least, most, zeros = int32(_MOST32), int32(_LEAST32), int32(0)
    for i in range(size):
        x = values[i]
        squares += x * x
        total += x
        pattern = patterns[i]
        ordered = int32(pattern ^ int32(int32(pattern >> 31) & int32(_MOST32)))
        least = min(least, ordered)
        most = max(most, ordered)
        zeros += int32(int32(pattern & int32(_MOST32)) < bound)
    return squares, total, _bits(least), _bits(most), zeros


@_compiled
def _float32_sums(address: Number, size: Number, scale: Number) -> tuple[Number, Number]:
    values, factor = carray(_float32s(address), size), float32(scale)
    squares, total = float32(0.0), float32(0.0)
    for i in range(size):
        x = values[i] * factor
        squares += x * x
        total += x
    return squares, total


@_compiled
def _bfloat16_sums(address: Number, size: Number, scale: Number) -> tuple[Number, Number]:
    shorts, factor = carray(_int16s(address), size), float32(scale)
    squares, total = float32(0.0), float32(0.0)
    for i in range(size):
        x = _as_float32(int32(int32(shorts[i]) << 16)) * factor
        squares += x * x
        total += x
    return squares, total


@_compiled
def _float16_sums(address: Number, size: Number) -> tuple[Number, Number]:
    shorts = carray(_int16s(address), size)
    squares, total = float32(0.0), float32(0.0)
    for i in range(size):
        x = _half(shorts[i])
        squares += x * x
        total += x
    return squares, total


@_compiled
def _extremes16(address: Number, size: Number, zero: Number) -> tuple[Number, Number, Number]:
    """Return the bits of the minimum and maximum of 16-bit floats, and the number of zeros.

    This loop processes twice as many elements per vector instruction as the loop for float32 elements.
    """
    patterns = carray(_int16s(address), size)
    bound = int16(zero)
    least, most, zeros = int16(_MOST16), int16(_LEAST16), int16(0)
    for i in range(size):
        pattern = patterns[i]
        ordered = int16(pattern ^ int16(int16(pattern >> 15) & int16(_MOST16)))
        least = min(least, ordered)
        most = max(most, ordered)
        zeros = int16(zeros + int16(int16(pattern & int16(_MOST16)) < bound))
    return _half_bits(least), _half_bits(most), zeros


@_compiled
def _block(  # noqa: PLR0917 - addresses and sizes
    address: Number, size: Number, code: Number, zero: Number, zero64: Number, scratch: Number
) -> Block:
    """Measure at most 4096 (BLOCK) elements of any supported dtype.

    They are measured in float32. If an element is not finite, or if the elements are float64, they are measured in
    float64.
    """
    if code == _FLOAT32:
        squares, total, least, most, zeros = _float32_block(address, size, zero)
        scale = _scale(least, most)
        if scale not in (0.0, 1.0):
            squares, total = _float32_sums(address, size, scale)
        if scale > 0.0:
            wide, sum_of_all = float64(squares) / (scale * scale), float64(total) / scale
            return wide, sum_of_all, _as_float32(least), _as_float32(most), 0, 0, zeros
    elif code == _BFLOAT16:
        low, high, few = _extremes16(address, size, zero)
        least, most = int32(int32(low) << 16), int32(int32(high) << 16)
        scale = _scale(least, most)
        if scale > 0.0:
            squares, total = _bfloat16_sums(address, size, scale)
            wide, sum_of_all = float64(squares) / (scale * scale), float64(total) / scale
            return wide, sum_of_all, _as_float32(least), _as_float32(most), 0, 0, few
    elif code == _FLOAT16:
        low, high, few = _extremes16(address, size, zero)
        if int16(low & int16(_MOST16)) <= _LARGEST_HALF and int16(high & int16(_MOST16)) <= _LARGEST_HALF:
            squares, total = _float16_sums(address, size)
            return squares, total, _half(low), _half(high), 0, 0, few
    else:
        return _block_float64(address, size, zero64)
    _widened(address, size, code, scratch)
    return _block_float64(scratch, size, zero64)


@_compiled
def _fourth_powers(address: Number, size: Number, code: Number, scratch: Number) -> Number:
    """Return the sum of x⁴ over the finite elements of a block, as float64."""
    place = address
    if code <= _FLOAT16:
        _widened(address, size, code, scratch)
        place = scratch
    values, patterns = carray(_float64s(place), size), carray(_int64s(place), size)
    total = 0.0
    for i in range(size):
        x = values[i] if (patterns[i] & _MOST64) < _INFINITE64 else 0.0
        square = x * x
        total += square * square
    return total


def _measure(  # noqa: PLR0917 - addresses and sizes
    jobs: Number,
    count: Number,
    sums: Number,
    counts: Number,
    fourths: Number,
    stride: Number,
    zeros_below: Number,
    scratch: Number,
) -> None:
    """Measure `count` tensors, and write the statistics of each to its column of the table.

    The rows of the table have `stride` columns. `fourths` is the address of the row for sums of fourth powers; if it is
    0, they are not measured.
    """
    job = carray(_int64s(jobs), count * JOB_FIELDS)
    below = carray(_int64s(zeros_below), 8)
    table, counted = carray(_float64s(sums), 4 * stride), carray(_int64s(counts), 4 * stride)
    for at in range(count):
        address, size, row = job[at * JOB_FIELDS], job[at * JOB_FIELDS + 1], job[at * JOB_FIELDS + 2]
        code, itemsize = job[at * JOB_FIELDS + 3], job[at * JOB_FIELDS + 4]
        squares, total, least, most = 0.0, 0.0, math.inf, -math.inf
        nans, infs, zeros = 0, 0, 0
        fourth = 0.0
        for first in range(0, size, BLOCK):
            part = _block(
                address + first * itemsize, min(BLOCK, size - first), code, below[code], below[4 + code], scratch
            )
            squares += part[0]
            total += part[1]
            least, most = min(least, part[2]), max(most, part[3])
            nans, infs, zeros = nans + part[4], infs + part[5], zeros + part[6]
            if fourths != 0:  # the block is still in the first-level cache
                fourth += _fourth_powers(address + first * itemsize, min(BLOCK, size - first), code, scratch)
        table[row], table[stride + row] = squares, least
        table[2 * stride + row], table[3 * stride + row] = most, total
        counted[row], counted[stride + row] = nans, infs
        counted[2 * stride + row], counted[3 * stride + row] = zeros, size
        if fourths != 0:
            carray(_float64s(fourths), stride)[row] = fourth


def compile_measure(*, cache: bool) -> Callable[..., None]:
    """Return the kernel, compiled now or read from the disk cache.

    Raise RuntimeError if numba finds no writable folder for its cache.
    """
    signature = types.void(*[types.int64] * 8)
    compiled: Callable[..., None] = numba.njit(signature, cache=cache, **_OPTIONS)(_measure)
    return compiled
