"""Read the files of a Delta log without delta-rs, and find damaged and unfinished files.

delta-rs reads either all entries or none, so it cannot open a log with one damaged entry.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from rankscope_storage.base.location import Location
from rankscope_storage.files.filesystem import filesystem
from rankscope_storage.files.local import Status

LOG_FOLDER: Final = "_delta_log"
NO_CHECKPOINT: Final = -1
ACTIONS: Final = "rankscopeActions"
"""Key in the commit information of a Delta log entry; the value is the number of lines that follow in the entry.

Without this number, an entry that was cut between two lines would look complete."""

COMMIT_ID: Final = "rankscopeCommit"
"""Key in the commit information of a Delta log entry; the value is the unique identifier of the commit."""

_HINT: Final = "_last_checkpoint"
_WATERMARK: Final = "w:"


def entry(root: Location, version: int) -> Location:
    """Return the path of the Delta log entry of `version`; the file need not exist."""
    return root / LOG_FOLDER / f"{version:020d}.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """The content of one entry of the Delta log: its text, and the transactions whose numbers it changed."""

    transactions: Mapping[str, int]
    text: bytes

    @property
    def info(self) -> dict[str, Any]:
        """The commit information, which is the first line of an entry of Rankscope; empty for other entries."""
        first = self.text.partition(b"\n")[0]
        return dict(json.loads(first)["commitInfo"]) if first.startswith(b'{"commitInfo"') else {}


def read_entry(path: Location) -> Entry | None:
    """Return the Delta log entry at `path`; None if the file does not exist, for example after clean-up."""
    try:
        text = filesystem(path).get(path)
    except FileNotFoundError:
        return None
    moved = (json.loads(line)["txn"] for line in text.splitlines() if line.startswith(b'{"txn"'))
    return Entry({transaction["appId"]: transaction["version"] for transaction in moved}, text)


def watermark_transaction(incarnation: str) -> str:
    """Return the name of the transaction for the watermark (last stored record number) of the process `incarnation`."""
    return f"{_WATERMARK}{incarnation}"


def watermarks_of(transactions: Mapping[str, int]) -> dict[str, int]:
    """Return the watermark of each incarnation (exporter process), from the transactions that store watermarks."""
    return {name.removeprefix(_WATERMARK): seq for name, seq in transactions.items() if name.startswith(_WATERMARK)}


def is_cut(text: bytes) -> bool:
    """Return whether an entry has fewer lines than its first line declares, for example after a power failure.

    Returns False for an entry that declares no number of lines. Raises ValueError if the first line is incomplete.
    """
    first, *others = text.splitlines() or [b"{}"]
    declared = json.loads(first).get("commitInfo", {}).get(ACTIONS)
    return declared is not None and len(others) < int(declared)


def has_entries(root: Location) -> bool:
    """Return whether a Delta table exists at `root`: its log has an entry or a checkpoint.

    A log folder without an entry is no table: it remains if a full disk interrupted the creation of the table.
    """
    files = filesystem(root)
    return any(files.list(root / LOG_FOLDER, pattern) for pattern in ("*.json", "*.parquet"))


def checkpoint_files(root: Location, version: int) -> tuple[Location, Location]:
    """Return the path of the checkpoint of `version`, and the path of the file that names the newest checkpoint."""
    return root / LOG_FOLDER / f"{version:020d}.checkpoint.parquet", root / LOG_FOLDER / _HINT


def newest_checkpoint(root: Location) -> int:
    """Return the version of the newest checkpoint, or NO_CHECKPOINT if there is none.

    The version is read from the small file that names the newest checkpoint. Listing the folder would take too long
    between two commits.
    """
    try:
        return int(json.loads(filesystem(root).get(root / LOG_FOLDER / _HINT))["version"])
    except (OSError, ValueError, KeyError, TypeError):  # never written, or torn by a power failure
        return NO_CHECKPOINT


def checkpoints(root: Location) -> list[int]:
    """Return the versions of the checkpoints in the log folder, oldest first."""
    return [int(path.name[:20]) for path in _paths(root, "*.checkpoint*.parquet")]


_STAGED: Final = re.compile(r".+#\d+")


def entries(root: Location) -> list[Location]:
    """Return the paths of all entries of the Delta log of the store at `root`, oldest first."""
    return [path for path in _paths(root, "*.json") if path.stem.isdecimal()]


def _paths(root: Location, pattern: str) -> list[Location]:
    return [status.path for status in filesystem(root).list(root / LOG_FOLDER, pattern)]


def is_torn(entry: Location) -> bool:
    """Return whether the file `entry` was not written completely, for example because of a power failure.

    Such an entry has fewer lines than it declares, or a line that is not a JSON object. An empty entry is complete: it
    is a commit without actions.
    """
    try:
        text = filesystem(entry).get(entry)
        return not all(isinstance(json.loads(line), dict) for line in text.splitlines()) or is_cut(text)
    except ValueError:
        return True


def torn_entries(root: Location) -> list[Location]:
    """Return the incompletely written entries after the newest checkpoint; every reader needs these entries."""
    return [entry for entry in _entries_after_checkpoint(root) if is_torn(entry)]


def empty_entries(root: Location) -> list[Location]:
    """Return the empty entry files after the newest checkpoint.

    Power may have failed before the content of such a file was written. For delta-rs, it is a commit without actions.
    """
    return [entry for entry in _entries_after_checkpoint(root) if not filesystem(entry).get(entry)]


def _entries_after_checkpoint(root: Location) -> list[Location]:
    newest = max(checkpoints(root), default=NO_CHECKPOINT)
    return [entry for entry in entries(root) if int(entry.stem) > newest]


def torn_checkpoint_files(root: Location) -> list[Location]:
    """Return the files of the newest checkpoint if it was not written completely, the damaged file first.

    The damaged file is the checkpoint itself, or the file that names a checkpoint which does not exist. Returns an
    empty list if the checkpoint is complete.
    """
    newest, files = _paths(root, "*.checkpoint.parquet")[-1:], filesystem(root)
    named, hint = checkpoint_files(root, newest_checkpoint(root))
    if files.head(hint) and newest_checkpoint(root) != NO_CHECKPOINT and not files.head(named):
        return [hint]
    try:
        for path in newest:
            pq.ParquetFile(files.open(path)).read()
    except (OSError, pa.ArrowException):
        return [*newest, hint]
    return []


def staged_entries(root: Location) -> list[Status]:
    """Return the temporary files in the log folder that a process left when it was killed before it renamed them."""
    return [one for one in filesystem(root).list(root / LOG_FOLDER) if _STAGED.fullmatch(one.path.name)]
