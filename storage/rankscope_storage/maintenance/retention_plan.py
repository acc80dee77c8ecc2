"""Select files with rows that are too old, and the action for each file.

This module uses only statistics of the Delta log. A file is not rolled up before its last bucket (range of steps) is
complete, so that few buckets have several rollup rows of one series. A file with old and newer rows is divided when its
oldest row is too old by more than the `slack` of the limit. For these two reasons, rows are kept after the limit, but
for at most the `slack` longer.
"""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope_storage.base.datasets import BUCKET_STEPS, ROLLUPS
from rankscope_storage.log.snapshot import LOG_TIME_STEP, Snapshot, divided
from rankscope_storage.maintenance.retention_policy import Limit

WORK_ROWS: Final = 50_000_000
"""Largest number of rows that one commit rolls up. This takes half a minute, for which a stopping service may wait."""

_BY_DAY: Final = frozenset({"samples"})
"""Datasets in which no file has rows of more than one day."""


File = Mapping[str, Any]
"""One data file as a row of `Snapshot.files`: path, dataset, part, rows, and ranges of columns."""


class RetentionAction(enum.StrEnum):
    """The action of a retention job.

    The text of the value names the replacement for the rows of a file. If the text has "in part", only the rows that
    are too old are replaced.
    """

    GONE = "nothing"
    ROLLED = "rollups"
    CUT = "rollups, in part"
    TRIMMED = "nothing, in part"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionJob:
    """Files that one commit replaces, and the action. Rows from before the time `before` are too old."""

    action: RetentionAction
    files: tuple[File, ...]
    before: dt.datetime


def plan(snapshot: Snapshot, limits: Mapping[str, Limit]) -> list[RetentionJob]:
    """Return the retention jobs at `snapshot`. `limits` has a limit per dataset; other datasets are kept forever."""
    by_dataset: dict[str, list[File]] = {dataset: [] for dataset in limits}
    for file in snapshot.files.to_pylist():
        if file["dataset"] in by_dataset:
            by_dataset[file["dataset"]].append(file)
    too_old = [
        file
        for name, files in by_dataset.items()
        if name not in ROLLUPS
        for file in files
        if _is_old(file, limits[name])
    ]
    jobs = []
    if too_old:
        newest = max(limit.before for limit in limits.values())
        jobs.append(RetentionJob(action=RetentionAction.GONE, files=tuple(too_old), before=newest))
    for name in sorted(by_dataset.keys() - ROLLUPS.keys() - _BY_DAY):
        jobs += _in_part(RetentionAction.TRIMMED, by_dataset[name], limits[name])
    for dataset in ROLLUPS:
        groups: dict[tuple[Any, ...], list[File]] = {}
        for file in by_dataset.get(dataset, ()):
            groups.setdefault((file["part"], file["attempt_min"], file["attempt_max"]), []).append(file)
        for group in groups.values():
            jobs += _rolling(group, limits[dataset])
    return jobs


def _rolling(group: Sequence[File], limit: Limit) -> Iterator[RetentionJob]:
    """Yield the jobs for the files of one part and attempt, of a dataset that has rollups."""
    first_steps = (file["step_min"] for file in group if not _is_old(file, limit) and file["step_min"] is not None)
    next_bucket = min((step // BUCKET_STEPS for step in first_steps), default=None)
    ready = [file for file in group if _is_old(file, limit) and not _waits(file, next_bucket, limit)]
    for files in divided(sorted(ready, key=_step_order), lambda file: int(file["rows"]), WORK_ROWS):
        yield RetentionJob(action=RetentionAction.ROLLED, files=tuple(files), before=limit.before)
    yield from _in_part(RetentionAction.CUT, group, limit)


def _in_part(action: RetentionAction, files: Sequence[File], limit: Limit) -> Iterator[RetentionJob]:
    """Yield the jobs for files with both old and newer rows.

    Such files result from compaction, which merges the rows of many days into one file if a run has few rows.
    """
    for file in files:
        if not _is_old(file, limit) and file["ts_min"] is not None and file["ts_min"] < limit.before - limit.slack:
            yield RetentionJob(action=action, files=(file,), before=limit.before)


def _is_old(file: File, limit: Limit) -> bool:
    """Return whether all rows of `file` are too old; False if the Delta log does not contain their times."""
    return file["ts_max"] is not None and bool(file["ts_max"] < limit.before - LOG_TIME_STEP)


def _waits(file: File, next_bucket: int | None, limit: Limit) -> bool:
    """Return whether newer files may have more rows of the last bucket of `file`, so that it is not rolled up yet.

    `next_bucket` is the lowest bucket of these files. Returns False if `file` is too old by more than the slack.
    """
    if next_bucket is None or file["step_max"] is None or file["ts_max"] < limit.before - limit.slack:
        return False
    return bool(file["step_max"] // BUCKET_STEPS >= next_bucket)


def _step_order(file: File) -> tuple[bool, int, str]:
    return file["step_min"] is None, file["step_min"] or 0, file["path"]
