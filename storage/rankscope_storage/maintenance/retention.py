"""`retain`: raw rows of so many days, rollups of so many more, then nothing. Events and what describes runs stay.

Each piece of work ends in one commit under the mutex of compaction: files of raw rows go and files of rollups come, or
nothing happens. Who dies before it has changed nothing, and who is asked again goes on with what is left.
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
from rankscope_storage.maintenance.retention_plan import File, RetentionAction, RetentionJob, plan
from rankscope_storage.maintenance.retention_policy import RAW, Retention
from rankscope_storage.maintenance.rollup_writer import cut, roll_up

__all__ = ["RAW", "Retention", "RetentionReport", "retain"]

_RETRIES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionReport:
    """What went and what came for it, or with `dry_run` would go: `groups` has a row per dataset, part and fate.

    What stays of files that were cut went in no sense; a dry run does not look into them, and counts them whole.
    `left` counts works that were not begun, `refused` those whose files somebody else replaced meanwhile; `failed` says
    why others could not be done, such as a file that cannot be read.
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
    """Roll up and let go what is too old at `now` in the store at `root`; the disk is free after maintenance.

    At most `works` commits are made, and `progress` is told how many of how many are. Raises ConflictError when
    compactions never let it through.
    """
    log = Log.open(root, sync)
    planned = plan(log.snapshot(), retention.limits(now))
    if dry_run:
        return _report(planned)
    if any(work.action in {RetentionAction.ROLLED, RetentionAction.CUT} for work in planned):
        _widen(log)
    done: list[RetentionJob] = []
    rollups: list[DataFile] = []
    rest: list[DataFile] = []
    refused, failed, begun = 0, [], 0
    for begun, work in enumerate(planned, 1):
        try:
            files = _apply_job(log, work, sync)
        except _ReplacedError:
            refused += 1
        except ConflictError:
            raise
        except StoreError as error:  # a file that cannot be read must not keep all others for ever
            failed.append(str(error))
        else:
            if files is not None:
                done.append(work)
                rest += [file for file in files if file.dataset == work.files[0]["dataset"]]
                rollups += [file for file in files if file.dataset != work.files[0]["dataset"]]
        if progress is not None:
            progress(begun, len(planned))
        if len(done) == works:
            break
    return _report(done, rollups, rest, left=len(planned) - begun, refused=refused, failed=tuple(failed))


class _ReplacedError(ConflictError):
    """Files of a work are no longer in the store as they were: plan anew."""


def _apply_job(log: Log, work: RetentionJob, sync: Sync) -> list[DataFile] | None:
    """Replace the files of `work`, and return those that came; None when nothing in them is due after all."""
    if not log.snapshot().contains(_paths(work.files)):
        raise _ReplacedError("another process has replaced the files")
    added: list[DataFile] = []
    if work.action is RetentionAction.ROLLED:
        added = roll_up(log.root, work.files, sync)
    elif work.action in {RetentionAction.CUT, RetentionAction.TRIMMED}:
        added = cut(log.root, work.files[0], work.before, sync)
        if not added:
            return None
    try:
        _replace(log, work, added)
    except ConflictError:  # after any other error it may have been stored all the same
        discard(log.root, added)
        raise
    return added


def _replace(log: Log, work: RetentionJob, added: Sequence[DataFile]) -> None:
    """Commit. However long reading took, it still holds where the files are still there: files never change."""

    def build() -> Change:
        if not log.snapshot().contains(_paths(work.files)):
            raise _ReplacedError("another process has replaced the files")
        return Change(
            added=added,
            removed=[DataFile.from_snapshot(file) for file in work.files],
            info={"rankscopeRetention": f"rows before {work.before.isoformat()} became {work.action}"},
            rewrites=True,  # though rows do change: delta-rs would refuse every append that is on its way
        )

    log.replace_files(build, tries=_RETRIES, reuse_files=True)


def _widen(log: Log) -> None:
    """Give the table the columns of rollups, if it was made before there were any."""
    for _ in range(_RETRIES):
        try:
            log.add_missing_columns()
        except ConflictError:
            log.refresh()
        else:
            return


def _report(
    works: Sequence[RetentionJob],
    rollups: Sequence[DataFile] = (),
    rest: Sequence[DataFile] = (),
    *,
    left: int = 0,
    refused: int = 0,
    failed: tuple[str, ...] = (),
) -> RetentionReport:
    files = [file for work in works for file in work.files]
    return RetentionReport(
        files=len(files),
        rows=sum(file["rows"] for file in files) - sum(file.rows for file in rest),
        size_bytes=sum(file["size_bytes"] for file in files) - sum(file.size_bytes for file in rest),
        added_rows=sum(file.rows for file in rollups),
        added_bytes=sum(file.size_bytes for file in rollups),
        left=left,
        refused=refused,
        failed=failed,
        groups=_groups(works),
    )


def _groups(works: Sequence[RetentionJob]) -> pa.Table:
    keys = {"dataset": pa.string(), "part": pa.string(), "becomes": pa.string()}
    schema = pa.schema({**keys, "rows": pa.int64(), "size_bytes": pa.int64()}.items())
    told = [{**file, "becomes": work.action} for work in works for file in work.files]
    rows = pa.Table.from_pylist([{name: file[name] for name in schema.names} for file in told], schema=schema)
    sums = [("rows", "count"), ("rows", "sum"), ("size_bytes", "sum")]
    grouped = rows.group_by(list(keys)).aggregate(sums).sort_by("size_bytes_sum")
    return grouped.select([*keys, "rows_count", "rows_sum", "size_bytes_sum"]).rename_columns(
        [*keys, "files", "rows", "bytes"]
    )


def _paths(files: Sequence[File]) -> list[str]:
    return [file["path"] for file in files]
