"""TLS of the service: its certificate, connections to ranks, and reloading of certificates without a restart."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import ClassVar, Final

import yaml

from rankscope_contract.wire.tls import (
    Reloading,
    TlsServer,
    WebConfigError,
    explain_to_client,
    explain_to_server,
    load_own,
    load_trusted,
    read_web_config,
    reloading_client,
    server_context,
)
from rankscope_ingest.base.errors import ConfigError

log = logging.getLogger(__name__)

RELOAD_SECONDS: Final = 5.0
"""Time in seconds between two checks for changed certificate files."""


def read_service_web_config(path: Path) -> TlsServer:
    """Return the web configuration at `path`, a YAML file in the format of Prometheus. Raises WebConfigError."""
    return read_web_config(path, yaml.safe_load)


def server_tls(path: str | None) -> Reloading | None:
    """Return the TLS context of the HTTPS server of the service.

    `path` is the web configuration file, which names the certificate and the key. When certificates are reloaded, they
    are loaded into the same context object. Raises ConfigError if one of these files cannot be used.
    """
    if path is None:
        return None
    try:
        return Reloading(_ServerContext(Path(path)))
    except WebConfigError as error:
        raise ConfigError(str(error)) from error


def client_tls(ca_file: str | None, cert_file: str | None, key_file: str | None) -> Reloading:
    """Return the client TLS contexts with which the service connects to ranks.

    Raises ConfigError if the file of the CA, the certificate or the key cannot be used.
    """
    ca, cert, key = (None if name is None else Path(name) for name in (ca_file, cert_file, key_file))
    try:
        return reloading_client(ca, cert, key)
    except WebConfigError as error:
        raise ConfigError(f"[service] {error}") from error


def tls_trouble(error: BaseException | None) -> str | None:
    """Return an explanation of a TLS error of a connection to a rank, or None if TLS is not the cause.

    aiohttp wraps TLS errors in several ways, so this function searches several attributes of `error`.
    """
    wrapped = (getattr(error, name, None) for name in ("os_error", "certificate_error", "__cause__", "__context__"))
    found = next((cause for cause in (*wrapped, error) if isinstance(cause, ssl.SSLError)), None)
    return None if found is None else explain_to_client(found)


class _Handshake(ssl.SSLObject):
    """A server connection that logs each reason of a failed TLS handshake once. asyncio does not log such failures."""

    _logged: ClassVar[set[str]] = set()

    def do_handshake(self) -> None:
        """Continue the TLS handshake with the received data. Log a failure once for each reason."""
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            reason = str(explain_to_server(error))
            level = logging.DEBUG if reason in self._logged else logging.WARNING
            log.log(level, "TLS handshake with a client failed: %s", reason)
            self._logged.add(reason)
            raise


class _ServerContext:
    """Loads renewed certificates into the TLS context of the listening server.

    The context object remains the same, because asyncio cannot replace the context of a listening server.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._context: ssl.SSLContext | None = None

    def __call__(self) -> tuple[ssl.SSLContext, tuple[Path, ...]]:
        config = read_service_web_config(self._path)
        tried = server_context(config)  # a key that does not match would break the context in use
        if self._context is None:
            tried.sslobject_class = _Handshake
            self._context = tried
        else:
            load_own(self._context, config.cert_file, config.key_file)
            if config.client_ca_file is not None:
                load_trusted(self._context, config.client_ca_file, "client_ca_file")
        return self._context, (self._path, *config.files)
