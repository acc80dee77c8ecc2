"""Making bytes and names outlive a loss of power: the one place that calls fsync. delta-rs never does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

Sync = Callable[[Path], None]
"""Brings one file, or the names in one folder, to the disk. Tests pass a recorder."""


def sync_to_disk(path: Path) -> None:
    """Return when the content of the file, or the entries of the folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_named: set[Path] = set()  # folders whose names this process has brought to the disk


def make_folders(folder: Path, root: Path, sync: Sync) -> None:
    """Create `folder` below `root`; each name is synced in its parent, so that no synced file loses its path.

    Also that of a folder which is there, once in a process: who made it may have been killed before it was synced.
    """
    unsure = []
    while folder != root and not (folder in _named and folder.is_dir()):
        unsure.append(folder)
        folder = folder.parent
    for new in reversed(unsure):
        new.mkdir(exist_ok=True)
        sync(new.parent)
        _named.add(new)
