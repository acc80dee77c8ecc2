"""`repair`: make a damaged store readable again, saying what is lost. What is damaged moves to `_damaged/`.

What dead processes left, and no version names, is removed once it is old enough to be nobody's.

Only a store that no service of this machine writes to is touched; the shard locks are held meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rankscope_storage.base.errors import StoreError
from rankscope_storage.base.fsync import Sync, make_folders
from rankscope_storage.files.parquet import DataFile
from rankscope_storage.log.delta import Log
from rankscope_storage.log.entries import LOG_FOLDER, entries, torn_checkpoint_files, torn_entries
from rankscope_storage.log.shard_lock import all_shards
from rankscope_storage.log.translation import Change
from rankscope_storage.maintenance.file_check import Fault, Finding, check_file, describe_rows
from rankscope_storage.maintenance.vacuum import delete_orphan_files, find_orphan_files

DAMAGED: Final = "_damaged"

_GONE: Final = (Fault.MISSING, Fault.UNREADABLE, Fault.OTHER_SIZE)
"""What no reader can use. A file of other content is readable: a person has to judge it. Of one out of reach a person
has to say that it will not come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """What was done, or with `dry_run` would be; `lost` says in words which rows no longer exist.

    `swept` counts files that no version names, and `swept_bytes` what they took.
    """

    torn_entry: str | None
    lost: tuple[str, ...]
    torn_checkpoint: str | None = None
    swept: int = 0
    swept_bytes: int = 0

    @property
    def changed(self) -> bool:
        """Whether there was anything to do."""
        return bool(self.torn_entry or self.torn_checkpoint or self.lost or self.swept)


def repair(root: Path, sync: Sync, *, dry_run: bool = False, deep: bool = False, force: bool = False) -> RepairReport:
    """Move a torn newest log entry or checkpoint away, and take files that cannot be read out of the log.

    Files that may come back, with a disk or a mount, stay in it, unless with `force`.
    Raises ShardLockError while a service of this machine writes, and StoreError for what no program should decide.
    """
    with all_shards(root, "rankscope store repair"):
        checkpoint = _shorten(root, sync, dry_run=dry_run)
        torn = _torn_entry(root)
        if (torn or checkpoint) and dry_run:
            return RepairReport(torn_entry=torn.name if torn else None, torn_checkpoint=checkpoint, lost=())
        if torn is not None:
            _set_aside(root, torn, sync)
        try:
            lost = _drop(root, sync, dry_run=dry_run, deep=deep, force=force)
        except StoreError as error:
            moved = " and ".join(name for name in (torn and torn.name, checkpoint) if name)
            if not moved:
                raise
            raise StoreError(f"{moved} moved to {DAMAGED}/. {error}") from error
        if torn or checkpoint or lost:
            # Not in the same breath: a person may want to look at what just fell out of the log.
            return RepairReport(torn_entry=torn.name if torn else None, torn_checkpoint=checkpoint, lost=lost)
        return _sweep(root, sync, dry_run=dry_run)


def _sweep(root: Path, sync: Sync, *, dry_run: bool) -> RepairReport:
    leavings = find_orphan_files(Log.open(root, sync))
    if not dry_run:
        try:
            delete_orphan_files(leavings)
        except OSError as error:
            raise StoreError(f"cannot tidy up {root}: {error.strerror or error}") from error
    count = len(leavings.data_files) + len(leavings.staged_files)
    return RepairReport(torn_entry=None, lost=(), swept=count, swept_bytes=leavings.size_bytes)


def _shorten(root: Path, sync: Sync, *, dry_run: bool) -> str | None:
    """Move a torn newest checkpoint away: the entries that it stood for go only when it has reached the disk."""
    torn = torn_checkpoint_files(root)
    if not dry_run:
        for path in reversed(torn):
            with contextlib.suppress(FileNotFoundError):
                _set_aside(root, path, sync)
    return torn[0].name if torn else None


def _torn_entry(root: Path) -> Path | None:
    torn = torn_entries(root)
    if not torn:
        return None
    if torn != entries(root)[-1:]:
        names = ", ".join(path.name for path in torn)
        raise StoreError(
            f"{names} in {root / LOG_FOLDER} cannot be read, and entries that build on it exist: restore it from a "
            "backup, or copy what `duckdb` reads from the Parquet files into a new store"
        )
    return torn[0]


def _drop(root: Path, sync: Sync, *, dry_run: bool, deep: bool, force: bool) -> tuple[str, ...]:
    log = Log.open(root, sync)
    gone: list[tuple[Mapping[str, Any], Finding]] = []

    def build() -> Change | None:
        examined = list(_examined(log, deep=deep))
        if not force:
            _refuse_what_may_come_back(root, examined)
        faults = {*_GONE, Fault.OUT_OF_REACH}
        gone[:] = [(file, finding) for file, finding in examined if finding.fault in faults]
        if dry_run or not gone:
            return None
        info = {"rankscopeRepair": "; ".join(finding.text for _, finding in gone)[:10_000]}
        return Change(removed=[DataFile.from_snapshot(file) for file, _ in gone], info=info)

    if log.replace_files(build) is not None:
        for file, _ in gone:
            with contextlib.suppress(FileNotFoundError, *([OSError] if force else [])):
                _set_aside(root, root / file["path"], sync)
    return tuple(f"{file['path']}: {describe_rows(file)}" for file, _ in gone)


def _refuse_what_may_come_back(root: Path, examined: Sequence[tuple[Mapping[str, Any], Finding]]) -> None:
    for file, finding in examined:
        folder = root / f"dataset={file['dataset']}"
        away = None
        if finding.fault == Fault.OUT_OF_REACH:
            away = f"{file['path']} {finding.text}"
        elif finding.fault == Fault.MISSING and not any(folder.glob("part=*/*.parquet")):  # a mount point stays
            away = f"no file of {file['dataset']} is left in {folder}"
        if away:
            raise StoreError(
                f"{away}. A disk or a mount may be away: no file was given up. Bring it back, or give up for ever "
                "what lies there: `rankscope store repair --force`"
            )


def _examined(log: Log, *, deep: bool) -> Iterator[tuple[Mapping[str, Any], Finding]]:
    for file in log.snapshot().files.to_pylist():
        finding = check_file(log.root, file, deep=deep)
        if finding is not None:
            yield file, finding


def _set_aside(root: Path, path: Path, sync: Sync) -> None:
    folder = root / DAMAGED
    make_folders(folder, root, sync)
    path.rename(folder / path.name)
    sync(path.parent)
    sync(folder)
