"""Write a data file: sorted rows, one encoding per column, statistics optionally rounded.

A column with one value in all rows is neither copied nor compared. A column without nulls is written as required, so
that readers need not count nulls.

Rounding to k bits of mantissa reduces a store to 60 % of its size, because most bytes of a statistic are noise in its
last bits, which no encoding compresses. The relative error of a rounded value is at most 2^-(k+1). NaN, infinities,
zeros, subnormal numbers, and numbers that rounding would make infinite keep all bits. Rounding preserves order (min <=
mean <= max) and is idempotent. Baselines, counts, events, scalars, hashes and samples are never rounded.

The Delta log stores statistics of each file.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import itertools
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rankscope_contract.model.kinds import VALUE_OPS
from rankscope_storage.base.fsync import Sync
from rankscope_storage.base.location import Location
from rankscope_storage.base.schema import DATASET_KEY, dataset_schema, written
from rankscope_storage.files.filesystem import filesystem
from rankscope_storage.files.sorting import (
    LAID_TOGETHER,
    SORT_KEYS,
    data_file,
    file_mantissa_bits,
    is_constant,
    is_sorted,
    one_chunk,
    sort_order,
)

ROW_GROUP_ROWS: Final = 65_536
"""Largest number of rows of a row group, and also of a page of most columns.

BYTE_STREAM_SPLIT divides the numbers of a page into streams of equal byte positions, which compress better when they
are longer. With twice as many rows, files are 1.7 % smaller. But finding one tensor takes a sixth longer, because a
reader decodes the whole row group that contains the tensor's rows."""

MANTISSA_BITS_KEY: Final = "rankscope_mantissa_bits"
"""Key in the metadata of a file with rounded statistics; the value is the number of mantissa bits that remain."""

INTEGERS_KEY: Final = "rankscope_integers"
"""Key in the metadata of each file of this release: all readers read its integers. Older files lack the key.

They have integers that are split into bytes (tensor statistics), or differences of any width (all other datasets)."""

_PAGE_BYTES: Final = 1 << 26
"""Limit of the page size in bytes, larger than all numbers of a row group.

A page therefore ends only at its limit of rows. The Parquet writer never changes from dictionary encoding to plain
encoding in the middle of a page."""

_WIDE: Final = 1 << 28
"""Range of differences from which integers are plain numbers: fastparquet would return wrong values."""

_LONG_SERIES_ROWS: Final = 16_384
"""Mean number of rows between wide differences from which row groups begin behind them."""

_SMALL_DICTIONARY: Final = 4096
"""Number of texts up to which the dictionary of a text column is written completely into each row group.

From larger dictionaries, texts that the row group does not use are removed before writing."""

_BYTE_CODES: Final = 256
"""Number of texts in the largest dictionary with one-byte codes.

With one-byte codes, Arrow finds the minimum and maximum text of a row group by lookup (4 ns per row). With larger
codes, it finds them by hashing (8 ns per row)."""

_SHORT_BATCH: Final = 1024  # Arrow's default
_DICTIONARY: Final = "dictionary"
_FREE_TEXT: Final = ("message", "details", "config", "reason", "stack")
"""Text columns that seldom repeat a value. They are written without a dictionary, which would only add bytes."""

_PLAIN_INTEGERS: Final = {"tensor_stats": ("step", "ts")}
"""Integer columns, by dataset, that are always plain numbers; all others are differences unless these are wide.

Times of steps have irregular differences of 20 bits. They repeat for each tensor, and zstd finds the repetitions of
plain numbers, but not those of packed differences, which rarely begin at the same bit. Nearly every query reads
`step`: DuckDB takes 1 ms to add up the differences of a row group."""

_FAST_CODEC: Final = {"tensor_stats": ("step",)}
"""Columns, by dataset, that are compressed with LZ4.

The first level of zstd misses the repetitions of plain numbers that count: it takes up to ten times as long, and a byte
per row."""

_PLAIN_LEVEL: Final = 3
"""Level of zstd for plain numbers that are not all zero.

Level 1 misses repetitions at distances of 10,000 rows. It also misses those of times whose differences vary by 0.1 ms,
and then takes a byte per row and four times as long."""

_SPLIT: Final = "BYTE_STREAM_SPLIT"

_UNSEARCHED: Final = ("incarnation", "labels", "ts_origin", "placement", "shard_group")
"""Text columns without minimum and maximum per row group: these are expensive to find and let no query skip data."""


