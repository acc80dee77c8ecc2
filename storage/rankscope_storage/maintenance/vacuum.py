"""Vacuum: delete files that no version needs, write a checkpoint, and clean up the Delta log.

Killed processes, compaction and retention leave such files. A new file may be part of a commit in progress, and a
replaced file may still be read. Only files above a certain age are therefore deleted.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Final

from rankscope_storage.base.errors import StoreError
from rankscope_storage.base.fsync import Sync
from rankscope_storage.base.location import Location
from rankscope_storage.files.filesystem import DATA_FILES, STAGING, filesystem
from rankscope_storage.log.delta import REMOVED_FILES_HOURS, Log
from rankscope_storage.log.entries import staged_entries
from rankscope_storage.query.sql_script import write_sql_script

_log = logging.getLogger(__name__)

STAGED_SECONDS: Final = 3600.0
"""Age in seconds above which files below `_staging/` and temporary files of the Delta log are from a killed process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanFiles:
    """Files that no process needs: data files that no version contains, and files that were not written completely."""

    data_files: tuple[Location, ...]
    staged_files: tuple[Location, ...]
    size_bytes: int


def find_orphan_files(log: Log) -> OrphanFiles:
    """Return the files of the store that no process needs and that are old enough to be deleted."""
    files, unused, before = filesystem(log.root), log.unused_files(REMOVED_FILES_HOURS), time.time() - STAGED_SECONDS
    unfinished = (*files.list(log.root / STAGING), *staged_entries(log.root))
    staged = [one for one in unfinished if one.modified < before]
    on_disk = {one.path: one.size for one in files.list(log.root, DATA_FILES)} if unused else {}
    return OrphanFiles(
        data_files=tuple(unused),
        staged_files=tuple(one.path for one in staged),
        size_bytes=sum(on_disk.get(path, 0) for path in unused) + sum(one.size for one in staged),
    )


def delete_orphan_files(orphans: OrphanFiles) -> None:
    """Delete the files of `orphans`. Raises OSError if a file cannot be deleted."""
    paths = (*orphans.data_files, *orphans.staged_files)
    if paths:
        filesystem(paths[0]).delete(paths)
    for path in paths:
        _log.info("deleted unused file", extra={"path": str(path)})


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceReport:
    """The result of maintenance: the numbers of deleted files, and the version of the new checkpoint."""

    version: int
    data_files: int
    staged_files: int
    seconds: float


def maintain(root: Location, sync: Sync) -> MaintenanceReport:
    """Delete unused files of the store at `root`, then write a checkpoint and delete old entries of the Delta log.

    Files that were replaced, or that a killed process never committed, are deleted after REMOVED_FILES_HOURS hours.
    """
    started = time.monotonic()
    log = Log.open(root, sync)
    try:
        # First, because a checkpoint needs space on the disk.
        orphans = find_orphan_files(log)
        delete_orphan_files(orphans)
        log.checkpoint()
        log.clean_up()
        write_sql_script(root)
    except OSError as error:
        raise StoreError(f"cannot maintain {root}: {error.strerror or error}") from error
    return MaintenanceReport(
        version=log.version,
        data_files=len(orphans.data_files),
        staged_files=len(orphans.staged_files),
        seconds=time.monotonic() - started,
    )
