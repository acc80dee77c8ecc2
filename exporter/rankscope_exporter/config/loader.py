"""Reads configuration files: TOML, or JSON with comments.

Comments in JSON are replaced by blanks. The text keeps its length and lines, so a parser error has the right position.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, Final

from rankscope_exporter.process.errors import ConfigError

# Strings first: `//` inside a string is not a comment.
_STRING_OR_COMMENT: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_VISIBLE: Final = re.compile(r"[^\r\n]")


def without_comments(text: str) -> str:
    """Return `text` with blanks for comments. One without an end remains, so that the parser rejects it."""
    return _STRING_OR_COMMENT.sub(_kept, text)


def _kept(found: re.Match[str]) -> str:
    return found[0] if found[0].startswith('"') else _VISIBLE.sub(" ", found[0])


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
    text = text.removeprefix("\ufeff")  # a byte order mark, which some editors write
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
