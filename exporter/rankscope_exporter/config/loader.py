"""Files of settings: TOML, or JSON in which comments are blanked; and configurations of other monitors.

Blanked JSON has the length and the lines of the original, so that the error of a parser names the right place.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from rankscope_exporter.base.errors import ConfigError

# A string first: what looks like a comment inside of one is none.
_STRING_OR_COMMENT: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_VISIBLE: Final = re.compile(r"[^\r\n]")


def without_comments(text: str) -> str:
    """Return `text` with blanks in the place of comments; one that has no end stays, for the parser to refuse."""
    return _STRING_OR_COMMENT.sub(_kept, text)


def _kept(found: re.Match[str]) -> str:
    return found[0] if found[0].startswith('"') else _VISIBLE.sub(" ", found[0])


_MARK: Final = "\ufeff"
"""What some editors put before the first character."""


def read_settings(path: Path) -> dict[str, Any]:
    """Return the table in the `.toml` or JSON file `path`. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return parse_settings(path, text)


def parse_settings(path: Path, text: str) -> dict[str, Any]:
    """Return the table that `text`, from the `.toml` or JSON file `path`, holds. Raises ConfigError."""
    text = text.removeprefix(_MARK)
    try:
        settings = tomllib.loads(text) if path.suffix == ".toml" else _json(without_comments(text))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: a table of settings is expected, not {type(settings).__name__}")
    return settings


def _json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_table)
    except json.JSONDecodeError as error:
        before, after = text[: error.pos].rstrip(), text[error.pos :].lstrip()
        if before.endswith(",") and after.startswith(("}", "]")):
            raise ValueError(f"{error}: take away the comma before it, behind which nothing follows") from error
        raise


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    for name, value in pairs:
        if table[name] != value:  # a parser would take the last one without a word
            raise ValueError(f"{name!r} stands twice in one table, as {value!r} and as {table[name]!r}: take one away")
    return table


class Dialect(NamedTuple):
    """The configuration format of another monitor; both functions take settings and the names of a MonitorConfig's."""

    recognizes: Callable[[Mapping[str, Any], Collection[str]], bool]
    """Return whether the settings are written in this format."""
    translated: Callable[[Mapping[str, Any], Collection[str]], dict[str, Any]]
    """Return the settings as those of a MonitorConfig. Raises ConfigError."""


_dialects: list[Dialect] = []


def register_dialect(dialect: Dialect) -> None:
    """Accept configurations in this format wherever settings of a monitor are read."""
    if dialect not in _dialects:
        _dialects.append(dialect)


def translated_settings(settings: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return `settings` as those of a MonitorConfig, which has `names`. Raises ConfigError."""
    found = next((dialect for dialect in _dialects if dialect.recognizes(settings, names)), None)
    return dict(settings) if found is None else found.translated(settings, names)
