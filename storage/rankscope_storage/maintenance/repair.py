"""Repair a damaged store: make it readable again, and report the lost rows.

Damaged files are moved to `_damaged/`. Files that no version needs, which killed processes leave, are deleted if they
are old enough. During a repair, the locks of all shards are held, so that no service on this machine writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rankscope_storage.base.errors import StoreError
from rankscope_storage.base.fsync import Sync
from rankscope_storage.base.location import Location
from rankscope_storage.files.encoding import DataFile
from rankscope_storage.files.filesystem import filesystem
from rankscope_storage.log.delta import Change, Log
from rankscope_storage.log.entries import LOG_FOLDER, entries, torn_checkpoint_files, torn_entries
from rankscope_storage.log.shard_lock import all_shards
from rankscope_storage.maintenance.check import Finding, FindingKind, check_file, describe_rows
from rankscope_storage.maintenance.vacuum import delete_orphan_files, find_orphan_files

DAMAGED: Final = "_damaged"

_LOST: Final = (FindingKind.MISSING, FindingKind.UNREADABLE, FindingKind.OTHER_SIZE, FindingKind.OUT_OF_REACH)
"""Kinds of findings for files that no reader can use; a repair removes such files from the Delta log.

A readable file with other content than the log states remains, because an operator has to decide about it. Two kinds of
files are removed only with `force`, with which an operator confirms that they are lost: files that the file system
cannot read now, and missing files of a dataset of which no file is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """The result of a repair, or of a dry run. `lost` describes the rows that no longer exist.

    `swept` is the number of deleted files that no version needed, and `swept_bytes` is their size.
    """

    torn_entry: str | None
    lost: tuple[str, ...]
    torn_checkpoint: str | None = None
    swept: int = 0
    swept_bytes: int = 0

    @property
    def changed(self) -> bool:
        """Return whether the repair changed the store, or in a dry run, whether a repair would change it."""
        return bool(self.torn_entry or self.torn_checkpoint or self.lost or self.swept)


def repair(
    root: Location, sync: Sync, *, dry_run: bool = False, deep: bool = False, force: bool = False
) -> RepairReport:
    """Move an incomplete newest entry or checkpoint of the Delta log away, and remove unreadable files from the log.

    Without `force`, files on a disk or mount that may be only temporarily unavailable remain in the log. Raises
    ShardLockError while a service on this machine writes, and StoreError for damage that an operator must decide on.
    """
    with all_shards(root, "rankscope store repair"):
        checkpoint = _remove_torn_checkpoint(root, sync, dry_run=dry_run)
        torn = _torn_entry(root)
        entry = torn.name if torn else None
        lost: tuple[str, ...] = ()
        if not ((torn or checkpoint) and dry_run):
            if torn is not None:
                _move_to_damaged(root, torn, sync)
            try:
                lost = _remove_lost_files(root, sync, dry_run=dry_run, deep=deep, force=force)
            except StoreError as error:
                moved = " and ".join(name for name in (entry, checkpoint) if name)
                if not moved:
                    raise
                raise StoreError(f"{moved} moved to {DAMAGED}/. {error}") from error
        if entry or checkpoint or lost:
            # Orphans are deleted by the next call: an operator may want to examine files just removed from the log.
            return RepairReport(torn_entry=entry, torn_checkpoint=checkpoint, lost=lost)
        return _delete_orphans(root, sync, dry_run=dry_run)


def _delete_orphans(root: Location, sync: Sync, *, dry_run: bool) -> RepairReport:
    orphans = find_orphan_files(Log.open(root, sync))
    if not dry_run:
        try:
            delete_orphan_files(orphans)
        except OSError as error:
            raise StoreError(f"cannot delete unused files of {root}: {error.strerror or error}") from error
    count = len(orphans.data_files) + len(orphans.staged_files)
    return RepairReport(torn_entry=None, lost=(), swept=count, swept_bytes=orphans.size_bytes)


def _remove_torn_checkpoint(root: Location, sync: Sync, *, dry_run: bool) -> str | None:
    """Move an incomplete newest checkpoint away, and return its name.

    This loses no data: entries of the Delta log are deleted only after the checkpoint that replaces them is durable.
    """
    torn = torn_checkpoint_files(root)
    if not dry_run:
        for path in reversed(torn):
            with contextlib.suppress(FileNotFoundError):
                _move_to_damaged(root, path, sync)
    return torn[0].name if torn else None


def _torn_entry(root: Location) -> Location | None:
    torn = torn_entries(root)
    if not torn:
        return None
    if torn != entries(root)[-1:]:
        names = ", ".join(path.name for path in torn)
        raise StoreError(
            f"{names} in {root / LOG_FOLDER} cannot be read, and later entries exist: restore the file from a "
            "backup, or copy the rows that `duckdb` reads from the Parquet files into a new store"
        )
    return torn[0]


def _remove_lost_files(root: Location, sync: Sync, *, dry_run: bool, deep: bool, force: bool) -> tuple[str, ...]:
    log = Log.open(root, sync)
    lost: list[tuple[Mapping[str, Any], Finding]] = []

    def build() -> Change | None:
        lost.clear()
        for file in log.snapshot().files.to_pylist():
            finding = check_file(log.root, file, deep=deep)
            if finding is not None and finding.kind in _LOST:
                if not force:
                    _refuse_if_unavailable(root, file, finding)
                lost.append((file, finding))
        if dry_run or not lost:
            return None
        info = {"rankscopeRepair": "; ".join(finding.text for _, finding in lost)[:10_000]}
        return Change(removed=[DataFile.from_snapshot(file) for file, _ in lost], info=info)

    if log.replace_files(build) is not None:
        for file, _ in lost:
            with contextlib.suppress(FileNotFoundError, *([OSError] if force else [])):
                _move_to_damaged(root, root / file["path"], sync)
    return tuple(f"{file['path']}: {describe_rows(file)}" for file, _ in lost)


def _refuse_if_unavailable(root: Location, file: Mapping[str, Any], finding: Finding) -> None:
    folder = root / f"dataset={file['dataset']}"
    if finding.kind == FindingKind.OUT_OF_REACH:
        reason = f"{file['path']} {finding.text}"
    elif finding.kind == FindingKind.MISSING and not filesystem(root).list(
        folder, "part=*/*.parquet"
    ):  # an unmounted folder is empty
        reason = f"no file of {file['dataset']} is left in {folder}"
    else:
        return
    raise StoreError(
        f"{reason}. A disk or a mount may be unavailable: no file was removed. Mount it again, or remove its files "
        "permanently: `rankscope store repair --force`"
    )


def _move_to_damaged(root: Location, path: Location, sync: Sync) -> None:
    filesystem(root).move(root, path, root / DAMAGED / path.name, sync)
