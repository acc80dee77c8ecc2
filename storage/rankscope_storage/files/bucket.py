"""Files in a bucket of S3, through obstore: the client of object storage that delta-rs uses, too.

An object is put under its final, unique name, and is durable when the request is answered. No reader sees it before its
commit. Only conditional creation (`If-None-Match: *`) is required of the server; `prepare` verifies it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import functools
import io
import os
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

import duckdb
import fsspec
import obstore
import pyarrow as pa
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import S3Store

from rankscope_storage.base.errors import BucketError, StoreError, UnwritableError
from rankscope_storage.base.fsync import Sync
from rankscope_storage.base.location import ObjectPath
from rankscope_storage.base.s3_errors import NO_CREDENTIALS, reason
from rankscope_storage.files.local import Status, delete_each

_TAIL_BYTES: Final = 128 * 1024
"""Number of bytes at the end of an object that the first request reads: the footer, and all of a small file."""
_TAILS: Final = 256
"""Number of objects whose ends are kept in memory. Files of a store never change."""
_DELETED_TOGETHER: Final = 1000
"""Largest number of objects in one request that deletes objects, as S3 defines it."""


_OF_OBSTORE: Final = (
    *("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
)
"""Variables that name credentials which obstore uses and renews itself."""
_RENEWED_AFTER: Final = dt.timedelta(minutes=5)
"""Time for which credentials of boto3 are used. boto3 renews temporary ones that expire within 10 minutes."""
_NEVER: Final = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)


class Bucket:
    """The objects of one bucket; `FileSystem` documents the methods. Thread-safe.

    `allow_http` follows from AWS_ENDPOINT_URL. All other settings are environment variables or come from the usual
    chain of credentials, and are renewed before they expire: variables, web identity, containers, instance metadata,
    and with boto3 also profiles of ~/.aws.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._options = {"allow_http": "true"} if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http:") else {}
        self._credentials = _credentials()
        self._store = S3Store(name, client_options=self._options, credential_provider=self._credentials)  # type: ignore[arg-type]
        self.read_tail = functools.lru_cache(_TAILS)(self._read_tail)

    def get(self, path: ObjectPath) -> bytes:
        with _os_errors(path):
            return bytes(obstore.get(self._store, path.key).bytes())

    def open(self, path: ObjectPath) -> pa.PythonFile:
        return pa.PythonFile(Ranges(self, path), mode="r")

    def head(self, path: ObjectPath) -> Status | None:
        try:
            with _os_errors(path):
                return _status(path.bucket, obstore.head(self._store, path.key))
        except FileNotFoundError:
            return None

    def size(self, path: ObjectPath) -> int:
        size: int = self.read_tail(path)[0]
        return size

    def list(self, folder: ObjectPath, pattern: str = "*") -> list[Status]:
        whole = f"{folder.key}/{pattern}".lstrip("/")
        matches = re.compile("[^/]*".join(map(re.escape, whole.split("*")))).fullmatch
        prefix = whole.partition("*")[0].rpartition("/")[0]
        with _os_errors(folder):
            found = (one for chunk in obstore.list(self._store, prefix or None) for one in chunk)
            return sorted(
                (_status(folder.bucket, one) for one in found if matches(one["path"])), key=lambda one: str(one.path)
            )

    def put(self, root: ObjectPath, path: ObjectPath, write: Callable[[Path | IO[bytes]], None], sync: Sync) -> Status:
        content = io.BytesIO()
        write(content)
        with _os_errors(path):
            obstore.put(self._store, path.key, content.getbuffer(), use_multipart=False)
        return Status(path, content.tell(), time.time())

    def put_if_absent(self, path: ObjectPath, content: bytes) -> bool:
        try:
            with _os_errors(path):
                obstore.put(self._store, path.key, content, use_multipart=False, mode="create")
        except FileExistsError:
            return False
        return True

    def delete(self, paths: Iterable[ObjectPath]) -> None:
        keys = [path.key for path in paths]
        delete_each(self._delete, (keys[n : n + _DELETED_TOGETHER] for n in range(0, len(keys), _DELETED_TOGETHER)))

    def _delete(self, keys: Sequence[str]) -> None:
        with _os_errors(ObjectPath(self._name, keys[0])):
            obstore.delete(self._store, keys)

    def move(self, root: ObjectPath, path: ObjectPath, target: ObjectPath, sync: Sync) -> None:
        with _os_errors(path):
            obstore.copy(self._store, path.key, target.key)
            obstore.delete(self._store, path.key)

    def check_root(self, root: ObjectPath) -> None:
        """Do nothing: the first request reports a missing bucket."""

    def prepare(self, root: ObjectPath) -> None:
        probe = root / "_staging" / f"probe-{uuid.uuid4().hex}"
        try:
            self.put_if_absent(probe, b"1")  # reports an existing object if the answer to the first request was lost
            try:
                is_created_again = self.put_if_absent(probe, b"2")
            finally:
                self.delete([probe])
        except OSError as error:
            raise UnwritableError(f"cannot write to {root}: {error.strerror or error}") from error
        if is_created_again:
            raise UnwritableError(
                f"the server of {root} has created one object twice: it ignores If-None-Match, which atomic commits "
                "need. Use a server that supports conditional writes, such as Amazon S3, MinIO or Ceph"
            )

    @contextlib.contextmanager
    def scratch(self, root: ObjectPath) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="rankscope-") as folder:
            yield Path(folder)

    def delta_options(self) -> dict[str, str]:
        if self._credentials is None:
            return dict(self._options)
        found = self._credentials()  # delta-rs does not know all kinds of profiles
        keys = {"aws_access_key_id": found["access_key_id"], "aws_secret_access_key": found["secret_access_key"]}
        token = {"aws_session_token": found["token"]} if found.get("token") else {}
        return self._options | keys | token

    def attach(self, database: duckdb.DuckDBPyConnection) -> None:
        with contextlib.suppress(duckdb.InvalidInputException):  # it is attached already
            database.register_filesystem(_DuckDBFiles(bucket=self, skip_instance_cache=True))

    def read_range(self, path: ObjectPath, start: int, end: int) -> bytes:
        """Return the bytes from `start` to before `end`."""
        with _os_errors(path):
            return bytes(obstore.get_range(self._store, path.key, start=start, end=end))

    def _read_tail(self, path: ObjectPath) -> tuple[int, bytes]:
        """Return the size of the object and its last _TAIL_BYTES bytes."""
        with _os_errors(path):
            found = obstore.get(self._store, path.key, options={"range": {"suffix": _TAIL_BYTES}})
            return found.meta["size"], bytes(found.bytes())


