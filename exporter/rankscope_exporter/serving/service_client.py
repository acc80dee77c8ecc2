"""HTTP calls of a rank to the service, and the Prometheus file_sd entry of a rank that has no service.

No retry, no thread, no state. The entry is written by rename and removed at the end.
"""

from __future__ import annotations

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

REGISTER_SECONDS: Final = 5.0
POKE_SECONDS: Final = 1.0
_REPLY_BYTES: Final = 65_536


class UnreachableError(Exception):
    """The service did not answer, or not in its language; worth another try."""


class RefusedError(Exception):
    """The service answered and said no, in its own words."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status
        self.text = text


class ServiceClient:
    """Speaks to one service. Follows no redirect and uses no proxy: the token goes where the configuration says."""

    def __init__(self, url: str, token: str | None, tls: MakeContext | None = None) -> None:
        self._url = url.rstrip("/")
        self._tls = tls
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def register(self, registration: Registration) -> RegistrationReply:
        """Tell the service about this rank. Raises RefusedError or UnreachableError."""
        body = self._post(REGISTER_PATH, registration.to_json(), REGISTER_SECONDS)
        try:
            return _checked(RegistrationReply.from_json(body))
        except ValueError as error:
            raise UnreachableError(f"{self._url} gave a reply that is no registration reply: {error}") from error

    def poke(self, incarnation: str) -> None:
        """Ask the service to pull this rank now. Raises RefusedError or UnreachableError."""
        self._post(POKE_PATH, json.dumps({"incarnation": incarnation}), POKE_SECONDS)

    def _post(self, path: str, body: str, timeout_seconds: float) -> bytes:
        data = body.encode("utf-8", "replace")
        # The scheme was checked with the configuration: http or https, so no file is opened here.
        request = urllib.request.Request(self._url + path, data, self._headers, method="POST")  # noqa: S310 - see above
        try:
            with self._opener().open(request, timeout=timeout_seconds) as response:
                return bytes(response.read(_REPLY_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                raise RefusedError(error.code, _words(error)) from error
        except (OSError, http.client.HTTPException) as error:
            raise UnreachableError(f"{self._url}: {_trouble(error, self._url)}") from error

    def _opener(self) -> urllib.request.OpenerDirector:
        # Made for each call, once in seconds: certificates may have changed since the last one.
        handlers = [urllib.request.HTTPSHandler(context=self._tls())] if self._tls is not None else []
        return urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect(), *handlers)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow nothing; the redirect itself then arrives as a refusal."""


def _trouble(error: Exception, url: str) -> str:
    """Return what went wrong, in words that name what mends it where TLS is to blame."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, ssl.SSLError):
        return str(explain_to_client(cause))
    if isinstance(cause, http.client.RemoteDisconnected | ConnectionResetError | BrokenPipeError):
        is_plain = url.startswith("http:")
        return "it hung up; where it speaks TLS (web_config), ingest_url begins with https://" if is_plain else HUNG_UP
    return str(getattr(error, "reason", None) or repr(error))


def _words(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read(_REPLY_BYTES).decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException):
        text = ""
    return text or str(error.reason)


def _checked(reply: RegistrationReply) -> RegistrationReply:
    good = isinstance(reply.lease, str) and reply.lease.isascii() and reply.lease.isprintable()
    numbers = isinstance(reply.heartbeat_seconds, int | float) and reply.heartbeat_seconds > 0
    if not (good and reply.lease and numbers and isinstance(reply.committed, int)):
        raise ValueError("lease must be text, heartbeat_seconds above 0, committed a whole number")
    return reply


JOB: Final = "rankscope"
_LONGEST_NAME: Final = 120  # leaves room for suffixes below the 255 bytes of a file name


class DiscoveryFile:
    """One JSON file in a folder that Prometheus watches with `file_sd_configs: [{files: ["<folder>/*.json"]}]`."""

    def __init__(self, folder: str, identity: Identity) -> None:
        self._identity = identity
        self._text = ""
        self.path = Path(folder) / f"{_file_name(identity)}.json"

    def write(self, target: str, scheme: str = "http") -> None:
        """Announce `target` (host:port), which speaks `scheme`. Raises ServeError when the folder cannot be written."""
        labels = {"job": JOB, "instance": f"{self._identity.run}/{self._identity.rank}"}
        labels |= {"__scheme__": scheme} if scheme != "http" else {}
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
        """Take the entry back, unless a newer process of the same rank has replaced it."""
        try:
            if self._text and self.path.read_text(encoding="utf-8") == self._text:
                self.path.unlink()
        except OSError:
            return  # gone already, or the folder is: nothing is announced any more


def _file_name(identity: Identity) -> str:
    # The name holds no incarnation: a restarted rank replaces the entry that a killed one left behind.
    run = path_segment(identity.run)
    if len(run) > _LONGEST_NAME:
        run = f"{run[:_LONGEST_NAME]}-{hashlib.sha256(identity.run.encode()).hexdigest()[:12]}"
    return f"rankscope-{run}-{identity.rank}"
