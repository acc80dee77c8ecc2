"""Requests to one organisation of a Grafana server, through grafana-client, with errors that a user can act on.

The methods of grafana-client for single objects do not quote uids, and some cannot send `X-Disable-Provenance`.
This module therefore uses its HTTP client, which has the authentication, the session and the exceptions.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

import niquests.exceptions
from grafana_client.api import GrafanaApi
from grafana_client.client import (
    GrafanaClient,
    GrafanaException,
    GrafanaTimeoutError,
    GrafanaUnauthorizedError,
)

OLDEST_RELEASE: Final = (9, 4)
TIMEOUT_SECONDS: Final = 10.0

EDITABLE: Final = {"X-Disable-Provenance": "true"}
"""Header with which users can edit an object in the Grafana UI after it was created through the API."""

_WRONG_CREDENTIALS: Final = ("invalid API key", "invalid username or password")
"""Texts of rejected credentials. Grafana 9.4 sends the first with status 500 for an unknown API key."""


class GrafanaError(Exception):
    """An answer of Grafana, or its absence, that ends the deployment. The message names the request and the remedy."""


class RefusedError(GrafanaError):
    """Grafana refused one request. Other requests can succeed."""


class NotFoundError(RefusedError):
    """The object of the request does not exist."""


class UnauthorizedError(GrafanaError):
    """Grafana rejected the credentials. A second request with them can lock the user."""


class UnreachableError(GrafanaError):
    """Grafana did not answer."""


class Server:
    """One organisation of a Grafana server."""

    def __init__(
        self,
        url: str,
        credentials: str | tuple[str, str],
        *,
        organisation: int | None = None,
        proxy: str | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self.url = url.rstrip("/")
        self.release = OLDEST_RELEASE
        parts = urlsplit(self.url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise GrafanaError(f"{url!r} is not the address of a Grafana server: write it as https://host:3000")
        if parts.username or parts.password:
            raise GrafanaError("the address contains credentials: write them to the file of --token-file instead")
        self._organisation = organisation
        self._timeout_seconds = timeout_seconds
        address: dict[str, Any] = {
            "host": parts.hostname,
            "port": parts.port,
            "url_path_prefix": f"{parts.path.strip('/')}/".lstrip("/"),
            "protocol": parts.scheme,
            "timeout": timeout_seconds,
            "verify": os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or True,
        }
        self._proxy = proxy
        self._client = self._direct(GrafanaApi(credentials, organization_id=organisation, **address).client)
        self._anonymous = self._direct(GrafanaApi(None, **address).client)

    def _direct(self, client: GrafanaClient) -> GrafanaClient:
        """Return `client` without a login from ~/.netrc, and with the given proxy only."""
        client.s.trust_env = False  # otherwise the library reads netrc, and asks the proxy for loopback addresses
        client.s.proxies = {} if self._proxy is None else {urlsplit(self.url).scheme: self._proxy}
        return client

    def check(self) -> str:
        """Check the address, the release, the credentials and the organisation; return the release of Grafana.

        Raises GrafanaError for the first check that fails.
        """
        not_grafana = f"{self.url} answers, but it is not Grafana: check the address, and its path if Grafana has one"
        try:
            health = self._ask("GET", "/health", client=self._anonymous)
        except (RefusedError, UnauthorizedError) as error:
            answer = getattr(error.__cause__, "response", None)
            if isinstance(answer, dict) and "database" in answer:  # Grafana has no connection to its database
                raise
            raise GrafanaError(not_grafana) from error
        version = str(health.get("version", "")) if isinstance(health, dict) and "database" in health else ""
        number = re.match(r"(\d+)\.(\d+)", version)
        if number is None:
            raise GrafanaError(not_grafana)
        self.release = (int(number[1]), int(number[2]))
        if self.release < OLDEST_RELEASE:
            oldest = ".".join(map(str, OLDEST_RELEASE))
            raise GrafanaError(f"Grafana {version} at {self.url} is too old: update it to {oldest} or newer")
        organisation = self.get("/org")["id"]
        if self._organisation not in {None, organisation}:
            raise GrafanaError(
                f"the credentials belong to organisation {organisation}, not to {self._organisation}: "
                f"use a token of organisation {self._organisation}"
            )
        return version

    def get(self, path: str, query: dict[str, Any] | None = None) -> Any:
        """Return the JSON document at `path`."""
        return self._ask("GET", path, query=query)

    def find(self, path: str) -> Any | None:
        """Return the JSON document at `path`; None if it does not exist."""
        try:
            return self.get(path)
        except NotFoundError:
            return None

    def post(self, path: str, body: dict[str, Any], *, headers: dict[str, str] | None = None) -> Any:
        """Send a new object and return the answer."""
        return self._ask("POST", path, body=body, headers=headers)

    def put(self, path: str, body: dict[str, Any], *, headers: dict[str, str] | None = None) -> Any:
        """Send a changed object and return the answer."""
        return self._ask("PUT", path, body=body, headers=headers)

    def delete(self, path: str) -> None:
        """Delete the object at `path`. An absent object is not an error."""
        try:
            self._ask("DELETE", path)
        except NotFoundError:
            return

    def _ask(
        self,
        method: str,
        path: str,
        *,
        body: dict[str, Any] | None = None,
        query: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        client: GrafanaClient | None = None,
    ) -> Any:
        request = f"{method} {self.url}/api{path}"
        try:
            send = getattr(client or self._client, method)
            # 9.4 answers some requests with status 200 and an empty body.
            return send(path, json=body, params=query, headers=headers, accept_empty_json=True)
        except GrafanaTimeoutError as error:
            raise UnreachableError(f"{request} timed out after {self._timeout_seconds:g} s") from error
        except GrafanaException as error:
            raise _translated(request, error) from error
        except niquests.exceptions.InvalidJSONError as error:
            raise RefusedError(f"{request}: the answer is no JSON: check the address of Grafana") from error
        except niquests.exceptions.RequestException as error:  # grafana-client does not wrap a refused connection
            raise UnreachableError(f"{request} failed: no connection to Grafana at {self.url}") from error


FOLDERS: Final = "/folders"


def segment(text: str) -> str:
    """Return `text` quoted as one part of a path."""
    return quote(text, safe="")


def object_path(collection: str, uid: str) -> str:
    """Return the path of an object of the API; `collection` is the path of all objects of its kind."""
    return f"{collection}/{segment(uid)}"


def read_credentials(file: Path) -> str | tuple[str, str]:
    """Return the token in `file`, or the pair of a file that contains `user:password`.

    Raises GrafanaError if the file cannot be read or is empty.
    """
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise GrafanaError(f"cannot read the token file {file}: {error.strerror}") from error
    if not text:
        raise GrafanaError(f"the token file {file} is empty: write a service account token to it")
    user, colon, password = text.partition(":")
    return (user, password) if colon else text


def _translated(request: str, error: GrafanaException) -> GrafanaError:
    """Return the exception for an error answer. Grafana 9.4 has status 500 for some absent objects and conflicts."""
    response = error.response
    text = str(response["message"]) if isinstance(response, dict) and "message" in response else str(error.message)
    answer = f"{request}: status {error.status_code}, {text}"
    if isinstance(error, GrafanaUnauthorizedError) or text in _WRONG_CREDENTIALS:
        remedy = (
            "Check the token file. Five wrong passwords lock a user for five minutes, so the request is not retried."
        )
        return UnauthorizedError(f"Grafana rejected the credentials ({text}). {remedy}")
    if error.status_code == 404 or text == "could not find alert rule":
        return NotFoundError(answer)
    if error.status_code == 403:
        return RefusedError(f"{answer}. Give this permission to the service account, or use a token of role Admin.")
    if "provenance" in text:
        return RefusedError(f"{answer}. A provisioning file or another tool owns this object.")
    return RefusedError(answer)
