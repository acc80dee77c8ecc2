"""The order of rows in a data file: the sort keys of each dataset, sorting, and a cheap check of the order.

The module also assigns rows to partitions and generates the names of data files. It does no I/O. The partition `part`
is a hint for people and for the selection of files. Only the columns of the rows, and the statistics in the Delta log,
determine which rows a file contains.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import re
import uuid
from collections.abc import Collection, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_storage.base.escaping import path_segment
from rankscope_storage.base.schema import fingerprint

SORT_KEYS: Final[dict[str, tuple[str, ...]]] = {
    # The rows of a series are adjacent and in step order. Neighbours share their high bytes, which
    # BYTE_STREAM_SPLIT and DELTA_BINARY_PACKED compress, and a query for one series reads few row groups.
    "tensor_stats": ("run", "tensor", "kind", "rank", "step"),
    "features": ("run", "module", "kind", "rank", "step"),
    "histograms": ("run", "tensor", "kind", "rank", "step"),
    "hashes": ("run", "tensor", "kind", "rank", "step"),
    "collectives": ("run", "op", "rank", "step"),
    "modules": ("run", "module", "rank", "step"),
    "tensor_rollups": ("run", "tensor", "kind", "rank", "step"),
    # Labels distinguish the series of one name.
    "scalars": ("run", "name", "labels", "rank", "step"),
    "scalar_rollups": ("run", "name", "labels", "rank", "step"),
    "samples": ("run", "target", "metric", "labels", "ts"),
    # Events are read in order of time, not by series.
    "events": ("run", "step", "rank"),
    "runs": ("run", "ordinal"),
    "attempts": ("run", "attempt", "ordinal"),
    "tensors": ("run", "tensor", "kind"),
}
"""By dataset: the columns by which the rows of a file are sorted, the most significant column first.

Rows with equal values in these columns remain in the order in which they arrived."""

LAID_TOGETHER: Final = {"samples": ("labels",)}
"""By dataset: the sort columns in which only equal values are made adjacent, without sorting the values.

