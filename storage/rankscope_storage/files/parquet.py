"""One sorted Parquet file: its way to the disk, and the statistics the log keeps of it. See `encoding` for its inside.

A file is written under `_staging/`, brought to the disk, then renamed: a name outside `_staging/` is always whole.
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
"""Columns whose minimum and maximum stand in the log. No floats: a NaN has no place in a range."""

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND: Final = dt.timedelta(microseconds=1)
_FIRST_MICROSECOND: Final = (dt.datetime(1000, 1, 1, tzinfo=dt.UTC) - _EPOCH) // _MICROSECOND  # in four digits
_LAST_MICROSECOND: Final = (dt.datetime(9999, 12, 31, tzinfo=dt.UTC) - _EPOCH) // _MICROSECOND


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

    @classmethod
    def from_snapshot(cls, file: Mapping[str, Any]) -> DataFile:
        """Return the file of a row of a Snapshot's files. It has no time and no statistics: a removal needs none."""
        names = ("path", "dataset", "part", "rows", "size_bytes")
        return cls(**{name: file[name] for name in names}, modified_at_ms=0, statistics="")


def write_file(
    root: Path, dataset: str, part: str, table: pa.Table, sync: Sync, *, mantissa_bits: int | None = None
) -> DataFile:
    """Sort `table`, which conforms to `dataset`, and write it as one file below `root`; durable on return.

    `mantissa_bits` is what the file says of itself: some of its statistics were rounded so far, and none further.
    """
    content = written(table, dataset)
    path = data_file(dataset, part, mantissa_bits, whole=content.num_columns == table.num_columns)
    staged, final = root / STAGING / f"{uuid.uuid4().hex}.parquet", root / path
    try:
        make_folders(staged.parent, root, sync)  # somebody may have tidied up
        write_sorted(content, dataset, staged, mantissa_bits)
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


def open_file(path: Path, dataset: str, *, plain: Collection[str] = ()) -> pq.ParquetFile:
    """Return the file at `path`, texts except the `plain` ones as dictionaries.

    It has the columns that it was written with: an older schema had fewer. Absent ones are for `conform` to add.
    """
    metadata = pq.read_metadata(path)
    texts = {field.name for field in dataset_schema(dataset) if field.type == pa.string()}
    return pq.ParquetFile(
        path, metadata=metadata, read_dictionary=sorted(texts & set(metadata.schema.names) - set(plain))
    )


def discard(root: Path, files: Iterable[DataFile]) -> None:
    """Remove files that no commit names; what cannot be removed (a disk turned read-only) is left to maintenance."""
    for file in files:
        with contextlib.suppress(OSError):
            (root / file.path).unlink(missing_ok=True)


def statistics(table: pa.Table) -> str:
    """Return the statistics of `table` as the JSON text of an `add` action."""
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
        else:  # it may name what no row has
            column = column.dictionary.take(column.indices.unique())
    if pa.types.is_timestamp(column.type):
        low, high = (value.as_py() for value in pc.min_max(column.view(pa.int64())).values())
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
