"""Merging small files into few that lie one step range after the other.

Every file costs a query 0.15 ms, whatever is in it. So the small files of one part and attempt are merged, in order of
step, and cut on step boundaries: no two files of one merge share a step of an attempt. What is newer than the slowest
live rank stays apart, to be merged with what that rank still sends; so do rows that come late, until they are worth the
next merge. What runs share by day is merged over days when these are past, and a run that has grown leaves it for a
part of its own. The log's mutex lets one compaction at a time commit; a loser throws its work away. A compaction that
dies leaves nothing but files that no version names, which maintenance removes.
"""

from __future__ import annotations

import datetime as dt
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.rollups import ROLLUPS
from rankscope_storage.durable import Sync
from rankscope_storage.errors import ConflictError, StoreError
from rankscope_storage.files.layout import OWN_PART_ROWS, SHARED_PREFIX, Indices, own_part, shared_part, sort_order
from rankscope_storage.files.parquet import DataFile, discard, open_file, write_file
from rankscope_storage.files.rounding import coarsest
from rankscope_storage.log.delta import Change, Log
from rankscope_storage.log.snapshot import Snapshot
from rankscope_storage.schema import conform

MUTEX: Final = "compact"
"""Transaction moved by everything that rewrites files."""

SMALL_ROWS: Final = 750_000
"""A file below this is worth merging: half of TARGET_ROWS, so that a merge leaves one such file at most."""
SMALL_FILES: Final = 50
"""Merge when a part has more small files than this …"""
TINY_FILES: Final = 10
"""… or more than this, and they hold on average less than TINY_ROWS."""
TINY_ROWS: Final = 100_000
TARGET_ROWS: Final = 1_500_000
"""Rows of a merged file, where steps allow it."""
MERGE_ROWS: Final = 2 * TARGET_ROWS
"""Rows that one merge holds in memory at most; small files that hold as many are merged, however few they are."""
ROLLUP_WEIGHT: Final = 4
"""A row of rollups counts as so many others, for it takes as much memory: it has forty numbers, and few are null."""
PAST_FILES: Final = 3
"""Small files that the shared parts of past days may have together."""
MOVED_ROWS: Final = 10_000
"""A run that has its own part moves there from a shared one with as many rows: fewer are not worth a file."""
SILENCE: Final = dt.timedelta(minutes=10)
"""A rank that has sent nothing for so long holds up no merge, and a part is merged to its end."""


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
    """Files of one part, or of the shared parts of several days, that become one or a few."""

    dataset: str
    part: str
    files: tuple[DataFile, ...]
    own_parts: frozenset[str] = frozenset()
    """Parts that runs have of their own in this dataset."""
    closed: bool = False
    """Nobody is expected to add to these steps."""


def plan(snapshot: Snapshot, now: dt.datetime | None = None) -> list[Merge]:
    """Return the merges that are worth while at `snapshot`: by part and attempt, each of neighbours in step order."""
    now = dt.datetime.now(dt.UTC) if now is None else now
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    own: dict[str, set[str]] = {}
    for file in snapshot.files.to_pylist():
        groups.setdefault((file["dataset"], _territory(file["part"], now), _attempt(file)), []).append(file)
        own.setdefault(file["dataset"], set()).add(file["part"])
    merges: list[Merge] = []
    for (dataset, territory, _), files in sorted(groups.items(), key=lambda group: group[0]):
        small = [file for file in files if file["rows"] is not None and _weight(file) < SMALL_ROWS]
        closed = territory == _PAST or (_is_silent(files, now) and not territory.startswith(SHARED_PREFIX))
        if _worth(small, PAST_FILES if territory == _PAST else 1 if closed else SMALL_FILES):
            merges.extend(_merges(small, frozenset(own[dataset]), closed=closed))
    return merges


_PAST: Final = f"{SHARED_PREFIX}past"


def _territory(part: str, now: dt.datetime) -> str:
    """Return the part, or one name for the shared parts of all past days: their files may become one."""
    return _PAST if part.startswith(SHARED_PREFIX) and part < shared_part(now.date()) else part


