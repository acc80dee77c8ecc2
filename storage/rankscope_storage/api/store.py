"""Open a store for writing, and claim one of its shards."""

from __future__ import annotations

from typing import Final

from rankscope_storage.base.errors import (
    ConflictError,
    NotAStoreError,
    ShardLockError,
    UnwritableError,
)
from rankscope_storage.base.fsync import Sync, sync_to_disk
from rankscope_storage.base.location import Location, located
from rankscope_storage.base.shards import Shard
from rankscope_storage.files.encoding import check_bits
from rankscope_storage.files.filesystem import filesystem
from rankscope_storage.log.delta import Change, Log
from rankscope_storage.log.entries import has_entries
from rankscope_storage.log.services import (
    ADDRESS,
    SERVICES,
    ServiceOwner,
    check_count,
    check_is_no_service,
    service_count,
    service_owners,
)
from rankscope_storage.log.shard_lock import ShardLock, current_owner, owner_info, shard_transaction
from rankscope_storage.maintenance.upgrade import upgrade
from rankscope_storage.query.sql_script import write_sql_script
from rankscope_storage.writer.writer import Batch, Commit, Writer

__all__ = ["Batch", "Commit", "Store", "Writer", "is_store"]

_CLAIM_TRIES: Final = 20


class Store:
    """A store for writing, at the location `root`. For reading, use `rankscope_storage.connection.connect`."""

    def __init__(self, root: Location, sync: Sync, mantissa_bits: int | None = None, *, is_new: bool = False) -> None:
        self.root = root
        self._sync = sync
        self._mantissa_bits = mantissa_bits
        self._is_new = is_new

    @classmethod
    def open(
        cls, path: str | Location, *, create: bool = False, sync: Sync = sync_to_disk, mantissa_bits: int | None = None
    ) -> Store:
        """Open the store at `path`, a folder or s3://bucket/prefix; with `create`, create it if it does not exist.

        With `mantissa_bits`, tensor statistics and features that are written from now on are rounded to this number of
        mantissa bits: see `rankscope_storage.files.encoding`. Raises StoreError, whose message names the remedy, in
        these cases: there is no store, the folder is not writable or does not support hard links, a newer Rankscope
        wrote the store, or an entry of the Delta log is incomplete.
        """
        if mantissa_bits is not None:
            check_bits(mantissa_bits)
        root = located(path)
        files = filesystem(root)
        files.check_root(root)
        try:
            is_new = not has_entries(root)
        except OSError as error:
            raise UnwritableError(f"cannot access {root}: {error.strerror or error}") from error
        if is_new:
            if not create:
                raise NotAStoreError(f"{root} is not a Rankscope store: `rankscope serve` creates one")
            files.prepare(root)
            Log.create(root, sync)
            write_sql_script(root)
        else:
            Log.open(root, sync, may_be_older=True)
            files.prepare(root)
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
        raises ServicesError if a service runs that was started with another number of services. Without it, and without
        file locks, raises ShardLockError for the shard of a service with a commit in the last LEASE_SECONDS.
        """
        try:
            claimed = Shard.parse(shard)
            shard = str(claimed)  # 01/02 is 1/2
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
        if not (is_service or is_locked):
            check_is_no_service(log, shard)
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


def is_store(path: Location) -> bool:
    """Return whether the folder `path` contains a store."""
    return has_entries(path)
