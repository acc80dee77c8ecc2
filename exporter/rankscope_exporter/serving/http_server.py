"""A small HTTP/1.1 server for the training process: few connections, hard time limits, no traceback on the console.

It knows framing and no routes: an answer is a value that the application returns. It listens on the first free port of
a range, with TLS where that is configured.
"""

from __future__ import annotations

import errno
import http.server
import logging
import os
import socket
import socketserver
import ssl
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from rankscope_contract.security.tls import MakeContext, explain_to_server
from rankscope_exporter.base.errors import ServeError
from rankscope_exporter.process.threads import CpuMeter, OwnThread
from rankscope_exporter.serving.addresses import (
    REQUEST_BODY_READ,
    TEXT,
    Address,
    drain_and_close,
    hang_up,
    refuse,
    resolve,
    send_raw,
)
from rankscope_exporter.serving.config import ServeConfig
from rankscope_exporter.serving.tls import server_tls

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 32
CLIENT_SECONDS: Final = 30.0
"""A client has this long to ask, and this long again to take its answer."""
_SWEEP_SECONDS: Final = 0.5
_REMEMBERED_COMPLAINTS: Final = 100


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked: decoded path, query (last value of each name), headers by lower-case name.

    A POST or PUT has a body, None where it is too long.
    """

    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    method: str = "GET"
    body: bytes | None = b""


@dataclass(frozen=True, slots=True)
class Answer:
    """A status and a body in pieces, which are sent one after the other without being joined."""

    status: int
    pieces: Sequence[Any] = ()  # objects with the buffer protocol
    content_type: str = TEXT
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def text(cls, status: int, text: str, **headers: str) -> Answer:
        """Return a plain-text answer; header names are written with underscores."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return cls(status, ((text + "\n").encode("utf-8", "replace"),), headers=named)


Application = Callable[[Request], Answer]


