"""Lock of a spool folder, and the spool of a dead process.

A held lock shows that the process is alive; the system releases it when the process ends. The process that then holds
the lock of the spool reads all records and then removes the spool.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from itertools import pairwise
from pathlib import Path
from typing import Final, Self

from rankscope_contract.wire.channel import NOTHING, Registration
from rankscope_contract.wire.spool import reader as files
from rankscope_contract.wire.spool.reader import NeededPlans, SpoolError, SpoolReader, SpoolRecords

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
        """Create and acquire the lock of a new folder, which no other process can have found yet.

        Raises OSError if the lock file cannot be created, or SpoolError if it cannot be locked.
        """
        descriptor = os.open(folder / files.LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if not _lock(descriptor, folder):
            os.close(descriptor)
            raise SpoolError(f"{folder}: the new lock file is already locked: another process uses this folder")
        return cls(descriptor)

    @classmethod
    def take(cls, folder: Path) -> Self | None:
        """Acquire the lock of the spool folder and return it.

        Return None if another process holds the lock or removed the folder. Raises OSError or SpoolError if the lock
        file cannot be opened or locked.
        """
        path = folder / files.LOCK_NAME
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as undo:
            descriptor = os.open(path, os.O_RDWR)
            undo.callback(os.close, descriptor)
            # Another process may have removed the folder between the open and the lock.
            if _lock(descriptor, folder) and os.path.samestat(os.fstat(descriptor), path.stat()):
                undo.pop_all()
                return cls(descriptor)
        return None

    def release(self) -> None:
        """Release the lock of the spool folder. A second call has no effect."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    forget = release
    """Close the lock file of the spool folder in a forked child.

    The parent continues to hold the lock, because it has the file open.
    """


def _lock(descriptor: int, folder: Path) -> bool:
    try:
        import fcntl  # noqa: PLC0415 - absent on Windows, where all except the spool works
    except ImportError as error:
        remedy = "remove spool_dir from the configuration"
        raise SpoolError(f"a spool needs flock, which this system does not have: {remedy}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        remedy = "choose a folder on a local disk, or mount with locks (for Lustre: -o flock)"
        raise SpoolError(f"{folder}: the file system does not support flock ({error.strerror}): {remedy}") from error
    return True


log = logging.getLogger(__name__)


class Orphan:
    """The spool of a dead process, locked by this process.

    A file is deleted when all its records are committed.
    """

    def __init__(self, reader: SpoolReader, lock: FolderLock, registration: Registration) -> None:
        self.reader = reader
        self.registration = registration
        self.head = reader.head()
        self.committed = NOTHING
        self.lease: str | None = None
        self._lock = lock

    @classmethod
    def take(cls, folder: Path, needed_plans: NeededPlans) -> Self | None:
        """Lock and return the spool in `folder`.

        Return None if the process of the spool is alive or another process reads the spool. Raises SpoolError or
        OSError if the spool cannot be read.
        """
        lock = FolderLock.take(folder)
        if lock is None:
            return None
        with contextlib.ExitStack() as undo:
            undo.callback(lock.release)
            if not (folder / files.IDENTITY_NAME).exists() and not files.segments(folder):
                remove_folder(folder)  # its reader was killed while it removed the folder
                return None
            orphan = cls(SpoolReader(folder, needed_plans), lock, files.read_identity(folder))
            undo.pop_all()
        return orphan

    @property
    def folder(self) -> Path:
        return self.reader.folder

    @property
    def incarnation(self) -> str:
        return self.registration.incarnation

    @property
    def is_done(self) -> bool:
        """Return whether a store has committed all records of the spool."""
        return self.committed >= self.head

    def after(self, cursor: int, max_bytes: int) -> SpoolRecords | None:
        """Return the next records after sequence number `cursor`, or None if there are no more. Raises OSError."""
        records = self.reader.after(cursor, max_bytes)
        if records is None and cursor < self.head:
            self.head = max(cursor, self.committed)  # the remaining records are damaged: no further record will come
        return records

    def commit(self, seq: int) -> None:
        """Record that a store has committed all records up to `seq`, and delete files that contain no later record."""
        if seq <= self.committed:
            return
        self.committed = seq
        for (_, path), (next_first, _) in pairwise(files.segments(self.folder)):
            if next_first <= seq + 1:
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the spool folder and release its lock. Call this after a store has committed all records."""
        try:
            remove_folder(self.folder)
        finally:
            self._lock.release()

    def release(self) -> None:
        """Release the lock of the spool folder and keep its files, so that another process can read them."""
        self._lock.release()


def remove_folder(folder: Path) -> None:
    """Delete the folder of a spool, the files of records first.

    If this process is killed meanwhile, the remaining records are still readable. Raises OSError.
    """
    last = {files.IDENTITY_NAME: 1, files.LOCK_NAME: 2}
    ours = [path for path in folder.iterdir() if files.is_ours(path.name)]
    for path in sorted(ours, key=lambda path: (last.get(path.name, 0), not path.name.endswith(".arrows"), path.name)):
        path.unlink(missing_ok=True)
    if any(folder.iterdir()):
        log.warning("%s contains files that do not belong to a spool; the folder and these files are kept", folder)
        return
    folder.rmdir()
