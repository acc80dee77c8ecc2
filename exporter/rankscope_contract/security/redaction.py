"""Mask secrets in the command line and configuration of a training before they are shown or stored.

A rank masks secrets before it sends them. The service and the importers mask them again before they store them, because
a rank may run another release, and a log may contain any text. A secret is detected by its name (`--hf-token`,
`password`), its place (`https://user:pw@host`) or its form (`ghp_…`, a JWT, a private key). A password in an argument
without such a name is not detected. The functions have no side effects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

MASK: Final = "***"

_DEEPEST: Final = 100
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_WORDS: Final = frozenset(
    {"secret", "secrets", "password", "passwords", "passwd", "passphrase", "passwort", "pwd", "credential"}
    | {"credentials", "auth", "authorization", "bearer", "cookie", "apikey", "apitoken", "accesskey"}
    | {"secretkey", "privatekey", "authtoken"}
)
_SECRET_BEFORE_KEY: Final = frozenset(
    {"access", "account", "api", "auth", "client", "deploy", "encryption", "license", "master", "private"}
    | {"secret", "service", "session", "shared", "signing", "ssh", "storage", "subscription", "wandb", "write"}
)
_SECRET_BEFORE_TOKENS: Final = frozenset(["access", "api", "auth", "bearer", "refresh", "secret"])
_VOCABULARY: Final = frozenset(
    {"audio", "bos", "cls", "end", "eos", "image", "mask", "max", "next", "pad", "per", "sep", "special"}
    | {"start", "unk", "video", "vision"}
)
_SHOWN_LAST_WORDS: Final = frozenset(["dir", "file", "folder", "mode", "name", "path", "type"])
"""Last words of names such as `token_file`: the named value is the location or type of a secret, not the secret."""

_LOOKS: Final = re.compile(
    r"(?<=://)[^/?#\s]+(?=@)"  # credentials in a URL
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\b(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|npg_|nvapi-|pypi-|xox[abeoprs]-|AIza)[\w-]{16,}"
    r"|\beyJ[\w-]{6,2000}\.[\w-]{6,2000}\.[\w-]*"  # a JSON web token
    r"|(?<=hooks\.slack\.com/)\S+"
)
_SCHEME: Final = re.compile(r"\b(bearer|basic)(\s++)[\w.~+/=:-]{6,}", re.IGNORECASE)
# Possessive quantifiers: no backtracking. Otherwise 1 MB of text from a rank could block the service.
_PAIR: Final = re.compile(r"""(?<![\w.-])([\w.-]++)(["']?+\s*+[=:]\s*+)("[^"]*"|'[^']*'|[^\s,;&"'{}\[\]]+)""")
_OPTION: Final = re.compile(r"-{1,2}([A-Za-z][\w.-]*)$")


def is_secret_name(name: str) -> bool:
    """Return whether a value with this name is a secret, according to the words of the name.

    For example, `hf_token` is the name of a secret and `pad_token` is not.
    """
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _SHOWN_LAST_WORDS:
        return False
    before = set(words[:-1])
    if words[-1] == "token":
        return not before & _VOCABULARY
    if words[-1] in ("key", "keys"):
        return words == ["key"] or bool(before & _SECRET_BEFORE_KEY)
    if words[-1] == "tokens":
        return bool(before & _SECRET_BEFORE_TOKENS)
    return not _SECRET_WORDS.isdisjoint(words)


def redacted_text(text: str) -> str:
    """Return `text` with secrets masked.

    Secrets are credentials in URLs, values of secret names, and text in the form of a secret.
    """
    text = _SCHEME.sub(rf"\1\2{MASK}", _LOOKS.sub(MASK, text))
    return _PAIR.sub(lambda found: f"{found[1]}{found[2]}{MASK}" if is_secret_name(found[1]) else found[0], text)


def redacted_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line with secrets masked. Examples: `--token x`, `--token=x`, `api.key=x`, `ghp_…`."""
    shown: list[str] = []
    masks_next = False
    for argument in arguments:
        option = _OPTION.match(argument)
        is_value = masks_next and not argument.startswith("--")
        masks_next = option is not None and is_secret_name(option[1])
        name, equals, _ = argument.partition("=")
        if is_value and not masks_next:
            shown.append(MASK)
        elif equals and is_secret_name(name):
            shown.append(f"{name}={MASK}")
        else:
            shown.append(redacted_text(argument))
    return shown


def redacted(value: Any, *, depth: int = 0) -> Any:
    """Return a JSON value with secrets masked. Secrets are detected by the names of keys and by the form of texts."""
    if depth > _DEEPEST:
        return MASK  # deeper nesting would exceed the recursion limit
    if isinstance(value, str):
        return redacted_text(value)
    if isinstance(value, Mapping):
        return {str(key): _named(str(key), item, depth) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item, depth=depth + 1) for item in value]
    return value


def redacted_json(text: str | None) -> str | None:
    """Return a JSON text with secrets masked.

    A text without secrets is returned unchanged. A text that is not JSON is masked as plain text.
    """
    try:
        document = json.loads(text or "null", object_pairs_hook=_without_doubles)
        shown = redacted(document)
    except (ValueError, RecursionError):
        return redacted_text(text or "")
    return text if shown == document else json.dumps(shown, ensure_ascii=False)


def _without_doubles(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict. Raises ValueError if a name is repeated.

    Readers use only the last value of a repeated name, but the JSON text also contains the first value, which may be a
    secret.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in a JSON object")
    return found


def _named(name: str, value: Any, depth: int) -> Any:
    if name == "argv" and isinstance(value, list | tuple):
        return redacted_arguments([str(item) for item in value])
    if value is None or isinstance(value, bool) or not is_secret_name(name):
        return redacted(value, depth=depth + 1)
    return MASK
