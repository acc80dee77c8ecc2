"""One sorted Parquet file: our encodings, its way to the disk, and the statistics the log keeps of it.

A file is written under `_staging/`, brought to the disk, then renamed: a name outside `_staging/` is always whole.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import json
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rankscope_storage.durable import Sync, make_folders
from rankscope_storage.layout import SORT_KEYS, data_file, sort_order
from rankscope_storage.schema import dataset_schema

STAGING: Final = "_staging"
ROW_GROUP_ROWS: Final = 122_880
STATISTICS_COLUMNS: Final = ("run", "attempt", "rank", "step", "ts")
"""Columns whose minimum and maximum stand in the log. No floats: a NaN has no place in a range."""

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND: Final = dt.timedelta(microseconds=1)
_FIRST_MICROSECOND: Final = (dt.datetime(1000, 1, 1, tzinfo=dt.UTC) - _EPOCH) // _MICROSECOND  # in four digits
_LAST_MICROSECOND: Final = (dt.datetime(9999, 12, 31, tzinfo=dt.UTC) - _EPOCH) // _MICROSECOND

_FREE_TEXT: Final = ("message", "details", "config", "reason", "stack")
"""Text that seldom repeats: a dictionary of it would only be in the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A file that is whole and on the disk; `path` is relative to the store."""

    path: str
    dataset: str
    part: str
    rows: int
    size_bytes: int
    modified_at_ms: int
    statistics: str  # JSON as the Delta log has it


def write_file(root: Path, dataset: str, part: str, table: pa.Table, sync: Sync) -> DataFile:
    """Sort `table`, which conforms to `dataset`, and write it as one file below `root`; durable on return."""
    path = data_file(dataset, part)
    staged, final = root / STAGING / f"{uuid.uuid4().hex}.parquet", root / path
    try:
        make_folders(staged.parent, root, sync)  # somebody may have tidied up
        _write(table, dataset, staged)
        sync(staged)
        make_folders(final.parent, root, sync)
        staged.rename(final)
    except OSError:
        with contextlib.suppress(OSError):  # the first error says more
            staged.unlink(missing_ok=True)  # on a full disk of all places
        raise
    sync(final.parent)
    status = final.stat()
    return DataFile(
        path=path,
        dataset=dataset,
        part=part,
        rows=table.num_rows,
        size_bytes=status.st_size,
        modified_at_ms=status.st_mtime_ns // 1_000_000,
        statistics=statistics(table),
    )


def discard(root: Path, files: Iterable[DataFile]) -> None:
    """Remove files that no commit names; what cannot be removed (a disk turned read-only) is left to maintenance."""
    for file in files:
        with contextlib.suppress(OSError):
            (root / file.path).unlink(missing_ok=True)


def _write(table: pa.Table, dataset: str, path: Path) -> None:
    order = pa.array(sort_order(table, SORT_KEYS[dataset]))
    encodings = _encodings(dataset)
    with pq.ParquetWriter(
        path,
        table.schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=list(encodings.dictionary),
        column_encoding=encodings.others,
        store_schema=False,  # else the footer would differ with how the text columns happened to be held in memory
        write_statistics=list(counted_columns(dataset)),
    ) as writer:
        # Sorted one row group at a time: a sorted copy of the whole would cost more than the sorting itself.
        for start in range(0, table.num_rows, ROW_GROUP_ROWS):
            writer.write_table(table.take(order.slice(start, ROW_GROUP_ROWS)), row_group_size=ROW_GROUP_ROWS)
        writer.add_key_value_metadata(dataset_schema(dataset).metadata)


@functools.cache
def counted_columns(dataset: str) -> tuple[str, ...]:
    """Return the columns whose range may stand in the footer: all but floats, whose range leaves out NaN.

    DuckDB takes such a range for the whole truth: `WHERE isnan(value)` would find nothing among finite numbers.
    """
    return tuple(name for name, type_ in _leaves(dataset) if not pa.types.is_floating(type_))


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
            others[name] = "DELTA_BINARY_PACKED"
    return _Encodings(tuple(dictionary), others)


def _leaves(dataset: str) -> Iterator[tuple[str, pa.DataType]]:
    """Yield the columns of a file by the names that Parquet has for them, and their types."""
    for field in dataset_schema(dataset):
        leaf, name = field.type, field.name
        while pa.types.is_list(leaf):
            leaf, name = leaf.value_type, f"{name}.list.element"
        yield name, leaf


def statistics(table: pa.Table) -> str:
    """Return the statistics of `table` as the JSON text of an `add` action."""
    minima: dict[str, Any] = {}
    maxima: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for name in STATISTICS_COLUMNS:
        column = table.column(name)
        nulls[name] = column.null_count
        low, high = _range(column)
        if low is not None:
            minima[name], maxima[name] = low, high
    document = {"numRecords": table.num_rows, "minValues": minima, "maxValues": maxima, "nullCount": nulls}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def _range(column: pa.ChunkedArray) -> tuple[Any, Any]:
    if pa.types.is_dictionary(column.type):
        column = column.unique().dictionary_decode()
    if pa.types.is_timestamp(column.type):
        low, high = (value.as_py() for value in pc.min_max(column.cast(pa.int64())).values())
        return _timestamps(low, high)
    low, high = (value.as_py() for value in pc.min_max(column).values())
    return low, high


def _timestamps(low: int | None, high: int | None) -> tuple[str | None, str | None]:
    """Return both in the form the Delta protocol asks for; no range where a rank's clock left the calendar."""
    if low is None or high is None or low < _FIRST_MICROSECOND or high > _LAST_MICROSECOND:
        return None, None
    return _timestamp(low), _timestamp(high)


def _timestamp(microseconds: int) -> str:
    return f"{_EPOCH + dt.timedelta(microseconds=microseconds):%Y-%m-%dT%H:%M:%S.%fZ}"