def write_sorted(table: pa.Table, dataset: str, path: Path | IO[bytes], mantissa_bits: int | None = None) -> None:
    """Write `table`, with the columns of `dataset`, to `path`, sorted by the keys of the dataset.

    `mantissa_bits` is only stored in the metadata: the caller has already rounded the values.
    """
    columns = {name: _Column.of(table.column(name)) for name in table.column_names}
    schema = pa.schema([pa.field(name, one.values.type, nullable=one.has_nulls) for name, one in columns.items()])
    order = None
    together = LAID_TOGETHER.get(dataset, ())
    if not is_sorted(table, SORT_KEYS[dataset], together=together):
        rows = sort_order(table, SORT_KEYS[dataset], together=together)
        # Reading the row numbers is a large part of moving four bytes per row: halve their size if they fit.
        order = pa.array(rows.astype(np.uint32) if len(rows) <= 1 << 32 else rows)
    zero = {name for name, column in columns.items() if column.is_constant and not column.values[0].as_py()}
    plain, begins = _plain_integers(columns, order, dataset, table.num_rows)
    with pq.ParquetWriter(path, schema, **_options(dataset, zero, plain)) as writer:
        # One row group at a time: a sorted copy of the whole table would cost more than the sorting.
        for start, end in itertools.pairwise([*begins, table.num_rows]):
            count = end - start
            places = None if order is None else order.slice(start, count)
            arrays = [column.rows(start, count, places) for column in columns.values()]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema), row_group_size=ROW_GROUP_ROWS)
        writer.add_key_value_metadata(dataset_schema(dataset).metadata)
        writer.add_key_value_metadata({INTEGERS_KEY: "1"})
        if mantissa_bits is not None:
            writer.add_key_value_metadata({MANTISSA_BITS_KEY: str(mantissa_bits)})


def has_older_integers(metadata: pq.FileMetaData) -> bool:
    """Return whether an earlier release wrote the file, so that some readers may not be able to read its integers."""
    known = metadata.metadata or {}
    return DATASET_KEY.encode() in known and INTEGERS_KEY.encode() not in known


def _plain_integers(
    columns: Mapping[str, _Column], order: pa.Array | None, dataset: str, rows: int
) -> tuple[set[str], list[int]]:
    """Return the columns that are written as plain numbers, and the first row of each row group, in the order `order`.

    Plain are those whose differences are wide; in tensor statistics, a wide range of the numbers is enough. If wide
    differences are few, as between long series, row groups begin behind them instead.
    """
    always_plain = _PLAIN_INTEGERS.get(dataset, ())
    plain, cuts = set(), {0}
    for name, column in columns.items():
        if column.is_constant or name in always_plain or not column.is_wide():
            continue
        wide = None if always_plain else column.wide_differences(order)
        if wide is None or len(cuts | set(wide)) > 1 + rows // _LONG_SERIES_ROWS:
            plain.add(name)
        else:
            cuts |= set(wide)
    ends = [*sorted(cuts)[1:], rows]
    return plain, [row for cut, end in zip(sorted(cuts), ends, strict=True) for row in range(cut, end, ROW_GROUP_ROWS)]


