"""Files of settings: TOML, or JSON in which comments are read over. What a table says is config.py's."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, Final

from rankscope_exporter.errors import ConfigError
from rankscope_exporter.msprobe.json_comments import without_comments

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
