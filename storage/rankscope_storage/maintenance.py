"""What a store needs now and then: a checkpoint, and the removal of what no version and no query needs any more."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankscope_storage.durable import Sync
from rankscope_storage.errors import StoreError
from rankscope_storage.log import REMOVED_FILES_HOURS, Log
from rankscope_storage.log_files import staged_entries
from rankscope_storage.parquet import STAGING
from rankscope_storage.plain_sql import write_plain_sql

_log = logging.getLogger(__name__)

STAGED_SECONDS: Final = 3600.0
"""A file that stays longer under `_staging/`, or unnamed beside the log, was left by a process that died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceReport:
    """What was removed, and the version of the checkpoint."""

    version: int
    data_files: int
    staged_files: int
    seconds: float


def maintain(root: Path, sync: Sync) -> MaintenanceReport:
    """Remove unused files of the store at `root`, then checkpoint and clean up its log.

    Files that compaction replaced, or that a dead process never committed, go after REMOVED_FILES_HOURS.
    """
    started = time.monotonic()
    log = Log.open(root, sync)
    try:
        # First, because a full disk has no room for a checkpoint.
        unused = log.unused_files(REMOVED_FILES_HOURS)
        left = (*(root / STAGING).iterdir(), *staged_entries(root))
        staged = [path for path in left if _age_seconds(path) > STAGED_SECONDS]
        for path in (*unused, *staged):
            path.unlink(missing_ok=True)
            _log.info("removed unused file", extra={"path": str(path)})
        log.checkpoint()
        log.clean_up()
        write_plain_sql(root)
    except OSError as error:
        raise StoreError(f"cannot tidy up {root}: {error.strerror or error}") from error
    return MaintenanceReport(
        version=log.version,
        data_files=len(unused),
        staged_files=len(staged),
        seconds=time.monotonic() - started,
    )


def _age_seconds(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:  # another process has just renamed it into place
        return 0.0
