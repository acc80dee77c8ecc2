"""`rankscope serve`: run the service that stores every step of every rank, with progress on the terminal."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import typer

from rankscope.access.service import load_settings, service_errors
from rankscope.output.progress import ProgressView, log_to
from rankscope.shell.options import Listen, Notify, OptionalStore
from rankscope.shell.streams import live_console
from rankscope_ingest.base.config import ServiceConfig
from rankscope_ingest.live.progress import Progress

log = logging.getLogger(__name__)

READY: Final = "READY=1"
ALIVE: Final = "WATCHDOG=1"
"""Message that the service sends to systemd repeatedly.

If the systemd unit has a watchdog, systemd restarts a service that no longer sends this message."""


def serve(
    config: Annotated[Path | None, typer.Argument(help="TOML file; docs/configuration.md lists its keys.")] = None,
    store: OptionalStore = None,
    listen: Listen = None,
    notify: Notify = None,
    shard: Annotated[
        str | None,
        typer.Option(help="I/N: this is service I of the N services of the store, from 0. It owns every N-th run."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only events, no progress.")] = False,
) -> None:
    """Store the records of all ranks that register, until Ctrl-C, SIGTERM or SIGHUP; then store pending rows and exit.

    A closed terminal sends SIGHUP; under nohup, the service continues. Options override the configuration file. Without
    a file, the store is $RANKSCOPE_STORE or the folder `history`. If the file contains no token, $RANKSCOPE_TOKEN or
    the file named by $RANKSCOPE_TOKEN_FILE is used, as on ranks.

    [bold]Examples[/bold]

    rankscope serve --store history

    rankscope serve service.toml --listen 127.0.0.1:9470 --notify json://127.0.0.1:8080/alerts

    rankscope serve service.toml --shard 1/2 --listen 127.0.0.1:9471
    """
    settings = load_settings(config, store, listen, notify, shard)
    console = live_console(sys.stdout)
    with ProgressView(console) as view, log_to(view.print_line):
        _run(settings, view, show=not quiet)


def _run(settings: ServiceConfig, view: ProgressView, *, show: bool) -> None:
    from rankscope_ingest.service.main import run

    def ready(url: str) -> None:
        view.print_line(f"listening on {url}")
        shard = f", shard {settings.store.shard}" if settings.store.owned.count > 1 else ""
        view.print_line(f"store: {settings.store.path}{shard}")
        view.print_line(f"for ranks: export RANKSCOPE_INGEST_URL={url}")
        notify_systemd(READY)

    printer = _ProgressPrinter(view, show=show)
    with service_errors():
        asyncio.run(run(settings, on_progress=printer.update, on_ready=ready))
    view.print_line(f"stopped; {printer.rows_stored:,} rows stored, {printer.rows_pending:,} rows not stored")


class _ProgressPrinter:
    """Prints the progress of runs, and a line when the service becomes degraded or recovers."""

    def __init__(self, view: ProgressView, *, show: bool) -> None:
        self._view = view
        self._show = show
        self._degraded: str | None = None
        self.rows_stored = 0
        self.rows_pending = 0

    def update(self, progress: Progress) -> None:
        self.rows_stored, self.rows_pending = progress.rows_stored, progress.rows_pending
        notify_systemd(ALIVE)
        if progress.degraded != self._degraded:
            self._degraded = progress.degraded
            self._view.print_line(f"degraded: {self._degraded}" if self._degraded else "recovered")
        if self._show:
            self._view.show(progress.runs, time.monotonic())


def notify_systemd(state: str, environment: Mapping[str, str] = os.environ) -> None:
    """Send `state` to systemd with the sd_notify protocol; do nothing if $NOTIFY_SOCKET is not set.

    On failure, a warning is logged and the service continues.
    """
    address = environment.get("NOTIFY_SOCKET", "")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram:
            datagram.connect("\0" + address[1:] if address.startswith("@") else address)
            datagram.send(state.encode("utf-8", "replace"))
    except OSError as error:
        log.warning("cannot send %s to systemd: %s", state.partition("=")[0], error)
