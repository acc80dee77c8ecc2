"""Check the addresses to which the service connects, at registration and again whenever a name is resolved.

Without the second check, a name could resolve to a forbidden address after it was accepted.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from aiohttp import ThreadedResolver
from aiohttp.abc import AbstractResolver, ResolveResult

from rankscope_ingest.base.addresses import Address, address_of
from rankscope_ingest.base.config import Network
from rankscope_ingest.base.errors import RegistrationError


def parse_target_url(url: str) -> tuple[str, int]:
    """Return host and port of the URL that a rank advertises.

    Raises RegistrationError with status 400 unless the URL has the form http://host:port or https://host:port.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
        parts = urlsplit("")
    extra = parts.path.strip("/") or parts.query or parts.fragment or parts.username or parts.password
    if parts.scheme not in {"http", "https"} or not host or not port or extra:
        raise RegistrationError(
            400, f"url {url!r} is not of the form http://host:port: advertise an address of this form"
        )
    return host, port


def check_allowed(url: str, addresses: Iterable[Address], networks: Sequence[Network]) -> None:
    """Raise RegistrationError with status 403 if any of `addresses` is outside `networks`.

    The message names the setting that allows further networks.
    """
    for address in addresses:
        if not is_allowed(address, networks):
            allowed = ", ".join(map(str, networks)) or "none"
            raise RegistrationError(
                403,
                f"{url} is at {address}, outside [service] allowed_networks ({allowed}): "
                "add its network to the service's configuration, or let the rank advertise another address",
            )


def is_allowed(address: Address, networks: Sequence[Network]) -> bool:
    """Return whether `address` is in one of the networks. An empty list of networks allows no address."""
    return any(address.version == network.version and address in network for network in networks)


class ForbiddenAddressError(OSError):
    """Raised when a host name resolves only to addresses outside the allowed networks."""


class AllowedResolver(AbstractResolver):
    """Resolves host names with the resolver of the system, and returns only addresses in the allowed networks."""

    def __init__(self, networks: Sequence[Network]) -> None:
        self._networks = networks
        self._system = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the allowed addresses of `host`.

        Raises OSError if the name cannot be resolved, and ForbiddenAddressError if none of its addresses is allowed.
        """
        found = await self._system.resolve(host, port, family)
        allowed = [result for result in found if self._permits(result["host"])]
        if found and not allowed:
            raise ForbiddenAddressError(
                f"{host} resolves to an address outside [service] allowed_networks: add its network there"
            )
        return allowed

    async def addresses(self, host: str) -> list[Address]:
        """Return all addresses of `host`, which is a name or an address.

        Raises OSError if the name cannot be resolved.
        """
        if (address := address_of(host)) is not None:
            return [address]
        results = await self._system.resolve(host, 0, socket.AF_UNSPEC)
        return [address for result in results if (address := address_of(result["host"])) is not None]

    async def close(self) -> None:
        """Do nothing, because the resolver holds no resources."""

    def _permits(self, text: str) -> bool:
        address = address_of(text)
        return address is not None and is_allowed(address, self._networks)
