"""One function per language in which a user's name may appear: paths, HTML, SQL, PromQL.

Runs, tensors and labels are free text: `../x`, `a=b`, `lr'"`, `学习`, `123` are all legal names.
"""

from __future__ import annotations

import html
import urllib.parse


def path_segment(name: str) -> str:
    """Return `name` as one safe path segment (percent-encoded UTF-8), reversible with `from_path_segment`.

    Nothing but ASCII letters, digits, `_` and `-` and inner `.` is left as it is, so no name can climb out of its
    folder, split into two segments or read as `key=value`. The empty name becomes `%`, which no encoding produces.
    """
    if not name:
        return "%"
    encoded = urllib.parse.quote(name, safe="")
    encoded = encoded.replace("~", "%7E")
    # A leading dot would hide the folder, and "." and ".." mean something to every file system.
    return "%2E" + encoded[1:] if encoded.startswith(".") else encoded


def from_path_segment(segment: str) -> str:
    """Return the name that `path_segment` encoded."""
    return "" if segment == "%" else urllib.parse.unquote(segment, errors="strict")


def html_text(name: str) -> str:
    """Return `name` for an HTML text node or a quoted attribute."""
    return html.escape(name, quote=True)


def sql_string(value: str) -> str:
    """Return `value` as a single-quoted SQL string literal."""
    return "'" + value.replace("'", "''") + "'"


def sql_identifier(name: str) -> str:
    """Return `name` as a double-quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def label_value(value: str) -> str:
    """Return `value` as it stands between the quotes of a Prometheus label, on the page and in PromQL."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
