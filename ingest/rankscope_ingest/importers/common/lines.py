"""Lines of a text that may be hostile: bounded memory whatever the file holds, a clear word on what is no text."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers.common.importer import Faults

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


MAX_LINE_BYTES: Final = 1 << 20
SHOWN_CHARACTERS: Final = 60

_UTF16: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_PROBE_BYTES: Final = 4096
_BINARY_SHARE: Final = 0.3


def read_lines(path: Path, faults: Faults, *, max_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, line without its end) and keep `faults.read_bytes` current; a UTF-8 mark is taken off.

    A line longer than `max_bytes` is skipped and counted. Raises IngestError on UTF-16 and on what is no text.
    """
    with path.open("rb") as file:
        refuse_no_text(path, file.read(_PROBE_BYTES))
        file.seek(0)
        number = 0
        while line := file.readline(max_bytes + 1):
            number += 1
            faults.read_bytes += len(line)
            if len(line) > max_bytes and not line.endswith(b"\n"):
                faults.add(number, f"longer than {max_bytes:,} bytes: {shown(line)}…")
                while (rest := file.readline(max_bytes)) and not rest.endswith(b"\n"):
                    faults.read_bytes += len(rest)
                faults.read_bytes += len(rest)
                continue
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            yield number, line.rstrip(b"\r\n")


def refuse_no_text(path: Path, head: bytes) -> None:
    """Raise IngestError, with what to do, when a file that begins with `head` is UTF-16 or binary."""
    if head.startswith(_UTF16) or _looks_utf16(head):
        raise IngestError(f"{path} is UTF-16: convert it first, as with `iconv -f UTF-16 -t UTF-8`")
    if head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"BZh", b"\xfd7zXZ")):
        raise IngestError(f"{path} is compressed: unpack it first")
    if head.count(0) > _BINARY_SHARE * len(head):
        raise IngestError(f"{path} is a binary file, not a text log")


def shown(line: bytes) -> str:
    """Return the start of a line, fit for a terminal."""
    text = line[: 2 * SHOWN_CHARACTERS].decode(errors="replace").strip()
    return "".join(character if character.isprintable() else "�" for character in text[:SHOWN_CHARACTERS])


def _looks_utf16(head: bytes) -> bool:
    """Return whether every second byte is zero and the others are not: Latin text in UTF-16 without a mark."""
    even, odd = head[0::2], head[1::2]
    if len(odd) < 4:
        return False
    zeros = even.count(0) / len(even), odd.count(0) / len(odd)
    return max(zeros) > 0.8 and min(zeros) < 0.2
