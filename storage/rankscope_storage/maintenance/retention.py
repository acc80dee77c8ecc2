"""Retention: raw rows are kept for some days, rollups for more days. Events and dimensions are kept forever.

The work is divided into jobs. Each job ends in one commit that conflicts with all other rewrites. Either files of raw
rows are removed and files of rollups added, or nothing changes. A process that is killed before the commit has changed
nothing, and the next call continues with the remaining jobs.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pyarrow as pa

from rankscope_storage.base.errors import ConflictError, StoreError
from rankscope_storage.base.fsync import Sync
from rankscope_storage.files.parquet import DataFile, discard
from rankscope_storage.log.delta import Log
from rankscope_storage.log.translation import Change
from rankscope_storage.maintenance.retention_plan import RetentionAction, RetentionJob, plan
from rankscope_storage.maintenance.retention_policy import RAW, Retention
from rankscope_storage.maintenance.rollup_writer import cut, roll_up

__all__ = ["RAW", "Retention", "RetentionReport", "retain"]

_RETRIES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionReport:
    """The result of a retention run, or of a dry run. `groups` has a row per dataset, part and action.

    Rows that remain of divided files are not counted as removed. A dry run does not read these files and counts all
    their rows. `left` is the number of jobs that were not started. `refused` is the number of jobs with files that
    another process replaced. `failed` has a reason for each other job that failed, such as an unreadable file.
    """

    files: int = 0
    rows: int = 0
    size_bytes: int = 0
    added_rows: int = 0
    added_bytes: int = 0
    left: int = 0
    refused: int = 0
    failed: tuple[str, ...] = ()
    groups: pa.Table = field(default_factory=lambda: _groups(()))


def retain(
    root: Path,
    retention: Retention,
    sync: Sync,
    *,
    now: dt.datetime,
    dry_run: bool = False,
    works: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RetentionReport:
    """Roll up and remove the rows of the store at `root` that are too old at `now`.

    Vacuum frees their disk space later.

    Makes at most `works` commits. `progress` is called with the number of finished jobs and the number of all jobs.
    Raises ConflictError if compactions prevent a commit repeatedly.
    """
    log = Log.open(root, sync)
    planned = plan(log.snapshot(), retention.limits(now))
    if dry_run:
        return _report(planned)
    if any(job.action in {RetentionAction.ROLLED, RetentionAction.CUT} for job in planned):
        _add_rollup_columns(log)
    done: list[RetentionJob] = []
    rollups: list[DataFile] = []
    remaining: list[DataFile] = []
    refused, failed, begun = 0, [], 0
    for begun, job in enumerate(planned, 1):
        try:
            files = _apply_job(log, job, sync)
        except _ReplacedError:
            refused += 1
        except ConflictError:
            raise
        except StoreError as error:  # an unreadable file must not block the retention of others
            failed.append(str(error))
        else:
            if files is not None:
                done.append(job)
                remaining += [file for file in files if file.dataset == job.files[0]["dataset"]]
                rollups += [file for file in files if file.dataset != job.files[0]["dataset"]]
        if progress is not None:
            progress(begun, len(planned))
        if len(done) == works:
            break
    return _report(done, rollups, remaining, left=len(planned) - begun, refused=refused, failed=tuple(failed))


class _ReplacedError(ConflictError):
    """Another process has replaced files of a retention job. The caller must plan the job again."""


def _apply_job(log: Log, job: RetentionJob, sync: Sync) -> list[DataFile] | None:
    """Replace the files of `job`, and return the new files; None if no bucket of steps in the files is too old."""

    def check_unchanged() -> None:
        if not log.snapshot().contains([file["path"] for file in job.files]):
            raise _ReplacedError("another process has replaced files of a retention job: plan the job again")

    def build() -> Change:
        check_unchanged()  # the rollups are still correct if the files exist, because files never change
        return Change(
            added=added,
            removed=[DataFile.from_snapshot(file) for file in job.files],
            info={"rankscopeRetention": f"rows before {job.before.isoformat()} became {job.action}"},
            rewrites=True,  # rollups have no new rows
        )

    check_unchanged()
    added: list[DataFile] = []
    if job.action is RetentionAction.ROLLED:
        added = roll_up(log.root, job.files, sync)
    elif job.action in {RetentionAction.CUT, RetentionAction.TRIMMED}:
        added = cut(log.root, job.files[0], job.before, sync)
        if not added:
            return None
    try:
        log.replace_files(build, tries=_RETRIES, reuse_files=True)
    except ConflictError:  # after any other error, the commit may have been stored
        discard(log.root, added)
        raise
    return added


def _add_rollup_columns(log: Log) -> None:
    for _ in range(_RETRIES):  # only a table of an older release lacks them
        try:
            log.add_missing_columns()
        except ConflictError:
            log.refresh()
        else:
            return


def _report(
    jobs: Sequence[RetentionJob],
    rollups: Sequence[DataFile] = (),
    remaining: Sequence[DataFile] = (),
    *,
    left: int = 0,
    refused: int = 0,
    failed: tuple[str, ...] = (),
) -> RetentionReport:
    files = [file for job in jobs for file in job.files]
    return RetentionReport(
        files=len(files),
        rows=sum(file["rows"] for file in files) - sum(file.rows for file in remaining),
        size_bytes=sum(file["size_bytes"] for file in files) - sum(file.size_bytes for file in remaining),
        added_rows=sum(file.rows for file in rollups),
        added_bytes=sum(file.size_bytes for file in rollups),
        left=left,
        refused=refused,
        failed=failed,
        groups=_groups(jobs),
    )


def _groups(jobs: Sequence[RetentionJob]) -> pa.Table:
    keys = {"dataset": pa.string(), "part": pa.string(), "becomes": pa.string()}
    schema = pa.schema({**keys, "rows": pa.int64(), "size_bytes": pa.int64()}.items())
    files = [{**file, "becomes": job.action} for job in jobs for file in job.files]
    rows = pa.Table.from_pylist([{name: file[name] for name in schema.names} for file in files], schema=schema)
    sums = [("rows", "count"), ("rows", "sum"), ("size_bytes", "sum")]
    grouped = rows.group_by(list(keys)).aggregate(sums).sort_by("size_bytes_sum")
    return grouped.select([*keys, "rows_count", "rows_sum", "size_bytes_sum"]).rename_columns(
        [*keys, "files", "rows", "bytes"]
    )
