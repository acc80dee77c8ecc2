"""Remove the secrets of an address from texts: user, password, parts of the path and values of the query.

The texts are reasons of failed deliveries, which are logged and shown. They can contain any text that a receiver sends.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator
from typing import Final
from urllib.parse import parse_qsl, quote, quote_plus, unquote, unquote_plus

from rankscope_contract.model.redaction import redacted_text

MASK: Final = "…"
MAX_CHARACTERS: Final = 200

_SHORT: Final = 6
"""Secrets with fewer characters are masked only as whole words: `a` in other words is no secret."""
_PUBLIC: Final = frozenset(["yes", "no", "true", "false", "on", "off"])
_URL: Final = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)(?:[^\s\"'<>/?#]*@)?([^\s\"'<>/?#]*)[^\s\"'<>]*")
_DELIMITERS: Final = re.compile(r"[/&=#@:,;\s]+")


class Secrets:
    """The secrets of addresses, and the texts from which they are removed."""

    def __init__(self, urls: Iterable[str], *, public: Iterable[str] = ()) -> None:
        """Collect the secrets of `urls`. `public` are texts that may be shown, such as the host."""
        shown = _PUBLIC | {text.lower() for text in public}
        found = {form for url in urls for secret in _secrets(url) for form in _forms(secret)}
        listed = sorted((secret for secret in found if secret.lower() not in shown), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(_pattern, listed)), re.IGNORECASE) if listed else None

    def removed_from(self, text: str) -> str:
        """Return `text` as one line of at most MAX_CHARACTERS without secrets, paths of URLs and control characters."""
        text = redacted_text(_URL.sub(rf"\1\2/{MASK}", text))
        if self._pattern is not None:
            text = self._pattern.sub(MASK, text)
        line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
        return line if len(line) <= MAX_CHARACTERS else f"{line[: MAX_CHARACTERS - 1]}…"


def _secrets(url: str) -> Iterator[str]:
    """Yield all parts of an address but its scheme, its port and the names in its query."""
    address, _, query = url.partition("://")[2].partition("?")
    for _, value in parse_qsl(query):
        yield value
    user, _, rest = address.rpartition("@")
    yield user
    yield from user.split(":", 1)
    yield base64.b64encode(unquote(user).encode()).decode()  # of the header Authorization
    host, _, path = rest.partition("/")
    host = re.sub(r":\d{1,5}$", "", host)
    yield from [host.strip("[]")] if host.startswith("[") else _DELIMITERS.split(host)
    yield from _DELIMITERS.split(path)
    yield from _DELIMITERS.split(user)


def _forms(secret: str) -> set[str]:
    """Return the texts in which a URL, a header or a body contains a secret."""
    plain = unquote(secret)
    forms = {secret, plain, unquote_plus(secret), quote(plain), quote(plain, safe=""), quote_plus(plain)}
    return {form for form in forms if any(map(str.isalnum, form))}


def _pattern(secret: str) -> str:
    return re.escape(secret) if len(secret) >= _SHORT else rf"(?<!\w){re.escape(secret)}(?!\w)"
