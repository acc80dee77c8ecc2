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


def make_folders(folder: Path, root: Path, sync: Sync) -> None:
    """Create `folder` below `root`; each new name is synced in its parent, so that no synced file loses its path."""
    missing = []
    while folder != root and not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        sync(new.parent)
