"""Asking a program on this machine, or a service, one thing over HTTP. No proxy, no redirect, a short time limit."""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from rankscope_contract.tls import client_context, explain_to_client
from rankscope_contract.web_config import WebConfigError

TIMEOUT_SECONDS: Final = 3.0
MOST_BYTES: Final = 32 << 20


class UnreachableError(Exception):
    """Nobody answered, or not in HTTP; the text says who was asked and what happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """How the other side's certificate is checked, and which one is shown to it."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None  # in its certificate, where it is reached under another name

    def context(self) -> ssl.SSLContext:
        """Return what connections are wrapped with. Raises WebConfigError."""
        return client_context(*(None if name is None else Path(name) for name in self._files))

    @property
    def _files(self) -> tuple[str | None, ...]:
        return self.ca_file, self.cert_file, self.key_file


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back; header names in lower case."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    def json(self) -> Any:
        """Return the body as a value; None when it is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


def get(
    url: str, *, token: str | None = None, timeout_seconds: float = TIMEOUT_SECONDS, trust: Trust | None = None
) -> Answer:
    """Return the answer to GET `url`, whatever its status. Raises UnreachableError."""
    return _ask("GET", url, None, token=token, timeout_seconds=timeout_seconds, trust=trust)


def post(
    url: str,
    document: Any,
    *,
    token: str | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    trust: Trust | None = None,
) -> Answer:
    """Return the answer to POST `url` with `document` as JSON, whatever its status. Raises UnreachableError."""
    body = json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
    return _ask("POST", url, body, token=token, timeout_seconds=timeout_seconds, trust=trust)


def _ask(
    method: str, url: str, body: bytes | None, *, token: str | None, timeout_seconds: float, trust: Trust | None
) -> Answer:
    headers = {"Connection": "close"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
    headers |= {} if body is None else {"Content-Type": "application/json"}
    connection: http.client.HTTPConnection | None = None
    try:
        parts = urlsplit(url)
        connection = _connection(parts.scheme, parts.hostname or "", parts.port, timeout_seconds, trust or Trust())
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request(method, path, body=body, headers=headers)
        response = connection.getresponse()
        return Answer(
            response.status, response.read(MOST_BYTES), {name.lower(): v for name, v in response.getheaders()}
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
        return "no answer in time"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _connection(scheme: str, host: str, port: int | None, timeout: float, trust: Trust) -> http.client.HTTPConnection:
    if scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=timeout)
    if scheme == "https":
        return _Https(host, port, timeout=timeout, context=trust.context(), server_name=trust.server_name)
    raise ValueError("an address begins with http:// or https://")


class _Https(http.client.HTTPSConnection):
    """Checks the certificate against another name than the one it connects to."""

    def __init__(
        self, host: str, port: int | None, *, timeout: float, context: ssl.SSLContext, server_name: str | None
    ) -> None:
        super().__init__(host, port, timeout=timeout, context=context)
        self._context_used = context
        self._server_name = server_name

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._context_used.wrap_socket(self.sock, server_hostname=self._server_name or self.host)
