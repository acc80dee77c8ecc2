"""The files of a store: one interface for local folders and for object storage. Nothing else accesses such files.

Two exceptions get addresses instead of bytes: delta-rs gets `delta_options`, and DuckDB reads what `attach` registers.
A file never changes after it was written, except `rankscope.sql` and the hint file of the Delta log.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Final, Protocol

import duckdb

from rankscope_storage.base.errors import BucketError, StoreError
from rankscope_storage.base.fsync import Sync
from rankscope_storage.base.location import Location, located
from rankscope_storage.files.local import LocalFiles, Status

STAGING: Final = "_staging"
DATA_FILES: Final = "dataset=*/part=*/*.parquet"
"""Pattern of all data files of a store."""

Content = Callable[[Path | IO[bytes]], None]
"""Function that writes the content of a file to a path or to an open file."""


class FileSystem(Protocol):
    """Access to the files at locations of one kind. Raises OSError if the disk or the server fails.

    `sync` makes local files durable; an object is durable when its request is answered.
    """

    def get(self, path: Any) -> bytes:
        """Return the content of the file at `path`. Raises FileNotFoundError."""

    def open(self, path: Any) -> Any:
        """Return a source of bytes for Arrow: a path, or an open file that reads only the bytes which are needed."""

    def head(self, path: Any) -> Status | None:
        """Return the status of the file at `path`; None if it does not exist."""

    def size(self, path: Any) -> int:
        """Return the size of the data file at `path` in bytes. A file that will be read needs no further request."""

    def list(self, folder: Any, pattern: str = "*") -> list[Status]:
        """Return the files below `folder` that match `pattern`, in the order of names. A star matches no slash."""

    def put(self, root: Any, path: Any, write: Content, sync: Sync) -> Status:
        """Write the file at `path` in the store at `root`. Readers never see a part of it; durable on return."""

    def put_if_absent(self, path: Any, content: bytes) -> bool:
        """Write the file at `path` unless it exists; return whether it was written."""

    def delete(self, paths: Iterable[Any]) -> None:
        """Delete the files at `paths`. Missing files are ignored; the first other error is raised at the end."""

    def move(self, root: Any, path: Any, target: Any, sync: Sync) -> None:
        """Move the file at `path` to `target`, in the same store at `root`; durable on return."""

    def check_root(self, root: Any) -> None:
        """Raise StoreError if `root` cannot be the root of a store, for example because it is a file."""

    def prepare(self, root: Any) -> None:
        """Verify that a store at `root` can be written with atomic commits. Raises UnwritableError."""

    def scratch(self, root: Any) -> contextlib.AbstractContextManager[Path]:
        """Return a context with the path of a local folder for temporary files, which is deleted at its end.

        The folder need not exist yet: DuckDB creates it when it needs it.
        """

    def delta_options(self) -> dict[str, str] | None:
        """Return the storage options of delta-rs."""

    def attach(self, database: duckdb.DuckDBPyConnection) -> None:
        """Make `database` able to read the files."""


_REQUEST: Final = re.compile(r"^[\w.]*(?:BucketError: cannot access (.+?): |FileNotFoundError: )(.+)$", re.MULTILINE)
"""Pattern of the last line of a traceback, with which DuckDB reports an error of a file system in Python."""


@contextlib.contextmanager
def duckdb_errors() -> Iterator[None]:
    """Convert errors of DuckDB about a bucket: to IOException for a missing object, otherwise to BucketError."""
    try:
        yield
    except duckdb.Error as error:
        if (found := _REQUEST.search(str(error))) is None:
            raise
        if found[1] is None:
            raise duckdb.IOException(found[2]) from error
        raise BucketError(errno.EIO, found[2], found[1]) from error


_LOCAL: Final = LocalFiles(STAGING)


def filesystem(path: Location) -> FileSystem:
    """Return the file system of `path`."""
    return _LOCAL if isinstance(path, Path) else _bucket(path.bucket)


@functools.cache
def _bucket(name: str) -> FileSystem:
    try:
        from rankscope_storage.files.bucket import Bucket
    except ImportError as error:
        raise StoreError(f"a store in a bucket needs {error.name}: pip install 'rankscope[s3]'") from error
    return Bucket(name)


def bytes_content(content: bytes) -> Content:
    """Return the function that writes `content`."""

    def write(target: Path | IO[bytes]) -> None:
        if isinstance(target, Path):
            target.write_bytes(content)
        else:
            target.write(content)

    return write


def source(path: str) -> Any:
    """Return a source of the bytes of the file that DuckDB reads at `path`, for Arrow."""
    location = located(path)
    return path if is_local(location) else filesystem(location).open(location)


def is_local(path: Location) -> bool:
    """Return whether `path` is on a file system of this machine."""
    return isinstance(path, Path)
