"""What can go wrong with a store, one class per remedy. Every text names the fix; nothing of delta-rs leaks out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""The beginning of a URL, also after `Path`, which merges the two slashes."""


class StoreError(Exception):
    """The store cannot do what was asked; the text says what to change."""


class NotAStoreError(StoreError):
    """The folder holds no Rankscope store."""


class UnwritableError(StoreError):
    """The folder cannot be written, or lacks what a durable commit needs."""


class SchemaVersionError(StoreError):
    """The store was written by a newer Rankscope than this one."""


class TornLogError(StoreError):
    """An entry of the log is incomplete, as after a loss of power."""


class BatchError(StoreError):
    """The rows of a batch do not fit their dataset."""


class ClaimError(StoreError):
    """Another live service holds the shard; the text names it."""


class ShardLostError(StoreError):
    """A newer claim exists: this writer is the old one and must stop."""


class ConflictError(StoreError):
    """A commit was refused because the table moved; nothing of it was stored. Reload and try again."""


class FilesGoneError(StoreError):
    """Files of a pinned version were vacuumed: the version is older than the store keeps."""


class QueryError(StoreError):
    """A statement is not allowed on a locked connection, or DuckDB refused it."""


class LimitError(StoreError):
    """The answer would be larger than allowed; the text says what to narrow."""


class ExportError(StoreError):
    """A run cannot be written in the format, or to the place, that was asked for."""


def is_url(path: str | Path) -> bool:
    """Return whether `path` begins as a URL does, such as s3://bucket/store."""
    return _URL.match(str(path)) is not None


def local_folder(path: str | Path) -> Path:
    """Return `path` as an absolute path. Raises NotAStoreError for a URL."""
    if is_url(path):
        raise NotAStoreError(
            f"{path} is a URL: a store is a local folder; name one, such as /data/history (a mounted bucket works)"
        )
    return Path(path).absolute()
