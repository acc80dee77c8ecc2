"""Accept the connections of the service, close those with an incomplete request, and keep files free for the store.

A client that sends half a request and then nothing would otherwise occupy an open file of the process for ever. Time
counts while a request arrives, and never while an answer is under way: event streams and long exports have no limit.
They use a part of the connections only: the others are reserved for ranks, Prometheus and the health page.

The listening socket of the service accepts IPv4 or IPv6 connections, depending on the configured address; with the
address `[::]` it accepts both.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import resource
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.http_exceptions import HttpProcessingError

from rankscope_contract.wire import channel
from rankscope_contract.wire.tls import MakeContext
from rankscope_ingest.base.background import cancel, start_task
from rankscope_ingest.base.config import ServiceSection, split_address
from rankscope_ingest.base.errors import ServiceError

log = logging.getLogger(__name__)

_MOST_CONNECTIONS: Final = 4096
"""Maximum number of connections, however many files the process can open: each takes about 20 KB of memory."""

_MOST_FILES: Final = 65_536
"""Highest soft limit that the service sets. A container may have a hard limit of 1,000 million files."""

_LOG_SECONDS: Final = 60.0
_RETRY_SECONDS: Final = 0.2
"""Time in seconds until the next attempt after a connection could not be accepted."""

_KEEP_ALIVE_SECONDS: Final = 75.0
"""Time in seconds for which a connection remains open after an answer. It also limits a next request whose first bytes
arrived together with the last one."""

_LATE: Final = b"the request did not arrive in time"
_FULL: Final = b"too many connections"
_BUSY: Final = "too many requests are under way; send the request again"
_RETRY_AFTER: Final = {"Retry-After": "1"}

_RESERVED_PATHS: Final = frozenset(
    {channel.HEALTH_PATH, channel.REGISTER_PATH, channel.POKE_PATH}
    | {channel.METRICS_PATH, channel.SERVICE_DISCOVERY_PATH}
)
"""Paths of requests by ranks, by Prometheus, and of the health page. Their answers are short."""

_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - a user may configure it, with a token


def file_limit() -> int:
    """Return the number of files that this process can have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_FILES if soft == resource.RLIM_INFINITY else soft


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit, at most to 65,536. A higher soft limit remains."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:  # some sandboxes forbid it
        log.warning("the limit of open files remains %d, because it cannot be raised: %s", soft, error)


