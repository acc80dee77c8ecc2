"""Copy one version of a store to another place, such as from a disk to a bucket.

All data files are copied first, then a checkpoint of the version, and its entry of the log last. A copy without an
entry is incomplete: no process can write it, and the next call resumes it. The target has the transactions of the
source, and therefore the watermarks of all processes. Its log begins with the copied version.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    """Copy the newest version of the store at `source` to `target`, where no store exists, and check every file.

    `progress` is called with the number of copied files and the number of all files. Raises StoreError if a file of
    either store is damaged or cannot be accessed; the next call continues the copy.
    """
    log = Log.open(source, sync)
    snapshot = log.snapshot()
    rows = snapshot.files.to_pylist()
    origin, files = filesystem(source), filesystem(target)
    resumed = 0
    try:
        files.check_root(target)
        if entries(target):
            raise StoreError(f"{target} is a store already: name another place for the copy")
        files.prepare(target)
        present = {status.path: status.size for status in files.list(target, DATA_FILES)}
        for done, row in enumerate(rows, 1):
            path = target / row["path"]
            if present.get(path) == row["size_bytes"]:
                resumed += 1
            else:
                files.put(target, path, bytes_content(origin.get(source / row["path"])), sync)
            finding = check_file(target, row, deep=False)
            if finding is not None and finding.kind.is_damage:
                raise StoreError(f"{finding.path} {finding.text}: check {source} with `rankscope store check`")
            if progress is not None:
                progress(done, len(rows))
        _copy_log(source, target, snapshot.version, sync)
    except OSError as error:
        raise StoreError(f"cannot copy {source} to {target}: {error.strerror or error}. Run the copy again") from error
    write_sql_script(target)
    size = sum(row["size_bytes"] for row in rows)
    return CopyReport(version=snapshot.version, files=len(rows), size_bytes=size, resumed=resumed)


def _copy_log(source: Location, target: Location, version: int, sync: Sync) -> None:
    """Write a checkpoint of `version` of the log of `source` to the log of `target`, and then the entry of the version.

    Without the entry, delta-rs commits nothing.
    """
    origin, files = filesystem(source), filesystem(target)
    first = min(newest_checkpoint(source), version)
    with files.scratch(target) as folder:
        local = filesystem(folder)
        make_folders(folder, folder.parent, lambda _: None)

        def fetch(path: Location) -> None:
            local.put(folder, folder / LOG_FOLDER / path.name, bytes_content(origin.get(path)), lambda _: None)

        if first != NO_CHECKPOINT:
            fetch(checkpoint_files(source, first)[0])
        for path in entries(source):
            if first < int(path.stem) <= version:
                fetch(path)
        if first == version:
            fetch(checkpoint_files(source, first)[1])
        else:
            Log.open(folder, lambda _: None, version=version).checkpoint()
        for made, path in zip(checkpoint_files(folder, version), checkpoint_files(target, version), strict=True):
            files.put(target, path, bytes_content(local.get(made)), sync)
    files.put(target, entry(target, version), bytes_content(origin.get(entry(source, version))), sync)
