"""Which files are too old to stay as they are, and what becomes of each. Pure: from the log's statistics alone.

What is rolled up waits until the buckets it ends in are complete, so that a bucket seldom has several rollup rows; a
file that reaches over the limit is cut once there is enough in it that is too old. Neither lasts longer than `slack`.
"""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope_contract.model.rollups import BUCKET_STEPS, ROLLUPS
from rankscope_storage.log.snapshot import Snapshot
from rankscope_storage.maintenance.retention_policy import Limit

WORK_ROWS: Final = 50_000_000
"""Rows that one commit rolls up at most: half a minute, which a service that is stopped may have to wait."""

_BY_DAY: Final = frozenset({"samples"})
"""No file of these holds rows of two days."""

_LOG_CUTS: Final = dt.timedelta(milliseconds=1)  # times in the log are cut to the millisecond

File = Mapping[str, Any]
"""A row of the files of a Snapshot."""


class RetentionAction(enum.StrEnum):
    """What becomes of a file."""

    GONE = "nothing"
    ROLLED = "rollups"
    CUT = "rollups, in part"
    TRIMMED = "nothing, in part"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionJob:
    """Files that are replaced in one commit."""

    action: RetentionAction
    files: tuple[File, ...]
    before: dt.datetime


def plan(snapshot: Snapshot, limits: Mapping[str, Limit]) -> list[RetentionJob]:
    """Return what is to be done at `snapshot`, by the limits of datasets; a dataset without one stays for ever."""
    by_dataset: dict[str, list[File]] = {dataset: [] for dataset in limits}
    for file in snapshot.files.to_pylist():
        if file["dataset"] in by_dataset:
            by_dataset[file["dataset"]].append(file)
    going = [file for name, files in by_dataset.items() if name not in ROLLUPS for file in _old(files, limits[name])]
    works = (
        [
            RetentionJob(
                action=RetentionAction.GONE, files=tuple(going), before=max(one.before for one in limits.values())
            )
        ]
        if going
        else []
    )
    for name in sorted(by_dataset.keys() - ROLLUPS.keys() - _BY_DAY):
        works += _in_part(RetentionAction.TRIMMED, by_dataset[name], limits[name])
    for dataset in ROLLUPS:
        for group in _groups(by_dataset.get(dataset, ())):
            works += _rolling(group, limits[dataset])
    return works


def _rolling(group: Sequence[File], limit: Limit) -> Iterator[RetentionJob]:
    """Yield the works on one part and attempt of a dataset."""
    old = _old(group, limit)
    young = [file for file in group if not _is_old(file, limit)]
    goes_on = min((one["step_min"] // BUCKET_STEPS for one in young if one["step_min"] is not None), default=None)
    ready: list[File] = []
    rows = 0
    for file in sorted((one for one in old if not _waits(one, goes_on, limit)), key=_step_order):
        if ready and rows + file["rows"] > WORK_ROWS:
            yield RetentionJob(action=RetentionAction.ROLLED, files=tuple(ready), before=limit.before)
            ready, rows = [], 0
        ready.append(file)
        rows += file["rows"]
    if ready:
        yield RetentionJob(action=RetentionAction.ROLLED, files=tuple(ready), before=limit.before)
    yield from _in_part(RetentionAction.CUT, group, limit)


def _in_part(fate: RetentionAction, files: Sequence[File], limit: Limit) -> Iterator[RetentionJob]:
    """Yield the works on files that reach over the limit; compaction makes one file of many days where rows are few."""
    for file in files:
        if not _is_old(file, limit) and file["ts_min"] is not None and file["ts_min"] < limit.before - limit.slack:
            yield RetentionJob(action=fate, files=(file,), before=limit.before)


def _old(files: Sequence[File], limit: Limit) -> list[File]:
    return [file for file in files if _is_old(file, limit)]


def _is_old(file: File, limit: Limit) -> bool:
    """Whether nothing in `file` is young enough; one whose times the log does not know stays."""
    return file["ts_max"] is not None and bool(file["ts_max"] < limit.before - _LOG_CUTS)


def _waits(file: File, goes_on: int | None, limit: Limit) -> bool:
    """Whether the last bucket of `file` is one that may go on in files that stay, the first of which is `goes_on`."""
    if goes_on is None or file["step_max"] is None or file["ts_max"] < limit.before - limit.slack:
        return False
    return bool(file["step_max"] // BUCKET_STEPS >= goes_on)


def _groups(files: Sequence[File]) -> list[list[File]]:
    groups: dict[tuple[Any, ...], list[File]] = {}
    for file in files:
        groups.setdefault((file["part"], file["attempt_min"], file["attempt_max"]), []).append(file)
    return list(groups.values())


def _step_order(file: File) -> tuple[bool, int, str]:
    return file["step_min"] is None, file["step_min"] or 0, file["path"]
