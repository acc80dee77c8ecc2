"""Requests of a command to the service or to a program on this machine, and the settings of the service for them.

The client uses no proxy, follows no redirects, and limits the time of a request.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, urlsplit

from rankscope.shell.errors import FAILED, TAKEN_OVER, USAGE, CommandError
from rankscope_contract.wire.tls import WebConfigError, client_context, explain_to_client

if TYPE_CHECKING:
    from rankscope_ingest.base.config import ServiceConfig
    from rankscope_storage.base.location import Location

TIMEOUT_SECONDS: Final = 3.0
MAX_BYTES: Final = 32 << 20


class UnreachableError(Exception):
    """No HTTP response was received. The message contains the URL and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """TLS settings of a client: the CA that verifies the server, and the certificate that the client presents."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None  # name in the server certificate, if it differs from the host of the URL

    def context(self) -> ssl.SSLContext:
        """Return the SSL context for connections of the client. Raises WebConfigError if a file cannot be used."""
        files = (self.ca_file, self.cert_file, self.key_file)
        return client_context(*(None if name is None else Path(name) for name in files))


@dataclass(frozen=True, slots=True)
class Response:
    """An HTTP response of any status. Header names are in lower case."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    def json(self) -> Any:
        """Return the parsed JSON body; None if the body is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


def request(
    url: str,
    document: Any = None,
    *,
    token: str | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    client_tls: ClientTls | None = None,
) -> Response:
    """Send GET `url`, or POST with `document` as JSON, and return the response, whatever its status.

    Raises UnreachableError if no response was received.
    """
    headers = {"Connection": "close"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
    body = None
    if document is not None:
        body = json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
        headers["Content-Type"] = "application/json"
    connection: http.client.HTTPConnection | None = None
    try:
        parts = urlsplit(url)
        connection = _connection(parts, timeout_seconds, client_tls or ClientTls())
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET" if body is None else "POST", path, body=body, headers=headers)
        response = connection.getresponse()
        return Response(
            response.status, response.read(MAX_BYTES), {name.lower(): v for name, v in response.getheaders()}
        )
    except (OSError, http.client.HTTPException, ValueError, WebConfigError) as error:
        raise UnreachableError(f"{url}: {_why(error)}") from error
    finally:
        if connection is not None:
            connection.close()


def _connection(parts: SplitResult, timeout: float, client_tls: ClientTls) -> http.client.HTTPConnection:
    host = parts.hostname or ""
    if parts.scheme == "http":
        return http.client.HTTPConnection(host, parts.port, timeout=timeout)
    if parts.scheme != "https":
        raise ValueError("the URL must start with http:// or https://")
    context = client_tls.context()
    connection = http.client.HTTPConnection(host, parts.port or 443, timeout=timeout)
    connection.connect()
    # http.client.HTTPSConnection cannot verify the certificate against another name than that of the URL.
    connection.sock = context.wrap_socket(connection.sock, server_hostname=client_tls.server_name or host)
    return connection


def _why(error: Exception) -> str:
    if (tls := explain_to_client(error)) is not None:
        return tls
    if isinstance(error, TimeoutError):
        return "timed out"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


DEFAULT_STORE: Final = "history"


def default_store() -> str:
    """Return the default folder of the store: $RANKSCOPE_STORE, or `history`."""
    return os.environ.get("RANKSCOPE_STORE") or DEFAULT_STORE


@contextlib.contextmanager
def service_errors() -> Iterator[None]:
    """Raise CommandError for each error of the service, of its configuration and of a store."""
    from rankscope_ingest.base.errors import ConfigError, IngestError
    from rankscope_storage.base.errors import ShardLostError, StoreError

    try:
        yield
    except (IngestError, StoreError) as error:
        codes = {ConfigError: USAGE, ShardLostError: TAKEN_OVER}
        raise CommandError(str(error), code=codes.get(type(error), FAILED)) from error


def load_settings(
    config: Path | None, store: Location | None, listen: str | None, notify: list[str] | None, shard: str | None = None
) -> ServiceConfig:
    """Return the configuration of the service; options replace settings of the file.

    Raises CommandError if a setting is wrong.
    """
    from rankscope_ingest.base.config_file import load_config

    given: dict[str, Any] = {
        "store.path": str(store) if store else default_store() if config is None else None,
        "store.shard": shard,
        "service.listen": listen,
        "notify.urls": tuple(notify) if notify else None,
    }
    overrides = {key: value for key, value in given.items() if value is not None}
    with service_errors():
        return load_config(config, overrides, environment=os.environ)


def service_tls(settings: ServiceConfig) -> ClientTls | None:
    """Return the TLS settings for requests to the service; None if the service uses plain HTTP.

    Without `ca_file`, the client trusts the certificate file of the service. This is safe, because a process that can
    write this file could also replace the certificate of the service.
    """
    from rankscope_ingest.base.config import split_address

    section, web = settings.service, settings.service.web
    if web is None:
        return None
    return ClientTls(
        ca_file=section.ca_file or str(web.cert_file),
        cert_file=section.cert_file,
        key_file=section.key_file,
        server_name=split_address(section.advertise)[0] if section.advertise else None,
    )


def environment_tls() -> ClientTls:
    """Return the TLS settings in RANKSCOPE_CA_FILE, RANKSCOPE_CERT_FILE and RANKSCOPE_KEY_FILE, which ranks use too."""
    ca, cert, key = (os.environ.get(f"RANKSCOPE_{name}_FILE") or None for name in ("CA", "CERT", "KEY"))
    return ClientTls(ca_file=ca, cert_file=cert, key_file=key)


def environment_token() -> str | None:
    """Return the token in RANKSCOPE_TOKEN, or in the file RANKSCOPE_TOKEN_FILE. Raises CommandError."""
    from rankscope_ingest.base.config_file import token_of

    with service_errors():
        return token_of(os.environ)


def service_address(settings: ServiceConfig) -> str | None:
    """Return the URL of the service for clients on this machine.

    Return None if the service selects a free port at start (port 0).
    """
    from rankscope_ingest.base.config import split_address

    host, port = split_address(settings.service.listen)
    if not port:
        return None
    return f"{'http' if service_tls(settings) is None else 'https'}://{client_address(host, port)}"


def client_address(host: str, port: int) -> str:
    """Return host:port of a listen address for clients on this machine."""
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - the wildcard is replaced
    return f"[{here}]:{port}" if ":" in here else f"{here}:{port}"
