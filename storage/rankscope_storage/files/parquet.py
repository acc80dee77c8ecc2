"""Write one sorted Parquet file durably, and compute the statistics that the Delta log stores for it.

A file is written below `_staging/`, fsynced, and then renamed. A file outside of `_staging/` is therefore always
complete. The module `encoding` defines the content of a file.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rankscope_storage.base.fsync import Sync, make_folders
from rankscope_storage.base.schema import dataset_schema, written
from rankscope_storage.files.encoding import write_sorted
from rankscope_storage.files.partitioning import data_file
from rankscope_storage.files.sorting import one_chunk

STAGING: Final = "_staging"
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
    root: Path, dataset: str, part: str, table: pa.Table, sync: Sync, *, mantissa_bits: int | None = None
) -> DataFile:
    """Sort `table`, which conforms to `dataset`, and write it as one file below `root`; durable on return.

    `mantissa_bits` is stored in the name and metadata of the file; the caller has already rounded the values. Raises
    OSError if the file cannot be written.
    """
    content = written(table, dataset)
    path = data_file(dataset, part, mantissa_bits, whole=content.num_columns == table.num_columns)
    staged, final = root / STAGING / f"{uuid.uuid4().hex}.parquet", root / path
    try:
        make_folders(staged.parent, root, sync)  # a user may have deleted the folder
        write_sorted(content, dataset, staged, mantissa_bits)
        sync(staged)
        make_folders(final.parent, root, sync)
        staged.rename(final)
    except OSError:
        with contextlib.suppress(OSError):  # the first error is the important one
            staged.unlink(missing_ok=True)  # free the space of a full disk
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


def open_file(path: Path, dataset: str, *, plain: Collection[str] = ()) -> pq.ParquetFile:
    """Return the Parquet file at `path`; text columns, except those in `plain`, are read as dictionaries.

    The result has only the columns of the file. A file with an older schema lacks newer columns; `conform` adds them.
    """
    metadata = pq.read_metadata(path)
    texts = {field.name for field in dataset_schema(dataset) if field.type == pa.string()}
    return pq.ParquetFile(
        path, metadata=metadata, read_dictionary=sorted(texts & set(metadata.schema.names) - set(plain))
    )


def own_columns(content: pq.ParquetFile, dataset: str) -> list[str]:
    """Return the columns of `dataset` that the Parquet file `content` has.

    A file that another tool rewrote has the columns of all datasets. Those of other datasets are null in all rows.
    """
    present = set(content.schema_arrow.names)
    return [name for name in dataset_schema(dataset).names if name in present]


def read_file(path: Path, dataset: str, *, plain: Collection[str] = ()) -> pa.Table:
    """Return the columns of `dataset` that the Parquet file at `path` has; `plain` is as in `open_file`."""
    content = open_file(path, dataset, plain=plain)
    return content.read(columns=own_columns(content, dataset))


def discard(root: Path, files: Iterable[DataFile]) -> None:
    """Delete `files`. The caller guarantees that no commit refers to them.

    A file that cannot be deleted, for example on a read-only disk, is left for vacuum.
    """
    for file in files:
        with contextlib.suppress(OSError):
            (root / file.path).unlink(missing_ok=True)


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
    if pa.types.is_dictionary(column.type):
        if len(column.dictionary) == 1 and not column.null_count and len(column):
            column = column.dictionary
        else:  # it may contain texts that no row uses
            column = column.dictionary.take(column.indices.unique())
    is_time = pa.types.is_timestamp(column.type)
    low, high = (value.as_py() for value in pc.min_max(column.view(pa.int64()) if is_time else column).values())
    if not is_time or low is None:
        return low, high
    if low < _FIRST_MICROSECOND or high > _LAST_MICROSECOND:  # the clock of a rank is outside of the calendar
        return None, None
    first, last = (_EPOCH + dt.timedelta(microseconds=end) for end in (low, high))
    return f"{first:%Y-%m-%dT%H:%M:%S.%fZ}", f"{last:%Y-%m-%dT%H:%M:%S.%fZ}"
