"""Statistics with fewer bits of mantissa: a store of six tenths the size, for an error known and bounded.

Most of what a statistic takes on disk is the noise in its last bits, which no code makes shorter. Rounded to the
nearest number with k bits of mantissa, a value differs from the one that the rank sent by at most 2^-(k+1) of itself.
What makes a difference in kind stays as it is, bit for bit: NaN, infinities, zeros, numbers too small to have all
their bits, and those at the very end of the range, which would become infinite. Rounding keeps order (min <= mean <=
max stays true) and changes nothing when it is done again.

What rules said is not touched: baselines, counts, events, scalars, hashes and samples of exporters are what they were.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankscope_contract.kinds import VALUE_OPS
from rankscope_storage.files.layout import file_mantissa_bits, one_chunk

ROUNDED_COLUMNS: Final = {"tensor_stats": VALUE_OPS, "features": ("value",)}
"""Columns that are rounded, by dataset; all are float32."""

MANTISSA_BITS: Final = 23
"""Of a float32."""
FEWEST_BITS: Final = 4
MOST_BITS: Final = MANTISSA_BITS - 1

_EXPONENT: Final = np.uint32(0x7F80_0000)

Bits = npt.NDArray[np.uint32]


def check_bits(bits: int) -> None:
    """Raise ValueError for a number of bits that is none to round to."""
    if not FEWEST_BITS <= bits <= MOST_BITS:
        raise ValueError(
            f"mantissa_bits is {FEWEST_BITS} to {MOST_BITS}, not {bits}: leave it out to keep all {MANTISSA_BITS}"
        )


def rounded(table: pa.Table, dataset: str, bits: int | None) -> tuple[pa.Table, int | None]:
    """Return `table` with its statistics rounded, and the bits that are left; None where nothing is to be rounded."""
    if bits is None or dataset not in ROUNDED_COLUMNS:
        return table, None
    for name in ROUNDED_COLUMNS[dataset]:
        column = _rounded_column(one_chunk(table.column(name)), bits)
        table = table.set_column(table.column_names.index(name), name, column)
    return table, bits


def coarsest(paths: Iterable[str]) -> int | None:
    """Return the fewest bits that a value in one of these files may have been rounded to; None for lossless ones."""
    return min((bits for bits in map(file_mantissa_bits, paths) if bits is not None), default=None)


def _rounded_column(column: pa.FloatArray, bits: int) -> pa.FloatArray:
    if column.null_count == len(column):
        return column
    stored = np.frombuffer(column.buffers()[1], np.uint32)[column.offset : column.offset + len(column)]
    nulls = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    return pa.array(round_bits(stored, bits).view(np.float32), mask=nulls)


def round_bits(values: Bits, bits: int) -> Bits:
    """Return float32 `values`, given by their bits, rounded to nearest (ties to even) with `bits` of mantissa."""
    cut = np.uint32(MANTISSA_BITS - bits)
    one = np.uint32(1)
    result = values >> cut
    result &= one
    result += (one << (cut - one)) - one
    result += values  # carries into the exponent where the mantissa overflows, which is the next number up
    result &= ~((one << cut) - one)
    exponents = values & _EXPONENT
    exact = (exponents == 0) | (exponents == _EXPONENT) | ((result & _EXPONENT) == _EXPONENT)
    np.copyto(result, values, where=exact)
    return result
