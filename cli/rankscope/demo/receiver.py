"""A real HTTP receiver of alerts, as a chat or paging service would be one; it keeps what it was told, and by whom.

The service itself and Alertmanager both post JSON here; their documents look different, and so they are told apart.
"""

from __future__ import annotations

import enum
import json
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


class Way(enum.StrEnum):
    """By whom we were told."""

    EMBEDDED = "embedded"  # the service itself, through Apprise
    ALERTMANAGER = "Alertmanager"


@dataclass(frozen=True, slots=True)
class Alert:
    """One message as it arrived. Alertmanager gathers several alerts in one; `labels` has those of each."""

    at: float  # seconds since the epoch
    title: str
    text: str
    way: Way = Way.EMBEDDED
    status: str = "firing"
    labels: tuple[Mapping[str, str], ...] = ()

    def lines(self) -> Iterator[str]:
        """Yield the lines a person is shown."""
        clock = time.strftime("%H:%M:%S", time.localtime(self.at))
        yield f"ALERT {clock}  {'' if self.way is Way.EMBEDDED else f'by {self.way}: '}{self.title}"
        for line in self.text.splitlines():
            yield f"      {line}"


def understood(document: Mapping[str, Any], at: float) -> Alert:
    """Return the message in a posted document."""
    if "alerts" not in document:
        return Alert(at, str(document.get("title", "")), str(document.get("message", "")))
    alerts = [alert for alert in document["alerts"] if isinstance(alert, dict)]
    group = document.get("groupLabels", {})
    status = str(document.get("status", ""))
    title = f"[{status}] {group.get('rule', '')} in run {group.get('run', '')}: {len(alerts)} alerts"
    text = "\n".join(sorted({str(alert.get("annotations", {}).get("summary", "")) for alert in alerts}))
    labels = tuple(dict(alert.get("labels", {})) for alert in alerts)
    return Alert(at, title, text, Way.ALERTMANAGER, status, labels)


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
        return f"json://{self._address}"

    @property
    def webhook_url(self) -> str:
        """Return the address in the form Alertmanager takes."""
        return f"http://{self._address}"

    @property
    def _address(self) -> str:
        return f"127.0.0.1:{self._server.server_port}/alerts"

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
        alert = understood(json.loads(body), time.time())
        self.alerts.append(alert)
        self._new.put(alert)
