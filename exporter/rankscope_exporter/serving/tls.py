"""TLS as this rank's settings ask for it: what its server shows, and how it speaks to the service."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from rankscope_contract.security.tls import Reloading, reloading_client, server_context
from rankscope_contract.security.web_config import LoadYaml, TlsServer, WebConfig, WebConfigError, read_web_config
from rankscope_exporter.base.errors import ServeError

T = TypeVar("T")


class ClientFiles(Protocol):
    """The settings that say how the service is spoken to."""

    @property
    def ca_file(self) -> str | None:
        """CA of the service's certificate; None trusts the system's."""
        ...

    @property
    def cert_file(self) -> str | None:
        """Certificate that the rank shows."""
        ...

    @property
    def key_file(self) -> str | None:
        """Its key, where it is not in the same file."""
        ...


def read_rank_web_config(path: Path) -> WebConfig:
    """Return the file as far as a rank can follow it. Raises ServeError."""
    return _told(lambda: _for_rank(path))


def server_tls(path: Path) -> Reloading:
    """Return the contexts of the rank's server. Raises ServeError when the files cannot be used."""

    def make() -> tuple[ssl.SSLContext, tuple[Path, ...]]:
        tls = _tls_of(_for_rank(path))
        return server_context(tls), (path, *tls.files)

    return _told(lambda: Reloading(make))


def client_tls(files: ClientFiles) -> Reloading:
    """Return the contexts for calls to the service. Raises ServeError when the files cannot be used."""
    ca, cert, key = (None if name is None else Path(name) for name in (files.ca_file, files.cert_file, files.key_file))
    return _told(lambda: reloading_client(ca, cert, key))


def _for_rank(path: Path) -> WebConfig:
    config = read_web_config(path, _yaml_reader())
    if config.users:
        raise WebConfigError(
            f"web_config {path}: basic_auth_users is not supported on a rank, whose CPU belongs to the training "
            "and not to bcrypt: use a token (RANKSCOPE_TOKEN), and `authorization` in Prometheus"
        )
    return config


def _tls_of(config: WebConfig) -> TlsServer:
    assert config.tls is not None, "a configuration without users has TLS"
    return config.tls


def _yaml_reader() -> LoadYaml | None:
    try:
        import yaml  # noqa: PLC0415 - a rank needs it only for a file that is written in YAML
    except ImportError:
        return None
    load: LoadYaml = yaml.safe_load
    return load


def _told(make: Callable[[], T]) -> T:
    try:
        return make()
    except WebConfigError as error:
        raise ServeError(str(error)) from error
