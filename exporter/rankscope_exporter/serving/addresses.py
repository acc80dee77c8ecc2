"""Addresses as people write them (host, port, range of ports, IPv6 in brackets), and the sockets of a server."""

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
"""Each port of a range is tried until one is free; a range may not turn the start of a training into a port scan."""


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port, as written in `listen` or `advertise`; with `last_port` any port from `port` up to it."""

    host: str
    port: int
    last_port: int | None = None

    @classmethod
    def parse(cls, text: str, *, what: str, default_port: int | None = None) -> Self:
        """Return the address in `host:port` or `host:first-last`. Raises ServeError naming `what` and the form."""
        ports = _PORTS.search(text)
        first, last = (int(ports[1]), int(ports[2])) if ports else (None, None)
        host, port = _host_and_port(_PORTS.sub(f":{first}", text), what)
        if port is None:
            if default_port is None:
                raise ServeError(f"{what} {text!r} has no port: write {text}:0 for any free one")
            port = default_port
        if last is not None and not 0 < port < last <= min(65535, port + _MOST_PORTS - 1):
            raise ServeError(
                f"{what} {text!r}: a range of ports goes up, such as 9400-9499, over {_MOST_PORTS} at most"
            )
        return cls(host, port, last)

    @property
    def ports(self) -> range:
        """Return the ports to choose from."""
        return range(self.port, (self.port if self.last_port is None else self.last_port) + 1)

    def each(self) -> Iterator[Address]:
        """Yield one address for every port, lowest first."""
        return (Address(self.host, port) for port in self.ports)

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine can reach the host."""
        ip = _ip(self.host)
        return self.host == "localhost" if ip is None else ip.is_loopback

    @property
    def is_wildcard(self) -> bool:
        """Return whether the host stands for every address of the machine."""
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
            f"{what} {text!r}: an address with a zone means nothing elsewhere; give a global one or a name"
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

REQUEST_BODY_READ: Final = 65_536  # read and thrown away, so that a refusal reaches the sender
_FAREWELL_SECONDS: Final = 0.5
_FAREWELL_READS: Final = 16
TEXT: Final = "text/plain; charset=utf-8"


def resolve(address: Address) -> tuple[socket.AddressFamily, Any]:
    """Return the family and the system's form of an address to listen on. Raises ServeError."""
    host = "127.0.0.1" if address.host == "localhost" else address.host
    try:
        family, _, _, _, sockaddr = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ServeError(
            f"cannot listen on {address}: {error.strerror or error}; give an address of this machine"
        ) from error
    return family, sockaddr


def refuse(connection: socket.socket) -> None:
    """Say that too many are here already, if that takes no waiting."""
    connection.settimeout(0)  # the accepting thread waits for nobody
    if isinstance(connection, ssl.SSLSocket):
        return  # an answer would take a handshake first
    send_raw(connection, "429 Too Many Requests", "too many connections", "Retry-After: 1\r\n")


def send_raw(connection: socket.socket, status: str, text: str, headers: str = "", *, is_clear: bool = False) -> None:
    """Answer without a handler and let the connection end; `is_clear` where TLS was wanted and never came about."""
    send, receive = (
        (socket.socket.send, socket.socket.recv) if is_clear else (type(connection).send, type(connection).recv)
    )
    head = f"HTTP/1.1 {status}\r\n{headers}Content-Type: {TEXT}\r\nContent-Length: {len(text) + 1}\r\n"
    try:
        send(connection, f"{head}Connection: close\r\n\r\n{text}\n".encode())
        connection.settimeout(0)
        receive(connection, REQUEST_BODY_READ)  # an unread request would turn the close into a reset
    except OSError:
        log.debug("a client was gone before its answer")


def drain_and_close(connection: socket.socket) -> None:
    """Give a client a moment to read why its handshake failed: a close before it has spoken out would be a reset."""
    try:
        socket.socket.shutdown(connection, socket.SHUT_WR)
        connection.settimeout(_FAREWELL_SECONDS)
        for _ in range(_FAREWELL_READS):
            if not socket.socket.recv(connection, REQUEST_BODY_READ):
                return
    except OSError:
        log.debug("a client left without a word")


def hang_up(connection: socket.socket) -> None:
    """End both directions at once; threads that wait on the connection wake up."""
    try:
        # Not SSLSocket's own, which lets the thread that writes go on in the clear.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        log.debug("connection was already closed")
