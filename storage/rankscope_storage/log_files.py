"""The files of a Delta log, read without delta-rs, which reads all of them or none. Paths and bytes only."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LOG_FOLDER: Final = "_delta_log"
NO_CHECKPOINT: Final = -1

_HINT: Final = "_last_checkpoint"
_STAGED: Final = re.compile(r".+#\d+")


def entry(root: Path, version: int) -> Path:
    """Return where the entry of `version` lies, whether it exists or not."""
    return root / LOG_FOLDER / f"{version:020d}.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """What one entry of the log says: the transactions it moved, and its text."""

    transactions: Mapping[str, int]
    text: bytes

    def holds(self, transactions: Mapping[str, int], paths: Sequence[str]) -> bool:
        """Whether it moved `transactions` and names the files at `paths`, whose last part no other file ever has."""
        named = all(path.rpartition("/")[2].encode() in self.text for path in paths)
        return named and transactions.items() <= self.transactions.items()


def read_entry(path: Path) -> Entry | None:
    """Return what the entry at `path` says, None when it was cleaned up."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    moved = (json.loads(line)["txn"] for line in text.splitlines() if line.startswith(b'{"txn"'))
    return Entry({transaction["appId"]: transaction["version"] for transaction in moved}, text)


def has_entries(root: Path) -> bool:
    """Return whether a table was ever completed at `root`; a full disk may have stopped its creation half way."""
    return any((root / LOG_FOLDER).glob("*.json")) or any((root / LOG_FOLDER).glob("*.parquet"))


def checkpoint_files(root: Path, version: int) -> tuple[Path, Path]:
    """Return the checkpoint of `version`, and the file that names the newest one to whoever opens the table."""
    return root / LOG_FOLDER / f"{version:020d}.checkpoint.parquet", root / LOG_FOLDER / _HINT


def newest_checkpoint(root: Path) -> int:
    """Return the version of the newest checkpoint, by the one small file that names it; NO_CHECKPOINT without one.

    The folder is not listed: this is asked between two commits.
    """
    try:
        return int(json.loads((root / LOG_FOLDER / _HINT).read_bytes())["version"])
    except (OSError, ValueError, KeyError, TypeError):  # never written, or torn by a loss of power
        return NO_CHECKPOINT


def staged_entries(root: Path) -> list[Path]:
    """Return what delta-rs writes before it gives it its name; who is killed meanwhile leaves it behind."""
    return [path for path in (root / LOG_FOLDER).iterdir() if _STAGED.fullmatch(path.name)]
