"""Escape user-defined names for paths, HTML, SQL and PromQL: one function per language.

Runs, tensors and labels are free text: `../x`, `a=b`, `lr'"`, `学习`, `123` are all valid names.
"""

from __future__ import annotations

import html
import urllib.parse


def path_segment(name: str) -> str:
    """Return `name` as one safe path segment (percent-encoded UTF-8). `from_path_segment` is the inverse function.

    Only ASCII letters, digits, `_`, `-` and inner `.` are not encoded. Therefore no name can point outside of its
    folder, become two segments or look like `key=value`. The empty name becomes `%`, which is not the encoding of any
    other name.
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


def html_text(name: str) -> str:
    """Return `name` escaped for an HTML text node or a quoted HTML attribute."""
    return html.escape(name, quote=True)


def sql_string(value: str) -> str:
    """Return `value` as a single-quoted SQL string literal."""
    return "'" + value.replace("'", "''") + "'"


def sql_identifier(name: str) -> str:
    """Return `name` as a double-quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def label_value(value: str) -> str:
    """Return `value` escaped for a quoted label value in the Prometheus text format and in PromQL."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
