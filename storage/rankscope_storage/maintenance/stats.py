"""Statistics of a store (contents and sizes), computed from the Delta log without opening data files."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.kinds import COUNT_OPS, DEFAULT_OPS, VALUE_OPS
from rankscope_storage.base.datasets import ROLLUPS
from rankscope_storage.files.encoding import coarsest
from rankscope_storage.files.filesystem import DATA_FILES, filesystem
from rankscope_storage.log.delta import Log
from rankscope_storage.log.entries import LOG_FOLDER, entries
from rankscope_storage.maintenance.retention_policy import RAW

_COUNTS: Final = len(COUNT_OPS) - 1
_VALUES: Final = len([op for op in VALUE_OPS if op in DEFAULT_OPS])
SAMPLES_PER_ROW: Final = {
    "tensor_stats": _VALUES + _COUNTS,
    "tensor_rollups": 3 * _VALUES + _COUNTS,
    "scalar_rollups": 3,
}
"""Number of measured numbers in one row, by dataset.

For tensors, these are the default statistics and the counts, without the number of elements. Datasets that are not
listed have one measured number per row."""

TIERS: Final = {
    **dict.fromkeys((*RAW, "scalars", "samples"), "raw"),
    **dict.fromkeys(ROLLUPS.values(), "rollups"),
}
"""Retention tier (raw or rollups) of each dataset. Datasets that are kept forever have no tier."""

_TIME: Final = pa.timestamp("us", tz="UTC")
_FIGURES: Final = {
    **dict.fromkeys(("files", "rows", "bytes"), pa.int64()),
    **dict.fromkeys(("bytes_per_row", "bytes_per_sample"), pa.float64()),
    "mantissa_bits": pa.int64(),
    "oldest": _TIME,
    "newest": _TIME,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Statistics of the whole store. `groups` has a row for each dataset, partition (part), run or tier."""

    version: int
    files: int
    rows: int
    size_bytes: int
    log_entries: int
    log_bytes: int
    unused_bytes: int
    oldest: dt.datetime | None
    newest: dt.datetime | None
    groups: pa.Table


def store_stats(log: Log, *, by: str) -> StoreStats:
    """Return the statistics of the newest version. `by` is the grouping: dataset, part, run or tier.

    Files whose number of rows is not in the Delta log count as files without rows.
    """
    snapshot = log.snapshot()
    files = [{**file, "rows": file["rows"] or 0} for file in snapshot.files.to_pylist()]
    on_disk = sum(one.size for one in filesystem(log.root).list(log.root, DATA_FILES))
    size = sum(file["size_bytes"] for file in files)
    return StoreStats(
        version=snapshot.version,
        files=len(files),
        rows=sum(file["rows"] for file in files),
        size_bytes=size,
        log_entries=len(entries(log.root)),
        log_bytes=sum(one.size for one in filesystem(log.root).list(log.root / LOG_FOLDER)),
        unused_bytes=max(0, on_disk - size),
        oldest=pc.min(snapshot.files["ts_min"]).as_py(),
        newest=pc.max(snapshot.files["ts_max"]).as_py(),
        groups=_grouped(files, by),
    )


def _grouped(files: list[dict[str, Any]], by: str) -> pa.Table:
    groups: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        groups.setdefault(_group(file, by), []).append(file)
    rows = [{by: name, **_figures(members)} for name, members in groups.items()]
    schema = pa.schema({by: pa.string(), **_FIGURES}.items())
    return pa.Table.from_pylist(sorted(rows, key=lambda row: -row["bytes"]), schema=schema)


def _figures(files: list[dict[str, Any]]) -> dict[str, Any]:
    rows, size = sum(file["rows"] for file in files), sum(file["size_bytes"] for file in files)
    samples = sum(file["rows"] * SAMPLES_PER_ROW.get(file["dataset"], 1) for file in files)
    return {
        "files": len(files),
        "rows": rows,
        "bytes": size,
        "bytes_per_row": size / rows if rows else None,
        "bytes_per_sample": size / samples if samples else None,
        "mantissa_bits": coarsest(file["path"] for file in files),
        "oldest": min((file["ts_min"] for file in files if file["ts_min"]), default=None),
        "newest": max((file["ts_max"] for file in files if file["ts_max"]), default=None),
    }


def _group(file: Mapping[str, Any], by: str) -> str:
    if by == "tier":
        return TIERS.get(file["dataset"], "kept for ever")
    if by != "run":
        return str(file[by])
    has_one_run = file["run_min"] is not None and file["run_min"] == file["run_max"]
    return str(file["run_min"]) if has_one_run else "(several)"
