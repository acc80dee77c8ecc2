"""Find damaged and unfinished files of the Delta log, without delta-rs, which reads all entries or none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from rankscope_storage.log.entries import LOG_FOLDER, NO_CHECKPOINT, checkpoint_files, is_cut, newest_checkpoint

_STAGED: Final = re.compile(r".+#\d+")


def entries(root: Path) -> list[Path]:
    """Return the entries of the log of the store at `root`, oldest first."""
    return sorted(path for path in (root / LOG_FOLDER).glob("*.json") if path.stem.isdecimal())


def log_files(root: Path) -> list[Path]:
    """Return all files of the log: entries, checkpoints and unfinished ones."""
    return list((root / LOG_FOLDER).iterdir())


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


def torn_checkpoint_files(root: Path) -> list[Path]:
    """Return the files of a torn newest checkpoint, the most telling first; none where it is whole."""
    torn = torn_checkpoint(root)
    if torn is None:
        return []
    _, hint = checkpoint_files(root, newest_checkpoint(root))
    return list(dict.fromkeys([torn, hint]))


def torn_checkpoint(root: Path) -> Path | None:
    """Return the newest checkpoint when it is not whole, or the name that stands for one which is not there."""
    found = max((root / LOG_FOLDER).glob("*.checkpoint.parquet"), default=None)
    named, hint = checkpoint_files(root, newest_checkpoint(root))
    if hint.exists() and newest_checkpoint(root) != NO_CHECKPOINT and not named.exists():
        return hint
    try:
        if found is not None:
            pq.ParquetFile(found).read()
    except (OSError, pa.ArrowException):
        return found
    return None


def staged_entries(root: Path) -> list[Path]:
    """Return what delta-rs writes before it gives it its name; who is killed meanwhile leaves it behind."""
    return [path for path in (root / LOG_FOLDER).iterdir() if _STAGED.fullmatch(path.name)]


def _needed(root: Path) -> list[Path]:
    checkpoints = [int(path.name[:20]) for path in (root / LOG_FOLDER).glob("*.checkpoint*.parquet")]
    newest = max(checkpoints, default=-1)
    return [entry for entry in entries(root) if int(entry.stem) > newest]
