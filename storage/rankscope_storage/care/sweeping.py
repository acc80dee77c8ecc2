"""What dead processes, compaction and retention leave behind: files that no version names, old enough to be nobody's.

A file just written may be on its way into a commit, and a file just replaced may still be read. Hence the ages.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankscope_storage.files.parquet import STAGING
from rankscope_storage.log.delta import REMOVED_FILES_HOURS, Log
from rankscope_storage.log.files import staged_entries

_log = logging.getLogger(__name__)

STAGED_SECONDS: Final = 3600.0
"""What stays longer under `_staging/`, or unnamed beside the log, was left by a process that died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leavings:
    """What nobody needs: data files that no version names, and unfinished ones."""

    data_files: tuple[Path, ...]
    staged_files: tuple[Path, ...]
    size_bytes: int


def find_leavings(log: Log) -> Leavings:
    """Return what is left behind in the store of `log`, and old enough."""
    unused = tuple(log.unused_files(REMOVED_FILES_HOURS))
    beside = (*(log.root / STAGING).glob("*"), *staged_entries(log.root))
    staged = tuple(path for path in beside if _age_seconds(path) > STAGED_SECONDS)
    return Leavings(data_files=unused, staged_files=staged, size_bytes=sum(map(_size, (*unused, *staged))))


def sweep(leavings: Leavings) -> None:
    """Remove them. Raises OSError."""
    for path in (*leavings.data_files, *leavings.staged_files):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        _log.info("removed unused file", extra={"path": str(path)})


def _age_seconds(path: Path) -> float:
    """Return how long nobody has touched `path`; of a folder, anything in it."""
    return time.time() - max((_modified(one) for one in (path, *_within(path))), default=time.time())


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process has just renamed it into place
        return time.time()


def _size(path: Path) -> int:
    try:
        return sum(one.stat().st_size for one in (path, *_within(path)) if one.is_file())
    except FileNotFoundError:
        return 0


def _within(path: Path) -> Iterable[Path]:
    return path.rglob("*") if path.is_dir() else ()