@dataclass(frozen=True, slots=True)
class _Column:
    """One column of a file in one chunk; `is_constant` is true if all rows have the same value."""

    values: pa.Array
    is_constant: bool
    has_nulls: bool

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> _Column:
        values = one_chunk(column)
        # Parquet stores nulls outside of a dictionary, and a column of only nulls needs no dictionary.
        if pa.types.is_dictionary(values.type) and (values.dictionary.null_count or values.null_count == len(values)):
            values = values.cast(values.type.value_type)
        is_same = is_constant(values)
        if pa.types.is_dictionary(values.type) and len(values.dictionary) <= _BYTE_CODES:
            used = values.slice(0, ROW_GROUP_ROWS) if is_same else values
            codes = used.indices.cast(pa.uint8(), safe=False)  # the code of a null can have any value
            values = pa.DictionaryArray.from_arrays(codes, used.dictionary)
        return cls(values, is_same, values.null_count > 0)

    def is_wide(self) -> bool:
        """Return whether these are integers or times, or lists of integers, of which two can have a wide difference."""
        if (integers := _integers(self.values)) is None:
            return False
        low, high = [end.as_py() for end in pc.min_max(integers).values()]
        return low is not None and bool(high - low >= _WIDE // 2)

    def wide_differences(self, order: pa.Array | None) -> list[int] | None:
        """Return the rows, in the order `order`, whose difference from the row before them is wide.

        None for lists and columns with nulls, where the differences of a row group are not those of its rows, and if
        row groups that begin behind them would be too short.
        """
        integers = _integers(self.values)
        if integers is None or pa.types.is_list(self.values.type):
            return None
        ordered = integers if order is None else pc.take(integers, order, boundscheck=False)
        differences = np.diff(ordered.drop_null().to_numpy())  # they overflow as those of the encoder
        if int(differences.max()) - int(differences.min()) < _WIDE:
            return []
        found = np.flatnonzero((differences < -_WIDE // 2) | (differences >= _WIDE // 2)) + 1
        return None if self.has_nulls or len(found) > len(self.values) // _LONG_SERIES_ROWS else found.tolist()

    def rows(self, start: int, count: int, places: pa.Array | None) -> pa.Array:
        """Return values of this column for one row group of the file, or for fewer rows.

        These are the values at the row numbers `places`, or if `places` is None, the `count` values from row number
        `start`.
        """
        if self.is_constant or places is None:
            values = self.values.slice(0 if self.is_constant else start, count)
        else:
            values = pc.take(self.values, places, boundscheck=False)
        return _without_unused(values) if pa.types.is_dictionary(values.type) else values


def _integers(values: pa.Array) -> pa.Array | None:
    """Return `values`, or the values in its lists, as integers; None if they are neither integers nor times."""
    flat = values.flatten() if pa.types.is_list(values.type) else values
    if pa.types.is_timestamp(flat.type):
        return flat.view(pa.int64())
    return flat if pa.types.is_integer(flat.type) else None


def _without_unused(column: pa.DictionaryArray) -> pa.DictionaryArray:
    """Return `column` with a dictionary that has only texts of the column, or at most _SMALL_DICTIONARY texts.

    A row group stores its whole dictionary, so that unused texts would take space.
    """
    if len(column.dictionary) <= _SMALL_DICTIONARY:
        return column
    if column.null_count == len(column):
        return pa.DictionaryArray.from_arrays(column.indices, column.dictionary.slice(0, 0))
    # Sorted rows have neighbouring codes: only the texts between the first and the last code are examined.
    first, last = (end.as_py() for end in pc.min_max(column.indices).values())
    between = column.dictionary.slice(first, last + 1 - first)
    nulls = column.indices.is_null().to_numpy(zero_copy_only=False) if column.indices.null_count else None
    codes = pc.fill_null(column.indices, first).to_numpy() - first
    is_used = np.zeros(len(between), np.bool_)
    is_used[codes] = True
    new_codes = np.cumsum(is_used, dtype=np.int32) - 1
    used = between.take(pa.array(np.flatnonzero(is_used)))
    return pa.DictionaryArray.from_arrays(pa.array(new_codes[codes], mask=nulls), used)


def _options(dataset: str, zero: Collection[str], plain: Collection[str]) -> dict[str, Any]:
    """Return the options of the Parquet writer for `dataset`.

    Integer columns in `zero`, which are zero or null in all rows, and in `plain` are written as plain numbers.
    """
    level_3 = {*plain, *_PLAIN_INTEGERS.get(dataset, ())} - set(zero)
    encodings, leaves, fast = _encodings(dataset), _leaves(dataset), _FAST_CODEC.get(dataset, ())
    unsearched = set(_UNSEARCHED)
    if dataset == "scalars":  # queries filter by labels, which are mostly null: such a range saves reading them
        unsearched.remove("labels")
    return {
        "compression": {name: "lz4" if name in fast else "zstd" for name, _, _ in leaves},
        "compression_level": {
            name: _PLAIN_LEVEL if column in level_3 else 1 for name, column, _ in leaves if name not in fast
        },
        "use_dictionary": [name for name, encoding in encodings.items() if encoding == _DICTIONARY],
        # zstd compresses plain zeros faster than any other content. For another constant, it takes longer than the
        # encoder of differences, and its result is 20 times as large.
        "column_encoding": {
            name: "PLAIN" if name in zero or column in plain else encodings[name]
            for name, column, _ in leaves
            if encodings.get(name, _DICTIONARY) != _DICTIONARY
        },
        "store_schema": False,  # otherwise the footer would depend on the in-memory form of the text columns
        "write_statistics": [name for name in counted_columns(dataset) if name not in unsearched],
        # A range is computed per batch, 13 ns per row for short batches.
        "write_batch_size": ROW_GROUP_ROWS if _is_flat(dataset) else _SHORT_BATCH,
        "data_page_size": _PAGE_BYTES,
        "max_rows_per_page": ROW_GROUP_ROWS,
        "dictionary_pagesize_limit": _PAGE_BYTES,
    }


@functools.cache
def counted_columns(dataset: str) -> tuple[str, ...]:
    """Return the columns whose minimum and maximum may be stored in the footer: all columns except floats.

    The stored range of a float column would ignore NaN, but DuckDB relies on stored ranges: for a range of finite
    numbers, `WHERE isnan(value)` would find nothing.
    """
    return tuple([name for name, _, type_ in _leaves(dataset) if not pa.types.is_floating(type_)])


@functools.cache
def _encodings(dataset: str) -> dict[str, str]:
    """Return the Parquet encoding of each leaf column of `dataset`, except columns with the default encoding."""
    encodings = {}
    for name, _, leaf in _leaves(dataset):
        if pa.types.is_string(leaf):
            encodings[name] = "PLAIN" if name in _FREE_TEXT else _DICTIONARY
        elif pa.types.is_floating(leaf):
            encodings[name] = _SPLIT  # effective only because the rows are sorted by series
        elif pa.types.is_integer(leaf) or pa.types.is_timestamp(leaf):
            is_plain = name in _PLAIN_INTEGERS.get(dataset, ())
            encodings[name] = "PLAIN" if is_plain else "DELTA_BINARY_PACKED"
    return encodings


@functools.cache
def _is_flat(dataset: str) -> bool:
    """Return whether `dataset` has no long texts and no lists, so that a row has few bytes."""
    names = {name for name, _, _ in _leaves(dataset)}
    return names == set(dataset_schema(dataset).names) and names.isdisjoint(_FREE_TEXT)


@functools.cache
def _leaves(dataset: str) -> tuple[tuple[str, str, pa.DataType], ...]:
    """Return the Parquet name, the column and the type of each leaf column of a file."""
    leaves = []
    for field in dataset_schema(dataset):
        leaf, name = field.type, field.name
        while pa.types.is_list(leaf):
            leaf, name = leaf.value_type, f"{name}.list.element"
        leaves.append((name, field.name, leaf))
    return tuple(leaves)


ROUNDED_COLUMNS: Final = {"tensor_stats": VALUE_OPS, "features": ("value",)}
"""By dataset: the columns with numbers that are rounded if a number of mantissa bits is set. All are float32."""

MANTISSA_BITS: Final = 23
"""Number of mantissa bits of a float32."""
FEWEST_BITS: Final = 4
MOST_BITS: Final = MANTISSA_BITS - 1

_EXPONENT: Final = np.uint32(0x7F80_0000)

Bits = npt.NDArray[np.uint32]


def check_bits(bits: int) -> None:
    """Raise ValueError if `bits` is not a permitted number of mantissa bits for rounded tensor statistics."""
    if not FEWEST_BITS <= bits <= MOST_BITS:
        raise ValueError(
            f"mantissa_bits must be {FEWEST_BITS} to {MOST_BITS}, not {bits}: omit it to keep all {MANTISSA_BITS} bits"
        )


def rounded(table: pa.Table, dataset: str, bits: int | None) -> tuple[pa.Table, int | None]:
    """Return `table` with tensor statistics and features rounded to `bits` bits of mantissa, and `bits`.

    If `bits` is None or `dataset` has no rounded columns, nothing is rounded, and the second result is None.
    """
    if bits is None or dataset not in ROUNDED_COLUMNS:
        return table, None
    for name in ROUNDED_COLUMNS[dataset]:
        column = _rounded_column(one_chunk(table.column(name)), bits)
        table = table.set_column(table.column_names.index(name), name, column)
    return table, bits


def coarsest(paths: Iterable[str]) -> int | None:
    """Return the smallest number of mantissa bits of the files at `paths`; None if no file has rounded statistics."""
    return min((bits for bits in map(file_mantissa_bits, paths) if bits is not None), default=None)


def _rounded_column(column: pa.FloatArray, bits: int) -> pa.FloatArray:
    if column.null_count == len(column):
        return column
    stored = np.frombuffer(column.buffers()[1], np.uint32)[column.offset : column.offset + len(column)]
    nulls = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    return pa.array(round_bits(stored, bits).view(np.float32), mask=nulls)


def round_bits(values: Bits, bits: int) -> Bits:
    """Return float32 values, rounded to `bits` bits of mantissa: to the nearest value, ties to even.

    `values` and the result contain the bit patterns of the values as uint32.
    """
    cut = np.uint32(MANTISSA_BITS - bits)
    one = np.uint32(1)
    result = values >> cut
    result &= one
    result += (one << (cut - one)) - one
    result += values  # a mantissa overflow carries into the exponent, which gives the next larger number
    result &= ~((one << cut) - one)
    exponents = values & _EXPONENT
    exact = (exponents == 0) | (exponents == _EXPONENT) | ((result & _EXPONENT) == _EXPONENT)
    np.copyto(result, values, where=exact)
    return result


STATISTICS_COLUMNS: Final = ("run", "attempt", "rank", "step", "ts")
"""Columns for which the Delta log stores minimum and maximum. No float column is listed, because NaN is in no range."""

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND: Final = dt.timedelta(microseconds=1)
_FIRST_MICROSECOND: Final = (dt.datetime(1000, 1, 1, tzinfo=dt.UTC) - _EPOCH) // _MICROSECOND  # in four digits
_LAST_MICROSECOND: Final = (dt.datetime(9999, 12, 31, tzinfo=dt.UTC) - _EPOCH) // _MICROSECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A complete and durable data file.

    `path` is relative to the store, and `statistics` is JSON as in the Delta log.
    """

    path: str
    dataset: str
    part: str
    rows: int
    size_bytes: int
    modified_at_ms: int
    statistics: str

    @classmethod
    def from_snapshot(cls, file: Mapping[str, Any]) -> DataFile:
        """Return the data file that a row of `Snapshot.files` describes, for a commit that removes this file.

        The result has no modification time and no statistics.
        """
        names = ("path", "dataset", "part", "rows", "size_bytes")
        return cls(**{name: file[name] for name in names}, modified_at_ms=0, statistics="")


def write_file(
    root: Location, dataset: str, part: str, table: pa.Table, sync: Sync, *, mantissa_bits: int | None = None
) -> DataFile:
    """Sort `table`, which conforms to `dataset`, and write it as one file below `root`; durable on return.

    `mantissa_bits` is stored in the name and metadata of the file; the caller has already rounded the values. Raises
    OSError if the file cannot be written.
    """
    content = written(table, dataset)
    path = data_file(dataset, part, mantissa_bits, whole=content.num_columns == table.num_columns)
    status = filesystem(root).put(
        root, root / path, lambda target: write_sorted(content, dataset, target, mantissa_bits), sync
    )
    return DataFile(
        path=path,
        dataset=dataset,
        part=part,
        rows=table.num_rows,
        size_bytes=status.size,
        modified_at_ms=int(status.modified * 1000),
        statistics=statistics(table),
    )


def read_file(path: Location, dataset: str, *, plain: Collection[str] = ()) -> pa.Table:
    """Return the columns of `dataset` that the Parquet file at `path` has.

    Text columns, except those in `plain`, are read as dictionaries. A file with an older schema lacks newer columns;
    `conform` adds them. A file that another tool rewrote has the columns of all datasets; they are left out.
    """
    source = filesystem(path).open(path)
    metadata = pq.read_metadata(source)
    present = set(metadata.schema.to_arrow_schema().names)
    fields = [field for field in dataset_schema(dataset) if field.name in present]
    texts = [field.name for field in fields if field.type == pa.string() and field.name not in plain]
    content = pq.ParquetFile(source, metadata=metadata, read_dictionary=texts)
    return content.read(columns=[field.name for field in fields])


def discard(root: Location, files: Iterable[DataFile]) -> None:
    """Delete `files`. The caller guarantees that no commit refers to them.

    A file that cannot be deleted, for example on a read-only disk, is left for vacuum.
    """
    with contextlib.suppress(OSError):
        filesystem(root).delete([root / file.path for file in files])


def statistics(table: pa.Table) -> str:
    """Return the statistics of `table` as the JSON text of an `add` action of Delta."""
    minima: dict[str, Any] = {}
    maxima: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for name in STATISTICS_COLUMNS:
        column = one_chunk(table.column(name))
        nulls[name] = column.null_count
        low, high = _range(column)
        if low is not None:
            minima[name], maxima[name] = low, high
    document = {"numRecords": table.num_rows, "minValues": minima, "maxValues": maxima, "nullCount": nulls}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def _range(column: pa.Array) -> tuple[Any, Any]:
    if pa.types.is_dictionary(column.type):  # it may contain texts that no row uses
        column = column.dictionary.take(column.indices.unique())
    is_time = pa.types.is_timestamp(column.type)
    low, high = [value.as_py() for value in pc.min_max(column.view(pa.int64()) if is_time else column).values()]
    if not is_time or low is None:
        return low, high
    if low < _FIRST_MICROSECOND or high > _LAST_MICROSECOND:  # the clock of a rank is outside of the calendar
        return None, None
    first, last = (_EPOCH + dt.timedelta(microseconds=end) for end in (low, high))
    return f"{first:%Y-%m-%dT%H:%M:%S.%fZ}", f"{last:%Y-%m-%dT%H:%M:%S.%fZ}"
