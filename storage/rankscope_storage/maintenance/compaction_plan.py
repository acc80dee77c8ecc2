"""Select the files to merge: small files by part and attempt, in step order. Select the files to rewrite.

A merge costs about half of the time that storing its rows took. At full speed, each row is therefore merged at most
once. Files that took more than an hour to fill are merged again. A query for one tensor takes 1.5 ms per file, and a
query for a curve takes twice as long over several files as over one.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from rankscope_contract.model.schema import ROLLUPS
from rankscope_storage.files.older_integers import has_older_integers
from rankscope_storage.files.parquet import DataFile
from rankscope_storage.files.partitioning import SHARED_PREFIX, shared_part
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


def _older_rows(path: Path) -> int:
    """Return the number of rows of the file at `path` if it has integers in an older encoding, otherwise 0."""
    try:
        metadata = pq.read_metadata(path)
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