def _is_silent(files: Sequence[dict[str, Any]], now: dt.datetime) -> bool:
    newest = max((file["ts_max"] for file in files if file["ts_max"] is not None), default=None)
    return newest is not None and newest < now - SILENCE


def compact(
    root: Path, sync: Sync, progress: Callable[[int, int], None] | None = None, *, now: dt.datetime | None = None
) -> CompactionReport:
    """Carry out the plan of the newest version of the store at `root`, one commit per merge.

    `progress` is told how many merges of how many are done; `now` is the time of day where it is not the clock's.
    """
    started = time.monotonic()
    now = dt.datetime.now(dt.UTC) if now is None else now
    log = Log.open(root, sync)
    removed = added = rows = refused = 0
    merges = plan(log.snapshot(), now)
    for done, merge in enumerate(merges, 1):
        try:
            files = _carry_out(log, merge, sync, now)
        except ConflictError:
            refused += 1
            break  # another compaction is at work: leave the rest to it
        log.keep_short()
        if progress is not None:
            progress(done, len(merges))
        removed, added = removed + len(merge.files), added + len(files)
        rows += sum(file.rows for file in files)
    seconds = time.monotonic() - started
    return CompactionReport(files_removed=removed, files_added=added, rows=rows, refused=refused, seconds=seconds)


def _carry_out(log: Log, merge: Merge, sync: Sync, now: dt.datetime) -> list[DataFile]:
    """Replace the files of `merge`, and return the new ones. Raises ConflictError when they are no longer there."""
    log.refresh()
    if not log.snapshot().contains([file.path for file in merge.files]):
        raise ConflictError("another compaction has replaced the files")
    # From here on the handle must not be refreshed: only so does the mutex cover what was just looked at.
    mutex = (log.transaction(MUTEX) or 0) + 1
    files = _rewrite(log.root, merge, sync, now)
    try:
        log.commit(Change(added=files, removed=merge.files, transactions={MUTEX: mutex}, rewrites=True))
    except ConflictError:
        discard(log.root, files)
        raise
    return files


def _worth(small: Sequence[dict[str, Any]], most: int) -> bool:
    rows = sum(map(_weight, small))
    if len(small) > most or (len(small) > 1 and rows >= MERGE_ROWS):
        return True
    return len(small) > TINY_FILES and rows < TINY_ROWS * len(small)


def _weight(file: dict[str, Any]) -> int:
    """Return how many rows the rows of `file` count as."""
    return int(file["rows"]) * _row_weight(file["dataset"])


def _row_weight(dataset: str) -> int:
    return ROLLUP_WEIGHT if dataset in ROLLUPS.values() else 1


def _attempt(file: dict[str, Any]) -> int:
    """Return the attempt that all rows of `file` belong to, -1 where there are several or none."""
    low, high = file["attempt_min"], file["attempt_max"]
    return int(low) if low is not None and low == high else -1


def _merges(small: Iterable[dict[str, Any]], own_parts: frozenset[str], *, closed: bool) -> Iterator[Merge]:
    group: list[DataFile] = []
    held = 0
    for file in sorted(small, key=_step_order):
        if group and held + _weight(file) > MERGE_ROWS:
            yield _merge(group, own_parts, closed=closed)
            group, held = [], 0
        group.append(_data_file(file))
        held += _weight(file)
    if len(group) > 1:
        yield _merge(group, own_parts, closed=closed)


def _merge(files: Sequence[DataFile], own_parts: frozenset[str], *, closed: bool) -> Merge:
    return Merge(dataset=files[0].dataset, part=files[0].part, files=tuple(files), own_parts=own_parts, closed=closed)


def _step_order(file: dict[str, Any]) -> tuple[str, bool, int, str]:
    """Sort by day where parts are of days, then by first step; what has no step at all last."""
    return file["part"], file["step_min"] is None, file["step_min"] or 0, file["path"]


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


