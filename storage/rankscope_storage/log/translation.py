"""Translation between this package and delta-rs: the actions of a commit, and errors.

delta-rs distinguishes kinds of errors by their text only, and draws their causes as trees.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from deltalake.transaction import AddAction, RemoveAction

from rankscope_storage.base.errors import StoreError, TornLogError
from rankscope_storage.files.parquet import DataFile
from rankscope_storage.log.entries import LOG_FOLDER

_MISREAD: Final = re.compile(r"[*?\[\\\x00-\x1f\x7f]|%[0-9A-Fa-f]{2}")
_TORN_CHECKPOINT: Final = ("Invalid Checkpoint", "Corrupt footer", "less than footer")
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


def check_path(root: Path) -> None:
    """Raise StoreError for a path that delta-rs or DuckDB would take for another one, or for a pattern."""
    if found := _MISREAD.search(str(root)):
        raise StoreError(
            f"{str(root)!r} holds {found[0]!r}, which the libraries under the store take for something else: "
            "choose a folder without * ? [ \\ %41 and control characters in its path"
        )


def torn(root: Path, text: str) -> TornLogError:
    """Return the error that tells of an entry which is not whole, with the remedy."""
    return TornLogError(
        f"the log of {root} has an incomplete entry ({text}), as after a loss of power. If it is the newest file "
        f"in {root / LOG_FOLDER}, move that file away, as `rankscope store repair` does: nothing in it was "
        "acknowledged, the service fetches it again"
    )


def translated(error: Exception, root: Path) -> StoreError:
    """Return our error for one of delta-rs, which tells kinds apart by their text only."""
    text = first_line(error)
    if "Json error" in str(error) or "Invalid JSON in log record" in str(error):
        return torn(root, text)
    if any(words in str(error) for words in _TORN_CHECKPOINT):
        return TornLogError(
            f"a checkpoint in {root / LOG_FOLDER} is incomplete ({text}), as after a loss of power: "
            "`rankscope store repair` moves it away, the entries that it stands for are still there"
        )
    return StoreError(f"the log of {root} cannot be read or written: {text}")


def first_line(error: Exception) -> str:
    """Return what delta-rs says in one line: its first, and the innermost cause, which it draws as a coloured tree."""
    lines = [_COLOUR.sub("", line).strip() for line in str(error).splitlines() if line.strip()]
    causes = [line.removeprefix("↳").strip() for line in lines if line.startswith("↳")]
    return ": ".join([*lines[:1], *causes[-1:]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one commit does, all of it or nothing."""

    added: Sequence[DataFile] = ()
    removed: Sequence[DataFile] = ()
    transactions: Mapping[str, int] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    rewrites: bool = False
    """The rows stay the same, only their files change. Then delta-rs does not look for conflicts, and two changes
    that remove the same file would both succeed: `transactions` must hold a mutex that both move."""


def actions_of(change: Change) -> list[AddAction | RemoveAction]:
    """Return the actions of delta-rs that remove and add the files of `change`."""
    return [*_removals(change), *_additions(change)]


def _additions(change: Change) -> list[AddAction]:
    return [
        AddAction(
            path=file.path,  # plain; delta-rs does the percent-encoding that the protocol asks for
            size=file.size_bytes,
            partition_values={"dataset": file.dataset, "part": file.part},
            modification_time=file.modified_at_ms,
            data_change=not change.rewrites,
            stats=file.statistics,
        )
        for file in change.added
    ]


def _removals(change: Change) -> list[RemoveAction]:
    now = time.time_ns() // 1_000_000
    return [
        RemoveAction(
            path=file.path,
            data_change=not change.rewrites,
            deletion_timestamp=now,
            partition_values={"dataset": file.dataset, "part": file.part},
            size=file.size_bytes,
        )
        for file in change.removed
    ]
