"""`retain`: let what is large and old go. Scalars, events and what describes runs, models and tensors stay for ever.

Whole files go, once the youngest row in them is old enough: nothing is read or written anew, whatever their size.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_storage.compaction import MUTEX
from rankscope_storage.durable import Sync
from rankscope_storage.errors import ConflictError
from rankscope_storage.log import Change, Log
from rankscope_storage.parquet import DataFile
from rankscope_storage.snapshot import Snapshot

EXPIRING: Final = ("tensor_stats", "features", "histograms", "hashes", "collectives", "samples")

_LOG_CUTS: Final = dt.timedelta(milliseconds=1)  # times in the log are cut to the millisecond
_ATTEMPTS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionReport:
    """What went, or with `dry_run` would go: `groups` has a row per dataset and part."""

    files: int
    rows: int
    size_bytes: int
    groups: pa.Table


def retain(root: Path, before: dt.datetime, sync: Sync, *, dry_run: bool = False) -> RetentionReport:
    """Take files whose rows are all older than `before` out of the store at `root`; the disk is free after maintenance.

    Raises ConflictError when compactions never let it through.
    """
    log = Log.open(root, sync)
    for _ in range(_ATTEMPTS - 1):
        try:
            return _attempt(log, before, dry_run=dry_run)
        except ConflictError:
            log.refresh()
    return _attempt(log, before, dry_run=dry_run)


def expired(snapshot: Snapshot, before: dt.datetime) -> list[dict[str, Any]]:
    """Return the files that can go; one whose times the log does not know stays."""
    is_due = pc.field("dataset").isin(EXPIRING) & (pc.field("ts_max") < before - _LOG_CUTS)
    due: list[dict[str, Any]] = snapshot.files.filter(is_due).to_pylist()
    return due


def _attempt(log: Log, before: dt.datetime, *, dry_run: bool) -> RetentionReport:
    mutex = (log.transaction(MUTEX) or 0) + 1
    due = expired(log.snapshot(), before)
    if due and not dry_run:
        info = {"rankscopeExpired": f"rows before {before.isoformat()}"}
        log.commit(Change(removed=[_data_file(file) for file in due], transactions={MUTEX: mutex}, info=info))
    return RetentionReport(
        files=len(due),
        rows=sum(file["rows"] for file in due),
        size_bytes=sum(file["size_bytes"] for file in due),
        groups=_groups(due),
    )


def _groups(files: Sequence[dict[str, Any]]) -> pa.Table:
    schema = pa.schema(
        {"dataset": pa.string(), "part": pa.string(), "rows": pa.int64(), "size_bytes": pa.int64()}.items()
    )
    rows = pa.Table.from_pylist([{name: file[name] for name in schema.names} for file in files], schema=schema)
    sums = [("rows", "sum"), ("size_bytes", "sum"), ("rows", "count")]
    grouped = rows.group_by(["dataset", "part"]).aggregate(sums).sort_by("size_bytes_sum")
    return grouped.select(["dataset", "part", "rows_count", "rows_sum", "size_bytes_sum"]).rename_columns(
        ["dataset", "part", "files", "rows", "bytes"]
    )


def _data_file(file: dict[str, Any]) -> DataFile:
    names = ("path", "dataset", "part", "rows", "size_bytes")
    return DataFile(**{name: file[name] for name in names}, modified_at_ms=0, statistics="")