def _credentials() -> Any:
    """Return the credentials of boto3 if it is installed and finds any, and no variable names them; otherwise None."""
    if any(name in os.environ for name in _OF_OBSTORE):
        return None
    with contextlib.suppress(ImportError, ValueError):
        from obstore.auth.boto3 import Boto3CredentialProvider

        return Boto3CredentialProvider(ttl=_RENEWED_AFTER)
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        raise StoreError(NO_CREDENTIALS)
    return None


def _status(bucket: str, found: Any) -> Status:
    modified = found["last_modified"].timestamp()
    return Status(ObjectPath(bucket, found["path"]), found["size"], modified, (found["e_tag"], found["size"]))


@contextlib.contextmanager
def _os_errors(path: ObjectPath) -> Iterator[None]:
    """Raise errors of obstore as BucketError; of missing and existing objects, as for local files."""
    try:
        yield
    except (NotFoundError, FileNotFoundError) as error:
        if "NoSuchBucket" not in str(error):
            raise FileNotFoundError(f"{path} does not exist") from None
        raise BucketError(errno.EIO, reason(str(error)), str(path)) from None
    except AlreadyExistsError:
        raise FileExistsError(f"{path} exists") from None
    except BaseError as error:
        raise BucketError(
            errno.EIO, reason(str(error)), str(path)
        ) from None  # the text of obstore may contain signatures


class Ranges(io.RawIOBase):
    """An object that is read by ranges. The first request reads its end, and the size."""

    def __init__(self, bucket: Bucket, path: ObjectPath) -> None:
        self._bucket = bucket
        self._path = path
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        start = (0, self._position, self.size() if whence == os.SEEK_END else 0)[whence]
        self._position = start + offset
        return self._position

    def size(self) -> int:
        """Return the size of the object in bytes."""
        return self._bucket.read_tail(self._path)[0]

    def read(self, size: int = -1) -> bytes:
        start, (total, tail) = self._position, self._bucket.read_tail(self._path)
        end = total if size < 0 else min(total, start + size)
        if start >= end:
            return b""
        first = total - len(tail)  # position of the tail
        found = b"" if start >= first else self._bucket.read_range(self._path, start, min(end, first))
        if end > first:
            found += tail[max(start, first) - first : end - first]
        self._position = end
        return found


class _DuckDBFiles(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Objects of a bucket for DuckDB. A file of a store never changes, so that its size and time need no request."""

    protocol = "s3"

    def __init__(self, bucket: Bucket, **options: Any) -> None:
        super().__init__(**options)
        self._bucket = bucket

    def open(self, path: str, mode: str = "rb", **_: Any) -> Ranges:
        return Ranges(self._bucket, _object(path))

    def size(self, path: str) -> int:
        return self._bucket.read_tail(_object(path))[0]

    def exists(self, path: str, **_: Any) -> bool:
        """Return True: DuckDB reads only files of the log, and reading a missing one raises FileNotFoundError."""
        return True

    def glob(self, path: str, **_: Any) -> list[str]:
        return [path]

    def isfile(self, path: str) -> bool:
        return True

    def modified(self, path: str) -> dt.datetime:
        return _NEVER


def _object(path: str) -> ObjectPath:
    bucket, _, key = path.removeprefix("s3://").partition("/")
    return ObjectPath(bucket, key)
