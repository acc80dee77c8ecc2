"""What the HTTP server does with bare sockets: find the address, refuse, answer without a handler, hang up."""

from __future__ import annotations

import logging
import socket
import ssl
from typing import Any, Final

from rankscope_exporter.errors import ServeError
from rankscope_exporter.serving.addresses import Address

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


def see_off(connection: socket.socket) -> None:
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
