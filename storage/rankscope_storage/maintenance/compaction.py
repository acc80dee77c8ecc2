"""Merge small files into a few files with adjacent step ranges.

Every file costs a query 0.15 ms. The plan therefore selects small files of one part (partition) and attempt. They are
merged in step order and divided at step boundaries, so that no two files of one merge share a step of an attempt. Rows
after the last step of the slowest live rank are written to a separate file. It is merged later with the rows that this
rank still sends. Rows that arrive late also remain separate until another merge is worthwhile.

The shared parts of past days are merged with each other, and a run that has grown is moved to a separate part. The
Delta log permits one compaction at a time to commit. A compaction whose commit is refused deletes its files. A
compaction that is killed leaves only files that no version contains, which vacuum deletes.

A merge costs about half of the time that storing its rows took. At full speed, each row is therefore merged at most
once. Files that took more than an hour to fill are merged again. A query for one tensor takes 1.5 ms per file, and a
query for a curve takes twice as long over several files as over one.
"""

from __future__ import annotations

import datetime as dt
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rankscope_storage.base.datasets import ROLLUPS
from rankscope_storage.base.errors import ConflictError, StoreError
from rankscope_storage.base.fsync import Sync
from rankscope_storage.base.location import Location
from rankscope_storage.base.schema import conform
from rankscope_storage.files.encoding import (
    DataFile,
    coarsest,
    discard,
    has_older_integers,
    read_file,
    write_file,
)
from rankscope_storage.files.filesystem import filesystem
from rankscope_storage.files.sorting import OWN_PART_ROWS, SHARED_PREFIX, Indices, own_part, shared_part, sort_order
from rankscope_storage.log.delta import Change, Log
from rankscope_storage.log.snapshot import Snapshot, divided

