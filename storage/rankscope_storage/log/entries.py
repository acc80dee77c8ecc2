"""The files of a Delta log, read without delta-rs, which reads all of them or none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LOG_FOLDER: Final = "_delta_log"
NO_CHECKPOINT: Final = -1
ACTIONS: Final = "rankscopeActions"
"""In what a commit says of itself: how many lines follow it. An entry that was cut between two lines looks valid."""

_HINT: Final = "_last_checkpoint"
_WATERMARK: Final = "w:"


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


def transactions_between(root: Path, since: int, upto: int) -> dict[str, int] | None:
    """Return the transactions that versions after `since` up to `upto` moved; None when one was cleaned up."""
    moved: dict[str, int] = {}
    for version in range(since + 1, upto + 1):
        found = read_entry(entry(root, version))
        if found is None:
            return None
        moved |= found.transactions
    return moved


def is_between(root: Path, since: int, upto: int, transactions: Mapping[str, int], paths: Sequence[str]) -> bool | None:
    """Whether one version after `since` up to `upto` holds all of this; None when one was cleaned up."""
    entries = [read_entry(entry(root, version)) for version in range(since + 1, upto + 1)]
    if any(found is not None and found.holds(transactions, paths) for found in entries):
        return True
    return None if None in entries else False


def watermark_transaction(incarnation: str) -> str:
    """Return the name of the transaction that says up to which seq `incarnation` is stored."""
    return f"{_WATERMARK}{incarnation}"


def watermarks_of(transactions: Mapping[str, int]) -> dict[str, int]:
    """Return the watermarks among `transactions`, by incarnation."""
    return {name.removeprefix(_WATERMARK): seq for name, seq in transactions.items() if name.startswith(_WATERMARK)}


def is_cut(text: bytes) -> bool:
    """Whether an entry has fewer lines than it says, as after a loss of power; one that does not say is taken as it is.

    Raises ValueError for a line that is not whole.
    """
    first, *others = text.splitlines() or [b"{}"]
    said = json.loads(first).get("commitInfo", {}).get(ACTIONS)
    return said is not None and len(others) < int(said)


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