class HttpServer(socketserver.ThreadingTCPServer):
    """Answers GET, POST and PUT with what `application` returns, a daemon thread each, in TLS where `tls` is given."""

    daemon_threads = True
    allow_reuse_address = True  # a port in TIME_WAIT is free; one that somebody listens on is still refused
    request_queue_size = 32

    def __init__(
        self,
        address: Address,
        application: Application,
        *,
        on_fault: Callable[[str, BaseException], None],
        meter: CpuMeter,
        tls: MakeContext | None = None,
        max_connections: int = MAX_CONNECTIONS,
        client_seconds: float = CLIENT_SECONDS,
    ) -> None:
        self.application = application
        self.meter = meter
        self.client_seconds = client_seconds
        self._on_fault = on_fault
        self._tls = tls
        self._complaints: set[str] = set()
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._since: dict[socket.socket, float] = {}  # connection -> start of what it is doing now
        self._thread: threading.Thread | None = None
        self.address_family, sockaddr = resolve(address)
        try:
            super().__init__(sockaddr, _Handler)
        except OSError as error:
            raise ServeError(
                f"cannot listen on {address}: {error.strerror or error}; use port 0 for any free port,"
                " or another RANKSCOPE_LISTEN"
            ) from error

    @property
    def port(self) -> int:
        """Return the port that was bound."""
        return int(self.server_address[1])

    def server_bind(self) -> None:
        """Bind; `[::]` takes IPv4 as well, whatever the system's default is."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def get_request(self) -> tuple[Any, Any]:
        """Take a connection; no byte is read here, since the accepting thread waits for nobody's handshake."""
        connection, client = super().get_request()
        if self._tls is None:
            return connection, client
        try:
            return self._tls().wrap_socket(connection, server_side=True, do_handshake_on_connect=False), client
        except OSError:  # gone before it was looked at
            connection.close()
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own."""
        target, args = self.process_request_thread, (request, client_address)
        OwnThread(target=target, args=args, name="rankscope-http-client").start()

    def complain(self, client: str, why: str) -> None:
        """Say once of each client what is wrong with its handshakes."""
        text = f"{client} could not speak to this rank: {why}"
        with self._lock:
            known = text in self._complaints or len(self._complaints) >= _REMEMBERED_COMPLAINTS
            if not known:
                self._complaints.add(text)
        log.log(logging.DEBUG if known else logging.WARNING, "%s", text)

    def start(self) -> None:
        """Serve from a daemon thread."""
        self._thread = OwnThread(target=self._serve, name="rankscope-http")
        self._thread.start()

    def stop(self) -> None:
        """Close the listening socket and all connections and end the thread."""
        if self._thread is not None:
            hang_up(self.socket)  # wakes the accepting thread, which would sleep out its poll interval
            self.shutdown()
            self._thread.join(timeout=2.0)
        self.server_close()
        with self._lock:
            connections = list(self._since)
        for connection in connections:
            hang_up(connection)

    def abandon(self) -> None:
        """In a forked child: close the inherited descriptors without a word to the other side. Takes no lock."""
        for connection in (self.socket, *self._since):
            descriptor = connection.detach()
            if descriptor >= 0:
                os.close(descriptor)

    def touch(self, connection: socket.socket) -> None:
        """Start the client's time limit anew."""
        with self._lock:
            if connection in self._since:
                self._since[connection] = time.monotonic()

    def _serve(self) -> None:
        self.serve_forever(poll_interval=_SWEEP_SECONDS)

    def service_actions(self) -> None:
        """Hang up on clients whose time is over; a socket time-out alone would let them drip byte by byte."""
        oldest = time.monotonic() - self.client_seconds
        with self._lock:
            overdue = [connection for connection, since in self._since.items() if since < oldest]
        for connection in overdue:
            hang_up(connection)
        self.meter.lap("http")

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002 - the base class' signature
        """Take the connection, or refuse it when enough are open."""
        with self._lock:
            if len(self._since) < self._max_connections:
                self._since[request] = time.monotonic()
                return True
        refuse(request)
        return False

    def shutdown_request(self, request: Any) -> None:
        """Close a connection and forget it."""
        with self._lock:
            self._since.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base class' signature
        """Report what went wrong, to the façade and to the client; a client that left is not a fault."""
        error = sys.exception()
        if error is None or isinstance(error, OSError):
            return
        self._on_fault("http", error)
        # Only writing to the client can fail once an answer has begun, and that is an OSError: nothing was sent yet.
        send_raw(request, "500 Internal Server Error", "this page could not be made; see the rank's log")


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: HttpServer

    def setup(self) -> None:
        self.request.settimeout(self.server.client_seconds)  # of one read; a write has it for the whole
        if isinstance(self.request, ssl.SSLSocket):
            self._shake_hands(self.request)
        super().setup()

    def _shake_hands(self, connection: ssl.SSLSocket) -> None:
        try:
            connection.do_handshake()
        except OSError as error:
            why = explain_to_server(error)
            if getattr(error, "reason", None) == "HTTP_REQUEST":
                send_raw(connection, "400 Bad Request", "this port speaks TLS: write https://", is_clear=True)
            if why is not None:
                self.server.complain(self.client_address[0], why)
                drain_and_close(connection)
            raise

    def handle_one_request(self) -> None:
        super().handle_one_request()
        self.server.meter.lap("http")

    def parse_request(self) -> bool:
        self.server.touch(self.connection)
        if not super().parse_request():
            return False
        if self.request_version == "HTTP/0.9":
            self.send_error(HTTPStatus.BAD_REQUEST, "not an HTTP/1.1 request")
            return False
        return True

    def do_GET(self) -> None:
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # its body would read as the next request
        self._answer()

    def do_POST(self) -> None:
        """Answer a request that has a body."""
        self._answer(self._short_body())

    do_PUT = do_POST  # noqa: N815 - see do_GET

    def _answer(self, body: bytes | None = b"") -> None:
        try:
            target = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(target.query, keep_blank_values=True, max_num_fields=32))
        except ValueError:
            self._send(Answer.text(HTTPStatus.BAD_REQUEST, "no address, or one with too many query parameters"))
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(urllib.parse.unquote(target.path), query, headers, self.command, body)
        self._send(self.server.application(request))

    def _short_body(self) -> bytes | None:
        """Return the body; None when it is longer than any page here would want to know, or has no length."""
        length = self.headers.get("Content-Length", "0")
        size = int(length) if length.isdecimal() else REQUEST_BODY_READ + 1
        body = self.rfile.read(min(size, REQUEST_BODY_READ)) if length.isdecimal() else b""
        self.close_connection = True  # what is left of it would read as the next request
        return body if size <= REQUEST_BODY_READ and "Transfer-Encoding" not in self.headers else None

    def _refuse_method(self) -> None:
        self._short_body()
        self._send(Answer.text(HTTPStatus.METHOD_NOT_ALLOWED, f"{self.command}: only GET is offered here", Allow="GET"))

    do_PATCH = do_DELETE = do_HEAD = do_OPTIONS = _refuse_method  # noqa: N815 - see do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002 - the base class' signature
        self.close_connection = True
        self.request_version = self.protocol_version  # else an answer to garbage has no headers
        self.requestline = getattr(self, "requestline", "")
        self._send(Answer.text(code, message or HTTPStatus(code).phrase))

    def _send(self, answer: Answer) -> None:
        pieces = [memoryview(piece).cast("B") for piece in answer.pieces]
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Type", answer.content_type)
            self.send_header("Content-Length", str(sum(map(len, pieces))))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD" and answer.status != HTTPStatus.NO_CONTENT:
            for piece in pieces:
                self.wfile.write(piece)
        self.server.touch(self.connection)

    def version_string(self) -> str:
        return "Rankscope"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class' signature
        log.debug("%s: %s", self.client_address[0], format % args)


def open_server(
    config: ServeConfig,
    application: Application,
    *,
    on_fault: Callable[[str, BaseException], None],
    meter: CpuMeter,
) -> HttpServer:
    """Return a server that listens but does not serve yet. Raises ServeError naming the setting to change."""
    tls = None if config.web_config is None else server_tls(Path(config.web_config))
    return first_free(
        config.address, lambda address: HttpServer(address, application, on_fault=on_fault, meter=meter, tls=tls)
    )


def first_free(addresses: Address, listen: Callable[[Address], HttpServer]) -> HttpServer:
    """Return what `listen` makes of the first port that nobody has; ranks and jobs of a node share a range this way."""
    for address in addresses.each():
        try:
            return listen(address)
        except ServeError as error:
            if addresses.last_port is None or getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
                raise
    raise ServeError(
        f"cannot listen on {addresses}: all {len(addresses.ports)} ports are in use; give a longer range in"
        " RANKSCOPE_LISTEN, or port 0 for any free port"
    )
