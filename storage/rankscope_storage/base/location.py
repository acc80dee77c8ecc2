"""Location of a store or of a file in it: a local path, or an object in a bucket. This module does no I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankscope_contract.model.redaction import redacted_name
from rankscope_storage.base.errors import NotAStoreError

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+([^/]*)/*(.*?)/*")
"""Pattern of a URL. One slash is enough, because `Path` reduces the two slashes of a URL to one."""
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX: Final = re.compile(r"[A-Za-z0-9._=/-]*")


@dataclass(frozen=True, slots=True, order=True)
class ObjectPath:
    """An object in a bucket of S3, or the common prefix of objects. The names follow those of `pathlib.Path`."""

    bucket: str
    key: str

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.bucket, f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}".rstrip("/")

    def absolute(self) -> ObjectPath:
        """Return this location, as a path does that is absolute already."""
        return self

    @property
    def name(self) -> str:
        """The key after its last slash."""
        return self.key.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """The name without the text after its last dot."""
        return self.name.rpartition(".")[0] or self.name

    @property
    def parent(self) -> ObjectPath:
        """The prefix that ends before the last slash of the key."""
        return ObjectPath(self.bucket, self.key.rpartition("/")[0])


Location = Path | ObjectPath


def is_url(path: str | Location) -> bool:
    """Return whether `path` starts as a URL does, such as s3://bucket/store."""
    return _URL.match(str(path)) is not None


def local_folder(path: str | Location) -> Path:
    """Return a folder of this machine for files next to a store: the store itself, or for a bucket, one in ~/.cache."""
    location = located(path)
    if isinstance(location, Path):
        return location
    return Path.home() / ".cache" / "rankscope" / location.bucket / location.key


def located(path: str | Location) -> Location:
    """Return the location that `path` names: an absolute path, or s3://bucket/prefix.

    Raises NotAStoreError for other schemes, and for a URL with a bucket or a prefix that some clients misread.
    """
    if isinstance(path, ObjectPath):
        return path
    found = _URL.fullmatch(str(path))
    if found is None:
        return Path(path).absolute()
    scheme, bucket, prefix = found.groups()
    if scheme != "s3":
        raise NotAStoreError(
            f"{redacted_name(str(path))} has the unknown scheme {scheme}: a store is a local folder, or s3://bucket/prefix"
        )
    is_misread = bool(prefix) and not {"", ".", ".."}.isdisjoint(prefix.split("/"))
    if not _BUCKET.fullmatch(bucket) or not _PREFIX.fullmatch(prefix) or is_misread:
        raise NotAStoreError(
            f"{redacted_name(str(path))} is not a valid location: "
            "write s3://bucket/prefix, with letters, digits and . _ = / - only"
        )
    return ObjectPath(bucket, prefix)
