"""An HTTP server that receives alerts, as a chat or paging service would, and stores each with its sender.

The service and Alertmanager both send JSON documents by POST. The fields of a document show which of them sent it.
"""

from __future__ import annotations

import enum
import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class Sender(enum.StrEnum):
    """The programs that send alerts in the demo."""

    EMBEDDED = "embedded"  # the service, through Apprise
    ALERTMANAGER = "Alertmanager"


@dataclass(frozen=True, slots=True)
class Alert:
    """One received alert message. Alertmanager groups several alerts in a message; `labels` has one entry per alert."""

    at: float  # seconds since the epoch
    title: str
    text: str
    sender: Sender = Sender.EMBEDDED
    status: str = "firing"
    labels: tuple[Mapping[str, str], ...] = ()

    def lines(self) -> Iterator[str]:
        """Yield the lines that the demo prints for this message."""
        clock = time.strftime("%H:%M:%S", time.localtime(self.at))
        yield f"ALERT {clock}  {'' if self.sender is Sender.EMBEDDED else f'by {self.sender}: '}{self.title}"
        for line in self.text.splitlines():
            yield f"      {line}"


def parse_alert(document: Mapping[str, Any], at: float) -> Alert:
    """Return the alert message in a received JSON document."""
    if "alerts" not in document:
        return Alert(at, str(document.get("title", "")), str(document.get("message", "")))
    alerts = [alert for alert in document["alerts"] if isinstance(alert, dict)]
    group = document.get("groupLabels", {})
    status = str(document.get("status", ""))
    title = f"[{status}] {group.get('rule', '')} in run {group.get('run', '')}: {len(alerts)} alerts"
    text = "\n".join(sorted({str(alert.get("annotations", {}).get("summary", "")) for alert in alerts}))
    labels = tuple(dict(alert.get("labels", {})) for alert in alerts)
    return Alert(at, title, text, Sender.ALERTMANAGER, status, labels)


class AlertReceiver:
    """A server that receives alerts on a free loopback port while its context is open.

    `alerts` has all received alerts. `new_alerts()` yields the alerts since its last call. `notify_url` is the address
    for the `[notify]` section of the service, and `webhook_url` that for Alertmanager.
    """

    def __init__(self) -> None:
        self.alerts: list[Alert] = []
        self._yielded = 0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                receiver.alerts.append(parse_alert(json.loads(body), time.time()))
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's signature
                """Do nothing instead of logging each request, because the demo prints the received alerts."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        address = f"127.0.0.1:{self._server.server_port}/alerts"
        self.notify_url = f"json://{address}"
        self.webhook_url = f"http://{address}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="receiver", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def new_alerts(self) -> Iterator[Alert]:
        """Yield the alerts received since the last call, without waiting."""
        while self._yielded < len(self.alerts):
            self._yielded += 1
            yield self.alerts[self._yielded - 1]
