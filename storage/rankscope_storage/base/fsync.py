"""Make files and folder entries survive a power failure.

No other module calls fsync, and delta-rs never calls it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rankscope_storage.base.location import Location

Sync = Callable[[Location], None]
"""Function that flushes one file, or the entries of one folder, to the disk.

Tests pass a function that records the calls."""


def sync_to_disk(path: Location) -> None:
    """Flush the content of the file, or the entries of the folder, at `path` to the disk."""
    descriptor = os.open(str(path), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_durable: set[Path] = set()  # folders with an entry in their parent that this process has fsynced


def make_folders(folder: Path, root: Path, sync: Sync) -> None:
    """Create `folder` and its missing parents below `root`, and fsync each parent, so that the path is durable.

    If a folder already exists, its parent is fsynced too, once per process: the process that created the folder may
    have been killed before its fsync.
    """
    missing = []
    while folder != root and not (folder in _durable and folder.is_dir()):
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        sync(new.parent)
        _durable.add(new)
