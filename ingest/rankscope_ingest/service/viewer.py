"""Serve the pages of a store without a service: nothing is polled, and nothing is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from rankscope_ingest.base.config import ServiceSection
from rankscope_ingest.http.pages import Pages
from rankscope_ingest.http.routes import errors_as_text
from rankscope_ingest.network.auth import own_names, refuse_web_pages
from rankscope_ingest.network.sockets import bind
from rankscope_view.site import Site


async def serve_pages(store: Path, listen: str, *, on_ready: Callable[[str], None]) -> None:
    """Serve the pages of `store` at `listen` until the task is cancelled. `on_ready` receives the address.

    Raises ServiceError if the address cannot be used.
    """
    section = ServiceSection(listen=listen)
    application = web.Application(middlewares=[errors_as_text, refuse_web_pages(own_names(section))])
    Pages(Site(store)).add_to(application)
    runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        on_ready(await bind(runner, section, None))
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
