"""Lock of a spool folder. A held lock shows that the process is alive; the system releases it when the process ends."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final, Self

from rankscope_contract.spool.layout import LOCK_NAME, SpoolError

_HELD: Final = (errno.EWOULDBLOCK, errno.EACCES)


class FolderLock:
    """A lock that this process holds.

    The lock belongs to the open file. A forked child must call `forget`; otherwise the lock would remain held after the
    parent has ended.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def create(cls, folder: Path) -> Self:
        """Create and acquire the lock of a folder that no other process knows yet.

        Raises OSError if the file cannot be created, or SpoolError if it cannot be locked.
        """
        descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if not _lock(descriptor, folder):
            os.close(descriptor)
            raise SpoolError(f"{folder}: the new lock file is already locked: another process uses this folder")
        return cls(descriptor)

    @classmethod
    def take(cls, folder: Path) -> Self | None:
        """Acquire the lock and return it, or None if another process holds the lock or removed the folder.

        Raises OSError or SpoolError if the file cannot be opened or locked.
        """
        path = folder / LOCK_NAME
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            # Another process may have removed the folder between the open and the lock.
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
        """Release the lock. A second call has no effect."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    forget = release
    """Close the file in a forked child. The parent continues to hold the lock, because it has the file open."""


def _lock(descriptor: int, folder: Path) -> bool:
    try:
        import fcntl  # noqa: PLC0415 - absent on Windows, where all except the spool works
    except ImportError as error:
        raise SpoolError(
            "a spool needs flock, which this system does not have: remove spool_dir from the configuration"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        raise SpoolError(
            f"{folder}: the file system does not support flock ({error.strerror}): choose a folder on a local disk, "
            "or mount with locks (for Lustre: -o flock)"
        ) from error
    return True
