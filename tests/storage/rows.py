"""Rows given as dictionaries, questions to stores, the files of stores, and a kill at an fsync."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from rankscope_storage.api.store import Batch, Writer
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import connect
from rankscope_storage.log.delta import Log
from rankscope_storage.log.entries import LOG_FOLDER

Rows = Iterable[Mapping[str, Any]]


def table(dataset: str, rows: Rows, /, **common: Any) -> pa.Table:
    """Return `rows` with the columns of `dataset`; `common` has the values of the columns that a row does not name."""
    return pa.Table.from_pylist([common | dict(row) for row in rows], schema=dataset_schema(dataset))


def put(writer: Writer, dataset: str, rows: Rows, watermarks: dict[str, int] | None = None, /, **common: Any) -> None:
    """Append rows as in `table` in one commit. Rows without an incarnation need no watermark."""
    writer.append(Batch(tables={dataset: table(dataset, rows, **common)}, watermarks=watermarks or {}))


def ask(source: Any, statement: str) -> list[tuple[Any, ...]]:
    """Return the rows of `statement` from a connection, or from the store in a folder."""
    if isinstance(source, Path):
        with connect(source) as connection:
            return ask(connection, statement)
    return source.sql(statement).fetchall()


def files(root: Path) -> pa.Table:
    return Log.open(root, sync_to_disk).snapshot().files


def data_files(root: Path) -> list[Path]:
    """Return all data files in the folder, also those of older versions, oldest first."""
    return sorted(root.glob("dataset=*/part=*/*.parquet"), key=lambda path: path.stat().st_mtime_ns)


def entries(root: Path) -> list[Path]:
    """Return the entries of the log, oldest first."""
    return sorted((root / LOG_FOLDER).glob("*.json"))


class Killed(BaseException):
    """Simulates a kill: the package does not catch it."""


def dying(after: int) -> Callable[[Path], None]:
    """Return a sync function that raises Killed at its `after`-th call."""
    left = [after]

    def sync(path: Path) -> None:
        left[0] -= 1
        if not left[0]:
            raise Killed
        sync_to_disk(path)

    return sync
