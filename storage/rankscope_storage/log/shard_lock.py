"""Who owns a shard: the lock that shows an owner alive on this machine, and its name in the log for all others."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rankscope_contract.security.escaping import from_path_segment, path_segment
from rankscope_storage.base.errors import ClaimError, UnwritableError
from rankscope_storage.log.delta import Log

LOCKS: Final = "_shards"
_OWNER: Final = "rankscopeOwner"
_SHARD: Final = "rankscopeShard"
_HISTORY: Final = 200
"""Commits to look through for the name of an owner; every commit of a shard carries it."""
_NAME_BYTES: Final = 1000
_LOOKS: Final = 5
_LOOK_SECONDS: Final = 0.1


def shard_transaction(shard: str) -> str:
    """Return the name of the transaction that every claim and every append of `shard` moves by one."""
    return f"ingest:{shard}"


def owner_info(shard: str, owner: str) -> dict[str, Any]:
    """Return what a commit says about who made it."""
    return {_SHARD: shard, _OWNER: owner}


def current_owner(log: Log, shard: str) -> str:
    """Return who made the newest commit of `shard`, as far as the log still tells."""
    for commit in log.history(_HISTORY):
        if commit.get(_SHARD) == shard and _OWNER in commit:
            return str(commit[_OWNER])
    return "an unknown owner"


@contextlib.contextmanager
def all_shards(root: Path, owner: str) -> Iterator[None]:
    """Hold the locks of all shards that the store at `root` ever had: no service of this machine writes meanwhile.

    Raises ClaimError naming a live process that holds one.
    """
    with contextlib.ExitStack() as held:
        for path in sorted((root / LOCKS).glob("*.lock")):
            held.callback(ShardLock.take(root, from_path_segment(path.stem), owner).release)
        yield


def _holder(descriptor: int) -> str:
    """Return who holds the lock; it may have taken it a moment ago, and its predecessor's name may still be there."""
    for _ in range(_LOOKS):
        time.sleep(_LOOK_SECONDS)
        if found := os.pread(descriptor, _NAME_BYTES, 0):
            return found.decode(errors="replace")
    return "an unnamed process"


class ShardLock:
    """An advisory lock on `_shards/<shard>.lock`, which the kernel frees when its holder dies, even by kill -9.

    It only ever proves life. Where locks do not work (some network mounts) or are not shared (another machine), nobody
    is proved alive, and the numbers in the log alone decide.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    @classmethod
    def take(cls, root: Path, shard: str, owner: str) -> ShardLock:
        """Take the lock of `shard`, or raise ClaimError naming the live process that holds it."""
        path = root / LOCKS / f"{path_segment(shard)}.lock"
        try:
            path.parent.mkdir(exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UnwritableError(f"cannot write {path}: {error.strerror}. Is it another user's?") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(descriptor)
                return cls.without_proof()
            holder = _holder(descriptor)
            os.close(descriptor)
            raise ClaimError(
                f"shard {shard} of {root} belongs to {holder}, which is alive: "
                "stop it, or give this service another shard"
            ) from error
        with contextlib.suppress(OSError):  # a full disk takes no name; the lock holds without one
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, owner.encode()[:_NAME_BYTES], 0)
        return cls(descriptor)

    @classmethod
    def without_proof(cls) -> ShardLock:
        """Return a lock that proves nothing, for a file system that has none."""
        return cls(None)

    def release(self) -> None:
        """Let the next owner in; idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
