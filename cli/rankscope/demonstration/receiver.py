"""A real HTTP receiver of notifications, as a chat or paging service would be one; it keeps what it was told."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self


@dataclass(frozen=True, slots=True)
class Alert:
    """One notification as it arrived."""

    at: float  # seconds since the epoch
    title: str
    text: str

    def lines(self) -> Iterator[str]:
        """Yield the lines a person is shown."""
        yield f"ALERT {time.strftime('%H:%M:%S', time.localtime(self.at))}  {self.title}"
        for line in self.text.splitlines():
            yield f"      {line}"


class Receiver:
    """Listens on a free loopback port while it is open; `alerts` grows, `arrived()` gives what is new."""

    def __init__(self) -> None:
        self.alerts: list[Alert] = []
        self._new: queue.SimpleQueue[Alert] = queue.SimpleQueue()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver._take(self.rfile.read(int(self.headers.get("Content-Length", 0))))
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's signature
                """Say nothing: the demo prints what arrives."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="receiver", daemon=True)

    @property
    def notify_url(self) -> str:
        """Return the address in the form a `[notify]` section takes."""
        return f"json://127.0.0.1:{self._server.server_port}/alerts"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def arrived(self) -> Iterator[Alert]:
        """Yield what came since the last call, without waiting."""
        while not self._new.empty():
            yield self._new.get()

    def _take(self, body: bytes) -> None:
        document = json.loads(body)
        alert = Alert(time.time(), str(document.get("title", "")), str(document.get("message", "")))
        self.alerts.append(alert)
        self._new.put(alert)
