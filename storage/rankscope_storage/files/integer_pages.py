"""Choose between two encodings of integers: differences in pages without wide differences, and plain numbers.

fastparquet returns wrong values if two differences in a page differ by 2^28, as those of times do at the first row of
another series. A page begins with a whole number, so that the difference to the row before is not stored.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rankscope_storage.files.sorting import Indices

Integers = npt.NDArray[np.signedinteger[Any]]

_RANGE_BITS: Final = 28
"""Differences in a page are in a range of 2^28, which begins anywhere."""

WIDE: Final = 1 << _RANGE_BITS - 1
"""Range of integers from which two differences can differ by 2^28."""

_PAGE_BYTES: Final = 60
"""Number of bytes that a further page takes."""

_PLAIN_BYTES: Final = 2.8
_MORE_PLAIN_BYTES: Final = 1.0
"""A time as a plain number, compressed by zstd, takes 2.8 bytes, and at least one byte more than as a difference.

Measured were 2.4 to 3.2 bytes with up to 0.1 s of jitter, and 4.9 with 6 s, which a difference stores in 3.3. A time
that occurs again in its row group takes no space."""

_BLOCK: Final = 128
_PART: Final = 32
"""Numbers of differences that DELTA_BINARY_PACKED stores with a common minimum, and with a common number of bits."""

_SAMPLED_BLOCKS: Final = 64
"""Number of blocks from which the number of bits is averaged over a part of all blocks."""

_SAMPLED_ROWS: Final = 1 << 13
"""Number of rows from which different values are counted in a sixteenth of the rows."""


def page_starts(integers: Integers, row_group: int, *, may_cut: bool) -> Indices | None:
    """Return the rows at which a page of differences must begin; none if all differences of a page may be stored.

    Return None if `integers`, in row groups of `row_group` rows, take less space as plain numbers, or if a page must
    begin within a row group and `may_cut` is false.
    """
    differences = np.diff(integers)  # they overflow as those of the encoder
    starts = _starts(differences)
    if starts is None or not (len(starts) == 0 or may_cut):
        return None
    if len(starts):
        differences[starts - 1] = differences[np.minimum(starts, len(differences) - 1)]  # these are not stored
        stored = _bytes_of_difference(differences)
        plain = max(_PLAIN_BYTES, stored + _MORE_PLAIN_BYTES) * _different(integers, row_group)
        if plain < stored * len(differences) + _PAGE_BYTES * len(starts):
            return None
    return starts


def _starts(differences: Integers) -> Indices | None:
    """Return the rows at which a page must begin; None if these are more than an eighth of all rows."""
    if not len(differences):
        return np.array([], np.int64)
    sample = np.sort(differences[:: 1 + len(differences) // 4096])
    # Ranges of equal width are numbered. The most frequent differences are in the middle of one of them.
    first = (int(sample[len(sample) // 2]) - WIDE) % (1 << _RANGE_BITS)
    ranges = (differences >> _RANGE_BITS) - ((differences & ((1 << _RANGE_BITS) - 1)) < first)
    changes = np.flatnonzero(ranges[1:] != ranges[:-1]) + 1
    if len(changes) > len(differences) // 8:
        return None
    starts = []
    page: int | None = int(ranges[0])
    for place, following in itertools.pairwise([*changes.tolist(), len(differences)]):
        found = int(ranges[place])
        if page is None:  # the page has only one row
            page = found
        elif found != page:
            starts.append(place + 1)
            page = None if following == place + 1 else found
    return np.array(starts, np.int64)


def _bytes_of_difference(differences: Integers) -> float:
    """Return about how many bytes a difference takes on average."""
    count = len(differences) // _BLOCK
    blocks = differences[: count * _BLOCK] if count else np.resize(differences, _BLOCK)
    blocks = blocks.reshape(-1, _BLOCK)[:: max(1, count // _SAMPLED_BLOCKS)].astype(np.float64)
    widths = blocks.reshape(len(blocks), -1, _PART).max(2) - blocks.min(1)[:, None]
    return float(np.ceil(np.log2(widths + 1)).mean()) / 8


def _different(integers: Integers, row_group: int) -> int:
    """Return about how many different numbers there are in all row groups of `row_group` rows."""
    return sum(_different_in(integers[start : start + row_group]) for start in range(0, len(integers), row_group))


def _different_in(integers: Integers) -> int:
    found = integers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # spreads the numbers over the range
    if len(found) < _SAMPLED_ROWS:
        return len(np.unique(found))
    return 16 * len(np.unique(found[found < 1 << 60]))  # a sixteenth of the numbers, with all their repetitions
