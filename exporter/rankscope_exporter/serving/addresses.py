"""Addresses in settings (host, port or range of ports, IPv6 in brackets), and operations on the sockets of a server."""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import ssl
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Self

from rankscope_exporter.base.errors import ServeError

_PORTS: Final = re.compile(r":(\d+)-(\d+)$", re.ASCII)
_MOST_PORTS: Final = 1000
"""Maximum number of ports in a range.

The server tries one port after the other, so a longer range would delay the start.
"""


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port of the setting `listen` or `advertise`. With `last_port`, any port from `port` to `last_port`."""

    host: str
    port: int
    last_port: int | None = None

    @classmethod
    def parse(cls, text: str, *, what: str, default_port: int | None = None) -> Self:
        """Parse a text `host:port` or `host:first-last` and return the address.

        Raises ServeError for any other text. The error contains the name of the setting, `what`, and the expected form.
        """
        ports = _PORTS.search(text)
        first, last = (int(ports[1]), int(ports[2])) if ports else (None, None)
        host, port = _host_and_port(_PORTS.sub(f":{first}", text), what)
        if port is None:
            if default_port is None:
                raise ServeError(f"{what} {text!r} has no port: write {text}:0 for any free port")
            port = default_port
        if last is not None and not 0 < port < last <= min(65535, port + _MOST_PORTS - 1):
            raise ServeError(
                f"{what} {text!r}: a port range must ascend, such as 9400-9499, and have at most {_MOST_PORTS} ports"
            )
        return cls(host, port, last)

    @property
    def ports(self) -> range:
        """Return the ports of the range; a range of one port if the address has a single port."""
        return range(self.port, (self.port if self.last_port is None else self.last_port) + 1)

    def each(self) -> Iterator[Address]:
        """Yield one address for each port, in ascending order."""
        return (Address(self.host, port) for port in self.ports)

    @property
    def is_loopback(self) -> bool:
        """Return whether `host` is a loopback address, which only processes on this machine can reach."""
        ip = _ip(self.host)
        return self.host == "localhost" if ip is None else ip.is_loopback

    @property
    def is_wildcard(self) -> bool:
        """Return whether `host` means all addresses of the machine, for example 0.0.0.0 or [::]."""
        ip = _ip(self.host)
        return ip is not None and ip.is_unspecified

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" + ("" if self.last_port is None else f"-{self.last_port}")


def _host_and_port(text: str, what: str) -> tuple[str, int | None]:
    try:
        parts = urllib.parse.urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ServeError(f"{what} {text!r}: {_fix(text, error)}") from error
    extra = parts.path or parts.query or parts.fragment or "@" in parts.netloc
    if extra or not host or any(character.isspace() for character in text):
        raise ServeError(f"{what} {text!r}: write host:port, for example 127.0.0.1:0 or [::1]:9400")
    if "%" in host:
        raise ServeError(
            f"{what} {text!r}: an address with a zone is valid on this machine only; use a global address or a name"
        )
    return host, port


def _fix(text: str, error: ValueError) -> str:
    if text.count(":") > 1 and "[" not in text:
        return f"write an IPv6 address in brackets, such as [::1]:9400 ({error})"
    return "the port must be a number from 0 to 65535" if "ort" in str(error) else str(error)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip


log = logging.getLogger(__name__)

REQUEST_BODY_READ: Final = 65_536  # bytes of a body that are read; with unread bytes, close() would reset the answer
_DRAIN_SECONDS: Final = 0.5
_DRAIN_READS: Final = 16
TEXT: Final = "text/plain; charset=utf-8"


def resolve(address: Address) -> tuple[socket.AddressFamily, Any]:
    """Return the address family and the socket address for listening on `address`. Raises ServeError."""
    host = "127.0.0.1" if address.host == "localhost" else address.host
    try:
        family, _, _, _, sockaddr = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ServeError(
            f"cannot listen on {address}: {error.strerror or error}; use an address of this machine"
        ) from error
    return family, sockaddr


def refuse(connection: socket.socket) -> None:
    """Answer an accepted connection with status 429, because too many connections are open.

    Does not block. Sends nothing on a TLS socket.
    """
    connection.settimeout(0)  # the accepting thread must not wait for a client
    if isinstance(connection, ssl.SSLSocket):
        return  # the answer would need a TLS handshake
    send_raw(connection, "429 Too Many Requests", "too many connections", "Retry-After: 1\r\n")


def send_raw(connection: socket.socket, status: str, text: str, headers: str = "", *, is_clear: bool = False) -> None:
    """Send an answer without a request handler; the caller closes the connection.

    With `is_clear`, the answer is sent unencrypted, for a TLS socket after a failed handshake.
    """
    send, receive = (
        (socket.socket.send, socket.socket.recv) if is_clear else (type(connection).send, type(connection).recv)
    )
    head = f"HTTP/1.1 {status}\r\n{headers}Content-Type: {TEXT}\r\nContent-Length: {len(text) + 1}\r\n"
    try:
        send(connection, f"{head}Connection: close\r\n\r\n{text}\n".encode())
        connection.settimeout(0)
        receive(connection, REQUEST_BODY_READ)  # with an unread request, close() would reset the connection
    except OSError:
        log.debug("client disconnected before it received the answer")


def drain_and_close(connection: socket.socket) -> None:
    """Read and discard the remaining bytes of a client, so that the client receives the TLS alert.

    Each read waits at most 0.5 s. Closing a socket with unread bytes would reset the connection, and the alert of a
    failed handshake would be lost.
    """
    try:
        socket.socket.shutdown(connection, socket.SHUT_WR)
        connection.settimeout(_DRAIN_SECONDS)
        for _ in range(_DRAIN_READS):
            if not socket.socket.recv(connection, REQUEST_BODY_READ):
                return
    except OSError:
        log.debug("client disconnected during the handshake")


def hang_up(connection: socket.socket) -> None:
    """Shut down both directions of a connection immediately. Threads that wait for data on this connection wake up."""
    try:
        # Not SSLSocket.shutdown(): after it, a thread that is writing would continue unencrypted.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        log.debug("connection was already closed")
