"""Escape user-defined names for paths, HTML, SQL and PromQL: one function per language.

Runs, tensors and labels are free text: `../x`, `a=b`, `lr'"`, `学习`, `123` are all valid names.
"""

from __future__ import annotations

import hashlib
import html
import unicodedata
import urllib.parse
from typing import Final

LONGEST_FILE_NAME: Final = 160
"""Largest number of bytes of a default file name without its suffix. File systems permit 255."""


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


def file_name(*parts: str) -> str:
    """Return the default name, without a suffix, of a file or folder about `parts`, such as a run and a scalar.

    Letters and digits of any script, `.`, `_` and `-` are kept. If a character is replaced, the text is cut, or a part
    after the first has a dash, the name ends with a digest: different parts never result in the same name.
    """
    text = "-".join(parts)
    kept = "".join(char if char in "._-" or unicodedata.category(char)[0] in "LMN" else "_" for char in text)
    name = unicodedata.normalize("NFC", kept).lstrip(".-") or "unnamed"
    if name == text and len(name.encode()) <= LONGEST_FILE_NAME and not any("-" in part for part in parts[1:]):
        return name
    digest = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return (
        f"{name.encode()[: LONGEST_FILE_NAME - 9].decode(errors='ignore')}~{digest}"  # names without one have no tilde
    )


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
