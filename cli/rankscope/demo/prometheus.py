"""Prometheus and Alertmanager beside the demo's service, where the machine has them: the second way of an alert."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from rankscope.up.executables import ALERTMANAGER, PROMETHEUS
from rankscope.up.ports import any_free
from rankscope.up.programs import SERVICE, ServiceWish, Wish, files, pieces
from rankscope.up.state_dir import Folder
from rankscope.up.supervisor import Requests, Supervision
from rankscope_dashboards.alertmanager_config import Receiver, Webhook

SCRAPE_SECONDS: Final = 1.0
GROUP_WAIT_SECONDS: Final = 2.0  # ranks are scraped at different moments, and one message should name all of them


def missing() -> list[str]:
    """Return how to get what is not there, one line each."""
    return [program.remedy for program in (PROMETHEUS, ALERTMANAGER) if program.find() is None]


@contextlib.contextmanager
def monitored(folder: Path, store: Path, service_url: str, webhook_url: str) -> Iterator[dict[str, str]]:
    """Watch the service at `service_url` and tell `webhook_url`; give the addresses of both programs."""
    state = Folder(folder)
    state.make()
    wish = _wish(store, service_url, webhook_url)
    state.write(files(wish, state))
    beside = [piece for piece in pieces(wish, state) if piece.name != SERVICE]
    supervision = Supervision(beside, say=lambda _: None, requests=Requests())
    try:
        supervision.start()
        yield {piece.name: piece.url for piece in beside}
    finally:
        supervision.stop()


def _wish(store: Path, service_url: str, webhook_url: str) -> Wish:
    address = urlsplit(service_url)
    ports = {SERVICE: address.port or 0, "prometheus": any_free(), "alertmanager": any_free()}
    return Wish(
        service=ServiceWish(config=None, store=str(store), host=address.hostname or ""),
        ports=ports,
        prometheus=PROMETHEUS.find(),
        alertmanager=ALERTMANAGER.find(),
        receivers=[Receiver(name="demo", ways=(Webhook(url=webhook_url),))],
        scrape_seconds=SCRAPE_SECONDS,
        group_wait_seconds=GROUP_WAIT_SECONDS,
        group_interval_seconds=5.0,
    )
