"""Translate between this package and delta-rs: commits to actions, and errors to errors of this package.

delta-rs distinguishes kinds of errors only by their text, and formats the causes of an error as a tree.
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
    """Raise StoreError if delta-rs or DuckDB would misread the path, for example as a pattern of file names."""
    if found := _MISREAD.search(str(root)):
        raise StoreError(
            f"{str(root)!r} contains {found[0]!r}, which delta-rs or DuckDB would misread: "
            "choose a path without * ? [ \\ %41 and control characters"
        )


def torn(root: Path, text: str) -> TornLogError:
    """Return the error for an incomplete entry of the Delta log; its message names the remedy."""
    return TornLogError(
        f"the log of {root} has an incomplete entry ({text}), as after a power failure. If it is the newest file "
        f"in {root / LOG_FOLDER}, move that file away, as `rankscope store repair` does: none of its rows was "
        "acknowledged, and the service reads them again"
    )


def translated(error: Exception, root: Path) -> StoreError:
    """Return the StoreError for an error of delta-rs, with a remedy if the kind of the error is known."""
    text = first_line(error)
    if "Json error" in str(error) or "Invalid JSON in log record" in str(error):
        return torn(root, text)
    if any(words in str(error) for words in _TORN_CHECKPOINT):
        return TornLogError(
            f"a checkpoint in {root / LOG_FOLDER} is incomplete ({text}), as after a power failure: "
            "`rankscope store repair` moves it away; the entries that it replaces still exist"
        )
    return StoreError(f"the log of {root} cannot be read or written: {text}")


def first_line(error: Exception) -> str:
    """Return one line for an error of delta-rs: the first line of its text, and its innermost cause.

    The text of such an error is a coloured tree of causes.
    """
    lines = [_COLOUR.sub("", line).strip() for line in str(error).splitlines() if line.strip()]
    causes = [line.removeprefix("↳").strip() for line in lines if line.startswith("↳")]
    return ": ".join([*lines[:1], *causes[-1:]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The content of one commit, which is stored completely or not at all.

    `rewrites` is true if the commit changes only files and no rows: the added files then have no new rows. delta-rs
    accepts two commits that remove the same file. `transactions` must therefore contain a transaction that every
    rewrite increments.
    """

    added: Sequence[DataFile] = ()
    removed: Sequence[DataFile] = ()
    transactions: Mapping[str, int] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    rewrites: bool = False


def actions_of(change: Change) -> list[AddAction | RemoveAction]:
    """Return the actions of delta-rs that remove and add the files of `change`.

    Removals are always marked as changes of data. delta-rs ignores other removals when it looks for conflicts: OPTIMIZE
    by another tool that began before the commit would add the removed rows once more.
    """
    now = time.time_ns() // 1_000_000
    removals = [
        RemoveAction(
            path=file.path,
            data_change=True,
            deletion_timestamp=now,
            partition_values={"dataset": file.dataset, "part": file.part},
            size=file.size_bytes,
        )
        for file in change.removed
    ]
    additions = [
        AddAction(
            path=file.path,  # delta-rs adds the percent-encoding of the protocol
            size=file.size_bytes,
            partition_values={"dataset": file.dataset, "part": file.part},
            modification_time=file.modified_at_ms,
            data_change=not change.rewrites,
            stats=file.statistics,
        )
        for file in change.added
    ]
    return [*removals, *additions]
