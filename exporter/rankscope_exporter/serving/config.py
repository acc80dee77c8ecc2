"""Where a rank listens, who may read it and how deep its ring is. Values only, checked when they are made."""

from __future__ import annotations

import ipaddress
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, Self

from rankscope_exporter.errors import ConfigError

MIN_RING_RECORDS: Final = 256
"""A service that restarts must find what it has not committed yet."""

_LISTEN_VARIABLE: Final = "RANKSCOPE_LISTEN"
_INSECURE_VARIABLE: Final = "RANKSCOPE_INSECURE"
_TEXT_VARIABLES: Final = {
    "listen": _LISTEN_VARIABLE,
    "advertise": "RANKSCOPE_ADVERTISE",
    "token": "RANKSCOPE_TOKEN",
    "ingest_url": "RANKSCOPE_INGEST_URL",
}
_DISCOVERY_VARIABLE: Final = "RANKSCOPE_DISCOVERY_DIR"
_TRUTHS: Final = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


class ServeError(ConfigError):
    """Serving cannot start as configured; the text names the fix."""


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port, as written in `listen` or `advertise`."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, *, what: str, default_port: int | None = None) -> Self:
        """Return the address in `host:port` (IPv6 in brackets). Raises ServeError naming `what` and the form."""
        parts = urllib.parse.urlsplit(f"//{text}")
        try:
            port = parts.port
        except ValueError as error:
            raise ServeError(f"{what} {text!r}: the port must be a number from 0 to 65535") from error
        extra = parts.path or parts.query or parts.fragment or "@" in parts.netloc
        if extra or not parts.hostname or any(character.isspace() for character in text):
            raise ServeError(f"{what} {text!r}: write host:port, for example 127.0.0.1:0 or [::1]:9400")
        if port is None:
            if default_port is None:
                raise ServeError(f"{what} {text!r} has no port: write {text}:0 for any free one")
            port = default_port
        return cls(parts.hostname, port)

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
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """How one rank serves. Loopback and a free port by default; any other address needs a token unless waived aloud."""

    listen: str = "127.0.0.1:0"
    advertise: str | None = None  # host or host:port under which others reach this rank; None: worked out from `listen`
    token: str | None = field(default=None, repr=False)
    insecure: bool = False
    ingest_url: str | None = None
    ring_records: int = 1024
    ring_bytes: int = 256 * 1024 * 1024  # beyond MIN_RING_RECORDS records, which are always kept
    series_budget: int = 20_000
    page_ops: Literal["judged", "all"] = "judged"
    discovery_dir: str | None = None  # Prometheus file_sd folder, used when there is no service

    def __post_init__(self) -> None:
        self._check_types()
        self._check_addresses()
        if self.token is not None and (not self.token.isascii() or not self.token.isprintable() or " " in self.token):
            raise ServeError("token: use printable ASCII without spaces, it travels in an HTTP header")
        if self.token == "":
            raise ServeError("token is empty: leave it out, or give at least one character")
        if self.ring_records < MIN_RING_RECORDS:
            raise ServeError(f"ring_records is {self.ring_records}: at least {MIN_RING_RECORDS} are needed")
        for name in ("ring_bytes", "series_budget"):
            if getattr(self, name) < 1:
                raise ServeError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.page_ops not in ("judged", "all"):
            raise ServeError(f"page_ops is {self.page_ops!r}: use 'judged' or 'all'")

    def _check_types(self) -> None:
        for name in ("listen", "advertise", "token", "ingest_url", "discovery_dir"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name == "listen"):
                raise ServeError(f"{name} is text, not {value!r}")
        for name in ("ring_records", "ring_bytes", "series_budget"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ServeError(f"{name} is a whole number, not {value!r}")
        if not isinstance(self.insecure, bool):
            raise ServeError(f"insecure is true or false, not {self.insecure!r}")

    def _check_addresses(self) -> None:
        if not (self.address.is_loopback or self.token or self.insecure):
            raise ServeError(
                f"listen {self.listen!r} can be reached from other machines: set a token (RANKSCOPE_TOKEN),"
                " listen on 127.0.0.1, or waive protection with insecure=True (RANKSCOPE_INSECURE=1)"
            )
        if self.advertise is not None:
            Address.parse(self.advertise, what="advertise", default_port=0)
        if self.ingest_url is not None:
            _check_service_url(self.ingest_url)

    @property
    def address(self) -> Address:
        """Return where to listen."""
        return Address.parse(self.listen, what="listen")

    def advertised(self, bound_port: int, host_name: str) -> Address:
        """Return where others reach a server bound to `bound_port` on the machine called `host_name`."""
        own = self.address
        host = (host_name or "127.0.0.1") if own.is_wildcard else own.host
        if self.advertise is None:
            return Address(host, bound_port)
        wanted = Address.parse(self.advertise, what="advertise", default_port=bound_port)
        return Address(wanted.host, wanted.port or bound_port)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Return the configuration that the RANKSCOPE_* variables ask for."""
        return cls().with_environment(environment)

    def with_environment(self, environment: Mapping[str, str]) -> Self:
        """Return this configuration with the RANKSCOPE_* variables put over it; an empty one counts as unset."""
        chosen: dict[str, Any] = {
            name: environment[variable] for name, variable in _TEXT_VARIABLES.items() if environment.get(variable)
        }
        if environment.get(_INSECURE_VARIABLE):
            chosen["insecure"] = _truth(environment[_INSECURE_VARIABLE])
        if environment.get(_DISCOVERY_VARIABLE):
            chosen["discovery_dir"] = str(Path(environment[_DISCOVERY_VARIABLE]).expanduser())
        return replace(self, **chosen)


def _check_service_url(url: str) -> None:
    parts = urllib.parse.urlsplit(url)
    try:
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        good = False
    if not good or parts.query or parts.fragment:
        raise ServeError(f"ingest_url {url!r}: write http://host:port of the service")
    if parts.username or parts.password:
        raise ServeError("ingest_url holds a user or password: give the secret as token (RANKSCOPE_TOKEN)")


def _truth(text: str) -> bool:
    try:
        return _TRUTHS[text.strip().lower()]
    except KeyError:
        raise ServeError(f"{_INSECURE_VARIABLE} is {text!r}: use 1 or 0") from None


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
