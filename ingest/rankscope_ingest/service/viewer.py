"""Serve the pages of a store without a service: nothing is polled, and nothing is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from aiohttp import web

from rankscope_ingest.base.config import is_loopback, split_address
from rankscope_ingest.base.config_file import load_config
from rankscope_ingest.base.stop_signals import stop_on_signals
from rankscope_ingest.http.pages import Pages
from rankscope_ingest.http.routes import errors_as_text
from rankscope_ingest.network.auth import own_names, refuse_web_pages, token_guard
from rankscope_ingest.network.connections import raise_file_limit, serving
from rankscope_view.site import Site


async def serve_pages(
    store: Path,
    listen: str,
    *,
    environment: Mapping[str, str],
    on_ready: Callable[[str], None],
    named: Path | None = None,
) -> None:
    """Serve the pages of `store` at `listen` until a signal arrives. `on_ready` receives the address.

    Commands on the pages name the folder `named`, of which `store` may be a temporary copy. Other machines need the
    token in `environment`; processes on this machine need none. Raises ServiceError if the address cannot be used, and
    ConfigError if other machines can reach it and there is no token.
    """
    raise_file_limit()
    is_local = is_loopback(split_address(listen)[0])
    settings = {"store.path": str(store), "service.listen": listen}
    config = load_config(None, settings, environment={} if is_local else environment)
    section = config.service
    guards = [errors_as_text, token_guard(config.token), refuse_web_pages(own_names(section))]
    application = web.Application(middlewares=guards)
    Pages(Site(store, store=named)).add_to(application)
    stop = asyncio.Event()
    with stop_on_signals(stop):
        async with serving(application, section, None, shutdown_seconds=1.0) as url:
            on_ready(url)
            await stop.wait()
