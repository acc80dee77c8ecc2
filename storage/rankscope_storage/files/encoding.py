"""The encoding of a data file: sorted rows, each column in its best form, statistics optionally rounded.

A column that has one value in all rows is neither copied nor compared, and one without nulls is written as required,
so that no reader counts nulls.

Rounding to k bits of mantissa makes a store six tenths of the size: most of a statistic's bytes are the noise in its
last bits, which no encoding compresses. A rounded value differs from the one that the rank sent by at most 2^-(k+1) of
itself. NaN, infinities, zeros, subnormal numbers and those at the end of the range keep all bits. Rounding keeps order
(min <= mean <= max) and is idempotent. Baselines, counts, events, scalars, hashes and samples are never rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rankscope_contract.model.kinds import VALUE_OPS
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.files.partitioning import file_mantissa_bits
from rankscope_storage.files.sorting import LAID_TOGETHER, SORT_KEYS, is_constant, is_sorted, one_chunk, sort_order

ROW_GROUP_ROWS: Final = 65_536
"""Also the rows of a page. BYTE_STREAM_SPLIT makes four streams of it: bytes of one kind get a code of their own, the
better the longer they are. With twice as many rows files are 1.7 % smaller, and one tensor takes a sixth longer to
find, whose rows lie in one row group of each file."""

MANTISSA_BITS_KEY: Final = "rankscope_mantissa_bits"
"""In the metadata of a file whose statistics were rounded: to how many bits of mantissa, to nearest, ties to even."""

_PAGE_BYTES: Final = 1 << 26
"""More than a row group of numbers has, so that its rows alone end a page, and no dictionary is given up half way."""

_SMALL_DICTIONARY: Final = 4096
"""Texts that are written without a look at which of them a row group has."""

_BYTE_CODES: Final = 256
"""Texts whose codes fit into a byte. For the range of a row group it is looked up then which of them it has, and
otherwise hashed: 4 and 8 ns a row."""

_SHORT_BATCH: Final = 1024  # Arrow's own
_FREE_TEXT: Final = ("message", "details", "config", "reason", "stack")
"""Text that seldom repeats: a dictionary of it would only be in the way."""

_IN_RUNS: Final = {"tensor_stats": ("rank",)}
"""Integers that stay the same for many rows: as differences they are hardly anything. All others of these datasets are
split into their bytes, in 0.3 ms a row group in place of 0.5, for as few bytes. The other datasets are small, and have
long series whose differences are all the same."""

_UNSEARCHED: Final = ("incarnation", "labels", "ts_origin", "placement", "shard_group")
"""Text of which a range per row group lets no query skip anything; finding it is dear."""


def write_sorted(table: pa.Table, dataset: str, path: Path | IO[bytes], mantissa_bits: int | None = None) -> None:
    """Write `table`, columns as `dataset` has them, as the file at or in `path`, sorted by the keys of the dataset."""
    columns = [_Column.of(table.column(name)) for name in table.column_names]
    fields = zip(table.column_names, columns, strict=True)
    schema = pa.schema([pa.field(name, column.values.type, nullable=column.has_nulls) for name, column in fields])
    together = LAID_TOGETHER.get(dataset, ())
    order = None
    if not is_sorted(table, SORT_KEYS[dataset], together=together):
        order = pa.array(_narrow(sort_order(table, SORT_KEYS[dataset], together=together)))
    same = [name for name, column in zip(table.column_names, columns, strict=True) if column.is_constant]
    with _writer(path, schema, dataset, same) as writer:
        # Sorted one row group at a time: a sorted copy of the whole would cost more than the sorting itself.
        for start in range(0, table.num_rows, ROW_GROUP_ROWS):
            rows = min(ROW_GROUP_ROWS, table.num_rows - start)
            if order is None:
                arrays = [column.slice(start, rows) for column in columns]
            else:
                places = order.slice(start, rows)
                arrays = [column.take(places) for column in columns]
            group = pa.Table.from_arrays(arrays, schema=schema)
            writer.write_table(group, row_group_size=ROW_GROUP_ROWS)
        writer.add_key_value_metadata(dataset_schema(dataset).metadata)
        if mantissa_bits is not None:
            writer.add_key_value_metadata({MANTISSA_BITS_KEY: str(mantissa_bits)})


@dataclass(frozen=True, slots=True)
class _Column:
    values: pa.Array
    is_constant: bool
    has_nulls: bool

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> _Column:
        values = one_chunk(column)
        # Parquet has nulls beside a dictionary and not in it, and needs none where there is nothing else.
        if pa.types.is_dictionary(values.type) and (values.dictionary.null_count or values.null_count == len(values)):
            values = values.cast(values.type.value_type)
        is_same = is_constant(values)
        if pa.types.is_dictionary(values.type) and len(values.dictionary) <= _BYTE_CODES:
            values = _in_bytes(values.slice(0, ROW_GROUP_ROWS) if is_same else values)
        return cls(values, is_same, values.null_count > 0)

    def take(self, rows: pa.Array) -> pa.Array:
        if self.is_constant:
            return self.values.slice(0, len(rows))
        return _with_used(pc.take(self.values, rows, boundscheck=False))

    def slice(self, start: int, rows: int) -> pa.Array:
        """Return `rows` of them from `start` on, at most a row group, where they lie in their order already."""
        return _with_used(self.values.slice(0 if self.is_constant else start, rows))


def _in_bytes(column: pa.DictionaryArray) -> pa.DictionaryArray:
    codes = column.indices.cast(pa.uint8(), safe=False)  # a code below a null may be anything
    return pa.DictionaryArray.from_arrays(codes, column.dictionary)


def _with_used(column: pa.Array) -> pa.Array:
    return _without_unused(column) if pa.types.is_dictionary(column.type) else column


def _without_unused(column: pa.DictionaryArray) -> pa.DictionaryArray:
    """Return `column` with a dictionary of what is in it: each row group has all of its dictionary written."""
    if len(column.dictionary) <= _SMALL_DICTIONARY:
        return column
    if column.null_count == len(column):
        return pa.DictionaryArray.from_arrays(column.indices, column.dictionary.slice(0, 0))
    # Rows that lie in order name neighbours: only what is between the first of them and the last is looked at.
    first, last = (end.as_py() for end in pc.min_max(column.indices).values())
    between = column.dictionary.slice(first, last + 1 - first)
    if len(between) <= _SMALL_DICTIONARY:
        return pa.DictionaryArray.from_arrays(pc.subtract(column.indices, pa.scalar(first, pa.int32())), between)
    nulls = column.indices.is_null().to_numpy(zero_copy_only=False) if column.indices.null_count else None
    codes = pc.fill_null(column.indices, first).to_numpy() - first
    is_used = np.zeros(len(between), np.bool_)
    is_used[codes] = True
    new_codes = np.cumsum(is_used, dtype=np.int32) - 1
    used = between.take(pa.array(np.flatnonzero(is_used)))
    return pa.DictionaryArray.from_arrays(pa.array(new_codes[codes], mask=nulls), used)


def _narrow(order: np.ndarray[tuple[int], np.dtype[np.int64]]) -> np.ndarray[tuple[int], np.dtype[np.integer]]:
    """Return row numbers in half the memory where they fit: reading them is a good part of moving four bytes each."""
    return order.astype(np.uint32) if len(order) <= 1 << 32 else order


def _writer(path: Path | IO[bytes], schema: pa.Schema, dataset: str, same: Sequence[str]) -> pq.ParquetWriter:
    encodings = _encodings(dataset)
    # What is the same in all rows is next to nothing in any form: zstd sees to that, and is soonest done with this one.
    plain = {name: "PLAIN" for name in same if name in encodings.others}
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=list(encodings.dictionary),
        column_encoding=encodings.others | plain,
        store_schema=False,  # else the footer would differ with how the text columns happened to be held in memory
        write_statistics=_searched_columns(dataset),
        write_batch_size=_batch_rows(dataset),
        data_page_size=_PAGE_BYTES,
        max_rows_per_page=ROW_GROUP_ROWS,
        dictionary_pagesize_limit=_PAGE_BYTES,
    )


@functools.cache
def _batch_rows(dataset: str) -> int:
    """Return how many rows are written at once: a range is looked for in each batch, 13 ns a row where these are short.

    A page ends between two batches only, so that long texts and lists have short ones: each row may be kilobytes.
    """
    is_flat = all(name not in _FREE_TEXT and not name.endswith(".list.element") for name, _ in _leaves(dataset))
    return ROW_GROUP_ROWS if is_flat else _SHORT_BATCH


@functools.cache
def counted_columns(dataset: str) -> tuple[str, ...]:
    """Return the columns whose range may stand in the footer: all but floats, whose range leaves out NaN.

    DuckDB takes such a range for the whole truth: `WHERE isnan(value)` would find nothing among finite numbers.
    """
    return tuple(name for name, type_ in _leaves(dataset) if not pa.types.is_floating(type_))


def _searched_columns(dataset: str) -> list[str]:
    unsearched = set(_UNSEARCHED)
    if dataset == "scalars":  # asked for with its labels, mostly none: where a footer says so nothing is read
        unsearched.remove("labels")
    return [name for name in counted_columns(dataset) if name not in unsearched]


@dataclass(frozen=True, slots=True)
class _Encodings:
    dictionary: tuple[str, ...]
    others: dict[str, str]


@functools.cache
def _encodings(dataset: str) -> _Encodings:
    dictionary, others = [], {}
    for name, leaf in _leaves(dataset):
        if pa.types.is_string(leaf):
            if name in _FREE_TEXT:
                others[name] = "PLAIN"
            else:
                dictionary.append(name)
        elif pa.types.is_floating(leaf):
            others[name] = "BYTE_STREAM_SPLIT"  # pays only because the rows are sorted by series
        elif pa.types.is_integer(leaf) or pa.types.is_timestamp(leaf):
            in_bytes = dataset in _IN_RUNS and name not in _IN_RUNS[dataset]
            others[name] = "BYTE_STREAM_SPLIT" if in_bytes else "DELTA_BINARY_PACKED"
    return _Encodings(tuple(dictionary), others)


def _leaves(dataset: str) -> Iterator[tuple[str, pa.DataType]]:
    """Yield the columns of a file by the names that Parquet has for them, and their types."""
    for field in dataset_schema(dataset):
        leaf, name = field.type, field.name
        while pa.types.is_list(leaf):
            leaf, name = leaf.value_type, f"{name}.list.element"
        yield name, leaf


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
