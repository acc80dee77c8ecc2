"""Vacuum: delete files that no version needs, write a checkpoint, and clean up the Delta log.

Killed processes, compaction and retention leave such files. A new file may be part of a commit in progress, and a
replaced file may still be read. Only files above a certain age are therefore deleted.
"""

from __future__ import annotations

import logging
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankscope_storage.base.errors import StoreError
from rankscope_storage.base.fsync import Sync
from rankscope_storage.files.encoding import STAGING
from rankscope_storage.log.delta import REMOVED_FILES_HOURS, Log
from rankscope_storage.log.entries import staged_entries
from rankscope_storage.maintenance.check import size_of
from rankscope_storage.query.sql_script import write_sql_script

_log = logging.getLogger(__name__)

STAGED_SECONDS: Final = 3600.0
"""Age in seconds above which files below `_staging/` and temporary files of the Delta log are from a killed process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanFiles:
    """Files that no process needs: data files that no version contains, and files that were not written completely."""

    data_files: tuple[Path, ...]
    staged_files: tuple[Path, ...]
    size_bytes: int


def find_orphan_files(log: Log) -> OrphanFiles:
    """Return the files of the store that no process needs and that are old enough to be deleted."""
    unused = tuple(log.unused_files(REMOVED_FILES_HOURS))
    unfinished = {path: _age_and_size(path) for path in (*(log.root / STAGING).glob("*"), *staged_entries(log.root))}
    staged = {path: size for path, (age, size) in unfinished.items() if age > STAGED_SECONDS}
    size_bytes = sum(map(size_of, unused)) + sum(staged.values())
    return OrphanFiles(data_files=unused, staged_files=tuple(staged), size_bytes=size_bytes)


def delete_orphan_files(orphans: OrphanFiles) -> None:
    """Delete the files of `orphans`. Raises OSError if a file cannot be deleted."""
    for path in (*orphans.data_files, *orphans.staged_files):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        _log.info("deleted unused file", extra={"path": str(path)})


def _age_and_size(path: Path) -> tuple[float, int]:
    """Return the age and the size of `path`: seconds since the last modification, and bytes.

    For a folder, the newest file defines the age, and the size is the sum of all files.
    """
    now = time.time()
    newest, size = 0.0, 0
    for entry in (path, *path.rglob("*")):
        try:
            status = entry.stat()
        except FileNotFoundError:  # another process has just renamed it
            newest = now
        else:
            newest = max(newest, status.st_mtime)
            size += 0 if stat.S_ISDIR(status.st_mode) else status.st_size
    return now - newest, size


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceReport:
    """The result of maintenance: the numbers of deleted files, and the version of the new checkpoint."""

    version: int
    data_files: int
    staged_files: int
    seconds: float


def maintain(root: Path, sync: Sync) -> MaintenanceReport:
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
