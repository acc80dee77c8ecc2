"""Decide which HTTP proxy a request uses. No name is resolved, and nothing is read but the environment.

Requests to this machine never use a proxy: a proxy cannot reach its loopback addresses.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Final
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

from rankscope_ingest.base.addresses import Address, address_of

ENVIRONMENT: Final = "environment"
NO_PROXY: Final = "none"

_SCHEMES: Final = frozenset(["http", "https", "socks4", "socks4a", "socks5", "socks5h"])
_PORTS: Final = {"http": 80, "https": 443}


def is_loopback(host: str) -> bool:
    """Return whether `host`, a name or an address, is this machine according to its text alone."""
    name = _plain(host)
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address(name)
    return address is not None and (address.is_loopback or address.is_unspecified)


def is_proxy(url: str) -> bool:
    """Return whether `url` is the address of a proxy, such as http://proxy:3128."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in _SCHEMES and bool(parts.hostname) and port_of(url) != 0


def port_of(url: str) -> int | None:
    """Return the port in `url`; None if there is none, and 0 if it is not valid."""
    try:
        return urlsplit(url).port
    except ValueError:
        return 0


def proxy_of(url: str, setting: str) -> str | None:
    """Return the address of the proxy for a request to `url`; None if the request is sent directly.

    `setting` is ENVIRONMENT, NO_PROXY, or the address of a proxy. With ENVIRONMENT, the proxy is that of the variables
    `http_proxy`, `https_proxy` and `all_proxy`, also in upper case. The hosts in `no_proxy` never use a proxy.
    """
    parts = urlsplit(url)
    host = _plain(parts.hostname or "")
    if setting == NO_PROXY or is_loopback(host):
        return None
    variables = getproxies_environment()
    if _is_listed(host, port_of(url) or _PORTS.get(parts.scheme), variables.get("no", "")):
        return None
    if setting != ENVIRONMENT:
        return setting
    found = variables.get(parts.scheme) or variables.get("all")
    return (found if "://" in found else f"http://{found}") if found else None


def _is_listed(host: str, port: int | None, no_proxy: str) -> bool:
    return any(_matches(host, port, entry) for entry in no_proxy.replace(",", " ").split())


def _matches(host: str, port: int | None, entry: str) -> bool:
    """Return whether an entry of `no_proxy` names `host`: `*`, a name, a domain, an address or a network."""
    if entry == "*":
        return True
    address = _address(host)
    if address is not None and (network := _network(entry)) is not None:
        return address in network
    name, given = _without_port(entry)
    if given is not None and given != port:
        return False
    if address is not None:
        return address == _address(name)
    domain = _plain(name.removeprefix("*")).lstrip(".")
    return bool(domain) and (host == domain or host.endswith(f".{domain}"))


def _without_port(entry: str) -> tuple[str, int | None]:
    """Return name and port of `entry`. An IPv6 address has a port only if it is in brackets."""
    name, colon, port = entry.rpartition(":")
    has_port = colon and port.isdecimal() and (":" not in name or name.endswith("]"))
    return (_plain(name), int(port)) if has_port else (_plain(entry), None)


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False) if "/" in text else None
    except ValueError:
        return None


def _address(name: str) -> Address | None:
    """Return the address that `name` is; None if it is a name. Short forms such as `127.1` are those of the system."""
    try:
        return address_of(name) or ipaddress.IPv4Address(socket.inet_aton(name))
    except (OSError, UnicodeEncodeError):
        return None


def _plain(host: str) -> str:
    return host.strip("[]").rstrip(".").lower()


def proxies_of_environment() -> list[str]:
    """Return the addresses of all proxies in the environment variables. They may contain a user and a password."""
    return [address for name, address in getproxies_environment().items() if name in {"http", "https", "all"}]
