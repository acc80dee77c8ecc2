"""Asking a program on this machine one thing over HTTP. No proxy, no redirect, a short time limit."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any, Final

TIMEOUT_SECONDS: Final = 3.0
MOST_BYTES: Final = 32 << 20


class UnreachableError(Exception):
    """Nobody answered, or not in HTTP; the text says who was asked and what happened."""


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
    url: str, *, token: str | None = None, timeout_seconds: float = TIMEOUT_SECONDS, ca_file: str | None = None
) -> Answer:
    """Return the answer to GET `url`, whatever its status. Raises UnreachableError."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 - http(s), as the caller's settings were checked
        with _opener(url, ca_file).open(request, timeout=timeout_seconds) as answer:
            return _answer(answer)
    except urllib.error.HTTPError as error:
        with error:
            return _answer(error)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise UnreachableError(f"{url}: {getattr(reason, 'strerror', None) or reason}") from error


def _answer(response: Any) -> Answer:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Answer(int(response.status), response.read(MOST_BYTES), headers)


def _opener(url: str, ca_file: str | None) -> urllib.request.OpenerDirector:
    handlers: list[Any] = [urllib.request.ProxyHandler({}), _NoRedirect()]
    if url.startswith("https:"):
        handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca_file)))
    return urllib.request.build_opener(*handlers)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow nothing: the token goes where it was meant to."""
