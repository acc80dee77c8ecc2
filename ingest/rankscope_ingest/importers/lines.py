"""Lines of a text that may be hostile: bounded memory whatever the file holds, a clear word on what is no text."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rankscope_ingest.errors import IngestError
from rankscope_ingest.importers.base import Faults

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
