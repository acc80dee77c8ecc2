"""Opening a store for writing, and claiming one of its shards."""

from __future__ import annotations

import errno
import os
import re
import uuid
from pathlib import Path
from typing import Final

from rankscope_storage.base.errors import (
    ConflictError,
    NotAStoreError,
    ShardLockError,
    StoreError,
    UnwritableError,
    local_folder,
)
from rankscope_storage.base.fsync import Sync, make_folders, sync_to_disk
from rankscope_storage.files.encoding import check_bits
from rankscope_storage.files.parquet import STAGING
from rankscope_storage.log.delta import Log
from rankscope_storage.log.entries import has_entries
from rankscope_storage.log.shard_lock import ShardLock, current_owner, owner_info, shard_transaction
from rankscope_storage.log.translation import Change
from rankscope_storage.query.sql_script import write_sql_script
from rankscope_storage.writer.writer import Batch, Commit, Writer

__all__ = ["Batch", "Commit", "Store", "Writer"]

_SHARD: Final = re.compile(r"(\d+)/(\d+)")


class Store:
    """A store that can be written. Reading needs none of this: see `connect`."""

    def __init__(self, root: Path, sync: Sync, mantissa_bits: int | None = None) -> None:
        self.root = root
        self._sync = sync
        self._mantissa_bits = mantissa_bits

    @classmethod
    def open(
        cls, path: str | Path, *, create: bool = False, sync: Sync = sync_to_disk, mantissa_bits: int | None = None
    ) -> Store:
        """Open the store in the folder `path`; with `create`, make folder and store where there is none.

        With `mantissa_bits`, what is appended from now on has its statistics rounded: see `rounding`.
        Raises StoreError saying what to change: not a store, not writable, no hard links, newer schema, torn log.
        """
        if mantissa_bits is not None:
            check_bits(mantissa_bits)
        root = local_folder(path)
        if root.exists() and not root.is_dir():
            raise NotAStoreError(f"{root} is a file: a store is a folder")
        if not has_entries(root):
            if not create:
                raise NotAStoreError(f"{root} is not a Rankscope store: `rankscope serve` creates one")
            _prepare_folder(root)
            Log.create(root, sync)
            write_sql_script(root)
        else:
            Log.open(root, sync)
            _prepare_folder(root)
        make_folders(root / STAGING, root, sync)
        return cls(root, sync, mantissa_bits)

    def claim(self, shard: str = "0/1", *, owner: str) -> Writer:
        """Take over `shard`, and return the one writer that may append to it from now on.

        A claim wins over every older one: the predecessor may have been killed a moment ago, and if it lives on
        another machine it stops at its next append. Only an owner that demonstrably lives (it holds the shard's lock
        file, which the system frees at its death) or that claims in the same moment wins over us: ShardLockError names it.
        `owner` is how others will be told of us: host and pid.
        """
        _check_shard(shard)
        lock = ShardLock.take(self.root, shard, owner)
        try:
            return self._claim(shard, owner, lock)
        except BaseException:
            lock.release()
            raise

    def _claim(self, shard: str, owner: str, lock: ShardLock) -> Writer:
        log = Log.open(self.root, self._sync)
        log.add_missing_columns()
        number = (log.transaction(shard_transaction(shard)) or 0) + 1
        try:
            log.commit(Change(transactions={shard_transaction(shard): number}, info=owner_info(shard, owner)))
        except ConflictError as error:
            log.refresh()
            raise ShardLockError(
                f"shard {shard} of {self.root} was claimed in the same moment by {current_owner(log, shard)}: "
                "stop that service, or give this one another shard"
            ) from error
        write_sql_script(self.root)
        return Writer(
            log,
            shard=shard,
            owner=owner,
            number=number,
            lock=lock,
            sync=self._sync,
            mantissa_bits=self._mantissa_bits,
        )


def _check_shard(shard: str) -> None:
    match = _SHARD.fullmatch(shard)
    if not match or not int(match[1]) < int(match[2]):
        raise ShardLockError(f"shard {shard!r} must be i/N with 0 <= i < N, as in 0/1 or 2/4")


def _prepare_folder(root: Path) -> None:
    """Create the folder and prove that it can hold a store, before anything depends on it."""
    staging = root / STAGING
    probe = staging / f"probe-{uuid.uuid4().hex}"
    linked = probe.with_suffix(".link")
    try:
        staging.mkdir(parents=True, exist_ok=True)
        probe.touch()
        _try_hard_link(probe, linked)
    except OSError as error:
        raise UnwritableError(
            f"cannot write to {root}: {error.strerror}. Choose another folder, or its rights"
        ) from error
    finally:
        _remove(linked)
        _remove(probe)


def _try_hard_link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV):
            raise
        raise UnwritableError(
            f"{source.parent} is on a file system without hard links (FAT, some network and FUSE mounts), which atomic "
            "commits need: put the store on a local disk (ext4, xfs, btrfs) or on NFS"
        ) from error


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.ENOENT, errno.EPERM):
            raise StoreError(f"cannot remove {path}: {error.strerror}") from error
