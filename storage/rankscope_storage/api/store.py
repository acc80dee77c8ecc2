"""Open a store for writing, and claim one of its shards."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from pathlib import Path
from typing import Final

from rankscope_storage.base.errors import (
    ConflictError,
    NotAStoreError,
    ShardLockError,
    UnwritableError,
    local_folder,
)
from rankscope_storage.base.fsync import Sync, make_folders, sync_to_disk
from rankscope_storage.base.shards import Shard
from rankscope_storage.files.encoding import STAGING, check_bits
from rankscope_storage.log.delta import Change, Log
from rankscope_storage.log.entries import has_entries
from rankscope_storage.log.services import ADDRESS, SERVICES, ServiceOwner, check_count, service_count, service_owners
from rankscope_storage.log.shard_lock import ShardLock, current_owner, owner_info, shard_transaction
from rankscope_storage.maintenance.upgrade import upgrade
from rankscope_storage.query.sql_script import write_sql_script
from rankscope_storage.writer.writer import Batch, Commit, Writer

__all__ = ["Batch", "Commit", "Store", "Writer", "is_store"]

_CLAIM_TRIES: Final = 20
_NO_HARD_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


class Store:
    """A store for writing, in the local folder `root`. For reading, use `rankscope_storage.connection.connect`."""

    def __init__(self, root: Path, sync: Sync, mantissa_bits: int | None = None, *, is_new: bool = False) -> None:
        self.root = root
        self._sync = sync
        self._mantissa_bits = mantissa_bits
        self._is_new = is_new

    @classmethod
    def open(
        cls, path: str | Path, *, create: bool = False, sync: Sync = sync_to_disk, mantissa_bits: int | None = None
    ) -> Store:
        """Open the store in the folder `path`; with `create`, create folder and store if they do not exist.

        With `mantissa_bits`, tensor statistics and features that are written from now on are rounded to this number of
        mantissa bits: see `rankscope_storage.files.encoding`. Raises StoreError, whose message names the remedy, in
        these cases: there is no store, the folder is not writable or does not support hard links, a newer Rankscope
        wrote the store, or an entry of the Delta log is incomplete.
        """
        if mantissa_bits is not None:
            check_bits(mantissa_bits)
        root = local_folder(path)
        try:
            is_file = root.exists() and not root.is_dir()
        except PermissionError as error:
            raise UnwritableError(
                f"cannot access {root}: {error.strerror}. Choose another folder, or change the permissions above it"
            ) from error
        if is_file:
            raise NotAStoreError(f"{root} is a file, but a store is a folder: name a folder")
        is_new = not has_entries(root)
        if is_new:
            if not create:
                raise NotAStoreError(f"{root} is not a Rankscope store: `rankscope serve` creates one")
            _prepare_folder(root)
            Log.create(root, sync)
            write_sql_script(root)
        else:
            Log.open(root, sync, may_be_older=True)
            _prepare_folder(root)
        make_folders(root / STAGING, root, sync)
        return cls(root, sync, mantissa_bits, is_new=is_new)

    def owners(self) -> dict[Shard, ServiceOwner | None]:
        """Return the service of each shard of the store; None if no recent commit names one."""
        log = Log.open(self.root, self._sync)
        found, count = service_owners(log), service_count(log)
        by_shard = {one.shard: one for one in found}
        return {shard: by_shard.get(shard) for shard in (Shard(number, count) for number in range(count))}

    def claim(self, shard: str = "0/1", *, owner: str, is_service: bool = False) -> Writer:
        """Take over `shard`, and return the only writer that may append to it from now on.

        A claim takes the shard from every older owner. An older owner that still runs on another machine gets an error
        at its next append and stops. Raises ShardLockError, which names the owner, in two cases: a process on this
        machine holds the shard's lock file, which the kernel releases when the process exits, or another claim is
        committed concurrently. A store of an earlier release is upgraded first. `owner` (host and pid) names this
        process in the errors of other services. With `is_service`, the writer is one of the services of the store:
        raises ServicesError if a service runs that was started with another number of services.
        """
        try:
            claimed = Shard.parse(shard)
        except ValueError as error:
            raise ShardLockError(str(error)) from error
        upgrade(self.root, self._sync)
        lock = ShardLock.take(self.root, shard, owner, is_service=is_service)
        try:
            log = Log.open(self.root, self._sync)
            log.add_missing_columns()
            number = self._claim(log, claimed, owner, is_service=is_service, is_locked=lock.is_held)
            if not self._is_new:  # an earlier release may have written the script
                write_sql_script(self.root)
            return Writer(
                log,
                shard=shard,
                owner=owner,
                number=number,
                lock=lock,
                sync=self._sync,
                mantissa_bits=self._mantissa_bits,
                is_service=is_service,
            )
        except BaseException:
            lock.release()
            raise

    def _claim(self, log: Log, shard: Shard, owner: str, *, is_service: bool, is_locked: bool) -> int:
        """Commit the claim of `shard`, and return its transaction number."""
        name = shard_transaction(str(shard))
        number = (log.transaction(name) or 0) + 1
        info = owner_info(str(shard), owner) | ({ADDRESS: ""} if is_service else {})
        for _ in range(_CLAIM_TRIES):
            changes = {name: number}
            if is_service:
                check_count(log, shard, is_locked=is_locked)
                changes |= {SERVICES: shard.count} if service_count(log) != shard.count else {}
            try:
                log.commit(Change(transactions=changes, info=info))
            except ConflictError as error:
                log.refresh()
                conflict = error
                if current_owner(log, str(shard)) == owner:  # a request of an earlier claim came late
                    number = (log.transaction(name) or 0) + 1
                elif log.transaction(name) != (number - 1 or None):
                    break
            else:
                return number
        raise ShardLockError(
            f"shard {shard} of {self.root} was claimed concurrently by {current_owner(log, str(shard))}: "
            "stop that service, or give this one another shard"
        ) from conflict


def is_store(path: Path) -> bool:
    """Return whether the folder `path` contains a store."""
    return path.is_dir() and has_entries(path)


def _prepare_folder(root: Path) -> None:
    """Create the folder of a store, and verify that it is writable and that its file system supports hard links."""
    probe = root / STAGING / f"probe-{uuid.uuid4().hex}"
    linked = probe.with_suffix(".link")
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        try:
            os.link(probe, linked)
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            raise UnwritableError(
                f"{probe.parent} is on a file system without hard links (FAT, some network and FUSE mounts), which "
                "atomic commits need: put the store on a local disk (ext4, xfs, btrfs) or on NFS"
            ) from error
    except OSError as error:
        raise UnwritableError(
            f"cannot write to {root}: {error.strerror}. Choose another folder, or change its permissions"
        ) from error
    finally:
        for path in (linked, probe):
            with contextlib.suppress(OSError):  # the first error is the important one
                path.unlink(missing_ok=True)
