"""Files in a local folder: staged below `_staging/`, fsynced, and renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, TypeVar

import duckdb

from rankscope_storage.base.errors import NotAStoreError, UnwritableError
from rankscope_storage.base.fsync import Sync, make_folders
from rankscope_storage.base.location import Location

T = TypeVar("T")

_NO_HARD_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


@dataclass(frozen=True, slots=True)
class Status:
    """A file: its location, its size in bytes, and the time of its last change in seconds since 1970.

    `identity` distinguishes the file from a later one at the same location.
    """

    path: Location
    size: int
    modified: float
    identity: tuple[object, ...] = ()


def delete_each(delete: Callable[[T], object], items: Iterable[T]) -> None:
    """Call `delete` for each of `items`, also after an error, and raise the first error then. Ignore missing files."""
    errors = []
    for item in items:
        try:
            delete(item)
        except FileNotFoundError:
            pass
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


class LocalFiles:
    """The file system of this machine; `FileSystem` documents the methods. Files below `staging` are incomplete."""

    def __init__(self, staging: str) -> None:
        self._staging = staging

    def get(self, path: Path) -> bytes:
        return path.read_bytes()

    def open(self, path: Path) -> Path:
        return path

    def head(self, path: Path) -> Status | None:
        try:
            found = path.stat()
        except FileNotFoundError:
            return None
        return Status(path, found.st_size, found.st_mtime, (found.st_ino, found.st_mtime_ns, found.st_size))

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def list(self, folder: Path, pattern: str = "*") -> list[Status]:
        found = (self._total(path) for path in sorted(folder.glob(pattern)))
        return [status for status in found if status is not None]

    def _total(self, path: Path) -> Status | None:
        """Return the status of a file. For a folder, return the time of its newest file and the size of all files."""
        try:
            status = self.head(path)
            if status is None or not path.is_dir():
                return status
        except OSError:  # it cannot be read now
            return Status(path, 0, time.time())
        below = [one for one in map(self.head, path.rglob("*")) if one is not None]
        size = sum(one.size for one in below if not Path(str(one.path)).is_dir())
        return Status(path, size, max(one.modified for one in (status, *below)))

    def put(self, root: Path, path: Path, write: Callable[[Path | IO[bytes]], None], sync: Sync) -> Status:
        staged = root / self._staging / f"{uuid.uuid4().hex}{path.suffix}"
        try:
            make_folders(staged.parent, root, sync)  # a user may have deleted the folder
            write(staged)
            sync(staged)
            make_folders(path.parent, root, sync)
            staged.rename(path)
        except OSError:
            with contextlib.suppress(OSError):  # the first error is the important one
                staged.unlink(missing_ok=True)  # free the space of a full disk
            raise
        sync(path.parent)
        found = path.stat()
        return Status(path, found.st_size, found.st_mtime)

    def put_if_absent(self, path: Path, content: bytes) -> bool:
        try:
            with path.open("xb") as file:
                file.write(content)
        except FileExistsError:
            return False
        return True

    def delete(self, paths: Iterable[Path]) -> None:
        delete_each(lambda path: shutil.rmtree(path) if path.is_dir() else path.unlink(), paths)

    def move(self, root: Path, path: Path, target: Path, sync: Sync) -> None:
        make_folders(target.parent, root, sync)
        path.rename(target)
        sync(path.parent)
        sync(target.parent)

    def check_root(self, root: Path) -> None:
        try:
            is_file = root.exists() and not root.is_dir()
        except PermissionError as error:
            raise UnwritableError(
                f"cannot access {root}: {error.strerror}. Choose another folder, or change the permissions above it"
            ) from error
        if is_file:
            raise NotAStoreError(f"{root} is a file, but a store is a folder: name a folder")

    def prepare(self, root: Path) -> None:
        probe = root / self._staging / f"probe-{uuid.uuid4().hex}"
        linked = probe.with_suffix(".link")
        try:
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.touch()
            try:
                os.link(probe, linked)
            except OSError as error:
                if error.errno not in _NO_HARD_LINKS:
                    raise
                raise UnwritableError(
                    f"{probe.parent} is on a file system without hard links (FAT, some network and FUSE mounts), which "
                    "atomic commits need: put the store on a local disk (ext4, xfs, btrfs) or on NFS"
                ) from error
        except OSError as error:
            raise UnwritableError(
                f"cannot write to {root}: {error.strerror}. Choose another folder, or change its permissions"
            ) from error
        finally:
            for path in (linked, probe):
                with contextlib.suppress(OSError):  # the first error is the important one
                    path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def scratch(self, root: Path) -> Iterator[Path]:
        folder = root / self._staging / f"rolling-{uuid.uuid4().hex}"
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def delta_options(self) -> None:
        return None

    def attach(self, database: duckdb.DuckDBPyConnection) -> None:
        """Do nothing: DuckDB reads local files."""
