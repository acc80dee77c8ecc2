"""Escape user-defined names for files, and for Prometheus: one function per language.

Runs, tensors and labels are free text: `../x`, `a=b`, `lr'"`, `学习`, `123` are all valid names.
"""

from __future__ import annotations

import hashlib
import unicodedata
from typing import Final

LONGEST_FILE_NAME: Final = 160
"""Largest number of bytes of a default file name without its suffix. File systems permit 255."""


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


def label_value(value: str) -> str:
    """Return `value` escaped for a quoted label value in the Prometheus text format and in PromQL."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
