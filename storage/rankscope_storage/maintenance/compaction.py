"""Merge small files into a few files with adjacent step ranges.

Every file costs a query 0.15 ms. `compaction_plan` therefore selects small files of one part (partition) and attempt.
They are merged in step order and divided at step boundaries, so that no two files of one merge share a step of an
attempt. Rows after the last step of the slowest live rank are written to a separate file. It is merged later with the
rows that this rank still sends. Rows that arrive late also remain separate until another merge is worthwhile.

The shared parts of past days are merged with each other, and a run that has grown is moved to a separate part. The
Delta log permits one compaction at a time to commit. A compaction whose commit is refused deletes its files. A
compaction that is killed leaves only files that no version contains, which vacuum deletes.
"""

from __future__ import annotations

import datetime as dt
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_storage.base.errors import ConflictError, StoreError
from rankscope_storage.base.fsync import Sync
from rankscope_storage.base.schema import conform
from rankscope_storage.files.encoding import coarsest
from rankscope_storage.files.parquet import DataFile, discard, read_file, write_file
from rankscope_storage.files.partitioning import OWN_PART_ROWS, SHARED_PREFIX, own_part
from rankscope_storage.files.sorting import Indices, sort_order
from rankscope_storage.log.delta import Log
from rankscope_storage.log.translation import Change
from rankscope_storage.maintenance.compaction_plan import SILENCE, Merge, plan, plan_rewrites

MOVED_ROWS: Final = 10_000
"""Smallest number of rows of a run that a merge moves from a shared part to the separate part of the run.

The limit applies to runs that have a separate part already. Fewer rows are not worth a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionReport:
    """The result of a compaction.

    `refused` is the number of merges that another compaction prevented. `rewritten` is the number of files that were
    not merged, but rewritten with the current encoding; the numbers of files and rows do not contain them.
    """

    files_removed: int = 0
    files_added: int = 0
    rows: int = 0
    refused: int = 0
    rewritten: int = 0
    seconds: float = 0.0


def compact(
    root: Path,
    sync: Sync,
    progress: Callable[[int, int], None] | None = None,
    *,
    now: dt.datetime | None = None,
    rewrite: bool = False,
) -> CompactionReport:
    """Execute the merges that are worthwhile at the newest version of the store at `root`, one commit per merge.

    `progress` is called with the number of finished merges and the number of all merges. `now` replaces the current
    time. With `rewrite`, all other files with an older encoding are also rewritten, one commit per file.
    """
    started = time.monotonic()
    now = dt.datetime.now(dt.UTC) if now is None else now
    log = Log.open(root, sync)
    removed = added = rows = refused = rewritten = 0
    merges = plan(log.snapshot(), now)
    rewrites = plan_rewrites(log.snapshot(), merges) if rewrite else []
    merges += rewrites
    for done, merge in enumerate(merges, 1):
        try:
            files = _apply_merge(log, merge, sync, now)
        except ConflictError:
            refused += 1
            if rewrite:
                continue  # another compaction rewrites only the files that it merges
            break  # another compaction is running and will do the rest
        log.checkpoint_if_due()
        if progress is not None:
            progress(done, len(merges))
        if done > len(merges) - len(rewrites):
            rewritten += 1
            continue
        removed, added = removed + len(merge.files), added + len(files)
        rows += sum(file.rows for file in files)
    return CompactionReport(
        files_removed=removed,
        files_added=added,
        rows=rows,
        refused=refused,
        rewritten=rewritten,
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


def _rewrite(root: Path, merge: Merge, sync: Sync, now: dt.datetime) -> list[DataFile]:
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
        raise StoreError(f"cannot merge files of {root}: {error}") from error
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
