"""Where a rank listens, who may read it and how deep its ring is. Values only, checked when they are made."""

from __future__ import annotations

import copy
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, Self

from rankscope_contract.security.web_config import WebConfig
from rankscope_exporter.base.errors import ServeError
from rankscope_exporter.serving.addresses import Address
from rankscope_exporter.serving.tls import read_rank_web_config

MIN_RING_RECORDS: Final = 256
"""A service that restarts must find what it has not committed yet."""

_TEXT_VARIABLES: Final = {
    "listen": "RANKSCOPE_LISTEN",
    "advertise": "RANKSCOPE_ADVERTISE",
    "token": "RANKSCOPE_TOKEN",
    "token_file": "RANKSCOPE_TOKEN_FILE",
    "web_config": "RANKSCOPE_WEB_CONFIG",
    "ca_file": "RANKSCOPE_CA_FILE",
    "cert_file": "RANKSCOPE_CERT_FILE",
    "key_file": "RANKSCOPE_KEY_FILE",
    "ingest_url": "RANKSCOPE_INGEST_URL",
    "discovery_dir": "RANKSCOPE_DISCOVERY_DIR",
    "spool_dir": "RANKSCOPE_SPOOL_DIR",
}
_TRUTH_VARIABLES: Final = {
    "insecure": "RANKSCOPE_INSECURE",
    "node_page": "RANKSCOPE_NODE_PAGE",
    "spool_sync": "RANKSCOPE_SPOOL_SYNC",
}
_PATHS: Final = ("token_file", "web_config", "ca_file", "cert_file", "key_file", "discovery_dir", "spool_dir")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """How one rank serves. Loopback and a free port by default; any other address needs a token unless waived aloud."""

    listen: str = "127.0.0.1:0"
    advertise: str | None = None  # host or host:port under which others reach this rank; None: worked out from `listen`
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    web_config: str | None = None  # TLS of this rank's server, as Prometheus writes it
    ca_file: str | None = None  # these three: how the service is spoken to
    cert_file: str | None = None
    key_file: str | None = None
    insecure: bool = False
    ingest_url: str | None = None
    ring_records: int = 1024
    ring_bytes: int = 256 * 1024 * 1024  # beyond MIN_RING_RECORDS records, which are always kept
    series_budget: int = 20_000
    page_ops: Literal["judged", "all"] = "judged"
    discovery_dir: str | None = None  # Prometheus file_sd folder, used when there is no service
    node_page: bool = False  # the ranks of a launch on this host show one page together
    spool_dir: str | None = None  # every record is kept here as well until a store has it
    spool_bytes: int = 1024 * 1024 * 1024
    spool_sync: bool = False  # wait for the device at every record

    def __post_init__(self) -> None:
        self._check_types()
        for name in _PATHS:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, str(Path(value).expanduser()))
        self._check_token()
        self._check_addresses()
        self._check_files()
        if self.ring_records < MIN_RING_RECORDS:
            raise ServeError(f"ring_records is {self.ring_records}: at least {MIN_RING_RECORDS} are needed")
        for name in ("ring_bytes", "series_budget", "spool_bytes"):
            if getattr(self, name) < 1:
                raise ServeError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.page_ops not in ("judged", "all"):
            raise ServeError(f"page_ops is {self.page_ops!r}: use 'judged' or 'all'")

    def _check_types(self) -> None:
        for name in _TEXT_VARIABLES:
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name == "listen"):
                raise ServeError(f"{name} is text, not {value!r}")
        for name in ("ring_records", "ring_bytes", "series_budget", "spool_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ServeError(f"{name} is a whole number, not {value!r}")
        for name in _TRUTH_VARIABLES:
            if not isinstance(getattr(self, name), bool):
                raise ServeError(f"{name} is true or false, not {getattr(self, name)!r}")

    def _check_token(self) -> None:
        if self.token is not None and self.token_file is not None:
            raise ServeError("token and token_file are both set: leave one of them out")
        source = "token" if self.token_file is None else f"token_file {self.token_file}"
        secret = self.secret
        if secret is not None and (not secret.isascii() or not secret.isprintable() or " " in secret):
            raise ServeError(f"{source}: use printable ASCII without spaces, it travels in an HTTP header")
        if secret == "":
            raise ServeError(f"{source} is empty: leave it out, or give at least one character")

    def _check_addresses(self) -> None:
        web = self.web
        if not (self.address.is_loopback or self.secret or self.insecure or (web and web.demands_identity)):
            raise ServeError(
                f"listen {self.listen!r} can be reached from other machines: set a token (RANKSCOPE_TOKEN),"
                " listen on 127.0.0.1, or waive protection with insecure=True (RANKSCOPE_INSECURE=1)"
            )
        if self.advertise is not None:
            self._check_advertise(Address.parse(self.advertise, what="advertise", default_port=0))
        if self.ingest_url is not None:
            _check_service_url(self.ingest_url)

    def _check_advertise(self, wanted: Address) -> None:
        own = self.address
        if wanted.is_wildcard:
            raise ServeError(
                f"advertise {self.advertise!r} is no address to dial: give a name or address of this machine"
            )
        if wanted.port and len(wanted.ports) != len(own.ports):
            raise ServeError(
                f"advertise {self.advertise!r} and listen {self.listen!r} differ in how many ports they name: "
                "give the host alone, or as many ports as listen has"
            )

    def _check_files(self) -> None:
        if self.key_file is not None and self.cert_file is None:
            raise ServeError("key_file without cert_file: name the client certificate as well")
        for name in ("ca_file", "cert_file", "key_file"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ServeError(f"{name} {path}: no such file")

    def without_secrets(self) -> ServeConfig:
        """Return the configuration without the token."""
        found = copy.copy(self)
        object.__setattr__(found, "token", None)
        return found

    @property
    def address(self) -> Address:
        """Return where to listen."""
        return Address.parse(self.listen, what="listen")

    @property
    def secret(self) -> str | None:
        """Return the token, read from its file where one is named."""
        if self.token_file is None:
            return self.token
        try:
            return Path(self.token_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ServeError(f"token_file {self.token_file}: {getattr(error, 'strerror', None) or error}") from error

    @property
    def web(self) -> WebConfig | None:
        """Return what `web_config` says, or None without one."""
        return None if self.web_config is None else read_rank_web_config(Path(self.web_config))

    @property
    def scheme(self) -> str:
        """Return http, or https where this rank's server speaks TLS."""
        return "http" if self.web_config is None else "https"

    def advertised(self, bound_port: int, host_name: str) -> Address:
        """Return where others reach a server bound to `bound_port` on the machine called `host_name`."""
        own = self.address
        host = (host_name or "127.0.0.1") if own.is_wildcard else own.host
        if self.advertise is None:
            return Address(host, bound_port)
        wanted = Address.parse(self.advertise, what="advertise", default_port=bound_port)
        if wanted.last_port is not None:  # the ports of both are paired, in order
            return Address(wanted.host, wanted.port + bound_port - own.port)
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
        for name, variable in _TRUTH_VARIABLES.items():
            if environment.get(variable):
                chosen[name] = _truth(variable, environment[variable])
        for name, other in (("token", "token_file"), ("token_file", "token")):
            if name in chosen:
                chosen.setdefault(
                    other, None
                )  # a secret of the environment replaces one of the file, wherever it is kept
        return replace(self, **chosen)


def _check_service_url(url: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or an IPv6 address without its brackets
        raise ServeError(
            f"ingest_url {url!r}: write http://host:port of the service, IPv6 as http://[::1]:9470"
        ) from None
    if not good or parts.query or parts.fragment:
        raise ServeError(f"ingest_url {url!r}: write http://host:port of the service")
    if parts.username or parts.password:
        raise ServeError("ingest_url holds a user or password: give the secret as token (RANKSCOPE_TOKEN)")


def _truth(variable: str, text: str) -> bool:
    try:
        return _TRUTHS[text.strip().lower()]
    except KeyError:
        raise ServeError(f"{variable} is {text!r}: use 1 or 0") from None
