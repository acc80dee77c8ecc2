"""Read the spool of a dead process.

The process that holds the lock of the spool reads all records and then removes the spool.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from typing import Self

from rankscope_contract.protocol.channel import NOTHING, Registration
from rankscope_contract.spool.layout import IDENTITY_NAME, LOCK_NAME, is_ours, read_identity, segments
from rankscope_contract.spool.lock import FolderLock
from rankscope_contract.spool.reader import NeededPlans, SpoolReader, Stretch

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
        try:
            if not (folder / IDENTITY_NAME).exists() and not segments(folder):
                remove_folder(folder)  # its reader was killed while it removed the folder
                lock.release()
                return None
            return cls(SpoolReader(folder, needed_plans), lock, read_identity(folder))
        except BaseException:
            lock.release()
            raise

    @property
    def folder(self) -> Path:
        """Return the path of the spool folder."""
        return self.reader.folder

    @property
    def incarnation(self) -> str:
        """Return the incarnation id of the dead process."""
        return self.registration.incarnation

    @property
    def is_done(self) -> bool:
        """Return whether a store has committed all records of the spool."""
        return self.committed >= self.head

    def after(self, cursor: int, max_bytes: int) -> Stretch | None:
        """Return the next records after sequence number `cursor`, or None if there are no more. Raises OSError."""
        stretch = self.reader.after(cursor, max_bytes)
        if stretch is None and cursor < self.head:
            self.head = max(cursor, self.committed)  # the remaining records are damaged: no further record will come
        return stretch

    def commit(self, seq: int) -> None:
        """Record that a store has committed all records up to `seq`, and delete files that contain no later record."""
        if seq <= self.committed:
            return
        self.committed = seq
        files = segments(self.folder)
        for (_, path), (next_first, _) in pairwise(files):
            if next_first <= seq + 1:
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the folder and release the lock. Call this after all records were committed."""
        try:
            remove_folder(self.folder)
        finally:
            self._lock.release()

    def release(self) -> None:
        """Release the lock and leave the files for another reader."""
        self._lock.release()


def remove_folder(folder: Path) -> None:
    """Delete the folder of a spool, the files of records first.

    If this process is killed meanwhile, the remaining records are still readable. Raises OSError.
    """
    last = {IDENTITY_NAME: 1, LOCK_NAME: 2}
    ours = [path for path in folder.iterdir() if is_ours(path.name)]
    for path in sorted(ours, key=lambda path: (last.get(path.name, 0), not path.name.endswith(".arrows"), path.name)):
        path.unlink(missing_ok=True)
    if any(folder.iterdir()):
        log.warning("%s contains files that do not belong to a spool; the folder and these files are kept", folder)
        return
    folder.rmdir()
