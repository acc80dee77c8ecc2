"""Open the listening socket of the service, and find the address under which ranks reach it.

The socket accepts IPv4 or IPv6 connections, depending on the configured address; with the address `[::]` it accepts
both.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from rankscope_contract.security.tls import MakeContext
from rankscope_ingest.base.config import ServiceSection, split_address
from rankscope_ingest.base.errors import ServiceError
from rankscope_ingest.network.connections import accepting

_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - a user may configure it, with a token


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
