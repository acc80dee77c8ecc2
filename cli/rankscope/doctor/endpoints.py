"""Where everything is: said on the command line, else noted by `rankscope up`, else configured, else usual."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rankscope.base.http_client import Trust
from rankscope.base.service_settings import environment_trust, service_address, service_trust
from rankscope.up.ports import USUAL
from rankscope.up.programs import TOKEN_FILE
from rankscope.up.state_dir import Folder

if TYPE_CHECKING:
    from rankscope_ingest.config import ServiceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """The addresses of an examination."""

    service: str
    prometheus: str
    alertmanager: str
    store: str
    token: str | None = None
    trust: Trust | None = None

    @property
    def ports(self) -> list[tuple[str, int]]:
        """Return the ports of what should be on this machine."""
        named = {"service": self.service, "prometheus": self.prometheus, "alertmanager": self.alertmanager}
        return [(name, port) for name, url in named.items() if (port := _local_port(url))]


def told(service: str | None, prometheus: str | None, alertmanager: str | None) -> dict[str, str]:
    """Return the addresses that were given."""
    given = {"service": service, "prometheus": prometheus, "alertmanager": alertmanager}
    return {name: url.rstrip("/") for name, url in given.items() if url}


def found(settings: ServiceConfig, state: Path | None, *, given: Mapping[str, str], is_explicit: bool) -> Whereabouts:
    """Return where to look; a configuration that was named beats what `rankscope up` noted of the service."""
    folder = Folder(state) if state else Folder.beside(settings.store.path)
    notes = folder.notes().get("urls", {})
    noted = {name: url for name, url in notes.items() if isinstance(url, str)} if isinstance(notes, dict) else {}
    usual = {name: f"http://127.0.0.1:{port}" for name, port in USUAL.items()}
    configured = service_address(settings)
    if is_explicit and configured:
        noted["service"] = configured
    urls = {**usual, **noted, **given}
    is_ours = "service" in noted and "service" not in given and not is_explicit
    return Whereabouts(
        **urls,
        store=settings.store.path,
        token=settings.token or (_token_of(folder) if is_ours else None),
        trust=service_trust(settings) or environment_trust(),
    )


def _token_of(folder: Folder) -> str | None:
    """Return the token of what `rankscope up` runs, whose folder is its owner's alone; it goes to no other address."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return folder.config(TOKEN_FILE).read_text(encoding="utf-8").strip() or None
    return None


def _local_port(url: str) -> int | None:
    parts = urlsplit(url)
    return parts.port if parts.hostname in {"127.0.0.1", "::1", "localhost"} else None