def most_connections() -> int:
    """Return half of the files that the process can open. The other half is for the store and the polls of ranks."""
    return min(_MOST_CONNECTIONS, file_limit() // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the connections of one server; times are in seconds."""

    head_seconds: float = 10.0
    """From the first byte of a request to the end of its head; also for a TLS handshake."""
    body_seconds: float = 30.0
    """From one read of a body to the next."""
    sweep_seconds: float = 1.0
    """Interval at which connections that exceed their time limit are closed."""
    most: int = field(default_factory=most_connections)
    """Maximum number of connections."""

    @property
    def most_under_way(self) -> int:
        """Return the maximum number of requests under way, apart from those for reserved paths."""
        return self.most - self.most // 4


class _Phase(enum.Enum):
    NEW = enum.auto()
    """No byte of a request has arrived, or the TLS handshake is not complete."""
    HEAD = enum.auto()
    BODY = enum.auto()
    """The request is being handled, but its body is not complete."""
    ANSWER = enum.auto()
    IDLE = enum.auto()
    """The last request is answered, and the next one has not begun."""


class Connection(asyncio.Protocol):
    """One connection: passes all events to the protocol of aiohttp, and knows which part of a request it waits for."""

    def __init__(self, inner: asyncio.Protocol, server: _Connections) -> None:
        self._inner = inner
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._request: web.BaseRequest | None = None
        self._phase = _Phase.NEW
        self._since = time.monotonic()
        self.opening: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport. With TLS, the handshake is complete."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._enter(_Phase.NEW)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Start the time limit of a head with its first byte, and that of a body again with each part."""
        if self._phase in (_Phase.NEW, _Phase.IDLE):
            self._enter(_Phase.HEAD)
        elif self._phase is _Phase.BODY:
            self._since = time.monotonic()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass the end of the client's data on."""
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end of the connection."""
        self._server.forget(self)
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """Pass on that the client reads slowly."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass on that the client has read."""
        self._inner.resume_writing()

    def on_head(self, request: web.BaseRequest) -> bool:
        """Note that the head of `request` is complete; return whether its handler may run."""
        self._request = request
        self._enter(_Phase.ANSWER if request.content.is_eof() else _Phase.BODY)
        return request.path in _RESERVED_PATHS or self._server.admit(self)

    def on_answered(self) -> None:
        """Note that the answer is complete."""
        self._request = None
        self._enter(_Phase.IDLE)
        self._server.finished(self)

    @property
    def is_opening(self) -> bool:
        """Return whether the TLS handshake is not complete."""
        return self._transport is None

    def rank(self) -> tuple[bool, float] | None:
        """Return the order in which this connection is closed to make room, idle ones first.

        Return None if it is not closed for that, because an answer is under way.
        """
        self._look()
        if self._phase is _Phase.IDLE and self._transport is not None and self._transport.get_write_buffer_size():
            return None  # the last bytes of an answer
        return None if self._phase is _Phase.ANSWER else (self._phase is not _Phase.IDLE, self._since)

    def is_overdue(self, now: float, limits: Limits) -> bool:
        """Return whether the client has exceeded a time limit at `now`."""
        self._look()
        seconds = {_Phase.HEAD: limits.head_seconds, _Phase.BODY: limits.body_seconds}.get(self._phase)
        return seconds is not None and now - self._since > seconds

    def close(self, *, is_late: bool = False) -> None:
        """Close the connection now. If `is_late`, send status 408 first."""
        if self._transport is None:
            if self.opening is not None:
                self.opening.cancel()
            return
        if is_late and not self._transport.get_write_buffer_size():
            self._transport.write(_raw_answer(b"408 Request Timeout", _LATE))
        self._transport.abort()  # close() would wait until a TLS client confirms

    def _enter(self, phase: _Phase) -> None:
        self._phase, self._since = phase, time.monotonic()

    def _look(self) -> None:
        """Update the phase of a body: it can be complete, or the handler does not read it at present."""
        if self._phase is not _Phase.BODY or self._request is None or self._transport is None:
            return
        if self._request.content.is_eof():
            self._enter(_Phase.ANSWER)
        elif not self._transport.is_reading():
            self._since = time.monotonic()


class _Connections:
    """All connections of one listening socket."""

    def __init__(
        self,
        listening: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        limits: Limits,
    ) -> None:
        self._socket = listening
        self._protocol = protocol
        self._tls = tls
        self._limits = limits
        self._open: set[Connection] = set()
        self._under_way: set[Connection] = set()  # with a request, apart from those for reserved paths
        self._next_logs: dict[str, float] = {}  # by the first words

    async def accept(self) -> None:
        """Accept connections until the task is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._socket)
            except OSError as error:
                self._make_room(self._open)
                self.log(f"a connection cannot be accepted, retrying in {_RETRY_SECONDS:g} s: {error}")
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if len(self._open) < self._limits.most or self._make_room(self._open):
                self._begin(accepted)
            else:
                self.log(f"new connections are refused: {len(self._open)} connections have an answer under way")
                _refuse(accepted, is_clear=self._tls is None)
            await asyncio.sleep(0)  # other tasks run, and closed connections are released

    async def sweep(self) -> None:
        """Close connections that exceed a time limit, until the task is cancelled."""
        while True:
            await asyncio.sleep(self._limits.sweep_seconds)
            now = time.monotonic()
            for connection in [found for found in self._open if found.is_overdue(now, self._limits)]:
                self._close(connection, is_late=True)

    def end_handshakes(self) -> None:
        """Close the connections that aiohttp does not have yet, because their TLS handshake is not complete."""
        for connection in [found for found in self._open if found.is_opening]:
            self._close(connection)

    def admit(self, connection: Connection) -> bool:
        """Return whether the request of `connection` may be handled. An incomplete request is closed for it."""
        if len(self._under_way) >= self._limits.most_under_way and not self._make_room(self._under_way):
            self.log(f"requests are refused: {len(self._under_way)} connections have an answer under way")
            return False
        self._under_way.add(connection)
        return True

    def finished(self, connection: Connection) -> None:
        """Note that the request of `connection` is answered."""
        self._under_way.discard(connection)

    def forget(self, connection: Connection) -> None:
        """Note that `connection` is closed."""
        self._open.discard(connection)
        self._under_way.discard(connection)

    def _begin(self, accepted: socket.socket) -> None:
        connection = Connection(self._protocol(), self)
        self._open.add(connection)
        connection.opening = start_task("opening a connection", lambda: self._start(accepted, connection))

        def release(opening: asyncio.Task[None]) -> None:
            if opening.cancelled():  # perhaps before it began, so that nothing else closes the socket
                accepted.close()

        connection.opening.add_done_callback(release)

    async def _start(self, accepted: socket.socket, connection: Connection) -> None:
        seconds = None if self._tls is None else self._limits.head_seconds
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, accepted, ssl=self._tls, ssl_handshake_timeout=seconds
            )
        except OSError as error:
            log.debug("a client ended the TLS handshake: %s", error)
            self.forget(connection)
        except Exception:
            self.forget(connection)
            accepted.close()
            raise

    def _make_room(self, candidates: Collection[Connection]) -> bool:
        """Close one of `candidates` that has no answer under way; return False if there is none."""
        ranked = [(rank, id(found), found) for found in candidates if (rank := found.rank()) is not None]
        if not ranked:
            return False
        if len(self._open) >= self._limits.most:
            self.log(
                f"{len(self._open)} connections are open, the maximum for {file_limit()} files: idle connections and "
                "incomplete requests are closed. Raise the limit of open files (ulimit -n) if this is the usual load"
            )
        self._close(min(ranked)[-1])
        return True

    def _close(self, connection: Connection, *, is_late: bool = False) -> None:
        self.forget(connection)
        connection.close(is_late=is_late)

    def log(self, text: str) -> None:
        """Log a warning, at most one of the same kind a minute."""
        now, kind = time.monotonic(), text[:20]
        if now >= self._next_logs.get(kind, 0.0):
            self._next_logs[kind] = now + _LOG_SECONDS
            log.warning("%s", text)


class _AnswerEnds(AbstractAccessLogger):
    """Receives each complete answer from aiohttp. It writes no log."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:  # noqa: ARG002 - the base class' signature
        """Note that an answer is complete."""
        if (connection := _connection(request)) is not None:
            connection.on_answered()


@contextlib.asynccontextmanager
async def accepting(
    application: web.Application,
    listening: socket.socket,
    tls: ssl.SSLContext | None,
    *,
    limits: Limits | None = None,
    shutdown_seconds: float = 60.0,
) -> AsyncIterator[None]:
    """Serve `application` on a listening socket inside the block, and close the socket at its end.

    `shutdown_seconds` is the time limit for requests that are being handled at the end.
    """

    def is_logged(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):  # aiohttp would log a traceback for each
            connections.log(f"requests that are not valid HTTP are refused: {type(error).__name__}")
        return not isinstance(error, HttpProcessingError)

    requests = logging.Logger(f"{__name__}.requests")  # noqa: LOG001 - of this server only
    requests.parent = log
    requests.addFilter(is_logged)
    application.middlewares.insert(0, _note_head)
    runner = web.AppRunner(
        application,
        access_log=log,
        access_log_class=_AnswerEnds,
        logger=requests,
        handle_signals=False,
        keepalive_timeout=_KEEP_ALIVE_SECONDS,
        auto_decompress=False,  # aiohttp would respond to unknown compressions, and log a traceback per request
        shutdown_timeout=shutdown_seconds,
    )
    await runner.setup()
    assert runner.server is not None
    listening.setblocking(False)
    connections = _Connections(listening, runner.server, tls, limits or Limits())
    tasks = [
        start_task("accepting connections", connections.accept, is_repeated=True),
        start_task("closing late connections", connections.sweep, is_repeated=True),
    ]
    try:
        yield
    finally:
        await cancel(tasks)
        listening.close()
        connections.end_handshakes()
        await runner.cleanup()


@web.middleware
async def _note_head(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    connection = _connection(request)
    if connection is not None and not connection.on_head(request):
        refused = web.Response(status=503, text=_BUSY, headers=_RETRY_AFTER)
        refused.force_close()
        return refused
    try:
        return await handler(request)
    except ConnectionError:
        if request.transport is not None and not request.transport.is_closing():
            raise
        return web.Response()  # it is not sent; aiohttp would log a traceback for each lost connection


def _connection(request: web.BaseRequest) -> Connection | None:
    protocol = None if request.transport is None else request.transport.get_protocol()
    return protocol if isinstance(protocol, Connection) else None


def _raw_answer(status: bytes, text: bytes) -> bytes:
    return (
        b"HTTP/1.1 " + status + b"\r\nContent-Type: text/plain; charset=utf-8\r\nRetry-After: 1\r\n"
        b"Connection: close\r\nContent-Length: " + str(len(text)).encode() + b"\r\n\r\n" + text
    )


def _refuse(accepted: socket.socket, *, is_clear: bool) -> None:
    """Close an accepted connection with status 503. With TLS it is only closed: an answer would need a handshake."""
    with accepted, contextlib.suppress(OSError):
        if is_clear:
            accepted.send(_raw_answer(b"503 Service Unavailable", _FULL))
            accepted.recv(65_536)  # with an unread request, close() would reset the connection


@contextlib.asynccontextmanager
async def serving(
    application: web.Application, section: ServiceSection, tls: MakeContext | None, *, shutdown_seconds: float = 60.0
) -> AsyncIterator[str]:
    """Serve `application` as configured inside the block. The value is the URL under which ranks reach the service.

    `shutdown_seconds` is the time limit for requests that are being handled at the end of the block. Raises
    ServiceError if the service cannot listen at the configured address.
    """
    try:
        listening = open_socket(section.listen)
    except OSError as error:
        raise ServiceError(
            f"cannot listen at {section.listen}: {error.strerror or error}. Set another address as [service] listen"
        ) from error
    scheme = "http" if tls is None else "https"
    url = f"{scheme}://{advertised(section, int(listening.getsockname()[1]))}"
    context = None if tls is None else tls()
    async with accepting(application, listening, context, shutdown_seconds=shutdown_seconds):
        yield url


def open_socket(listen: str) -> socket.socket:
    """Return a listening socket at the address `listen`, which is host:port.

    Raises OSError if the address cannot be used.
    """
    host, port = split_address(listen)
    found = socket.getaddrinfo("127.0.0.1" if host == "localhost" else host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = found[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # asyncio would switch IPv4 off
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind(address)
        listening.listen(1024)  # all ranks of a large job register at the same time
    except OSError:
        listening.close()
        raise
    return listening


def advertised(section: ServiceSection, bound: int, host_name: Callable[[], str] = socket.gethostname) -> str:
    """Return the host:port that users set as RANKSCOPE_INGEST_URL on the ranks.

    The result is the setting `advertise` if it is set. Otherwise it is the setting `listen`, with the host name of this
    machine in place of a wildcard address. `bound` is the port of the listening socket.
    """
    if section.advertise is not None:
        host, port = split_address(section.advertise)
        return _host_port(host, port or bound)
    host, _ = split_address(section.listen)
    return _host_port(host_name() if host in _WILDCARDS else host, bound)


def _host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
