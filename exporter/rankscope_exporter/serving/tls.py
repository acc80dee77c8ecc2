"""TLS contexts from the settings of a rank: for its own server and for requests to the service."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rankscope_contract.security.tls import Reloading, reloading_client, server_context
from rankscope_contract.security.web_config import WebConfig, WebConfigError, read_web_config
from rankscope_exporter.base.errors import ServeError

T = TypeVar("T")


def read_rank_web_config(path: Path) -> WebConfig:
    """Return the `web_config` file of a rank. Raises ServeError if it is invalid or has options a rank cannot serve."""
    return _as_serve_error(lambda: _read(path))


def server_tls(path: Path) -> Reloading:
    """Return the TLS contexts of the rank's server, reloaded when a file changes. Raises ServeError."""

    def make() -> tuple[ssl.SSLContext, tuple[Path, ...]]:
        tls = _read(path).tls
        assert tls is not None, "a configuration without users has TLS"
        return server_context(tls), (path, *tls.files)

    return _as_serve_error(lambda: Reloading(make))


def client_tls(ca_file: str | None, cert_file: str | None, key_file: str | None) -> Reloading:
    """Return the TLS contexts for requests to the service, reloaded when a file changes. Raises ServeError.

    Without `ca_file` the certificate authorities of the system are trusted.
    """
    ca, cert, key = (None if name is None else Path(name) for name in (ca_file, cert_file, key_file))
    return _as_serve_error(lambda: reloading_client(ca, cert, key))


def _read(path: Path) -> WebConfig:
    try:
        import yaml  # noqa: PLC0415 - only a file in YAML needs it; a rank may have no PyYAML
    except ImportError:
        config = read_web_config(path, None)
    else:
        config = read_web_config(path, yaml.safe_load)
    if config.users:
        raise WebConfigError(
            f"web_config {path}: basic_auth_users is not supported on a rank, because bcrypt would take CPU time from "
            "the training: use a token (RANKSCOPE_TOKEN), and `authorization` in Prometheus"
        )
    return config


def _as_serve_error(make: Callable[[], T]) -> T:
    try:
        return make()
    except WebConfigError as error:
        raise ServeError(str(error)) from error
