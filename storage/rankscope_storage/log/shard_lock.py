"""Owner of a shard: a lock that proves that the owner runs on this machine, and the owner's name in the Delta log."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rankscope_storage.base.errors import ShardLockError, StoreError, UnwritableError
from rankscope_storage.base.escaping import from_path_segment, path_segment
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.location import Location
from rankscope_storage.base.shards import Shard
from rankscope_storage.log.delta import Log

LOCKS: Final = "_shards"
OWNER: Final = "rankscopeOwner"
SHARD: Final = "rankscopeShard"
HISTORY: Final = 200
"""Number of newest commits in which to search for the owner of a shard; each commit of a shard names its owner."""
SILENT_SECONDS: Final = 30.0
"""Time without a commit of a shard after which no process counts as its owner in a bucket, as for services."""
_SERVICE: Final = "service"
"""Second line of a lock file of a service. Other writers, such as imports, use shards only as names."""
_NAME_BYTES: Final = 1000
_READS: Final = 5
_READ_SECONDS: Final = 0.1


def shard_transaction(shard: str) -> str:
    """Return the name of the transaction that each claim and each append of `shard` increments by 1."""
    return f"ingest:{shard}"


def owner_info(shard: str, owner: str) -> dict[str, Any]:
    """Return the commit information that identifies the shard and its owner."""
    return {SHARD: shard, OWNER: owner}


def current_owner(log: Log, shard: str) -> str:
    """Return the name of the owner from the newest commit of `shard` that is still in the Delta log."""
    for commit in log.history(HISTORY):
        if commit.get(SHARD) == shard and OWNER in commit:
            return str(commit[OWNER])
    return "an unknown owner"


def shard_numbers(log: Log) -> dict[str, int]:
    """Return the transaction number of each shard that the store ever had, by the name of the transaction."""
    if (found := log.transactions()) is None:
        raise StoreError(f"entries of the log of {log.root} were deleted meanwhile: try again")
    return {name: number for name, number in found.items() if name.startswith(shard_transaction(""))}


@contextlib.contextmanager
def all_shards(root: Location, owner: str) -> Iterator[None]:
    """Hold the locks of all shards that the store at `root` ever had, so that no service on this machine can write.

    Raises ShardLockError if a running process holds one of these locks; the message names the process. On an object
    store, there are no locks: raises ShardLockError if the newest commit of a shard is younger than SILENT_SECONDS.
    """
    if not isinstance(root, Path):
        _check_silence(root)
    with contextlib.ExitStack() as held:
        for path in _lock_files(root):
            held.callback(ShardLock.take(root, from_path_segment(path.stem), owner, is_one_of_all=True).release)
        yield


def _lock_files(root: Location) -> list[Path]:
    return sorted((root / LOCKS).glob("*.lock")) if isinstance(root, Path) else []


def _check_silence(root: Location) -> None:
    for commit in Log.open(root, sync_to_disk, may_be_older=True).history(HISTORY):
        age = time.time() - commit.get("timestamp", 0) / 1000  # other tools may write entries without it
        if SHARD in commit and age < SILENT_SECONDS:
            raise ShardLockError(
                f"shard {commit[SHARD]} of {root} was written {age:.0f} s ago by {commit.get(OWNER)}: stop it, and try "
                f"again after {SILENT_SECONDS:.0f} s"
            )


def _holder(descriptor: int) -> str:
    """Return the name of the process that holds the lock file, which is open as `descriptor`.

    The process writes its name shortly after it takes the lock, so this function waits up to 0.5 s for the name.
    """
    return _lines(descriptor)[0] or "an unnamed process"


def _lines(descriptor: int) -> list[str]:
    for _ in range(_READS):
        time.sleep(_READ_SECONDS)
        if found := os.pread(descriptor, _NAME_BYTES, 0):
            return found.decode(errors="replace").split("\n")
    return [""]


def lock_of_service(root: Location, shard: Shard) -> str | None:
    """Return the shard and the owner of a running service with another number of services than `shard`, or None."""
    for path in _lock_files(root):
        name = from_path_segment(path.stem)
        if name.partition("/")[2] == str(shard.count):
            continue  # its service may be taking the lock at this moment
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                owner, *kind = _lines(file.fileno())
                if kind == [_SERVICE]:
                    return f"{name}, {owner}"
    return None


class ShardLock:
    """An advisory lock on `_shards/<shard>.lock`, which the kernel releases when the owner exits, even after kill -9.

    The lock only proves that an owner is running on this machine. It proves nothing between machines, or on file
    systems without locks (some network mounts). In these cases, only the transaction numbers in the Delta log decide
    which owner may write.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    @classmethod
    def take(
        cls, root: Location, shard: str, owner: str, *, is_service: bool = False, is_one_of_all: bool = False
    ) -> ShardLock:
        """Take the lock of `shard`. Raises ShardLockError with the name of the holder if a running process holds it.

        With `is_one_of_all`, `owner` needs all shards, and the message does not advise another one.
        """
        if not isinstance(root, Path):
            return cls(None)
        path = root / LOCKS / f"{path_segment(shard)}.lock"
        try:
            path.parent.mkdir(exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UnwritableError(f"cannot write {path}: {error.strerror}. Check the owner of the folder") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(descriptor)
                return cls(None)  # a file system without locks
            holder = _holder(descriptor)
            os.close(descriptor)
            held = f"shard {shard} of {root} is locked by {holder}, which is running: stop it"
            if is_one_of_all:
                raise ShardLockError(f"{owner} needs the store for itself: {held}") from error
            other = f"{shard.partition('/')[2]}/{int(shard.partition('/')[2]) + 1}"
            raise ShardLockError(
                f"{held}, or write to another shard, such as {other} (import and watch: --shard {other})"
            ) from error
        with contextlib.suppress(OSError):  # on a full disk, the lock has no name but is valid
            os.ftruncate(descriptor, 0)
            text = f"{owner}\n{_SERVICE}" if is_service else owner
            os.pwrite(descriptor, text.encode()[:_NAME_BYTES], 0)
        return cls(descriptor)

    @property
    def is_held(self) -> bool:
        """Return whether the file system has locks, and this one is not released."""
        return self._descriptor is not None

    def release(self) -> None:
        """Release the lock, so that the next owner can take it. May be called repeatedly."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
