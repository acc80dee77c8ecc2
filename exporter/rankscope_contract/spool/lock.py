"""Whether the process behind a folder lives: it holds a lock, which the system takes back whatever kills it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final, Self

from rankscope_contract.spool.layout import LOCK_NAME, SpoolError

_HELD: Final = (errno.EWOULDBLOCK, errno.EACCES)


class FolderLock:
    """A lock that is held. It belongs to the open file: a forked child must `forget` it, or it would outlive us."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def create(cls, folder: Path) -> Self:
        """Make and hold the lock of a folder that nobody else knows yet. Raises OSError or SpoolError."""
        descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if not _lock(descriptor, folder):
            os.close(descriptor)
            raise SpoolError(f"{folder}: a new lock file is already locked; another program works in this folder")
        return cls(descriptor)

    @classmethod
    def take(cls, folder: Path) -> Self | None:
        """Return the lock, or None while its process lives or somebody else took it. Raises OSError or SpoolError."""
        path = folder / LOCK_NAME
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            # Whoever drained the folder may have removed it between our open and our lock.
            held = _lock(descriptor, folder) and os.path.samestat(os.fstat(descriptor), path.stat())
        except FileNotFoundError:
            held = False
        except BaseException:
            os.close(descriptor)
            raise
        if not held:
            os.close(descriptor)
            return None
        return cls(descriptor)

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    forget = release
    """In a forked child: closing does not release the lock as long as the parent has the file open."""


def _lock(descriptor: int, folder: Path) -> bool:
    try:
        import fcntl  # noqa: PLC0415 - absent on Windows, where everything but the spool works
    except ImportError as error:
        raise SpoolError("a spool needs flock, which this system does not have: leave spool_dir out") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        raise SpoolError(
            f"{folder}: the file system has no flock ({error.strerror}): choose a folder on a local disk, "
            "or mount with locks (for Lustre: -o flock)"
        ) from error
    return True
