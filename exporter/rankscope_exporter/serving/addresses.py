"""Addresses as people write them: a host, a port or a range of ports to choose from, IPv6 in brackets. Values only."""

from __future__ import annotations

import ipaddress
import re
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Self

from rankscope_exporter.errors import ServeError

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
