"""Servers on loopback: any routes, a receiver of messages, and an exporter."""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

from aiohttp import web


@contextlib.asynccontextmanager
async def serving(*routes: web.RouteDef) -> AsyncIterator[str]:
    """Serve `routes` at a free port, and yield the address as host:port."""
    application = web.Application()
    application.add_routes(routes)
    runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


class Receiver:
    """A receiver of messages, which refuses the next `refuse` ones."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.refuse = 0
        self._stack = contextlib.AsyncExitStack()

    @property
    def titles(self) -> list[str]:
        return [message["title"] for message in self.messages]

    async def __aenter__(self) -> Self:
        self.url = f"json://{await self._stack.enter_async_context(serving(web.post('/', self._take)))}/"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _take(self, request: web.Request) -> web.Response:
        if self.refuse:
            self.refuse -= 1
            return web.Response(status=500)
        self.messages.append(await request.json())
        return web.Response()


class FakeExporter:
    """A server with one page on a separate port; `answer`, if set, replaces the response."""

    def __init__(self, page: bytes = b"") -> None:
        self.page = page
        self.requests: list[web.Request] = []
        self.answer: Callable[[web.Request], web.Response] | None = None
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        self.address = await self._stack.enter_async_context(serving(web.get("/{path:.*}", self._handle)))
        self.url = f"http://{self.address}/metrics"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _handle(self, request: web.Request) -> web.Response:
        self.requests.append(request)
        if self.answer is not None:
            return self.answer(request)
        return web.Response(body=self.page, headers={"Content-Type": "text/plain; version=0.0.4"})
