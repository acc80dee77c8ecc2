"""Run the service: claim the shard of the store, read the stored state, and serve until a signal arrives."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence

from rankscope_ingest.base.config import ServiceConfig
from rankscope_ingest.base.memory import tune_allocator, unfreeze_gc
from rankscope_ingest.base.stop_signals import stop_on_signals
from rankscope_ingest.base.tls import client_tls, server_tls
from rankscope_ingest.detect.history import History, read_history
from rankscope_ingest.live.progress import Progress
from rankscope_ingest.network.connections import raise_file_limit
from rankscope_ingest.notify.notifiers import Notifier, make_notifiers
from rankscope_ingest.record_channel.client import Fetcher
from rankscope_ingest.service.service import Service
from rankscope_ingest.watch.session import check_logs
from rankscope_storage.api.store import Store
from rankscope_storage.connection import connect
from rankscope_storage.writer.writer import Writer


async def run(
    config: ServiceConfig,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    on_ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Run the service until SIGTERM, SIGINT or `stop`; then poll and commit the remaining records, and return.

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
        with stop_on_signals(stop), contextlib.closing(await asyncio.to_thread(_claim, config)) as writer:
            history = await asyncio.to_thread(_history, config.store.path)
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


def _claim(config: ServiceConfig) -> Writer:
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    store = Store.open(config.store.path, create=True, mantissa_bits=config.store.mantissa_bits)
    return store.claim(config.store.shard, owner=owner)


def _history(path: str) -> History:
    with connect(path, single_threaded=True) as connection:
        return read_history(connection, time.monotonic())