SMALL_ROWS: Final = 750_000
"""A file with fewer rows than this is small.

It is half of TARGET_ROWS, so that a merge leaves at most one small file."""
SMALL_FILES: Final = 50
"""Number of small files in a part (partition) above which these files are merged."""
TINY_FILES: Final = 10
"""Number of small files in a part (partition) above which they are merged if they are tiny.

They are tiny if they have fewer than TINY_ROWS rows on average."""
TINY_ROWS: Final = 100_000
TARGET_ROWS: Final = 1_500_000
"""Number of rows of a merged file, as far as step boundaries permit.

Files that are merged again have up to MERGE_ROWS."""
MERGE_ROWS: Final = 2 * TARGET_ROWS
"""Largest number of rows in memory per merge. Small files with at least this many rows together are always merged."""
ROLLUP_WEIGHT: Final = 4
"""Number of raw rows that need as much memory as one rollup row, which has forty numbers, few of them null."""
PAST_FILES: Final = 3
"""Number of small files in the shared parts (partitions) of all past days above which these files are merged."""
SLOW: Final = dt.timedelta(hours=1)
"""Files that took longer than this to fill are merged again.

Rows then arrive so slowly that there is time to write each row once more."""
LAST_STEP_ROWS: Final = 1_000
"""Number of rows per step above which the file with the last steps is not merged again.

A query for the last step reads this whole file."""
SILENCE: Final = dt.timedelta(minutes=10)
"""Time without new rows of a rank after which merges no longer wait for this rank.

After the same time without new rows of a part (partition), the part is merged completely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """Files of one part, or of the shared parts of several days, that a compaction replaces by one file or a few.

    `own_parts` are the names of those parts of the dataset that have rows of only one run. `closed` means that no more
    rows of these steps are expected. `rows` is the number of rows of each new file, as far as step boundaries permit.
    """

    dataset: str
    part: str
    files: tuple[DataFile, ...]
    own_parts: frozenset[str] = frozenset()
    closed: bool = False
    rows: int = TARGET_ROWS


def plan(snapshot: Snapshot, now: dt.datetime | None = None) -> list[Merge]:
    """Return the merges that are worthwhile at `snapshot`.

    The files of a merge are adjacent in the order of their steps.

    They belong to one attempt and to one part, or to the shared parts of past days.
    """
    now = dt.datetime.now(dt.UTC) if now is None else now
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    own: dict[str, set[str]] = {}
    for file in snapshot.files.to_pylist():
        groups.setdefault((file["dataset"], _territory(file["part"], now), _attempt(file)), []).append(file)
        own.setdefault(file["dataset"], set()).add(file["part"])
    merges: list[Merge] = []
    for (dataset, territory, _), listed in sorted(groups.items(), key=lambda group: group[0]):
        files = sorted((file for file in listed if file["rows"] is not None), key=_step_order)
        own_parts, is_shared = frozenset(own[dataset]), territory.startswith(SHARED_PREFIX)
        closed = territory == _PAST or (_is_silent(listed, now) and not is_shared)
        small = [file for file in files if _weight(file) < SMALL_ROWS]
        if _worth(small, PAST_FILES if territory == _PAST else 1 if closed else SMALL_FILES):
            merges.extend(_merges(small, own_parts, closed=closed, rows=TARGET_ROWS))
            files = [file for file in files if _weight(file) >= SMALL_ROWS]
        if not is_shared:
            for neighbours in _worth_again(files, closed=closed):
                merges.extend(_merges(neighbours, own_parts, closed=closed, rows=MERGE_ROWS))
    return merges


def plan_rewrites(snapshot: Snapshot, merges: Iterable[Merge]) -> list[Merge]:
    """Return a merge of one file into one file for each file with integers in an older encoding.

    Files that `merges` replace anyway are excluded, and so are files that cannot be read, which a check reports. The
    number of rows is read from the file, because the Delta log lacks it for some files of other tools.
    """
    replaced = {file.path for merge in merges for file in merge.files}
    rewrites = []
    for file in snapshot.files.to_pylist():
        rows = 0 if file["path"] in replaced else _older_rows(snapshot.root / file["path"])
        if rows:
            own = (DataFile.from_snapshot(file),)
            rewrites.append(Merge(dataset=file["dataset"], part=file["part"], files=own, closed=True, rows=rows))
    return rewrites


def _older_rows(path: Location) -> int:
    """Return the number of rows of the file at `path` if it has integers in an older encoding, otherwise 0."""
    try:
        metadata = pq.read_metadata(filesystem(path).open(path))
    except (OSError, pa.ArrowException):
        return 0
    return metadata.num_rows if has_older_integers(metadata) else 0


_PAST: Final = f"{SHARED_PREFIX}past"


def _territory(part: str, now: dt.datetime) -> str:
    """Return `part`, the part (partition) of a file; for the shared parts of past days, return one common name.

    Files with the same result may be merged with each other.
    """
    return _PAST if part.startswith(SHARED_PREFIX) and part < shared_part(now.date()) else part


def _is_silent(files: Sequence[dict[str, Any]], now: dt.datetime) -> bool:
    newest = max((file["ts_max"] for file in files if file["ts_max"] is not None), default=None)
    return newest is not None and newest < now - SILENCE


def _worth(small: Sequence[dict[str, Any]], most: int) -> bool:
    rows = sum(map(_weight, small))
    if len(small) > most or (len(small) > 1 and rows >= MERGE_ROWS):
        return True
    return len(small) > TINY_FILES and rows < TINY_ROWS * len(small)


def _worth_again(files: Sequence[dict[str, Any]], *, closed: bool) -> Iterator[list[dict[str, Any]]]:
    """Yield lists of adjacent files that are merged once more. The merged files will need no other merge.

    The files of a list took at least the time SLOW to fill.
    """

    def may_grow(file: dict[str, Any]) -> bool:
        is_slow = file["ts_min"] is not None and file["ts_max"] - file["ts_min"] >= SLOW
        if not is_slow or _weight(file) >= TARGET_ROWS or (_weight(file) < SMALL_ROWS and not closed):
            return False
        if file is not files[-1] or file["step_min"] is None:
            return True
        return bool(file["rows"] / (file["step_max"] - file["step_min"] + 1) <= LAST_STEP_ROWS)

    return (list(group) for may, group in itertools.groupby(files, key=may_grow) if may)


def _row_weight(dataset: str) -> int:
    return ROLLUP_WEIGHT if dataset in ROLLUPS.values() else 1


def _weight(file: dict[str, Any]) -> int:
    """Return the number of rows of `file`, multiplied by ROLLUP_WEIGHT if they are rollups."""
    return int(file["rows"]) * _row_weight(file["dataset"])


def _attempt(file: dict[str, Any]) -> int:
    """Return the attempt of all rows of `file`, or -1 if the rows have several attempts or none."""
    low, high = file["attempt_min"], file["attempt_max"]
    return int(low) if low is not None and low == high else -1


def _merges(files: Iterable[dict[str, Any]], own_parts: frozenset[str], *, closed: bool, rows: int) -> Iterator[Merge]:
    for group in divided(files, _weight, MERGE_ROWS):
        if len(group) > 1:
            dataset, part = group[0]["dataset"], group[0]["part"]
            yield Merge(
                dataset=dataset,
                part=part,
                files=tuple(map(DataFile.from_snapshot, group)),
                own_parts=own_parts,
                closed=closed,
                rows=rows // _row_weight(dataset),
            )


def _step_order(file: dict[str, Any]) -> tuple[str, bool, int, str]:
    """Return the sort key of a file: its part, then its first step. Files without steps are last."""
    return file["part"], file["step_min"] is None, file["step_min"] or 0, file["path"]


Progress = Callable[[int, int], None]
"""Function that receives the number of attempted merges and the number of all merges."""

MOVED_ROWS: Final = 10_000
"""Smallest number of rows of a run that a merge moves from a shared part to the separate part of the run.

