"""Settings of the HTTP server of a rank: address, token, TLS, ring, spool and metrics page.

The module also creates the TLS contexts.

`ServeConfig` contains values only and checks them when it is created.

Addresses in settings: host, port or range of ports, IPv6 in brackets.
"""

from __future__ import annotations

import contextlib
import copy
import ipaddress
import re
import ssl
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from rankscope_contract.wire.spool import DEFAULT_SPOOL_DIR
from rankscope_contract.wire.tls import (
    Reloading,
    TlsServer,
    WebConfigError,
    read_web_config,
    reloading_client,
    server_context,
)
from rankscope_exporter.process.errors import ServeError
from rankscope_exporter.process.validation import Converted, at_least, validate

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
        return range(self.port, (self.port if self.last_port is None else self.last_port) + 1)

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


T = TypeVar("T")


def server_tls(path: Path) -> Reloading:
    """Return the TLS contexts of the rank's server, reloaded when a file changes. Raises ServeError."""

    def make() -> tuple[ssl.SSLContext, tuple[Path, ...]]:
        tls = _read(path)
        return server_context(tls), (path, *tls.files)

    return _as_serve_error(lambda: Reloading(make))


def client_tls(ca_file: str | None, cert_file: str | None, key_file: str | None) -> Reloading:
    """Return reloaded TLS contexts for requests to the service; without `ca_file`, of the system. Raises ServeError."""
    ca, cert, key = (None if name is None else Path(name) for name in (ca_file, cert_file, key_file))
    return _as_serve_error(lambda: reloading_client(ca, cert, key))


def _read(path: Path) -> TlsServer:
    load_yaml = None
    with contextlib.suppress(ImportError):
        import yaml  # noqa: PLC0415 - only a file in YAML needs it; a rank may have no PyYAML

        load_yaml = yaml.safe_load
    return read_web_config(path, load_yaml)


def _as_serve_error(make: Callable[[], T]) -> T:
    try:
        return make()
    except WebConfigError as error:
        raise ServeError(str(error)) from error


MIN_RING_RECORDS: Final = 256
"""Smallest allowed value of `ring_records`, the number of records that a rank keeps in memory.

When the service returns after a restart, the ring must still contain the records that the service has not committed.
"""

