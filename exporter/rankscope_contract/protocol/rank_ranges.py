"""Groups of ranks as text: `0-7`, with a step `0-24:8`, and `0,3,5` where they follow no rule."""

from __future__ import annotations

import re
from typing import Final

_SPAN: Final = re.compile(r"(\d{1,9})-(\d{1,9})(?::(\d{1,9}))?")
_LIST: Final = re.compile(r"\d{1,9}(,\d{1,9})*")
_MOST: Final = 1 << 20
"""More ranks than any job has: a text from elsewhere must not fill the memory."""


def parse_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks in `text`, ascending. Raises ValueError."""
    if span := _SPAN.fullmatch(text):
        first, last, step = int(span[1]), int(span[2]), int(span[3] or 1)
        if first > last or step < 1 or (last - first) // step >= _MOST:
            raise ValueError(f"{text!r} is no group of ranks")
        return tuple(range(first, last + 1, step))
    if _LIST.fullmatch(text):
        return tuple(sorted({int(part) for part in text.split(",")}))
    raise ValueError(f"{text!r} is no group of ranks: write 0-7, 0-24:8 or 0,3,5")
