"""Which files are worth merging: small ones by part and attempt, in order of step, and those of slow runs once more.

A merge costs about half of what it took to store its rows: at full speed each row is merged once at most. Files that
took more than an hour to fill are merged again, since a question about one tensor takes 1.5 ms for each file, and a
curve over several files twice as long as over one.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope_contract.model.rollups import ROLLUPS
from rankscope_storage.files.parquet import DataFile
from rankscope_storage.files.partitioning import SHARED_PREFIX, shared_part
from rankscope_storage.log.snapshot import Snapshot

SMALL_ROWS: Final = 750_000
"""A file below this is worth merging: half of TARGET_ROWS, so that a merge leaves one such file at most."""
SMALL_FILES: Final = 50
"""Merge when a part has more small files than this …"""
TINY_FILES: Final = 10
"""… or more than this, and they hold on average less than TINY_ROWS."""
TINY_ROWS: Final = 100_000
TARGET_ROWS: Final = 1_500_000
"""Rows of a merged file, where steps allow it. What is merged once more becomes files of up to MERGE_ROWS."""
MERGE_ROWS: Final = 2 * TARGET_ROWS
"""Rows that one merge holds in memory at most; small files that hold as many are merged, however few they are."""
ROLLUP_WEIGHT: Final = 4
"""A row of rollups counts as so many others, for it takes as much memory: it has forty numbers, and few are null."""
PAST_FILES: Final = 3
"""Small files that the shared parts of past days may have together."""
SLOW: Final = dt.timedelta(hours=1)
"""Where files take longer to fill, rows come so seldom that each can be written once more."""
LAST_STEP_ROWS: Final = 1_000
"""Whoever asks for the last step reads its whole file: of steps with more rows, the last file grows no further."""
SILENCE: Final = dt.timedelta(minutes=10)
"""A rank that has sent nothing for so long holds up no merge, and a part is merged to its end."""


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
    rows: int = TARGET_ROWS
    """Of each file that these become, where steps allow it."""


def plan(snapshot: Snapshot, now: dt.datetime | None = None) -> list[Merge]:
    """Return the merges that are worth while at `snapshot`: by part and attempt, each of neighbours in step order."""
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


_PAST: Final = f"{SHARED_PREFIX}past"


def _territory(part: str, now: dt.datetime) -> str:
    """Return the part, or one name for the shared parts of all past days: their files may become one."""
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
    """Yield files, each behind the other, that may be merged once more because that will not have to be done again."""

    def may_grow(file: dict[str, Any]) -> bool:
        if _weight(file) >= TARGET_ROWS or (file is files[-1] and _rows_a_step(file) > LAST_STEP_ROWS):
            return False
        return _is_slow(file) and (closed or _weight(file) >= SMALL_ROWS)

    for may, neighbours in itertools.groupby(files, key=may_grow):
        if may:
            yield list(neighbours)


def _is_slow(file: dict[str, Any]) -> bool:
    return file["ts_min"] is not None and file["ts_max"] - file["ts_min"] >= SLOW


def _rows_a_step(file: dict[str, Any]) -> float:
    if file["step_min"] is None:
        return 0.0
    return int(file["rows"]) / (int(file["step_max"]) - int(file["step_min"]) + 1)


def _weight(file: dict[str, Any]) -> int:
    """Return how many rows the rows of `file` count as."""
    return int(file["rows"]) * _row_weight(file["dataset"])


def _row_weight(dataset: str) -> int:
    return ROLLUP_WEIGHT if dataset in ROLLUPS.values() else 1


def _attempt(file: dict[str, Any]) -> int:
    """Return the attempt that all rows of `file` belong to, -1 where there are several or none."""
    low, high = file["attempt_min"], file["attempt_max"]
    return int(low) if low is not None and low == high else -1


def _merges(files: Iterable[dict[str, Any]], own_parts: frozenset[str], *, closed: bool, rows: int) -> Iterator[Merge]:
    group: list[dict[str, Any]] = []
    for file in files:
        if group and sum(map(_weight, group)) + _weight(file) > MERGE_ROWS:
            yield _merge(group, own_parts, closed=closed, rows=rows)
            group = []
        group.append(file)
    if len(group) > 1:
        yield _merge(group, own_parts, closed=closed, rows=rows)


def _merge(files: Sequence[dict[str, Any]], own_parts: frozenset[str], *, closed: bool, rows: int) -> Merge:
    return Merge(
        dataset=files[0]["dataset"],
        part=files[0]["part"],
        files=tuple(map(DataFile.from_snapshot, files)),
        own_parts=own_parts,
        closed=closed,
        rows=rows // _row_weight(files[0]["dataset"]),
    )


def _step_order(file: dict[str, Any]) -> tuple[str, bool, int, str]:
    """Sort by day where parts are of days, then by first step; what has no step at all last."""
    return file["part"], file["step_min"] is None, file["step_min"] or 0, file["path"]