These columns have hundreds of thousands of texts, which are expensive to sort and which no query compares by range."""

Indices = npt.NDArray[np.int64]


def sort_order(table: pa.Table, keys: Sequence[str], *, together: Collection[str] = ()) -> Indices:
    """Return the row numbers in the order that sorts `table` by `keys`: ascending, nulls last, stable.

    For the keys in `together`, equal values are adjacent, but the values can be in any order.

    The keys and the row number, in its low bits, are packed into one integer per row, so that one integer sort is
    enough. If keys and row number need more than 63 bits, the slower general sort is used.
    """
    keyed = ((one_chunk(table.column(key)), key in together) for key in keys)
    columns = [_ordinals(column, by_code=by_code) for column, by_code in keyed if not is_constant(column)]
    if not columns:
        return np.arange(table.num_rows)
    row_bits = (table.num_rows - 1).bit_length()
    widths = [int(column.max()).bit_length() for column in columns]
    if sum(widths) + row_bits > 63:
        general: Indices = np.lexsort(columns[::-1])
        return general
    packed = columns[0]
    for column, width in zip(columns[1:], widths[1:], strict=True):
        packed <<= width
        packed |= column
    packed <<= row_bits
    packed |= np.arange(table.num_rows)
    packed.sort()
    packed &= (1 << row_bits) - 1
    return packed


def is_sorted(table: pa.Table, keys: Sequence[str], *, together: Collection[str] = ()) -> bool:
    """Return True if the rows of `table` are already in the order of `keys`, False if a cheap check cannot prove it.

    Rows from ranks and scrapes are usually sorted, and this check takes a tenth of the time of sorting. The values
    of keys in `together` are compared by their dictionary codes instead of their texts.
    """
    rows = table.num_rows
    equal = np.ones(max(rows - 1, 0), np.bool_)  # to the previous row, in all keys so far
    for key in keys:
        column = one_chunk(table.column(key))
        if is_constant(column):
            continue
        if (values := _in_order(column, by_code=key in together)) is None:
            return False
        before, after = values[:-1], values[1:]
        if (equal & (after < before)).any():
            return False
        equal &= after == before
    return True


def _in_order(column: pa.Array, *, by_code: bool) -> npt.NDArray[np.integer] | None:
    """Return integers that have the same order as the values of `column`; None if they are expensive to compute.

    The result may share memory with `column`.
    """
    if by_code and pa.types.is_dictionary(column.type):
        found: npt.NDArray[np.integer] = pc.fill_null(column.indices, len(column.dictionary)).to_numpy()
        return found
    if column.null_count:
        return None
    if pa.types.is_dictionary(column.type):
        if column.dictionary.null_count:
            return None
        codes: npt.NDArray[np.integer] = column.indices.to_numpy()
        ranks = pc.rank(column.dictionary, tiebreaker="dense").to_numpy(zero_copy_only=False)
        return codes if (np.diff(ranks.astype(np.int64)) > 0).all() else ranks[codes]
    if pa.types.is_timestamp(column.type):
        column = column.view(pa.int64())
    if not pa.types.is_integer(column.type):
        return None
    integers: npt.NDArray[np.integer] = column.to_numpy()
    return integers


def is_constant(column: pa.Array) -> bool:
    """Return whether a cheap check proves that all values of `column` are equal, or that all are null."""
    if column.null_count or not len(column):
        return bool(column.null_count == len(column))
    if pa.types.is_dictionary(column.type):
        return len(column.dictionary) == 1 or is_constant(column.indices)
    if pa.types.is_integer(column.type) or pa.types.is_timestamp(column.type):
        if column[0] != column[-1]:  # true for most columns that vary: saves reading them completely
            return False
        low, high = pc.min_max(column).values()
        return bool(low == high)
    return False


def _ordinals(column: pa.Array, *, by_code: bool = False) -> Indices:
    """Return small non-negative integers that have the same order as the values of `column`, nulls last.

    The caller may modify the result. With `by_code`, texts are ordered by their position in the column's dictionary
    instead of alphabetically.
    """
    if pa.types.is_dictionary(column.type) or pa.types.is_string(column.type):
        encoded = dictionary_encoded(column)
        codes = pc.fill_null(encoded.indices, len(encoded.dictionary)).to_numpy()  # nulls sort after all texts
        if by_code:
            by_place: Indices = codes.astype(np.int64)
            return by_place
        # Ranks, not codes: a dictionary is in order of first occurrence and may contain a text twice.
        ranks = pc.rank(encoded.dictionary, tiebreaker="dense").to_numpy().astype(np.int64)
        result: Indices = np.append(ranks, len(ranks) + 1)[codes]
        return result
    integers = column.view(pa.int64()) if pa.types.is_timestamp(column.type) else column
    low, high = (value.as_py() for value in pc.min_max(integers).values())
    values = pc.fill_null(integers, low or 0).to_numpy(zero_copy_only=False)
    numbers: Indices
    if low is not None and high - low >= 1 << 62:  # a difference would overflow
        numbers = np.unique(values, return_inverse=True)[1]
    else:
        numbers = np.subtract(values, low or 0, dtype=np.int64)
    if integers.null_count:
        numbers[integers.is_null().to_numpy(zero_copy_only=False)] = numbers.max() + 1
    return numbers


def dictionary_encoded(column: pa.ChunkedArray | pa.Array) -> pa.DictionaryArray:
    """Return `column` in one chunk and dictionary-encoded."""
    one = one_chunk(column)
    return one if pa.types.is_dictionary(one.type) else one.dictionary_encode()


def one_chunk(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return `column` in one chunk. The data is copied only if the column has several chunks."""
    if isinstance(column, pa.Array):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


OWN_PART_ROWS: Final = 100_000
"""If a run has at least this many rows of a dataset in one flush, these rows get a separate part (partition)."""

SHARED_PREFIX: Final = "_shared-"

LONGEST_PART: Final = 200
"""Largest length of a part name in bytes. File systems permit 255, including the prefix `part=`."""

_DIGEST_LENGTH: Final = 16
_DAY_MICROSECONDS: Final = 86_400_000_000
_ROUNDED_FILE: Final = re.compile(r"-m(\d+)\.parquet$")


