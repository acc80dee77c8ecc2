"""Read the lines of text logs in bounded memory, reject files that are not text, and convert lines to blocks.

Each importer parses its own lines and returns the objects on them. The module `objects` converts these objects to
records.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers.common.importer import BlockBuilder, Faults, Imported
from rankscope_ingest.importers.common.objects import ObjectReader

MAX_LINE_BYTES: Final = 1 << 20
SHOWN_CHARACTERS: Final = 60

_COLOUR: Final = re.compile(r"\x1b\[[0-9;?]{0,16}[A-Za-z]")
_RANK: Final = re.compile(
    r"\[\s*(?:rank[ _]?|default)(\d{1,9})\s*\]|\brank(?:[ _=]|: ?)(\d{1,9})\b|^\s*(\d{1,9}):(?=\s)", re.IGNORECASE
)
"""A regular expression for the rank before a log message, as torchrun, srun and common training scripts print it."""
_TIME: Final = re.compile(r"\b(\d{4}-\d{2}-\d{2}[ T]\d{2}:\d{2}:\d{2}(?:[.,]\d{1,9})?(?:Z|[-+]\d{2}:?\d{2})?)")

_WINDOW_BYTES: Final = 65_536
_MAX_LINES: Final = 2_000
_UTF16: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_PROBE_BYTES: Final = 4096
_BINARY_SHARE: Final = 0.3


def read_log(
    path: Path,
    faults: Faults,
    documents: Callable[[int, bytes], Iterable[Mapping[str, Any]]],
    counts: Mapping[str, int],
    *,
    max_bytes: int = MAX_LINE_BYTES,
) -> Iterator[Imported]:
    """Yield blocks of the records in a text log, then the facts about the run.

    `documents` is called with the number (from 1) and the bytes of each line; it returns the objects on the line and
    records unreadable lines in `faults`. `counts` are numbers of lines by kind; they are stored with the run. A line of
    more than `max_bytes` bytes is skipped.
    """
    builder, objects = BlockBuilder(), ObjectReader()
    number = 0
    for number, line in read_lines(path, faults, max_bytes=max_bytes):
        for document in documents(number, line):
            objects.add(document, builder)
        if builder.is_full and (block := builder.take()):
            yield block
    if block := builder.take():
        yield block
    if objects.are_writers_interleaved:
        faults.notes.append(
            "records of several writers alternate: each writer is an attempt; the last is shown by default"
        )
    if objects.keys:
        yield objects.run({"lines": number, **counts})


def read_lines(path: Path, faults: Faults, *, max_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield the number (from 1) and the bytes of each line, without the line end and without a UTF-8 byte order mark.

    A line of more than `max_bytes` bytes is skipped and recorded in `faults`; `faults.read_bytes` is updated after each
    line. Raises IngestError if the file is UTF-16, compressed or binary.
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


def read_chunks(file: IO[bytes], path: Path, faults: Faults, size: int, *, checks_text: bool = True) -> Iterator[bytes]:
    """Yield the bytes of `file` in chunks of `size` bytes and update `faults.read_bytes`.

    With `checks_text`, raises IngestError that names `path` if the file is UTF-16, compressed or binary.
    """
    while chunk := file.read(size):
        if checks_text:
            refuse_no_text(path, chunk[:_PROBE_BYTES])
        checks_text = False
        faults.read_bytes += len(chunk)
        yield chunk


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Return a context manager that converts an OSError in its body to an IngestError with the path and the reason."""
    try:
        yield
    except OSError as error:
        raise IngestError(f"{path} cannot be read: {error.strerror or error}") from error


def refuse_no_text(path: Path, head: bytes) -> None:
    """Raise IngestError if the file at `path`, which begins with `head`, is UTF-16, compressed or binary.

    The message contains the remedy.
    """
    if head.startswith(_UTF16) or _looks_utf16(head):
        raise IngestError(f"{path} is UTF-16: convert it first, for example with `iconv -f UTF-16 -t UTF-8`")
    if head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"BZh", b"\xfd7zXZ")):
        raise IngestError(f"{path} is compressed: unpack it first")
    if head.count(0) > _BINARY_SHARE * len(head):
        raise IngestError(f"{path} is a binary file, not a text log")


def _looks_utf16(head: bytes) -> bool:
    """Return whether `head` looks like Latin text in UTF-16 without a byte order mark.

    In such text, every second byte is zero and the other bytes are not.
    """
    even, odd = head[0::2], head[1::2]
    if len(odd) < 4:
        return False
    zeros = even.count(0) / len(even), odd.count(0) / len(odd)
    return max(zeros) > 0.8 and min(zeros) < 0.2


def sample_lines(path: Path, head: bytes) -> list[bytes]:
    """Return at most 2,000 complete lines from the beginning, the middle and the end of a file that begins with `head`.

    The last line of the file is included only if it is the only line.
    """
    lines = _whole_lines(head.removeprefix(codecs.BOM_UTF8), is_first=True)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            for start in _window_starts(len(head), size):
                file.seek(start)
                lines += _whole_lines(file.read(_WINDOW_BYTES), is_first=False)
    except OSError:
        pass  # reading the file reports the error
    return lines[:: len(lines) // _MAX_LINES + 1]


def _window_starts(seen: int, size: int) -> list[int]:
    """Return the offsets of the parts of a file that are read as a sample, after the first `seen` bytes.

    The file has `size` bytes. The parts do not overlap.
    """
    if size - seen <= 2 * _WINDOW_BYTES:
        return [start for start in (seen, seen + _WINDOW_BYTES) if start < size]
    return [(seen + size - _WINDOW_BYTES) // 2, size - _WINDOW_BYTES]


def _whole_lines(window: bytes, *, is_first: bool) -> list[bytes]:
    """Return the complete lines of `window`, a part of a file.

    A first or last line that may be incomplete is left out.
    """
    lines = window.split(b"\n")
    if is_first and len(lines) == 1:
        return lines
    return lines[0 if is_first else 1 : -1]


def torn_size(path: Path) -> int | None:
    """Return the size of a file whose last line has no line feed and may therefore be incomplete; otherwise None."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        return None if file.read(1) in {b"\n", b""} else size


def without_colours(text: str) -> str:
    """Return `text` as a terminal shows it: without colour codes, and only the text after the last carriage return."""
    if "\x1b" in text:
        text = _COLOUR.sub("", text)
    parts = [part for part in text.split("\r") if part.strip()]
    return parts[-1] if parts else ""


def prefix_fields(prefix: str) -> dict[str, Any]:
    """Return the rank and the time in `prefix`, the text before a record, under the keys `rank` and `timestamp`.

    A value that is not found has no key.
    """
    found: dict[str, Any] = {}
    if rank := _RANK.search(prefix):
        found["rank"] = int(rank[1] or rank[2] or rank[3])
    if moment := _TIME.search(prefix):
        found["timestamp"] = moment[1]
    return found


def shown(line: bytes) -> str:
    """Return the first 60 characters of a line for a message. Unprintable characters are replaced."""
    text = line[: 2 * SHOWN_CHARACTERS].decode(errors="replace").strip()
    return "".join(character if character.isprintable() else "�" for character in text[:SHOWN_CHARACTERS])