PREFIX: Final = "RANKSCOPE_"
_BOOLS: Final = ("insecure", "spool_sync")
SERVE_VARIABLES: Final = (
    *_BOOLS,
    *("token", "token_file", "web_config", "listen", "advertise", "ca_file", "cert_file", "key_file"),
    *("ingest_url", "discovery_dir", "spool_dir"),
)
"""Settings that environment variables can override; RANKSCOPE_SPOOL_DIR overrides `spool_dir`.

A setting follows those that its check reads: an address beyond this machine needs a token.
"""
FilePath = Annotated[str, Converted(lambda name: str(Path(name).expanduser()))]
OFF: Final = "off"
"""Value of `spool_dir` and RANKSCOPE_SPOOL_DIR with which a rank writes no records to disk."""
SpoolPath = Annotated[str, Converted(lambda name: None if name == OFF else str(Path(name).expanduser()))]
_Size = Annotated[int, at_least(1)]
_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Settings of the server of one rank. By default it listens on a free port of the loopback address.

    Any other address needs a token or client certificates, unless `insecure` is true.
    """

    listen: str = "127.0.0.1:0"
    advertise: str | None = None  # host or host:port under which other machines reach this rank; None: from `listen`
    token: str | None = field(default=None, repr=False)
    token_file: FilePath | None = None
    web_config: FilePath | None = None  # file with the TLS settings of this rank's server, in the format of Prometheus
    ca_file: FilePath | None = None  # this file and the next two: TLS for requests to the service
    cert_file: FilePath | None = None
    key_file: FilePath | None = None
    insecure: bool = False
    ingest_url: str | None = None
    ring_records: Annotated[int, at_least(MIN_RING_RECORDS)] = 1024
    ring_bytes: _Size = 256 * 1024 * 1024  # limit for the records above MIN_RING_RECORDS, which are always kept
    series_budget: _Size = 20_000  # largest number of tensor series on the metrics page
    page_ops: Literal["judged", "all"] = "judged"  # ops on the metrics page: those that rules use, or all
    discovery_dir: FilePath | None = None  # Prometheus file_sd folder, used when there is no service
    # Folder where each record is written until a store has committed it, relative to the working directory; "off" or
    # None: records are only in memory.
    spool_dir: SpoolPath | None = DEFAULT_SPOOL_DIR
    spool_bytes: _Size = 1024 * 1024 * 1024
    spool_sync: bool = False  # call fdatasync after each record

    def __post_init__(self) -> None:
        validate(self, ServeError)
        self._check_token()
        self._check_addresses()
        self._check_files()

    def _check_token(self) -> None:
        if self.token is not None and self.token_file is not None:
            raise ServeError("token and token_file are both set: remove one of them")
        source = "token" if self.token_file is None else f"token_file {self.token_file}"
        secret = self.secret
        if secret is not None and (not secret.isascii() or not secret.isprintable() or " " in secret):
            raise ServeError(f"{source}: use printable ASCII without spaces, because it is sent in an HTTP header")
        if secret == "":
            raise ServeError(f"{source} is empty: remove it, or set at least one character")

    def _check_addresses(self) -> None:
        if not (self.is_guarded or self.insecure):
            raise ServeError(
                f"listen {self.listen!r} can be reached from other machines: set a token (RANKSCOPE_TOKEN),"
                " listen on 127.0.0.1, or disable this check with insecure=True (RANKSCOPE_INSECURE=1)"
            )
        if self.advertise is not None:
            wanted = Address.parse(self.advertise, what="advertise", default_port=0)
            if wanted.is_wildcard:
                raise ServeError(
                    f"advertise {self.advertise!r} is not a reachable address: set a name or address of this machine"
                )
            if wanted.port and len(wanted.ports) != len(self.address.ports):
                raise ServeError(
                    f"advertise {self.advertise!r} and listen {self.listen!r} have different numbers of ports: "
                    "set only the host, or as many ports as listen has"
                )
        if self.ingest_url is not None:
            _check_service_url(self.ingest_url)

    def _check_files(self) -> None:
        if self.key_file is not None and self.cert_file is None:
            raise ServeError("key_file is set without cert_file: set the client certificate as well")
        for name in ("ca_file", "cert_file", "key_file"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ServeError(f"{name} {path}: no such file")

    def without_secrets(self) -> ServeConfig:
        """Return a copy of this configuration without the token, so that it can be shown or stored."""
        found = copy.copy(self)
        object.__setattr__(found, "token", None)
        return found

    @property
    def address(self) -> Address:
        return Address.parse(self.listen, what="listen")

    @property
    def secret(self) -> str | None:
        """Return the token, that in `token_file` if it is set. Raises ServeError if the file cannot be read."""
        if self.token_file is None:
            return self.token
        try:
            return Path(self.token_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ServeError(f"token_file {self.token_file}: {getattr(error, 'strerror', None) or error}") from error

    @property
    def web(self) -> TlsServer | None:
        """Return the contents of the `web_config` file; None if it is not set. Raises ServeError if it is invalid."""
        return None if self.web_config is None else _as_serve_error(partial(_read, Path(self.web_config)))

    @property
    def is_guarded(self) -> bool:
        """Return whether only processes on this machine, or clients with a token or certificate, can send requests."""
        web = self.web
        return self.address.is_loopback or bool(self.secret) or (web is not None and web.demands_client_certificates)

    @property
    def scheme(self) -> str:
        return "http" if self.web_config is None else "https"

    def advertised(self, bound_port: int, host_name: str) -> Address:
        """Return the address under which other machines reach a server on port `bound_port` of host `host_name`."""
        own = self.address
        host = (host_name or "127.0.0.1") if own.is_wildcard else own.host
        if self.advertise is None:
            return Address(host, bound_port)
        wanted = Address.parse(self.advertise, what="advertise", default_port=bound_port)
        if wanted.last_port is not None:  # the n-th port of `listen` is reached at the n-th port of `advertise`
            return Address(wanted.host, wanted.port + bound_port - own.port)
        return Address(wanted.host, wanted.port or bound_port)

    def with_variable(self, name: str, text: str) -> Self:
        """Return this configuration with the setting `name` set to the `text` of its environment variable.

        Raises ServeError if it is invalid.
        """
        changed: dict[str, Any] = {name: flag_of(text) if name in _BOOLS else text}
        # A token in the environment replaces the token of the configuration file, however the two are set.
        if other := {"token": "token_file", "token_file": "token"}.get(name):
            changed[other] = None
        return replace(self, **changed)


def _check_service_url(url: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number, or an IPv6 address has no brackets
        raise ServeError(
            f"ingest_url {url!r}: write http://host:port of the service, IPv6 as http://[::1]:9470"
        ) from None
    if not good or parts.query or parts.fragment:
        raise ServeError(f"ingest_url {url!r}: write http://host:port of the service")
    if parts.username or parts.password:
        raise ServeError("ingest_url contains a user or password: set the secret as token (RANKSCOPE_TOKEN)")


def flag_of(text: str) -> bool:
    """Return the value of an environment variable that is on or off. Raises ServeError for another text."""
    value = text.strip().lower()
    if value not in (*_TRUE, *_FALSE):
        raise ServeError(f"use 1 or 0, not {text!r}")
    return value in _TRUE
