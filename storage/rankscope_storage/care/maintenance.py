"""What a store needs now and then: a checkpoint, and the removal of what no version and no query needs any more."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from rankscope_storage.asking.plain_sql import write_plain_sql
from rankscope_storage.care.sweeping import find_leavings, sweep
from rankscope_storage.durable import Sync
from rankscope_storage.errors import StoreError
from rankscope_storage.log.delta import Log


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
        leavings = find_leavings(log)
        sweep(leavings)
        log.checkpoint()
        log.clean_up()
        write_plain_sql(root)
    except OSError as error:
        raise StoreError(f"cannot tidy up {root}: {error.strerror or error}") from error
    return MaintenanceReport(
        version=log.version,
        data_files=len(leavings.data_files),
        staged_files=len(leavings.staged_files),
        seconds=time.monotonic() - started,
    )
