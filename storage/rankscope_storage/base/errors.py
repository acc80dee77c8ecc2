"""Errors of a store, one class for each remedy. Every message names the remedy and hides internals of delta-rs."""

from __future__ import annotations

import re


class StoreError(Exception):
    """A store operation failed; the message states what to change."""


class NotAStoreError(StoreError):
    """The folder contains no Rankscope store."""


class UnwritableError(StoreError):
    """The folder is not writable, or its file system lacks a feature that durable commits need."""


class SchemaVersionError(StoreError):
    """A newer version of Rankscope wrote the store."""


class TornLogError(StoreError):
    """An entry of the Delta log is incomplete, for example after a power failure."""


class BucketError(StoreError, OSError):
    """A request to a bucket failed; `strerror` names the reason. Code for errors of a disk handles it, too."""

    def __str__(self) -> str:
        return f"cannot access {self.filename}: {self.strerror}"


class BatchError(StoreError):
    """Rows of a batch do not match the schema of their dataset."""


class RepeatedError(BatchError):
    """The batch contains a request that another service has stored. Append its other requests without it."""


class ShardLockError(StoreError):
    """Another running process holds the lock of the shard; the message names that process."""


class ShardLostError(StoreError):
    """Another service has taken over the shard. The writer that gets this error must stop."""


class ServicesError(StoreError):
    """The services that share the store were started with different numbers of services."""


class ConflictError(StoreError):
    """A commit was refused because the table of the store was changed concurrently; nothing was stored.

    Refresh the handle on the table, and retry the commit.
    """


class FilesGoneError(StoreError):
    """Vacuum has deleted data files of the version of the store that a connection is pinned to.

    A file is deleted some hours after a newer version replaced it.
    """


class QueryError(StoreError):
    """A read-only connection does not permit the statement, or DuckDB rejected the statement."""


class LimitError(StoreError):
    """The result of a query would exceed a limit of series, samples, memory or time.

    The message states how to request less.
    """


class ExportError(StoreError):
    """A run cannot be exported in the requested format or to the requested path."""


def damaged_file(error: BaseException) -> str | None:
    """Return the path of the data file that `error`, an error of DuckDB, reports as damaged; None for others."""
    found = re.search(r"'([^']+\.parquet)'", str(error))
    return found[1] if found is not None and re.search("magic bytes|too small|file size is", str(error)) else None


def damage(error: BaseException) -> str | None:
    """Return the message about the data file that `error` reports as damaged; None for another error."""
    path = damaged_file(error)
    return path and f"{path} is damaged: `rankscope store check` names the run and the steps of its rows"
