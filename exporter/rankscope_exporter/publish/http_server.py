"""A small HTTP/1.1 server for the training process: few connections, strict time limits, no traceback on the console.

It handles sockets, TLS and framing. The application (`routes`) gets each request as a value and returns the answer as a
value. The server listens on the first free port of a range.
"""

from __future__ import annotations

import errno
import http.server
import io
import logging
import math
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

from rankscope_contract.wire.tls import MakeContext, explain_to_server
from rankscope_exporter.process.errors import ServeError
from rankscope_exporter.process.threads import CpuMeter, OwnThread
from rankscope_exporter.publish.serving_config import Address, ServeConfig, server_tls

log = logging.getLogger(__name__)

_REQUEST_BODY_READ: Final = 65_536  # bytes of a body that are read; with unread bytes, close() would reset the answer
_DRAIN_SECONDS: Final = 0.5
_DRAIN_READS: Final = 16
TEXT: Final = "text/plain; charset=utf-8"
_PART_BYTES: Final = 65_536
"""Size in bytes of the parts of an answer to which the time limit applies.

With TLS, a part is accepted as a whole. Without TLS, the system accepts up to 0.3 MB at a time after a client has read
quickly. A client that continues to read with 10 kB/s is therefore not disconnected.
"""
_SWEEP_SECONDS: Final = 0.5
_MOST_WARNINGS: Final = 100
"""Maximum number of distinct TLS handshake failures that are logged as warnings.

Later ones are logged at level DEBUG.
"""


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request: decoded path, query (last value of each name), headers by lower-case name, and body.

    `body` is None if it is too long or has no length.
    """

    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    method: str = "GET"
    body: bytes | None = b""


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP answer: status, headers, and a body in pieces that are sent in order without being joined."""

    status: int
    pieces: Sequence[Any] = ()  # objects with the buffer protocol
    content_type: str = TEXT
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def text(cls, status: int, text: str, **headers: str) -> Answer:
        """Return a plain-text answer; underscores in header names become hyphens."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return cls(status, ((text + "\n").encode("utf-8", "replace"),), headers=named)


Application = Callable[[Request], Answer]


class HttpServer(socketserver.ThreadingTCPServer):
    """HTTP server that calls `application` for each request, on one daemon thread per connection.

    It uses TLS if `tls` is set.

    If the application raises an exception, the server reports it through `on_fault` and answers with status 500.
    """

    daemon_threads = True
    allow_reuse_address = True  # a port in TIME_WAIT counts as free; a port with a listening socket is still refused
    request_queue_size = 32
    max_connections: int = 32
    head_seconds: float = 10.0
    """Time limit in seconds from the first byte of a request to the end of its head."""
    client_seconds: float = 30.0
    """Time limit in seconds for a client to send its next request, or the next part of a body.

    The same limit applies to an answer. It counts from the last bytes that the system accepted for the client.
    """

    def __init__(
        self,
        address: Address,
        application: Application,
        *,
        on_fault: Callable[[str, BaseException], None],
        meter: CpuMeter,
        tls: MakeContext | None = None,
    ) -> None:
        self.application = application
        self.meter = meter
        self._on_fault = on_fault
        self._tls = tls
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self._deadlines: dict[socket.socket, float] = {}  # monotonic time at which a connection is closed
        self._thread: threading.Thread | None = None
        host = "127.0.0.1" if address.host == "localhost" else address.host
        try:
            found: Any = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM)[0]
            self.address_family, sockaddr = found[0], found[-1]
            super().__init__(sockaddr, _Handler)
        except OSError as error:
            remedy = "use port 0 for any free port, or another RANKSCOPE_LISTEN"
            if isinstance(error, socket.gaierror):
                remedy = "use an address of this machine"
            raise ServeError(f"cannot listen on {address}: {error.strerror or error}; {remedy}") from error

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def server_bind(self) -> None:
        """Bind the socket; `[::]` accepts IPv4 as well, independent of the system's default."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection without reading from it. The accepting thread must not wait for a TLS handshake."""
        connection, client = super().get_request()
        if self._tls is None:
            return connection, client
        try:
            return self._tls().wrap_socket(connection, server_side=True, do_handshake_on_connect=False), client
        except OSError:  # the client has disconnected
            connection.close()
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer the requests of an accepted connection on a new daemon thread."""
        target, args = self.process_request_thread, (request, client_address)
        OwnThread(target=target, args=args, name="rankscope-http-client").start()

    def warn_once(self, client: str, reason: str) -> None:
        """Log a failed TLS handshake as a warning, once for each client and reason."""
        text = f"TLS handshake with {client} failed: {reason}"
        with self._lock:
            is_known = text in self._warned or len(self._warned) >= _MOST_WARNINGS
            if not is_known:
                self._warned.add(text)
        log.log(logging.DEBUG if is_known else logging.WARNING, "%s", text)

    def start(self) -> None:
        """Start a daemon thread that accepts connections."""
        serve, every = self.serve_forever, (_SWEEP_SECONDS,)
        self._thread = OwnThread(target=serve, args=every, name="rankscope-http", on_fault=self._on_fault)
        self._thread.start()

    def stop(self) -> None:
        """Close the listening socket and all connections, and end the accepting thread."""
        if self._thread is not None:
            _hang_up(self.socket)  # wakes the accepting thread, which would wait until the end of its poll interval
            self.shutdown()
            self._thread.join(timeout=2.0)
        self.server_close()
        with self._lock:
            connections = list(self._deadlines)
        for connection in connections:
            _hang_up(connection)

    def abandon(self) -> None:
        """Close the inherited descriptors in a forked child, without sending anything to the clients. Takes no lock."""
        for connection in (self.socket, *self._deadlines):
            descriptor = connection.detach()
            if descriptor >= 0:
                os.close(descriptor)

    def touch(self, connection: socket.socket, seconds: float | None = None) -> None:
        """Restart the time limit of a connection, such as for a new request; it is `seconds` or `client_seconds`."""
        with self._lock:
            if connection in self._deadlines:
                limit = self.client_seconds if seconds is None else seconds
                self._deadlines[connection] = time.monotonic() + limit

    def service_actions(self) -> None:
        """Close connections that have exceeded their time limit.

        A socket timeout is not enough: it restarts with each received byte.
        """
        now = time.monotonic()
        with self._lock:
            overdue = [connection for connection, deadline in self._deadlines.items() if deadline < now]
        for connection in overdue:
            _hang_up(connection)
        self.meter.lap("http")

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002 - the base class' signature
        """Return whether the connection is accepted; answer 429 if the maximum number of connections is open."""
        with self._lock:
            if len(self._deadlines) < self.max_connections:
                self._deadlines[request] = time.monotonic() + self.client_seconds
                return True
        request.settimeout(0)  # the accepting thread must not wait for a client
        if not isinstance(request, ssl.SSLSocket):  # with TLS, the answer would need a handshake
            _send_raw(request, "429 Too Many Requests", "too many connections", "Retry-After: 1\r\n")
        return False

    def shutdown_request(self, request: Any) -> None:
        """Close a connection and stop measuring its time limit."""
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base class' signature
        """Report an error that a request caused, and answer with status 500.

        A client that has disconnected is not an error.
        """
        error = sys.exception()
        if error is None or isinstance(error, OSError):
            return
        self._on_fault("http", error)
        # After the first byte of an answer only writes can fail, with an OSError. So nothing was sent before this.
        _send_raw(request, "500 Internal Server Error", "internal error; see the log of the rank")


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: HttpServer

    def setup(self) -> None:
        self.request.settimeout(self.server.client_seconds)  # for each read and each write
        if isinstance(self.request, ssl.SSLSocket):
            self._do_handshake(self.request)
        super().setup()

    def _do_handshake(self, connection: ssl.SSLSocket) -> None:
        try:
            connection.do_handshake()
        except OSError as error:
            reason = explain_to_server(error)
            if getattr(error, "reason", None) == "HTTP_REQUEST":
                _send_raw(connection, "400 Bad Request", "this port speaks TLS: write https://", is_clear=True)
            if reason is not None:
                self.server.warn_once(self.client_address[0], reason)
                _drain_and_close(connection)
            raise

    def handle_one_request(self) -> None:
        assert isinstance(self.rfile, io.BufferedReader)
        self.rfile.peek(1)  # waits for the first byte
        self.server.touch(self.connection, self.server.head_seconds)
        super().handle_one_request()
        self.server.meter.lap("http")

    def parse_request(self) -> bool:
        is_valid = super().parse_request()
        self.server.touch(self.connection)
        if not is_valid:
            return False
        if self.request_version == "HTTP/0.9":
            self.send_error(HTTPStatus.BAD_REQUEST, "the request is not HTTP/1.1")
            return False
        return True

    def do_GET(self) -> None:
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # otherwise its body would be read as the next request
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self._read_body())

    do_HEAD = do_GET  # noqa: N815 - a name of the base class
    do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_POST  # noqa: N815 - names of the base class

    def _answer(self, body: bytes | None) -> None:
        try:
            target = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(target.query, keep_blank_values=True, max_num_fields=32))
        except ValueError:
            self._send(Answer.text(HTTPStatus.BAD_REQUEST, "invalid URL, or more than 32 query parameters"))
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(urllib.parse.unquote(target.path), query, headers, self.command, body)
        self.server.touch(self.connection, math.inf)
        self._send(self.server.application(request))

    def _read_body(self) -> bytes | None:
        """Return the body of the request; None if it is longer than 64 KiB or has no length.

        In all cases, the connection is closed after the answer.
        """
        length, body = self.headers.get("Content-Length", "0"), b""
        size = int(length[:20]) if length.isdecimal() else _REQUEST_BODY_READ + 1
        wanted = min(size, _REQUEST_BODY_READ) if length.isdecimal() else 0
        while len(body) < wanted and (part := self.rfile.read1(wanted - len(body))):
            body += part
            self.server.touch(self.connection)
        self.close_connection = True  # otherwise the unread rest would be read as the next request
        return body if size <= _REQUEST_BODY_READ and "Transfer-Encoding" not in self.headers else None

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002 - the base class' signature
        self.close_connection = True
        self.request_version = self.protocol_version  # otherwise the answer to an invalid request has no headers
        self.requestline = getattr(self, "requestline", "")
        self._send(Answer.text(code, message or HTTPStatus(code).phrase))

    def _send(self, answer: Answer) -> None:
        self.server.touch(self.connection)
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
                self._write(piece)
        self.server.touch(self.connection)

    def _write(self, piece: memoryview) -> None:
        """Send `piece`. The time limit starts again whenever the system accepts bytes for the client."""
        while piece:
            sent = self.connection.send(piece[:_PART_BYTES])  # not sendall, whose limit is for all bytes
            piece = piece[sent:]
            self.server.touch(self.connection)

    def version_string(self) -> str:
        return "Rankscope"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class' signature
        log.debug("%s: %s", self.client_address[0], format % args)


def _send_raw(connection: socket.socket, status: str, text: str, headers: str = "", *, is_clear: bool = False) -> None:
    """Send an answer without a request handler; the caller closes the connection.

    With `is_clear`, the answer is sent unencrypted, for a TLS socket after a failed handshake.
    """
    kind = socket.socket if is_clear else type(connection)
    head = f"HTTP/1.1 {status}\r\n{headers}Content-Type: {TEXT}\r\nContent-Length: {len(text) + 1}\r\n"
    try:
        kind.send(connection, f"{head}Connection: close\r\n\r\n{text}\n".encode())
        connection.settimeout(0)
        kind.recv(connection, _REQUEST_BODY_READ)  # with an unread request, close() would reset the connection
    except OSError:
        log.debug("client disconnected before it received the answer")


def _drain_and_close(connection: socket.socket) -> None:
    """Read and discard the remaining bytes of a client, so that the client receives the TLS alert.

    Each read waits at most 0.5 s. Closing a socket with unread bytes would reset the connection, and the alert of a
    failed handshake would be lost.
    """
    try:
        socket.socket.shutdown(connection, socket.SHUT_WR)
        connection.settimeout(_DRAIN_SECONDS)
        for _ in range(_DRAIN_READS):
            if not socket.socket.recv(connection, _REQUEST_BODY_READ):
                return
    except OSError:
        log.debug("client disconnected during the handshake")


def _hang_up(connection: socket.socket) -> None:
    """Shut down both directions of a connection immediately. Threads that wait for data on this connection wake up."""
    try:
        # Not SSLSocket.shutdown(): after it, a thread that is writing would continue unencrypted.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        log.debug("connection was already closed")


def open_server(
    config: ServeConfig, application: Application, *, on_fault: Callable[[str, BaseException], None], meter: CpuMeter
) -> HttpServer:
    """Return a server on the first free port of `config.address`. It listens but does not serve before `start()`.

    Several ranks and jobs on one node can share a range of ports. Raises ServeError, which names the setting to change.
    """
    tls = None if config.web_config is None else server_tls(Path(config.web_config))
    addresses = config.address
    for port in addresses.ports:
        try:
            return HttpServer(Address(addresses.host, port), application, on_fault=on_fault, meter=meter, tls=tls)
        except ServeError as error:
            if addresses.last_port is None or getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
                raise
    raise ServeError(
        f"cannot listen on {addresses}: all {len(addresses.ports)} ports are in use; set a longer range in"
        " RANKSCOPE_LISTEN, or port 0 for any free port"
    )