def _rewrite(root: Path, merge: Merge, sync: Sync, now: dt.datetime) -> list[DataFile]:
    files: list[DataFile] = []
    write = functools.partial(write_file, mantissa_bits=coarsest(file.path for file in merge.files))
    try:
        for part, table in apart(_read(root, merge), merge):
            ranges = [table] if merge.closed else open_and_closed(table, now)
            target = TARGET_ROWS // _row_weight(merge.dataset)
            for rows in itertools.chain.from_iterable(cut(range_, target) for range_ in ranges):
                files.append(write(root, merge.dataset, part, rows, sync))  # noqa: PERF401 - known even if the next fails
    except FileNotFoundError as error:
        discard(root, files)
        raise ConflictError(f"a file to merge has gone: {error}") from error
    except (OSError, pa.ArrowException) as error:
        discard(root, files)
        raise StoreError(f"cannot merge files of {root}: {error}") from error
    return files


def _read(root: Path, merge: Merge) -> pa.Table:
    tables = [open_file(root / file.path, merge.dataset).read() for file in merge.files]
    return conform(pa.concat_tables(tables, promote_options="default"), merge.dataset)


def apart(table: pa.Table, merge: Merge) -> Iterator[tuple[str, pa.Table]]:
    """Yield the part and the rows of each run that has grown out of a shared part, then what goes on sharing it."""
    if not merge.part.startswith(SHARED_PREFIX) or merge.dataset == "samples":
        yield merge.part, table
        return
    counts = {entry["values"]: entry["counts"] for entry in pc.value_counts(table.column("run")).to_pylist()}
    grown = [run for run, rows in counts.items() if rows >= OWN_PART_ROWS or _moves(run, rows, merge.own_parts)]
    for run in grown:
        yield own_part(run), table.filter(pc.equal(table.column("run"), run))
    shared = table.filter(pc.invert(pc.is_in(table.column("run"), pa.array(grown, pa.string())))) if grown else table
    if shared.num_rows:
        yield merge.part, shared


def _moves(run: str, rows: int, own_parts: frozenset[str]) -> bool:
    return rows >= MOVED_ROWS and own_part(run) in own_parts


def open_and_closed(table: pa.Table, now: dt.datetime) -> Iterator[pa.Table]:
    """Yield the rows up to the step that the slowest live rank has reached, then the rest: ranks will add to that."""
    last = pa.table({name: table.column(name) for name in ("rank", "step", "ts")}).group_by("rank")
    reached = last.aggregate([("step", "max"), ("ts", "max")]).to_pylist()
    live = [rank for rank in reached if rank["ts_max"] is not None and rank["ts_max"] >= now - SILENCE]
    slowest = min((rank["step_max"] for rank in live if rank["step_max"] is not None), default=None)
    if slowest is None:
        yield table
        return
    closed = pc.fill_null(pc.less_equal(table.column("step"), slowest), fill_value=True)
    for rows in (table.filter(closed), table.filter(pc.invert(closed))):
        if rows.num_rows:
            yield rows


_CUT_KEYS: Final = ("run", "attempt", "step")


def cut(table: pa.Table, target: int) -> Iterator[pa.Table]:
    """Yield `table` by run, attempt and step, in pieces that end with a step, of `target` rows where steps allow."""
    if table.num_rows <= target:
        yield table
        return
    order = sort_order(table, _CUT_KEYS)
    ends = _step_ends(table, order)
    start = 0
    while start < table.num_rows:
        position = int(np.searchsorted(ends, start + target, side="right"))
        end = int(ends[max(position - 1, int(np.searchsorted(ends, start, side="right")))])
        yield table.take(pa.array(order[start:end]))
        start = end


def _step_ends(table: pa.Table, order: Indices) -> Indices:
    """Return the positions in `order` behind which another step, or attempt, begins; the last is the row count."""
    sorted_steps = table.select(_CUT_KEYS).take(pa.array(order))
    changed = np.zeros(table.num_rows - 1, dtype=bool)
    for name in _CUT_KEYS:
        column = sorted_steps.column(name).combine_chunks()
        if not pa.types.is_dictionary(column.type):
            column = column.dictionary_encode(null_encoding="encode")
        codes = column.indices.to_numpy(zero_copy_only=False)
        changed |= codes[1:] != codes[:-1]
    return np.append(np.flatnonzero(changed) + 1, table.num_rows)
