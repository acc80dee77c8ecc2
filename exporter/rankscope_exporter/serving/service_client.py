"""HTTP client of a rank for the service, and the Prometheus file_sd entry of a rank that has no service.

It has no retries, no thread and no state. The entry is written by rename and removed when the rank exits.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

from rankscope_contract.model.identity import Identity
from rankscope_contract.protocol.channel import POKE_PATH, REGISTER_PATH, Registration, RegistrationReply
from rankscope_contract.security.escaping import path_segment
from rankscope_contract.security.tls import HUNG_UP, MakeContext, explain_to_client
from rankscope_exporter.base.errors import ServeError
from rankscope_exporter.serving.config import ServeConfig
from rankscope_exporter.serving.tls import client_tls

REGISTER_SECONDS: Final = 5.0
POKE_SECONDS: Final = 1.0
_REPLY_BYTES: Final = 65_536


class UnreachableError(Exception):
    """The service did not answer, or its answer was not valid. The caller retries."""


class RefusedError(Exception):
    """The service answered with an HTTP error status; `text` is the body of its answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status
        self.text = text


class ServiceClient:
    """HTTP client for one service. It uses no redirect and no proxy: only the configured URL gets the token."""

    def __init__(self, url: str, token: str | None, tls: MakeContext | None = None) -> None:
        self._url = url.rstrip("/")
        self._tls = tls
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def register(self, registration: Registration) -> RegistrationReply:
        """Register this rank and return the reply. Raises RefusedError or UnreachableError."""
        body = self._post(REGISTER_PATH, registration.to_json(), REGISTER_SECONDS)
        try:
            return _checked(RegistrationReply.from_json(body))
        except ValueError as error:
            raise UnreachableError(f"{self._url} sent an invalid registration reply: {error}") from error

    def poke(self, incarnation: str) -> None:
        """Request an immediate poll of this rank. Raises RefusedError or UnreachableError."""
        self._post(POKE_PATH, json.dumps({"incarnation": incarnation}), POKE_SECONDS)

    def _post(self, path: str, body: str, timeout_seconds: float) -> bytes:
        data = body.encode("utf-8", "replace")
        # ServeConfig has checked that the scheme is http or https, so urllib opens no local file.
        request = urllib.request.Request(self._url + path, data, self._headers, method="POST")  # noqa: S310 - see above
        # A new opener for each call: calls are seconds apart, and certificates may have been replaced since the last.
        handlers = [urllib.request.HTTPSHandler(context=self._tls())] if self._tls is not None else []
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect(), *handlers)
        try:
            with opener.open(request, timeout=timeout_seconds) as response:
                return bytes(response.read(_REPLY_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                raise RefusedError(error.code, _body_text(error)) from error
        except (OSError, http.client.HTTPException) as error:
            raise UnreachableError(f"{self._url}: {_reason(error, self._url)}") from error


def service_client(config: ServeConfig) -> ServiceClient | None:
    """Return the client for the service that `config` names, None if it names none. Raises ServeError for TLS files."""
    if config.ingest_url is None:
        return None
    is_tls = config.ingest_url.startswith("https:")
    tls = client_tls(config.ca_file, config.cert_file, config.key_file) if is_tls else None
    return ServiceClient(config.ingest_url, config.secret, tls)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow no redirect; the caller then gets the redirect as an HTTPError."""


def _reason(error: Exception, url: str) -> str:
    """Return the reason of a failed request; for TLS errors it names the setting to change."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, ssl.SSLError):
        return str(explain_to_client(cause))
    if isinstance(cause, http.client.RemoteDisconnected | ConnectionResetError | BrokenPipeError):
        is_plain = url.startswith("http:")
        return (
            "it closed the connection; if it uses TLS (web_config), write https:// in ingest_url"
            if is_plain
            else HUNG_UP
        )
    return str(getattr(error, "reason", None) or repr(error))


def _body_text(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read(_REPLY_BYTES).decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException):
        text = ""
    return text or str(error.reason)


def _checked(reply: RegistrationReply) -> RegistrationReply:
    is_text = isinstance(reply.lease, str) and reply.lease.isascii() and reply.lease.isprintable()
    is_positive = isinstance(reply.heartbeat_seconds, int | float) and reply.heartbeat_seconds > 0
    if not (is_text and reply.lease and is_positive and isinstance(reply.committed, int)):
        raise ValueError("lease must be text, heartbeat_seconds above 0, committed a whole number")
    return reply


JOB: Final = "rankscope"
_LONGEST_NAME: Final = 120  # with its suffixes the file name is below the limit of 255 bytes


class DiscoveryFile:
    """One JSON file in a folder that Prometheus watches with `file_sd_configs: [{files: ["<folder>/*.json"]}]`."""

    def __init__(self, folder: str, identity: Identity) -> None:
        # The name contains no incarnation: a restarted rank replaces the entry that a killed process left.
        run = path_segment(identity.run)
        if len(run) > _LONGEST_NAME:
            run = f"{run[:_LONGEST_NAME]}-{hashlib.sha256(identity.run.encode()).hexdigest()[:12]}"
        self.path = Path(folder) / f"rankscope-{run}-{identity.rank}.json"
        self._labels = {"job": JOB, "instance": f"{identity.run}/{identity.rank}"}
        self._text = ""

    def write(self, target: str, scheme: str = "http") -> None:
        """Write an entry for `target` (host:port) with `scheme`. Raises ServeError if the folder cannot be written."""
        labels = self._labels | ({"__scheme__": scheme} if scheme != "http" else {})
        self._text = json.dumps([{"targets": [target], "labels": labels}], indent=2) + "\n"
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(self._text, encoding="utf-8")
            temporary.replace(self.path)
        except OSError as error:
            raise ServeError(
                f"cannot write the discovery file {self.path}: {error.strerror or error};"
                " set RANKSCOPE_DISCOVERY_DIR to a folder that this process may write"
            ) from error

    def remove(self) -> None:
        """Delete the entry, unless a newer process of the same rank has replaced it."""
        with contextlib.suppress(OSError):  # the file or the folder does not exist any more
            if self._text and self.path.read_text(encoding="utf-8") == self._text:
                self.path.unlink()
