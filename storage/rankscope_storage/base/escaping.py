"""Escape user-defined names for paths, HTML and SQL: one function per language.

Runs, tensors and labels are free text: `../x`, `a=b`, `lr'"`, `学习`, `123` are all valid names.
"""

from __future__ import annotations

import urllib.parse


def path_segment(name: str) -> str:
    """Return `name` as one safe path segment in percent-encoded UTF-8; `from_path_segment` is the inverse.

    No name can leave its folder, become two segments or look like `key=value`. The empty name becomes `%`.
    """
    if not name:
        return "%"
    encoded = urllib.parse.quote(name, safe="")
    encoded = encoded.replace("~", "%7E")
    # A leading dot would hide the folder, and "." and ".." have a meaning in every file system.
    return "%2E" + encoded[1:] if encoded.startswith(".") else encoded


def from_path_segment(segment: str) -> str:
    """Return the name that `path_segment` encoded."""
    return "" if segment == "%" else urllib.parse.unquote(segment, errors="strict")


def sql_string(value: str) -> str:
    """Return `value` as a single-quoted SQL string literal."""
    return "'" + value.replace("'", "''") + "'"


def sql_identifier(name: str) -> str:
    """Return `name` as a double-quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'
