"""Read configuration files: TOML, or JSON with comments. Also translates configurations of other monitors.

Comments in JSON are replaced by blanks. The text keeps its length and lines, so a parser error has the right position.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from rankscope_exporter.base.errors import ConfigError

# Strings first: `//` inside a string is not a comment.
_STRING_OR_COMMENT: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_VISIBLE: Final = re.compile(r"[^\r\n]")


def without_comments(text: str) -> str:
    """Return `text` with comments replaced by blanks. A comment without an end is kept, and the parser rejects it."""
    return _STRING_OR_COMMENT.sub(_kept, text)


def _kept(found: re.Match[str]) -> str:
    return found[0] if found[0].startswith('"') else _VISIBLE.sub(" ", found[0])


_MARK: Final = "\ufeff"
"""Byte order mark, which some editors write at the start of a file."""


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings in the `.toml` or JSON file `path`. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return parse_settings(path, text)


def parse_settings(path: Path, text: str) -> dict[str, Any]:
    """Return the settings in `text`, the content of the `.toml` or JSON file `path`. Raises ConfigError."""
    text = text.removeprefix(_MARK)
    try:
        settings = tomllib.loads(text) if path.suffix == ".toml" else _json(without_comments(text))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: expected a table of settings, not {type(settings).__name__}")
    return settings


def _json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_table)
    except json.JSONDecodeError as error:
        before, after = text[: error.pos].rstrip(), text[error.pos :].lstrip()
        if before.endswith(",") and after.startswith(("}", "]")):
            raise ValueError(f"{error}: remove the comma before it") from error
        raise


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    for name, value in pairs:
        if table[name] != value:  # a parser would silently use the last one
            raise ValueError(f"{name!r} occurs twice in one table, as {value!r} and as {table[name]!r}: remove one")
    return table


class Dialect(NamedTuple):
    """The configuration format of another monitor."""

    name: str
    keys: frozenset[str]
    """All keys of a document in this format. Some may also be settings of a MonitorConfig."""
    translated: Callable[[Mapping[str, Any], Collection[str]], dict[str, Any]]
    """Return settings in this format as settings of a MonitorConfig with the given names. Raises ConfigError."""


_dialects: dict[str, Dialect] = {}


def register_dialect(dialect: Dialect) -> None:
    """Accept configurations in this format wherever settings of a monitor are read."""
    _dialects[dialect.name] = dialect


def dialect_keys() -> frozenset[str]:
    """Return the keys of all registered formats."""
    return frozenset().union(*(dialect.keys for dialect in _dialects.values()))


def translated_settings(settings: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return `settings` as settings of a MonitorConfig, whose setting names are `names`. Raises ConfigError.

    A document with at least one key that only another format has is in that format. No key is compared by similarity.
    """
    for dialect in _dialects.values():
        if any(key in dialect.keys and key not in names for key in settings):
            return dialect.translated(settings, names)
    return dict(settings)


def translated_from(name: str, settings: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return `settings`, in the registered format `name`, as settings of a MonitorConfig. Raises ConfigError."""
    return _dialects[name].translated(settings, names)
