"""TLS of the service: what it shows, how it dials ranks, and new certificates without a restart."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import ClassVar, Final

import yaml

from rankscope_contract.security.tls import (
    Reloading,
    explain_to_client,
    explain_to_server,
    load_own,
    load_trusted,
    reloading_client,
    server_context,
)
from rankscope_contract.security.web_config import WebConfig, WebConfigError, read_web_config
from rankscope_ingest.base.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 5.0


def read_service_web_config(path: Path) -> WebConfig:
    """Return the file as far as the service can follow it. Raises WebConfigError."""
    config = read_web_config(path, yaml.safe_load)
    if config.users:
        raise WebConfigError(
            f"web_config {path}: basic_auth_users is not supported: ranks and readers show a token (token, "
            "token_file), Prometheus by `authorization`"
        )
    return config


def server_tls(path: str | None) -> Reloading | None:
    """Return the context of the service's own server, always the same object. Raises ConfigError."""
    if path is None:
        return None
    try:
        return Reloading(_Renewed(Path(path)))
    except WebConfigError as error:
        raise ConfigError(str(error)) from error


def client_tls(ca_file: str | None, cert_file: str | None, key_file: str | None) -> Reloading:
    """Return the contexts by which ranks are dialled. Raises ConfigError."""
    ca, cert, key = (None if name is None else Path(name) for name in (ca_file, cert_file, key_file))
    try:
        return reloading_client(ca, cert, key)
    except WebConfigError as error:
        raise ConfigError(f"[service] {error}") from error


def tls_trouble(error: BaseException | None) -> str | None:
    """Return what is wrong with a rank in words, when TLS is to blame; aiohttp wraps errors in several ways."""
    wrapped = (getattr(error, name, None) for name in ("os_error", "certificate_error", "__cause__", "__context__"))
    found = next((cause for cause in (*wrapped, error) if isinstance(cause, ssl.SSLError)), None)
    return None if found is None else explain_to_client(found)


async def reload_certificates(tls: Reloading) -> None:
    """Take new certificates as they come; runs until cancelled."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        tls()


class _Handshake(ssl.SSLObject):
    """A connection whose failed handshake is told, once for each reason: asyncio would let it pass in silence."""

    _told: ClassVar[set[str]] = set()

    def do_handshake(self) -> None:
        """Go on with the handshake as far as what arrived allows."""
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            why = str(explain_to_server(error))
            log.log(logging.DEBUG if why in self._told else logging.WARNING, "a client was not let in: %s", why)
            self._told.add(why)
            raise


class _Renewed:
    """Puts new certificates into the context that the listening server holds: asyncio takes no other one later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._context: ssl.SSLContext | None = None

    def __call__(self) -> tuple[ssl.SSLContext, tuple[Path, ...]]:
        config = read_service_web_config(self._path).tls
        assert config is not None, "a configuration without users has TLS"
        tried = server_context(config)  # a key that does not fit would spoil the context in use
        if self._context is None:
            tried.sslobject_class = _Handshake
            self._context = tried
        else:
            load_own(self._context, config.cert_file, config.key_file)
            if config.client_ca_file is not None:
                load_trusted(self._context, config.client_ca_file, "client_ca_file")
        return self._context, (self._path, *config.files)
