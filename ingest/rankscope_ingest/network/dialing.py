"""Which addresses the service may dial: checked when a rank registers, and again whenever a name is resolved.

Without the second check a name could point elsewhere after it was accepted.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

import aiohttp
from aiohttp import ThreadedResolver
from aiohttp.abc import AbstractResolver, ResolveResult

from rankscope_contract.security.tls import HUNG_UP
from rankscope_ingest.base.config import Network
from rankscope_ingest.base.errors import FetchError, RegistrationError
from rankscope_ingest.base.tls import tls_trouble

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def parse_target_url(url: str) -> tuple[str, int]:
    """Return (host, port) of a rank's advertised URL. Raises RegistrationError(400) unless it is http(s)://host:port."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
        parts = urlsplit("")
    extra = parts.path.strip("/") or parts.query or parts.fragment or parts.username or parts.password
    if parts.scheme not in {"http", "https"} or not host or not port or extra:
        raise RegistrationError(400, f"url {url!r} is not of the form http://host:port: advertise such an address")
    return host, port


def address_of(host: str) -> Address | None:
    """Return the address that `host` spells out, IPv4-mapped ones as IPv4; None for a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def check_allowed(url: str, addresses: Iterable[Address], networks: Sequence[Network]) -> None:
    """Raise RegistrationError(403), naming the setting, when an address of the rank is not allowed."""
    for address in addresses:
        if not is_allowed(address, networks):
            allowed = ", ".join(map(str, networks)) or "none"
            raise RegistrationError(
                403,
                f"{url} is at {address}, outside [service] allowed_networks ({allowed}): "
                "add its network to the service's configuration, or let the rank advertise another address",
            )


def is_allowed(address: Address, networks: Sequence[Network]) -> bool:
    """Return whether `address` lies in one of `networks`; an empty list allows nothing."""
    return any(address.version == network.version and address in network for network in networks)


def dial_allowed(host: str, port: int, networks: Sequence[Network], *, timeout_seconds: float | None) -> socket.socket:
    """Return a connection to the first address of `host` that may be dialled and answers. Blocks.

    Raises OSError, and FetchError when `host` has no address that is allowed.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    allowed = [one for one in found if (address := address_of(str(one[4][0]))) and is_allowed(address, networks)]
    if not allowed:
        raise FetchError("forbidden", f"{host} resolves to an address outside [service] allowed_networks")
    for number, (family, kind, protocol, _, place) in enumerate(allowed, 1):
        dialled = socket.socket(family, kind, protocol)
        try:
            dialled.settimeout(timeout_seconds)
            dialled.connect(place)
            dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            dialled.close()
            if number == len(allowed):
                raise
        else:
            return dialled
    raise AssertionError("one of them has answered, or the last error was raised")


class AllowedResolver(AbstractResolver):
    """Resolves names as the system does, and hands over only addresses that may be dialled."""

    def __init__(self, networks: Sequence[Network]) -> None:
        self._networks = networks
        self._system = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the allowed addresses of `host`. Raises OSError when none is."""
        found = await self._system.resolve(host, port, family)
        allowed = [result for result in found if self._permits(result["host"])]
        if found and not allowed:
            raise OSError(f"{host} resolves to an address outside [service] allowed_networks")
        return allowed

    async def addresses(self, host: str) -> list[Address]:
        """Return every address of `host`, a name or a spelt-out address. Raises OSError when there is none."""
        if (address := address_of(host)) is not None:
            return [address]
        results = await self._system.resolve(host, 0, socket.AF_UNSPEC)
        return [address for result in results if (address := address_of(result["host"])) is not None]

    async def close(self) -> None:
        """Nothing is held open."""

    def _permits(self, text: str) -> bool:
        address = address_of(text)
        return address is not None and is_allowed(address, self._networks)


def fetch_error(error: BaseException | None, url: str) -> FetchError | None:
    """Return what aiohttp, http.client or the system raised as the failure of `url`; None when it is none of theirs."""
    if (trouble := tls_trouble(error)) is not None:
        return FetchError("tls", f"{url}: {trouble}")
    match error:
        case TimeoutError():
            return FetchError("timeout", f"{url} did not answer in time")
        case ConnectionRefusedError() | aiohttp.ClientConnectorError(os_error=ConnectionRefusedError()):
            return FetchError("refused", f"nobody listens at {url}")
        case http.client.IncompleteRead() | aiohttp.ClientPayloadError():
            return FetchError("cut", f"{url} broke off in the middle of a body")
        case http.client.RemoteDisconnected() | aiohttp.ServerDisconnectedError() if url.startswith("https:"):
            return FetchError("tls", f"{url}: {HUNG_UP}")
        case http.client.HTTPException() | aiohttp.ClientError() | OSError() | ValueError():
            return FetchError("connection", f"{url}: {error or type(error).__name__}")
    return None
