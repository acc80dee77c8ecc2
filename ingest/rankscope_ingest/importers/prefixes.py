"""What stands before a record on its line: colours, a rank, a time. Pure."""

from __future__ import annotations

import re
from typing import Any, Final

_COLOUR: Final = re.compile(r"\x1b\[[0-9;?]{0,16}[A-Za-z]")
_RANK: Final = re.compile(
    r"\[\s*(?:rank[ _]?|default)(\d{1,9})\s*\]|\brank(?:[ _=]|: ?)(\d{1,9})\b|^\s*(\d{1,9}):(?=\s)", re.IGNORECASE
)
"""As torchrun, the program itself, or srun says it."""
_MOMENT: Final = re.compile(r"\b(\d{4}-\d{2}-\d{2}[ T]\d{2}:\d{2}:\d{2}(?:[.,]\d{1,9})?(?:Z|[-+]\d{2}:?\d{2})?)")


def without_colours(text: str) -> str:
    """Return `text` as a terminal shows it: no colour codes, and only what was not written over."""
    if "\x1b" in text:
        text = _COLOUR.sub("", text)
    parts = [part for part in text.split("\r") if part.strip()]
    return parts[-1] if parts else ""


def told_before(prefix: str) -> dict[str, Any]:
    """Return the rank and the time that stand in `prefix`, under the names of a record."""
    found: dict[str, Any] = {}
    if rank := _RANK.search(prefix):
        found["rank"] = int(rank[1] or rank[2] or rank[3])
    if moment := _MOMENT.search(prefix):
        found["timestamp"] = moment[1]
    return found
