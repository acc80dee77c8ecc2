"""`rankscope notify test`: send one test notification to every configured address."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from rankscope.access.service import load_settings, service_errors
from rankscope.shell.errors import USAGE, CommandError
from rankscope.shell.options import Notify
from rankscope_ingest.notify.announcer import Message, Notifier, NotifyError, receiver_names
from rankscope_ingest.notify.notifiers import make_notifiers


def notify(
    action: Annotated[Literal["test"], typer.Argument(help="test.")],  # noqa: ARG001 - the only action
    config: Annotated[
        Path | None, typer.Argument(help="Configuration file of the service.", show_default=False)
    ] = None,
    to: Notify = None,
) -> None:
    """Send one test notification to every receiver, without retries; exit with 1 if a notification fails.

    The receivers are those of `rankscope serve`: the addresses in [notify] urls of the configuration file, or in
    --notify. The notification is not recorded in a store, and the service need not run.

    [bold]Examples[/bold]

    rankscope notify test service.toml

    rankscope notify test --notify json://127.0.0.1:8080/alerts
    """
    notifiers = _notifiers(config, to)
    failures = asyncio.run(_send(notifiers))
    for name, failure in zip(receiver_names(notifiers), failures, strict=True):
        print(f"{name}: {failure or 'sent'}")
    failed = sum(failure is not None for failure in failures)
    if failed:
        raise CommandError(f"{failed} of {len(notifiers)} notifications failed")


def _notifiers(config: Path | None, to: Sequence[str] | None) -> Sequence[Notifier]:
    section = load_settings(config, None, None, list(to) if to else None).notify
    if not section.urls:
        raise CommandError("no address: give --notify URL, or a file with [notify] urls", code=USAGE)
    urls, proxy = [url.get_secret_value() for url in section.urls], section.proxy.get_secret_value()
    with service_errors():
        return make_notifiers(urls, timeout_seconds=section.timeout_seconds, proxy=proxy)


async def _send(notifiers: Sequence[Notifier]) -> list[str | None]:
    """Send the notification to each address; return the error for each address, or None if it was delivered."""
    host = socket.gethostname()
    text = Message(
        key=f"rankscope-test-{host}",
        title="[test] Rankscope notification",
        body=f"Sent by `rankscope notify test` on {host}. Alerts of the service are sent to this address.",
        severity="info",
    )

    async def deliver(notifier: Notifier) -> str | None:
        try:
            await notifier.send(text)
        except NotifyError as error:
            return f"failed: {error}"
        return None

    return list(await asyncio.gather(*map(deliver, notifiers)))
