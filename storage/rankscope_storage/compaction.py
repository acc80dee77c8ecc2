"""Merging small files into few that lie one step range after the other.

Every file costs a query 0.15 ms, whatever is in it. So the small files of one part and attempt are merged, in order of
step, and cut on step boundaries: no two files of one merge share a step of an attempt. Rows that come late stay in
files of their own until these are worth the next merge. The log's mutex lets one compaction at a time commit; a loser
throws its work away. A compaction that dies leaves nothing but files that no version names, which maintenance removes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rankscope_storage.durable import Sync
from rankscope_storage.errors import ConflictError, StoreError
from rankscope_storage.layout import Indices, sort_order
from rankscope_storage.log import Change, Log
from rankscope_storage.parquet import DataFile, discard, write_file
from rankscope_storage.rounding import coarsest
from rankscope_storage.schema import conform, dataset_schema
from rankscope_storage.snapshot import Snapshot

MUTEX: Final = "compact"
"""Transaction moved by everything that rewrites files."""

SMALL_ROWS: Final = 500_000
"""A file below this is worth merging."""
SMALL_FILES: Final = 50
"""Merge when a part has more small files than this …"""
TINY_FILES: Final = 10
"""… or more than this, and they hold on average less than TINY_ROWS."""
TINY_ROWS: Final = 100_000
TARGET_ROWS: Final = 1_500_000
"""Rows of a merged file, where steps allow it."""
MERGE_ROWS: Final = 2 * TARGET_ROWS
"""Rows that one merge holds in memory at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionReport:
    """What one compaction did. `refused` merges lost against another compaction and changed nothing."""

    files_removed: int = 0
    files_added: int = 0
    rows: int = 0
    refused: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """Files of one part that become one or a few."""

    dataset: str
    part: str
    files: tuple[DataFile, ...]


def plan(snapshot: Snapshot) -> list[Merge]:
    """Return the merges that are worth while at `snapshot`: by part and attempt, each of neighbours in step order."""
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for file in snapshot.files.to_pylist():
        if file["rows"] is not None and file["rows"] < SMALL_ROWS:
            groups.setdefault((file["dataset"], file["part"], _attempt(file)), []).append(file)
    return [merge for key in sorted(groups) if _worth(groups[key]) for merge in _merges(groups[key])]


def compact(root: Path, sync: Sync, progress: Callable[[int, int], None] | None = None) -> CompactionReport:
    """Carry out the plan of the newest version of the store at `root`, one commit per merge.

    `progress` is told how many merges of how many are done.
    """
    started = time.monotonic()
    log = Log.open(root, sync)
    removed = added = rows = refused = 0
    merges = plan(log.snapshot())
    for done, merge in enumerate(merges, 1):
        try:
            files = _carry_out(log, merge, sync)
        except ConflictError:
            refused += 1
            break  # another compaction is at work: leave the rest to it
        if progress is not None:
            progress(done, len(merges))
        removed, added = removed + len(merge.files), added + len(files)
        rows += sum(file.rows for file in files)
    seconds = time.monotonic() - started
    return CompactionReport(files_removed=removed, files_added=added, rows=rows, refused=refused, seconds=seconds)


def _carry_out(log: Log, merge: Merge, sync: Sync) -> list[DataFile]:
    """Replace the files of `merge`, and return the new ones. Raises ConflictError when they are no longer there."""
    log.refresh()
    if not log.snapshot().contains([file.path for file in merge.files]):
        raise ConflictError("another compaction has replaced the files")
    # From here on the handle must not be refreshed: only so does the mutex cover what was just looked at.
    mutex = (log.transaction(MUTEX) or 0) + 1
    files = _rewrite(log.root, merge, sync)
    try:
        log.commit(Change(added=files, removed=merge.files, transactions={MUTEX: mutex}, rewrites=True))
    except ConflictError:
        discard(log.root, files)
        raise
    return files


def _worth(small: Sequence[dict[str, Any]]) -> bool:
    if len(small) > SMALL_FILES:
        return True
    return len(small) > TINY_FILES and sum(file["rows"] for file in small) < TINY_ROWS * len(small)


def _attempt(file: dict[str, Any]) -> int:
    """Return the attempt that all rows of `file` belong to, -1 where there are several or none."""
    low, high = file["attempt_min"], file["attempt_max"]
    return int(low) if low is not None and low == high else -1


def _merges(small: Iterable[dict[str, Any]]) -> Iterator[Merge]:
    group: list[DataFile] = []
    for file in sorted(small, key=_step_order):
        if group and sum(member.rows for member in group) + file["rows"] > MERGE_ROWS:
            yield _merge(group)
            group = []
        group.append(_data_file(file))
    if len(group) > 1:
        yield _merge(group)


def _merge(files: Sequence[DataFile]) -> Merge:
    return Merge(dataset=files[0].dataset, part=files[0].part, files=tuple(files))


def _step_order(file: dict[str, Any]) -> tuple[bool, int, str]:
    """Sort by first step; what has no step at all last."""
    return file["step_min"] is None, file["step_min"] or 0, file["path"]


def _data_file(file: dict[str, Any]) -> DataFile:
    return DataFile(
        path=file["path"],
        dataset=file["dataset"],
        part=file["part"],
        rows=file["rows"],
        size_bytes=file["size_bytes"],
        modified_at_ms=0,
        statistics="",
    )


def _rewrite(root: Path, merge: Merge, sync: Sync) -> list[DataFile]:
    files: list[DataFile] = []
    try:
        table = _read(root, merge)
        bits = coarsest(file.path for file in merge.files)
        write = functools.partial(write_file, mantissa_bits=bits)
        files.extend(write(root, merge.dataset, merge.part, rows, sync) for rows in cut(table))
    except FileNotFoundError as error:
        discard(root, files)
        raise ConflictError(f"a file to merge has gone: {error}") from error
    except (OSError, pa.ArrowException) as error:
        discard(root, files)
        raise StoreError(f"cannot merge files of {root}: {error}") from error
    return files


def _read(root: Path, merge: Merge) -> pa.Table:
    strings = [field.name for field in dataset_schema(merge.dataset) if field.type == pa.string()]
    tables = [pq.ParquetFile(root / file.path, read_dictionary=strings).read() for file in merge.files]
    return conform(pa.concat_tables(tables, promote_options="default"), merge.dataset)


def cut(table: pa.Table) -> Iterator[pa.Table]:
    """Yield `table` by attempt and step, in pieces that end with a step and hold TARGET_ROWS where steps allow it."""
    if table.num_rows <= TARGET_ROWS:
        yield table
        return
    order = sort_order(table, ("attempt", "step"))
    ends = _step_ends(table, order)
    start = 0
    while start < table.num_rows:
        position = int(np.searchsorted(ends, start + TARGET_ROWS, side="right"))
        end = int(ends[max(position - 1, int(np.searchsorted(ends, start, side="right")))])
        yield table.take(pa.array(order[start:end]))
        start = end


def _step_ends(table: pa.Table, order: Indices) -> Indices:
    """Return the positions in `order` behind which another step, or attempt, begins; the last is the row count."""
    sorted_steps = table.select(["attempt", "step"]).take(pa.array(order))
    changed = np.zeros(table.num_rows - 1, dtype=bool)
    for name in ("attempt", "step"):
        encoded = sorted_steps.column(name).combine_chunks().dictionary_encode(null_encoding="encode")
        codes = encoded.indices.to_numpy(zero_copy_only=False)
        changed |= codes[1:] != codes[:-1]
    return np.append(np.flatnonzero(changed) + 1, table.num_rows)
