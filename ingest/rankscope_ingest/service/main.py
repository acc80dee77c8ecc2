"""Run the service: claim the shard of the store, read the stored state, and serve until a signal arrives.

`import_spools` stores the records that ranks wrote to disk: the service reads copies of their spools until all records
are stored. The files of the ranks are not changed, so a folder can be read several times, and while the training
continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from rankscope_contract.wire.spool import (
    LOCK_NAME,
    SpoolError,
    SpoolReader,
    is_ours,
    read_identity,
    segments,
    spool_folders,
    take_lock,
)
from rankscope_ingest.base.config import (
    IngestSection,
    NotifySection,
    ServiceConfig,
    ServiceSection,
    SpoolSection,
    StoreSection,
)
from rankscope_ingest.base.errors import IngestError, RegistrationError
from rankscope_ingest.base.memory import tune_allocator, unfreeze_gc
from rankscope_ingest.base.stop_signals import stop_on_signals
from rankscope_ingest.base.tls import client_tls, server_tls
from rankscope_ingest.detect.history import History, read_history
from rankscope_ingest.live.progress import Progress
from rankscope_ingest.network.connections import raise_file_limit
from rankscope_ingest.notify.announcer import Notifier
from rankscope_ingest.notify.notifiers import make_notifiers
from rankscope_ingest.record_channel.client import Fetcher
from rankscope_ingest.service.service import Service
from rankscope_ingest.targets.registry import check_registration
from rankscope_ingest.watch.watcher import check_logs
from rankscope_storage.api.store import Store
from rankscope_storage.base.location import Location
from rankscope_storage.connection import connect
from rankscope_storage.writer.writer import Writer

IDLE_SECONDS: Final = 60.0
"""Time in seconds without a stored row or a finished spool after which the import is considered stuck."""

_SCAN_SECONDS: Final = 0.1


async def run(
    config: ServiceConfig,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    on_ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
    shard_of_import: str | None = None,
) -> None:
    """Run the service until SIGTERM, SIGINT or `stop`; then poll and commit the remaining records, and return.

    With `shard_of_import`, the process is no service of the store: it stores all runs, and writes this shard.

    `on_ready` receives the URL of the service as soon as the service accepts requests. `on_progress` receives a
    snapshot each second and one at the end. Raises IngestError or StoreError with a message for the user if the service
    cannot start or continue, for example because the store does not exist, another service owns the shard, or the port
    is in use.
    """
    stop = stop or asyncio.Event()
    tune_allocator()
    raise_file_limit()
    try:
        # Parts that can reject the configuration come first: an invalid file must not create a store.
        notifiers = _notifiers(config)
        check_logs(config.watch)
        own_tls = server_tls(config.service.web_config)
        ranks_tls = client_tls(config.service.ca_file, config.service.cert_file, config.service.key_file)
        with (
            stop_on_signals(stop),
            contextlib.closing(await asyncio.to_thread(_claim, config, shard_of_import)) as writer,
        ):
            history = await asyncio.to_thread(_history, config.store)
            async with Fetcher(
                networks=config.service.allowed_networks,
                token=config.token,
                timeout_seconds=config.ingest.timeout_seconds,
                tls=ranks_tls,
                server_name=config.service.server_name,
            ) as fetcher:
                service = Service(
                    config, writer=writer, history=history, fetcher=fetcher, notifiers=notifiers, tls=own_tls
                )
                await service.serve(stop, on_progress=on_progress, on_ready=on_ready)
    finally:
        unfreeze_gc()


def _notifiers(config: ServiceConfig) -> Sequence[Notifier]:
    """Return the notifiers that the configuration defines. Raises ConfigError for an unsupported notification URL."""
    section = config.notify
    urls = [url.get_secret_value() for url in section.urls] if section.mode == "embedded" else []
    return make_notifiers(urls, timeout_seconds=section.timeout_seconds, proxy=section.proxy.get_secret_value())


def _claim(config: ServiceConfig, shard_of_import: str | None) -> Writer:
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    store = Store.open(config.store.path, create=True, mantissa_bits=config.store.mantissa_bits)
    is_service = shard_of_import is None
    return store.claim(shard_of_import or config.store.shard, owner=owner, is_service=is_service)


def _history(store: StoreSection) -> History:
    with connect(store.path, single_threaded=True) as connection:
        return read_history(connection, time.monotonic(), store.owned.owns)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineSpool:
    """The spool of one process: its folder, the run and rank, the number of records, and whether the process lives."""

    folder: Path
    run: str
    rank: int
    records: int
    is_running: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineFolder:
    """The spools in a folder that can be read, and a text about each spool that cannot be read."""

    spools: tuple[OfflineSpool, ...]
    unreadable: tuple[str, ...]


def inspect(path: Path) -> OfflineFolder:
    """Return the spools at `path`, which is a spool folder or contains spool folders."""
    spools, unreadable = [], []
    for folder in spool_folders(path):
        try:
            registration = read_identity(folder)
            check_registration(registration)
            files = segments(folder)
            records = SpoolReader(folder, pa, lambda _: ()).head() + 1 - files[0][0] if files else 0
            lock = take_lock(folder)
        except (SpoolError, RegistrationError, OSError) as error:
            unreadable.append(f"{folder}: {error}")
            continue
        if lock is not None:
            lock.close()
        spools.append(
            OfflineSpool(
                folder=folder,
                run=registration.run,
                rank=registration.rank,
                records=records,
                is_running=lock is None,
            )
        )
    return OfflineFolder(spools=tuple(spools), unreadable=tuple(unreadable))


def import_spools(
    spools: tuple[OfflineSpool, ...],
    store: Location,
    *,
    shard: str = "0/1",
    progress: Callable[[int], None] | None = None,
) -> int:
    """Store the records of `spools` in `store`, and return the number of new rows. The spools are not changed.

    Records that the store already has are skipped. No notification is sent. `progress` receives the number of spools
    that are stored so far. Raises IngestError or StoreError if any spool could not be stored.
    """
    with tempfile.TemporaryDirectory(prefix=".rankscope-", dir=_parent_of(store)) as copies:
        for spool in spools:
            _copy(spool, Path(copies) / spool.folder.name)
        config = ServiceConfig(
            service=ServiceSection(listen="127.0.0.1:0"),
            store=StoreSection(path=str(store)),
            ingest=IngestSection(flush_after_seconds=1.0),
            spool=SpoolSection(folders=(copies,), scan_seconds=_SCAN_SECONDS),
            notify=NotifySection(group_wait_seconds=0.0),
        )
        return asyncio.run(_serve_until_read(config, Path(copies), shard, progress or (lambda _: None)))


async def _serve_until_read(config: ServiceConfig, copies: Path, shard: str, progress: Callable[[int], None]) -> int:
    """Run the service until all spools in the folder `copies` are stored and deleted.

    Return the number of stored rows.
    """
    stop, total = asyncio.Event(), _count(copies)
    known, changed_at, is_stuck = (total, 0), time.monotonic(), False

    def follow(now: Progress) -> None:
        nonlocal known, changed_at, is_stuck
        left = _count(copies)
        progress(total - left)
        if known != (known := (left, now.rows_stored)):
            changed_at = time.monotonic()
        is_stuck |= time.monotonic() > changed_at + IDLE_SECONDS
        if is_stuck or not left:
            stop.set()

    await run(config, stop=stop, on_progress=follow, shard_of_import=shard)
    left, rows_stored = known
    if left and is_stuck:
        raise IngestError(f"{left} of {total} spools could not be stored within {IDLE_SECONDS:g} s")
    if left:
        raise IngestError(f"interrupted: {left} of {total} spools are not stored; run the command again")
    return rows_stored


def _count(folder: Path) -> int:
    return len(list(folder.iterdir()))


def _parent_of(store: Location) -> Path:
    """Return the folder that contains the store, and create it if it is missing.

    Copies of spools are made in this folder. Files can be linked instead of copied if the spools are on the same disk
    as the store.
    """
    if not isinstance(store, Path):
        return Path(tempfile.gettempdir())
    parent = store.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    return parent


def _copy(spool: OfflineSpool, copy: Path) -> None:
    """Create the spool folder `copy` with links to the files of `spool`, and with its own lock.

    The lock file is empty, as in all spools, except if the process of the spool is running.
    """
    copy.mkdir(mode=0o700)
    (copy / LOCK_NAME).write_text("running" if spool.is_running else "")
    for path in spool.folder.iterdir():
        if path.name == LOCK_NAME or not is_ours(path.name):
            continue
        try:
            os.link(path, copy / path.name)
        except OSError:  # another disk, or a file system without links
            with contextlib.suppress(FileNotFoundError):  # a service has committed its records in the meantime
                shutil.copy2(path, copy / path.name)
