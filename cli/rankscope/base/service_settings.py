"""How a program on this machine reaches the service that a configuration describes, with TLS and without."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rankscope.base.errors import USAGE, CommandError
from rankscope.base.http_client import Trust

if TYPE_CHECKING:
    from rankscope_ingest.config import ServiceConfig


DEFAULT_STORE: Final = "history"


def default_store() -> str:
    """Return where the store is when nobody says so."""
    return os.environ.get("RANKSCOPE_STORE") or DEFAULT_STORE


def load_settings(
    config: Path | None, store: Path | None, listen: str | None, notify: list[str] | None
) -> ServiceConfig:
    """Return the service's configuration, options over the file. Raises CommandError naming what is wrong."""
    from rankscope_ingest.config_file import load_config
    from rankscope_ingest.errors import ConfigError

    given: dict[str, Any] = {
        "store.path": str(store) if store else default_store() if config is None else None,
        "service.listen": listen,
        "notify.urls": tuple(notify) if notify else None,
    }
    try:
        overrides = {key: value for key, value in given.items() if value is not None}
        return load_config(config, overrides, environment=os.environ)
    except ConfigError as error:
        raise CommandError(str(error), code=USAGE) from error


def service_trust(settings: ServiceConfig) -> Trust | None:
    """Return how its certificate is checked; None when it speaks plain HTTP.

    Without a CA its certificate is trusted as it lies in the file: whoever can change that file is the service.
    """
    section, web = settings.service, settings.service.web
    if web is None or web.tls is None:
        return None
    return Trust(
        ca_file=section.ca_file or str(web.tls.cert_file),
        cert_file=section.cert_file,
        key_file=section.key_file,
        server_name=_name(settings),
    )


def environment_trust() -> Trust:
    """Return how ranks check the service's certificate, which the environment of a training job says."""
    ca, cert, key = (os.environ.get(f"RANKSCOPE_{name}_FILE") or None for name in ("CA", "CERT", "KEY"))
    return Trust(ca_file=ca, cert_file=cert, key_file=key)


def service_address(settings: ServiceConfig) -> str | None:
    """Return its address as a URL on this machine; None where the port is chosen when it starts."""
    from rankscope_ingest.config import split_address

    host, port = split_address(settings.service.listen)
    if not port:
        return None
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - the wildcard is replaced
    scheme = "http" if service_trust(settings) is None else "https"
    return f"{scheme}://[{here}]:{port}" if ":" in here else f"{scheme}://{here}:{port}"


def _name(settings: ServiceConfig) -> str | None:
    """Return the name that its certificate is for, where that is not the address we dial."""
    from rankscope_ingest.config import split_address

    advertise = settings.service.advertise
    return split_address(advertise)[0] if advertise else None
