"""Reads configuration files: TOML, or JSON with comments. Also translates configurations of other monitors.

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
    """Return `text` with comments replaced by blanks.

    A comment without an end is not replaced, so that the parser rejects it.
    """
    return _STRING_OR_COMMENT.sub(_kept, text)


def _kept(found: re.Match[str]) -> str:
    return found[0] if found[0].startswith('"') else _VISIBLE.sub(" ", found[0])


_MARK: Final = "\ufeff"
"""Byte order mark (BOM), which some editors write at the start of a file."""


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings in the `.toml` or JSON file `path`.

    Raises ConfigError if the file cannot be read or is invalid.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return parse_settings(path, text)


def parse_settings(path: Path, text: str) -> dict[str, Any]:
    """Return the settings in `text`, the content of the `.toml` or JSON file `path`.

    Raises ConfigError if the text is invalid.
    """
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
            raise ValueError(f"{error}: remove the comma before this position") from error
        raise


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    for name, value in pairs:
        if table[name] != value:  # a parser would silently use the last one
            raise ValueError(f"{name!r} occurs twice in one table, as {value!r} and as {table[name]!r}: remove one")
    return table


class Dialect(NamedTuple):
    """A configuration format of another monitor, and its translation to settings of a MonitorConfig."""

    name: str
    keys: frozenset[str]
    """All keys that a document in this format may have. Settings of a MonitorConfig can have the same names."""
    translated: Callable[[Mapping[str, Any], Collection[str]], dict[str, Any]]
    """Function that translates settings in this format to settings of a MonitorConfig.

    The second argument contains the names of all settings of a MonitorConfig. The function raises ConfigError if a
    setting is invalid.
    """


_dialects: dict[str, Dialect] = {}


def register_dialect(dialect: Dialect) -> None:
    """Register a configuration format of another monitor.

    Every function that reads settings of a monitor then accepts this format.
    """
    _dialects[dialect.name] = dialect


def dialect_keys() -> frozenset[str]:
    """Return the keys of all registered configuration formats of other monitors."""
    return frozenset().union(*(dialect.keys for dialect in _dialects.values()))


def translated_settings(settings: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return `settings`, which may be in the format of another monitor, as settings of a MonitorConfig.

    `names` contains the names of all settings of a MonitorConfig. If `settings` contains a key that exists only in a
    registered format of another monitor, it is translated from that format. Keys are compared exactly. Raises
    ConfigError if a setting in that format is invalid.
    """
    for dialect in _dialects.values():
        if any(key in dialect.keys and key not in names for key in settings):
            return dialect.translated(settings, names)
    return dict(settings)


def translated_from(name: str, settings: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Translate `settings` from the registered format `name` to settings of a MonitorConfig.

    Raises ConfigError if a setting is invalid.
    """
    return _dialects[name].translated(settings, names)