The limit applies to runs that have a separate part already. Fewer rows are not worth a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionReport:
    """The result of a compaction.

    `refused` is the number of merges that another process prevented. The other fields depend on `rewrite`. `rewritten`
    is the number of files that were not merged, but rewritten with the current encoding; the numbers of files and rows
    do not contain them. `left` is the number of files that still have an older encoding. `failed` has the errors of the
    merges that failed.
    """

    files_removed: int = 0
    files_added: int = 0
    rows: int = 0
    refused: int = 0
    rewritten: int = 0
    left: int = 0
    failed: tuple[str, ...] = ()
    seconds: float = 0.0


def compact(
    root: Location,
    sync: Sync,
    progress: Progress | None = None,
    *,
    now: dt.datetime | None = None,
    rewrite: bool = False,
) -> CompactionReport:
    """Execute the merges that are worthwhile at the newest version of the store at `root`, one commit per merge.

    `progress` is called with the number of attempted merges and the number of all merges. `now` replaces the current
    time. With `rewrite`, all other files with an older encoding are also rewritten, one commit per file. A merge that
    fails, or that another process prevents, does not prevent the others. Without `rewrite`, the merges after one that
    another process prevents are left to it, and a merge that fails raises StoreError.
    """
    started = time.monotonic()
    now = dt.datetime.now(dt.UTC) if now is None else now
    log = Log.open(root, sync)
    snapshot = log.snapshot()
    merges = plan(snapshot, now)
    merges += plan_rewrites(snapshot, merges) if rewrite else []
    done: list[tuple[Merge, list[DataFile]]] = []
    failed: list[str] = []
    refused = 0
    for attempted, merge in enumerate(merges, 1):
        try:
            done.append((merge, _apply_merge(log, merge, sync, now)))
        except ConflictError:
            refused += 1
            if not rewrite:
                break  # the other process will do the rest
        except StoreError as error:  # an unreadable file must not prevent that other files are rewritten
            if not rewrite:
                raise
            failed.append(str(error))
        else:
            log.checkpoint_if_due()
        finally:
            if progress is not None:
                progress(attempted, len(merges))
    log.refresh()
    merged = [(merge, files) for merge, files in done if len(merge.files) > 1]
    return CompactionReport(
        files_removed=sum(len(merge.files) for merge, _ in merged),
        files_added=sum(len(files) for _, files in merged),
        rows=sum(file.rows for _, files in merged for file in files),
        refused=refused,
        rewritten=len(done) - len(merged),
        left=len(plan_rewrites(log.snapshot(), ())) if rewrite else 0,
        failed=tuple(failed),
        seconds=time.monotonic() - started,
    )


