"""A synchronous HTTP client for one request to the service or to a program on this machine.

The client uses no proxy, follows no redirects, and limits the time of a request.
"""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from rankscope_contract.wire.tls import WebConfigError, client_context, explain_to_client

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
        return client_context(*(None if name is None else Path(name) for name in self._files))

    @property
    def _files(self) -> tuple[str | None, ...]:
        return self.ca_file, self.cert_file, self.key_file


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


def get(
    url: str, *, token: str | None = None, timeout_seconds: float = TIMEOUT_SECONDS, client_tls: ClientTls | None = None
) -> Response:
    """Send GET `url` and return the response, whatever its status.

    Raises UnreachableError if no response was received.
    """
    return _request("GET", url, None, token=token, timeout_seconds=timeout_seconds, client_tls=client_tls)


def post(
    url: str,
    document: Any,
    *,
    token: str | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    client_tls: ClientTls | None = None,
) -> Response:
    """Send POST `url` with `document` as JSON, and return the response, whatever its status.

    Raises UnreachableError if no response was received.
    """
    body = json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
    return _request("POST", url, body, token=token, timeout_seconds=timeout_seconds, client_tls=client_tls)


def _request(
    method: str,
    url: str,
    body: bytes | None,
    *,
    token: str | None,
    timeout_seconds: float,
    client_tls: ClientTls | None,
) -> Response:
    headers = {"Connection": "close"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
    headers |= {} if body is None else {"Content-Type": "application/json"}
    connection: http.client.HTTPConnection | None = None
    try:
        parts = urlsplit(url)
        connection = _connection(
            parts.scheme, parts.hostname or "", parts.port, timeout_seconds, client_tls or ClientTls()
        )
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request(method, path, body=body, headers=headers)
        response = connection.getresponse()
        return Response(
            response.status, response.read(MAX_BYTES), {name.lower(): v for name, v in response.getheaders()}
        )
    except (OSError, http.client.HTTPException, ValueError, WebConfigError) as error:
        raise UnreachableError(f"{url}: {_why(error)}") from error
    finally:
        if connection is not None:
            connection.close()


def _why(error: Exception) -> str:
    if (tls := explain_to_client(error)) is not None:
        return tls
    if isinstance(error, TimeoutError):
        return "timed out"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _connection(
    scheme: str, host: str, port: int | None, timeout: float, client_tls: ClientTls
) -> http.client.HTTPConnection:
    if scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=timeout)
    if scheme == "https":
        return _Https(host, port, timeout=timeout, context=client_tls.context(), server_name=client_tls.server_name)
    raise ValueError("the URL must start with http:// or https://")


class _Https(http.client.HTTPSConnection):
    """An HTTPS connection that can verify the server's certificate against a name other than the connected host's."""

    def __init__(
        self, host: str, port: int | None, *, timeout: float, context: ssl.SSLContext, server_name: str | None
    ) -> None:
        super().__init__(host, port, timeout=timeout, context=context)
        self._context_used = context
        self._server_name = server_name

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._context_used.wrap_socket(self.sock, server_hostname=self._server_name or self.host)