def parts(table: pa.Table, dataset: str, today: dt.date) -> Iterator[tuple[str, pa.Table]]:
    """Divide the rows of one flush into parts (partitions); yield the name and the rows of each part."""
    names, codes = _day_parts(table, today) if dataset == "samples" else _run_parts(table, today)
    if len(names) == 1:
        yield names[0], table
        return
    used = np.flatnonzero(np.bincount(codes, minlength=len(names)))
    for code in used.tolist():
        rows = table if len(used) == 1 else table.take(pa.array(np.flatnonzero(codes == code)))
        yield names[code], rows


def _run_parts(table: pa.Table, today: dt.date) -> tuple[list[str], npt.NDArray[np.integer]]:
    """Return the names of parts, and the place of the name of each row; `_day_parts` does so by the time of rows."""
    encoded = dictionary_encoded(table.column("run"))
    if len(encoded.dictionary.unique()) < len(encoded.dictionary):
        encoded = encoded.dictionary_decode().dictionary_encode()
    runs, codes = encoded.dictionary.to_pylist(), encoded.indices.to_numpy(zero_copy_only=False)
    own = np.bincount(codes, minlength=len(runs)) >= OWN_PART_ROWS
    shared = len(runs)
    codes = codes if own.all() else np.where(own[codes], codes, shared)
    return [*map(own_part, runs), shared_part(today)], codes


def _day_parts(table: pa.Table, today: dt.date) -> tuple[list[str], npt.NDArray[np.integer]]:
    times = one_chunk(table.column("ts")).view(pa.int64())
    if len(times) and not times.null_count:  # nearly always of one day: no sorting needed
        low, high = (value.as_py() // _DAY_MICROSECONDS for value in pc.min_max(times).values())
        if low == high:
            return [_day(low)], np.zeros(len(times), np.int8)
    days, codes = np.unique(pc.fill_null(times, 0).to_numpy() // _DAY_MICROSECONDS, return_inverse=True)
    if times.null_count:
        codes = np.where(times.is_null().to_numpy(zero_copy_only=False), len(days), codes)
    return [*map(_day, days.tolist()), today.isoformat()], codes


def _day(number: int) -> str:
    """Return a day, given as the number of days since 1970-01-01, as text.

    Days outside of Python's calendar are permitted.
    """
    return str(np.datetime64(number, "D"))


def own_part(run: str) -> str:
    """Return the name of the part (partition) that has rows of `run` only.

    A name that is too long is shortened and ends with a digest.
    """
    segment = path_segment(run)
    if len(segment) <= LONGEST_PART:
        return segment
    digest = hashlib.sha256(run.encode()).hexdigest()[:_DIGEST_LENGTH]
    kept = run[:LONGEST_PART]
    while len(path_segment(kept)) > LONGEST_PART - _DIGEST_LENGTH - 1:
        kept = kept[:-1]
    return f"{path_segment(kept)}~{digest}"  # encoded names contain no tilde


def shared_part(day: dt.date) -> str:
    """Return the name of the part (partition) that all runs without a separate part share for rows flushed on `day`."""
    return f"{SHARED_PREFIX}{day.isoformat()}"


def data_file(dataset: str, part: str, mantissa_bits: int | None = None, *, whole: bool = False) -> str:
    """Return a unique path for a new file, relative to the store.

    Set `whole` if the file also has the UNWRITTEN columns, which are null in most files and then absent. The file name
    contains `mantissa_bits`, so that readers find the number of mantissa bits of rounded statistics in the Delta log.
    """
    rounded = "" if mantissa_bits is None else f"-m{mantissa_bits}"
    return f"dataset={dataset}/part={part}/{fingerprint(dataset, whole=whole)}-{uuid.uuid4().hex}{rounded}.parquet"


def file_fingerprint(path: str) -> str:
    """Return the fingerprint of the columns of the file at `path`, which is part of the file's name."""
    return path.rsplit("/", 1)[-1].split("-", 1)[0]


def file_mantissa_bits(path: str) -> int | None:
    """Return the mantissa bits of the statistics in the file at `path`; None if they were not rounded."""
    match = _ROUNDED_FILE.search(path)
    return int(match[1]) if match else None
