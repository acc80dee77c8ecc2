"""Entries of the log that are not whole, found without delta-rs, which reads all of them or none."""

from __future__ import annotations

import json
from pathlib import Path

from rankscope_storage.log.files import LOG_FOLDER, is_cut


def entries(root: Path) -> list[Path]:
    """Return the entries of the log of the store at `root`, oldest first."""
    return sorted(path for path in (root / LOG_FOLDER).glob("*.json") if path.stem.isdecimal())


def is_torn(entry: Path) -> bool:
    """Whether `entry` is cut, or no line of JSON per action, as after a loss of power. An empty one commits nothing."""
    try:
        text = entry.read_bytes()
        return not all(isinstance(json.loads(line), dict) for line in text.splitlines()) or is_cut(text)
    except ValueError:
        return True


def torn_entries(root: Path) -> list[Path]:
    """Return the torn entries among those that a reader needs: the ones behind the newest checkpoint."""
    return [entry for entry in _needed(root) if is_torn(entry)]


def empty_entries(root: Path) -> list[Path]:
    """Return the entries among those that have a name only: power failed before they had content."""
    return [entry for entry in _needed(root) if not entry.stat().st_size]


def _needed(root: Path) -> list[Path]:
    checkpoints = [int(path.name[:20]) for path in (root / LOG_FOLDER).glob("*.checkpoint*.parquet")]
    newest = max(checkpoints, default=-1)
    return [entry for entry in entries(root) if int(entry.stem) > newest]
