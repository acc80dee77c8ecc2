"""Copy one version of a store to another place, such as from a disk to a bucket.

All data files are copied first, then a checkpoint of the version, and its entry of the log last. A copy without an
entry is incomplete: no process can write it, and the next call resumes it. The target has the transactions of the
source, and therefore the watermarks of all processes. Its log begins with the copied version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope_storage.base.errors import StoreError
from rankscope_storage.base.fsync import Sync, make_folders
from rankscope_storage.base.location import Location
from rankscope_storage.files.filesystem import DATA_FILES, bytes_content, filesystem
from rankscope_storage.log.delta import Log
from rankscope_storage.log.entries import (
    LOG_FOLDER,
    NO_CHECKPOINT,
    checkpoint_files,
    entries,
    entry,
    newest_checkpoint,
)
from rankscope_storage.maintenance.check import check_file
from rankscope_storage.query.sql_script import write_sql_script


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """The result of a copy: its version, its files and bytes, and the number of files that existed already."""

    version: int
    files: int
    size_bytes: int
    resumed: int


def copy_store(
    source: Location, target: Location, sync: Sync, progress: Callable[[int, int], None] | None = None
) -> CopyReport:
    """Copy the newest version of the store at `source` to `target`, where no store exists, and decode every file.

    Meanwhile, a service may write the source; the copy has one version. Files that are there already are compared.
    `progress` is called with the number of copied files and the number of all files. Raises StoreError if a file of
    either store is damaged or cannot be accessed; the next call continues the copy.
    """
    first = newest_checkpoint(source)  # before the version is known, so that it is not newer
    snapshot = Log.open(source, sync).snapshot()
    rows = snapshot.files.to_pylist()
    files = filesystem(target)
    resumed = 0
    try:
        files.check_root(target)
        _check_is_no_store(target)
        files.prepare(target)
        with files.scratch(target) as folder:
            _fetch_log(source, folder, first, snapshot.version)  # a running service deletes these entries in an hour
            present = {status.path: status.size for status in files.list(target, DATA_FILES)}
            for done, row in enumerate(rows, 1):
                resumed += _copy_file(source, target, row, sync, size_there=present.get(target / row["path"]))
                if progress is not None:
                    progress(done, len(rows))
            _check_is_no_store(target)
            for path in (*checkpoint_files(folder, snapshot.version), entry(folder, snapshot.version)):
                files.put(target, target / LOG_FOLDER / path.name, bytes_content(filesystem(path).get(path)), sync)
    except OSError as error:
        raise StoreError(f"cannot copy {source} to {target}: {error.strerror or error}. Run the copy again") from error
    write_sql_script(target)
    size = sum(row["size_bytes"] for row in rows)
    return CopyReport(version=snapshot.version, files=len(rows), size_bytes=size, resumed=resumed)


def _check_is_no_store(target: Location) -> None:
    if entries(target):
        raise StoreError(f"{target} is a store already: name another place for the copy")


def _copy_file(
    source: Location, target: Location, row: Mapping[str, Any], sync: Sync, *, size_there: int | None
) -> bool:
    """Copy the data file of `row` unless `target` has it with the same content; return whether it has it."""
    path, files = target / row["path"], filesystem(target)
    content = filesystem(source).get(source / row["path"])
    finding = check_file(source, row, deep=True, content=content)
    if finding is not None and finding.kind.is_damage:
        raise StoreError(f"{finding.path} of {source} {finding.text}: see `rankscope store check --deep` of that store")
    is_there = size_there == len(content) and files.get(path) == content
    if not is_there:
        files.put(target, path, bytes_content(content), sync)
    return is_there


def _fetch_log(source: Location, folder: Path, first: int, version: int) -> None:
    """Write a checkpoint of `version`, and the entry of the version, to the log of `folder`.

    `first` is a checkpoint of `source` up to this version. Without the entry, delta-rs commits nothing.
    """
    make_folders(folder, folder.parent, _unsynced)
    needed = [] if first == NO_CHECKPOINT else [*checkpoint_files(source, first)]
    needed += [path for path in entries(source) if first <= int(path.stem) <= version]
    for path in needed:
        content = bytes_content(filesystem(source).get(path))
        filesystem(folder).put(folder, folder / LOG_FOLDER / path.name, content, _unsynced)
    Log.open(folder, _unsynced, version=version).checkpoint()
    if newest_checkpoint(folder) != version:
        raise StoreError(f"a service has written a checkpoint of {source} at this moment: run the copy again")


def _unsynced(path: Location) -> None:
    """Leave a temporary file to the disk."""
