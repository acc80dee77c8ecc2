"""`rankscope serve`: the service that collects every step of every rank, with its progress on the terminal."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from rankscope.base.errors import TAKEN_OVER, USAGE, CommandError
from rankscope.base.service_settings import load_settings
from rankscope.output.rows import printable

if TYPE_CHECKING:
    from rankscope.output.progress import View
    from rankscope_ingest.config import ServiceConfig
    from rankscope_ingest.progress import Progress
log = logging.getLogger(__name__)

READY: Final = "READY=1"
ALIVE: Final = "WATCHDOG=1"
"""To be repeated: where the unit has a watchdog, silence means that the service hangs."""


def serve(
    config: Annotated[Path | None, typer.Argument(help="TOML file; docs/configuration.md lists its keys.")] = None,
    store: Annotated[Path | None, typer.Option("--store", "-s", help="Folder of the store.")] = None,
    listen: Annotated[str | None, typer.Option(help="Address to listen on, host:port.")] = None,
    notify: Annotated[list[str] | None, typer.Option(help="Apprise address to notify; may be repeated.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, only what is worth a line.")] = False,
) -> None:
    """Collect from every rank that registers, until Ctrl-C or SIGTERM; then store what is left and end.

    Options win over the file. Without a file the store is $RANKSCOPE_STORE, or the folder `history`; a file that names
    no token leaves it to $RANKSCOPE_TOKEN or the file in $RANKSCOPE_TOKEN_FILE, as ranks do.

    [bold]Examples[/bold]

    rankscope serve --store history

    rankscope serve service.toml --listen 127.0.0.1:9470 --notify json://127.0.0.1:8080/alerts
    """
    settings = load_settings(config, store, listen, notify)
    from rankscope.output.progress import view_for

    console = Console(highlight=False)
    with view_for(console) as view:
        _log_to(view)
        _run(settings, view, show=not quiet)


def _run(settings: ServiceConfig, view: View, *, show: bool) -> None:
    from rankscope_ingest.errors import ConfigError, IngestError
    from rankscope_ingest.service import run
    from rankscope_storage.errors import ShardLostError, StoreError

    def ready(url: str) -> None:
        view.say(f"listening on {url}")
        view.say(f"storing into {settings.store.path}")
        view.say(f"ranks find it with RANKSCOPE_INGEST_URL={url}")
        notify_systemd(READY)

    teller = _Teller(view, show=show)
    try:
        asyncio.run(run(settings, on_progress=teller.tell, on_ready=ready))
    except ConfigError as error:
        raise CommandError(str(error), code=USAGE) from error
    except ShardLostError as error:
        raise CommandError(str(error), code=TAKEN_OVER) from error
    except (IngestError, StoreError) as error:
        raise CommandError(str(error)) from error
    view.say(f"stopped; {teller.rows_stored:,} rows were stored, {teller.rows_pending:,} are left")


class _Teller:
    """Shows progress as it comes, and says when the service falls into trouble or gets out of it."""

    def __init__(self, view: View, *, show: bool) -> None:
        self._view = view
        self._show = show
        self._trouble: str | None = None
        self.rows_stored = 0
        self.rows_pending = 0

    def tell(self, progress: Progress) -> None:
        self.rows_stored, self.rows_pending = progress.rows_stored, progress.rows_pending
        notify_systemd(ALIVE)
        if progress.degraded != self._trouble:
            self._trouble = progress.degraded
            self._view.say(f"trouble: {self._trouble}" if self._trouble else "all is well again")
        if self._show:
            self._view.show(progress.runs, time.monotonic())


class _Lines(logging.Handler):
    """Hands log records to the view, so that they do not tear its bars."""

    def __init__(self, view: View) -> None:
        super().__init__(logging.INFO)
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        fields = ((key, value) for key, value in vars(record).items() if key not in _RECORD_FIELDS)
        about = "".join(f", {key} {value}" for key, value in fields if value is not None)
        self._view.say(printable(f"{record.levelname.lower()}: {record.getMessage()}{about}"))


_RECORD_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "taskName"}
"""What every log record has; the rest says what it is about."""


def _log_to(view: View) -> None:
    logger = logging.getLogger("rankscope_ingest")
    logger.addHandler(_Lines(view))
    logger.setLevel(logging.INFO)
    logging.getLogger("rankscope_storage").addHandler(_Lines(view))


def notify_systemd(state: str, environment: Mapping[str, str] = os.environ) -> None:
    """Send `state`; a systemd that cannot be told is no reason to stop serving."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
            told.connect("\0" + address[1:] if address.startswith("@") else address)
            told.send(state.encode("utf-8", "replace"))
    except OSError as error:
        log.warning("systemd cannot be told %s: %s", state.partition("=")[0], error)
