"""Load the configuration of the service, and derive the address and the TLS settings for clients of the service."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rankscope.base.errors import USAGE, CommandError
from rankscope.base.http_client import ClientTls

if TYPE_CHECKING:
    from rankscope_ingest.base.config import ServiceConfig


DEFAULT_STORE: Final = "history"


def default_store() -> str:
    """Return the default folder of the store: $RANKSCOPE_STORE, or `history`."""
    return os.environ.get("RANKSCOPE_STORE") or DEFAULT_STORE


def load_settings(
    config: Path | None, store: Path | None, listen: str | None, notify: list[str] | None, shard: str | None = None
) -> ServiceConfig:
    """Return the configuration of the service; options replace settings of the file.

    Raises CommandError if a setting is wrong.
    """
    from rankscope_ingest.base.config_file import load_config
    from rankscope_ingest.base.errors import ConfigError

    given: dict[str, Any] = {
        "store.path": str(store) if store else default_store() if config is None else None,
        "store.shard": shard,
        "service.listen": listen,
        "notify.urls": tuple(notify) if notify else None,
    }
    try:
        overrides = {key: value for key, value in given.items() if value is not None}
        return load_config(config, overrides, environment=os.environ)
    except ConfigError as error:
        raise CommandError(str(error), code=USAGE) from error


def service_tls(settings: ServiceConfig) -> ClientTls | None:
    """Return the TLS settings for requests to the service; None if the service uses plain HTTP.

    Without `ca_file`, the client trusts the certificate file of the service. This is safe, because a process that can
    write this file could also replace the certificate of the service.
    """
    section, web = settings.service, settings.service.web
    if web is None:
        return None
    return ClientTls(
        ca_file=section.ca_file or str(web.cert_file),
        cert_file=section.cert_file,
        key_file=section.key_file,
        server_name=_name(settings),
    )


def environment_tls() -> ClientTls:
    """Return the TLS settings in RANKSCOPE_CA_FILE, RANKSCOPE_CERT_FILE and RANKSCOPE_KEY_FILE, which ranks use too."""
    ca, cert, key = (os.environ.get(f"RANKSCOPE_{name}_FILE") or None for name in ("CA", "CERT", "KEY"))
    return ClientTls(ca_file=ca, cert_file=cert, key_file=key)


def service_address(settings: ServiceConfig) -> str | None:
    """Return the URL of the service for clients on this machine.

    Return None if the service selects a free port at start (port 0).
    """
    from rankscope_ingest.base.config import split_address

    host, port = split_address(settings.service.listen)
    if not port:
        return None
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - the wildcard is replaced
    scheme = "http" if service_tls(settings) is None else "https"
    return f"{scheme}://[{here}]:{port}" if ":" in here else f"{scheme}://{here}:{port}"


def _name(settings: ServiceConfig) -> str | None:
    """Return the host name in the certificate of the service if the setting `advertise` contains one, else None."""
    from rankscope_ingest.base.config import split_address

    advertise = settings.service.advertise
    return split_address(advertise)[0] if advertise else None