def _apply_merge(log: Log, merge: Merge, sync: Sync, now: dt.datetime) -> list[DataFile]:
    """Replace the files of `merge`, and return the new files.

    Raises ConflictError if another process has replaced one of these files since the merge was planned.
    """
    files: list[DataFile] = []

    def build() -> Change:
        if not log.snapshot().contains([file.path for file in merge.files]):
            raise ConflictError("another process has replaced files of a merge: plan the merge again")
        files.extend(_rewrite(log.root, merge, sync, now))
        return Change(added=files, removed=merge.files, rewrites=True)

    log.replace_files(build)
    return files


def _rewrite(root: Location, merge: Merge, sync: Sync, now: dt.datetime) -> list[DataFile]:
    files: list[DataFile] = []
    write = functools.partial(write_file, mantissa_bits=coarsest(file.path for file in merge.files))
    try:
        tables = [read_file(root / file.path, merge.dataset) for file in merge.files]
        merged = conform(
            pa.concat_tables(tables, promote_options="permissive"), merge.dataset
        )  # delta-rs widens a type
        del tables
        for part, table in split_by_part(merged, merge):
            ranges = [table] if merge.closed else open_and_closed(table, now)
            for rows in itertools.chain.from_iterable(split_by_step(range_, merge.rows) for range_ in ranges):
                files.append(write(root, merge.dataset, part, rows, sync))  # noqa: PERF401 - known even if the next fails
    except FileNotFoundError as error:
        discard(root, files)
        raise ConflictError(f"a file to merge was deleted: {error}") from error
    except (OSError, pa.ArrowException) as error:
        discard(root, files)
        others = f" and {len(merge.files) - 1} other files" if len(merge.files) > 1 else ""
        raise StoreError(f"cannot merge {root / merge.files[0].path}{others}: {error}") from error
    return files


def split_by_part(table: pa.Table, merge: Merge) -> Iterator[tuple[str, pa.Table]]:
    """Yield part (partition) and rows of each run that is too large for a shared part.

    Then yield the shared part and the rows of all other runs.
    """
    if not merge.part.startswith(SHARED_PREFIX) or merge.dataset == "samples":
        yield merge.part, table
        return
    counts = {entry["values"]: entry["counts"] for entry in pc.value_counts(table.column("run")).to_pylist()}
    grown = [
        run
        for run, rows in counts.items()
        if rows >= OWN_PART_ROWS or (rows >= MOVED_ROWS and own_part(run) in merge.own_parts)
    ]
    for run in grown:
        yield own_part(run), table.filter(pc.equal(table.column("run"), run))
    shared = table.filter(pc.invert(pc.is_in(table.column("run"), pa.array(grown, pa.string())))) if grown else table
    if shared.num_rows:
        yield merge.part, shared


def open_and_closed(table: pa.Table, now: dt.datetime) -> Iterator[pa.Table]:
    """Yield the rows up to the last step of the slowest live rank, then the rows of later steps.

    Ranks will still add rows to the later steps.
    """
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


_STEP_KEYS: Final = ("run", "attempt", "step")


def split_by_step(table: pa.Table, target: int) -> Iterator[pa.Table]:
    """Yield `table`, ordered by run, attempt and step, as tables of about `target` rows. A step is never divided."""
    if table.num_rows <= target:
        yield table
        return
    order = sort_order(table, _STEP_KEYS)
    ends = _step_ends(table, order)
    start = 0
    while start < table.num_rows:
        position = int(np.searchsorted(ends, start + target, side="right"))
        end = int(ends[max(position - 1, int(np.searchsorted(ends, start, side="right")))])
        yield table.take(pa.array(order[start:end]))
        start = end


def _step_ends(table: pa.Table, order: Indices) -> Indices:
    """Return the positions at which another step or attempt begins, if the rows of `table` are in the order `order`.

    `order` has row numbers of `table`. The last position is the number of rows.
    """
    sorted_steps = table.select(_STEP_KEYS).take(pa.array(order))
    changed = np.zeros(table.num_rows - 1, dtype=bool)
    for name in _STEP_KEYS:
        column = sorted_steps.column(name).combine_chunks()
        if not pa.types.is_dictionary(column.type):
            column = column.dictionary_encode(null_encoding="encode")
        codes = column.indices.to_numpy(zero_copy_only=False)
        changed |= codes[1:] != codes[:-1]
    return np.append(np.flatnonzero(changed) + 1, table.num_rows)
