"""Pages of a store, served on loopback by a thread."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from aiohttp import web

from rankscope_ingest.http.pages import Pages
from rankscope_view.site import Site


def served(site: Site) -> contextlib.AbstractContextManager[str]:
    """Serve the pages of `site` in the context. The value is their address."""
    application = web.Application()
    Pages(site).add_to(application)
    return served_application(application)


@contextlib.contextmanager
def served_application(application: web.Application) -> Iterator[str]:
    """Serve `application` in the context. The value is its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[web.AppRunner, int]:
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        server = web.TCPSite(runner, "127.0.0.1", 0)
        await server.start()
        return runner, runner.addresses[0][1]

    runner, port = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
