"""Lines to judge a log by: from its beginning, middle and end, since many begin with pages of something else."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Final

_WINDOW_BYTES: Final = 65_536
_MAX_LINES: Final = 2_000


def sample_lines(path: Path, head: bytes) -> list[bytes]:
    """Return whole lines of `path`, which begins with `head`; of the last one only if nothing follows it."""
    lines = _whole_lines(head.removeprefix(codecs.BOM_UTF8), is_first=True)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            for start in _starts(len(head), size):
                file.seek(start)
                lines += _whole_lines(file.read(_WINDOW_BYTES), is_first=False)
    except OSError:
        pass  # who reads it will say so
    return lines[:: len(lines) // _MAX_LINES + 1]


def _starts(seen: int, size: int) -> list[int]:
    """Return where to look beyond the first `seen` bytes of `size`, nothing twice."""
    if size - seen <= 2 * _WINDOW_BYTES:
        return [start for start in (seen, seen + _WINDOW_BYTES) if start < size]
    return [(seen + size - _WINDOW_BYTES) // 2, size - _WINDOW_BYTES]


def _whole_lines(window: bytes, *, is_first: bool) -> list[bytes]:
    """Return the lines of `window` but those its edges may have cut."""
    lines = window.split(b"\n")
    if is_first and len(lines) == 1:
        return lines
    return lines[0 if is_first else 1 : -1]
