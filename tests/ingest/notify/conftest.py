"""Servers on loopback, and an environment without proxies but with a login for every host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ingest.notify.web_server import PROXIES, Web


@pytest.fixture
def serve() -> Iterator[Callable[..., Web]]:
    servers = []

    def start(**changes: Any) -> Web:
        web = Web(**changes)
        servers.append(web.start())
        return web

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove the proxies of the environment, and give every host a login in ~/.netrc."""
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    (tmp_path / "netrc").write_text("default login stranger password stolen\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
