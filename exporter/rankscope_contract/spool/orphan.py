"""A spool whose process is dead, held by the process that reads it to its end and then removes it."""

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
    """Records of a dead process. Files go as their records are committed, the folder with the last of them."""

    def __init__(self, reader: SpoolReader, lock: FolderLock, registration: Registration) -> None:
        self.reader = reader
        self.registration = registration
        self.head = reader.head()
        self.committed = NOTHING
        self.lease: str | None = None
        self._lock = lock

    @classmethod
    def take(cls, folder: Path, needed_plans: NeededPlans) -> Self | None:
        """Return the spool in `folder`, None while its process lives or another one reads it.

        Raises SpoolError or OSError when nobody holds it and yet it cannot be read.
        """
        lock = FolderLock.take(folder)
        if lock is None:
            return None
        try:
            if not (folder / IDENTITY_NAME).exists() and not segments(folder):
                remove_folder(folder)  # whoever drained it was killed while it removed the rest
                lock.release()
                return None
            return cls(SpoolReader(folder, needed_plans), lock, read_identity(folder))
        except BaseException:
            lock.release()
            raise

    @property
    def folder(self) -> Path:
        """Return where it lies."""
        return self.reader.folder

    @property
    def incarnation(self) -> str:
        """Return the id of the dead process."""
        return self.registration.incarnation

    @property
    def is_done(self) -> bool:
        """Return whether a store has everything."""
        return self.committed >= self.head

    def after(self, cursor: int, max_bytes: int) -> Stretch | None:
        """Return the next records above `cursor`, None when there are no more. Raises OSError."""
        stretch = self.reader.after(cursor, max_bytes)
        if stretch is None and cursor < self.head:
            self.head = max(cursor, self.committed)  # the rest is damaged: there is nothing left to wait for
        return stretch

    def commit(self, seq: int) -> None:
        """Note that all up to `seq` is durable, and delete the files that hold nothing else."""
        if seq <= self.committed:
            return
        self.committed = seq
        files = segments(self.folder)
        for (_, path), (next_first, _) in pairwise(files):
            if next_first <= seq + 1:
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the folder and give the lock back: everything in it is in a store."""
        try:
            remove_folder(self.folder)
        finally:
            self._lock.release()

    def release(self) -> None:
        """Give the lock back and leave the files to whoever comes next."""
        self._lock.release()


def remove_folder(folder: Path) -> None:
    """Delete a spool, records first, so that what is left at any moment can still be read. Raises OSError."""
    last = {IDENTITY_NAME: 1, LOCK_NAME: 2}
    ours = [path for path in folder.iterdir() if is_ours(path.name)]
    for path in sorted(ours, key=lambda path: (last.get(path.name, 0), not path.name.endswith(".arrows"), path.name)):
        path.unlink(missing_ok=True)
    if any(folder.iterdir()):
        log.warning("%s holds files that are not a spool's; they are left there", folder)
        return
    folder.rmdir()
