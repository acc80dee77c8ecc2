"""Read the lines of text logs in bounded memory, and reject files that are not text."""

from __future__ import annotations

import codecs
import datetime as dt
import io
import itertools
import re
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from rankscope_contract.model.redaction import redacted_text
from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers.common.importer import SETTLED_SECONDS, Faults
from rankscope_ingest.importers.common.values import FORM

MAX_LINE_BYTES: Final = 1 << 20
SHOWN_CHARACTERS: Final = 60

_COLOUR: Final = re.compile(r"\x1b\[[0-9;?]{0,16}[A-Za-z]")
_RANK: Final = re.compile(
    r"\[\s*(?:rank[ _]?|default|proc |xla:)(\d{1,9})\s*\]|\brank(?:[ _=]|: ?)(\d{1,9})\b|^\s*(\d{1,9}):(?=\s)"
    r"|\[[\w@.-]{1,80},(?:mpirank:)?(\d{1,9})(?:,[^\[\]]{1,80})?\]<std(?:out|err)>:",
    re.IGNORECASE,
)
"""A regular expression for the rank before a log message, as torchrun, srun, mpirun and many scripts print it."""
_TIME: Final = re.compile(
    r"(?:\b|\b[IWEF](?=\d{8} ))(\d{4}(?:([-/])\d{2}\2|\d{2})\d{2}"
    r"[ T,]\d{2}:\d{2}:\d{2}(?:[.,]\d{1,9})?(?:Z|[-+]\d{2}:?\d{2})?)"
)
"""A regular expression for a time with a complete date, such as `2026-01-17 10:00:00` or `I20260117 10:00:00`."""

_CTIME: Final = re.compile(
    r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) "
    r"((?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}\d{1,2} \d\d:\d\d:\d\d \d{4})"
)
"""A regular expression for a time as C prints it: `Thu Jan  1 00:00:05 2026`."""

_WINDOW_BYTES: Final = 65_536
BLOCK_BYTES: Final = 1 << 20
"""Number of bytes that are read from a log in one call."""
_HOLE_BYTES: Final = 1 << 20
_FEWEST_NULS: Final = 4
_LONGEST_SAMPLE: Final = 1 << 24
_DRAWN_BAR: Final = re.compile(rb"(?:it/s|s/it)[,\]]")
_NUL_RUNS: Final = re.compile(rb"\0+")
_MOST_HOLES: Final = 8  # crashes leave few holes; a binary file has NUL bytes everywhere
_HOLES: Final = re.compile(rb"\0{16,}")
_NULS: Final = re.compile(rb"\0{2,}")
_MAX_LINES: Final = 2_000
ZIP: Final = b"PK\x03\x04"
_UTF16: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_PROBE_BYTES: Final = 4096
_BINARY_SHARE: Final = 0.3
_CONTROLS: Final = bytes({*range(1, 32)} - set(b"\b\t\n\v\f\r\x1a\x1b"))
_CONTROL_SHARE: Final = 0.02  # text has none of these characters


def open_log(path: Path) -> BinaryIO:
    """Open the log at `path` for reading, or the only file in a zip archive that is not compressed."""
    file = path.open("rb")
    if file.read(len(ZIP)) == ZIP and zipfile.is_zipfile(file):
        archive = zipfile.ZipFile(path)
        match archive.infolist():
            case [only] if only.compress_type == zipfile.ZIP_STORED and not only.flag_bits & 1:  # encrypted
                file.close()
                return io.BufferedReader(archive.open(only))  # type: ignore[type-var] # typeshed: only IO[bytes]
    file.seek(0)
    return file


class LogLines:
    """The lines of a text log: the number of each line, from 1, and its bytes without line end and byte order mark.

    A line of more than `max_bytes` bytes is skipped and recorded in `faults`; `faults.read_bytes` is updated after each
    line. The parts of a line between NUL bytes, which a crash or a truncation leaves in a file, are returned one by
    one, unless `is_valid` returns true for the whole line: then the NUL bytes are a part of its text. `begin` has the
    offset at which reading begins, the end of a line, and the number of lines before it.
    Iteration raises IngestError if the file is UTF-16, compressed or binary. A file is binary if any 64 KiB of it
    contain more runs of NUL bytes than crashes leave. With `is_any`, lines are found between any bytes.
    """

    def __init__(
        self,
        path: Path,
        faults: Faults,
        *,
        max_bytes: int = MAX_LINE_BYTES,
        is_valid: Callable[[bytes], bool] | None = None,
        begin: tuple[int, int] = (0, 0),
        is_any: bool = False,
    ) -> None:
        self._path = path
        self._faults = faults
        self._size = max_bytes + 1
        self._is_valid = is_valid
        self._offset, self._number = begin
        self._is_any = is_any
        self._data = b""  # read from the file
        self._at = 0  # begin of the next line in it
        self._is_split = False  # further parts of the last line may follow

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        with open_log(self._path) as file:
            hole = skip_hole(file)
            head = file.read(_WINDOW_BYTES)
            (refuse_no_text if self._is_any else refuse_binary)(self._path, head)
            self._faults.read_bytes += 0 if self._offset else hole
            file.seek(self._offset or hole)
            holes = _Holes(self._path, self._faults.read_bytes + (0 if self._offset else len(head)))
            yield from self._lines(file, line_end(head), None if self._is_any else holes)

    def matching(self, expression: re.Pattern[bytes], most: int | None = None) -> tuple[list[bytes], bytes]:
        """Go on behind the next lines that match, at most `most` matches; only lines count that are read already.

        Return the texts of the groups, match after match, and the text of all matches. A match of `expression` includes
        the line end, and may have several lines.
        """
        if self._is_split:
            return [], b""
        end = self._data.rfind(b"\n") + 1  # the rest of the last line is not read yet
        scanner = expression.scanner(self._data, self._at, end)  # type: ignore[attr-defined] # matches in a row
        texts: list[bytes] = []  # instead of matches, which the garbage collector would visit again and again
        match, count = None, 0
        for match in itertools.islice(iter(scanner.match, None), most):
            texts += match.groups()
            count += 1
        if match is None:
            return [], b""
        faults, text = self._faults, self._data[self._at : match.end()]
        self._at, self._number = match.end(), self._number + count * match[0].count(b"\n")  # equal in all matches
        faults.line_start, faults.lines = faults.read_bytes + text.rfind(b"\n", 0, -1) + 1, self._number
        faults.read_bytes += len(text)
        return texts, text

    def _lines(self, file: BinaryIO, end: bytes, holes: _Holes | None) -> Iterator[tuple[int, bytes]]:
        faults = self._faults
        is_rest = is_skipped = False  # the rest of a long line: it is skipped, except behind many NUL bytes
        while line := self._piece(file, end):
            size = len(line)
            if not is_rest:
                faults.line_start, self._number = faults.read_bytes, self._number + 1
            faults.read_bytes, faults.lines = faults.read_bytes + size, self._number
            faults.is_torn = not line.endswith((b"\n", b"\r"))
            if not (is_rest or size >= self._size or b"\0" in line):
                line = line if self._number > 1 else line.removeprefix(codecs.BOM_UTF8)
                yield self._number, line.rstrip(b"\r\n")
                continue
            is_long = size >= self._size and faults.is_torn
            if self._is_valid and not (is_rest or is_long) and self._is_valid(line.rstrip(b"\r\n")):
                yield self._number, line.rstrip(b"\r\n")
                continue
            if holes is not None:
                holes.see(line, faults.read_bytes)
            if is_long and not is_rest:
                faults.add(self._number, f"longer than {self._size - 1:,} bytes: {shown(line)}…")
            is_skipped = (is_rest and is_skipped) or (is_long and not line.endswith(b"\0"))
            is_rest = is_long
            if is_skipped:
                continue
            self._is_split = True
            for part in filter(bytes.strip, _NULS.split(line.strip(b"\0"))):
                yield self._number, part.replace(b"\0", b"").rstrip(b"\r\n")
            self._is_split = False

    def _piece(self, file: BinaryIO, end: bytes) -> bytes:
        """Return the next line, or its next part of the largest size; empty bytes at the end of the file."""
        behind = self._data.find(b"\n", self._at) + 1
        while not behind and len(self._data) - self._at < self._size and (more := file.read(BLOCK_BYTES)):
            more = more if end == b"\n" else more.replace(end, b"\n")
            self._data, self._at = self._data[self._at :] + more, 0
            behind = self._data.find(b"\n") + 1
        begin, self._at = self._at, min(behind or len(self._data), self._at + self._size)
        if self._at - begin == self._size:  # the text behind NUL bytes is another part
            self._at = self._data.rfind(b"\0", begin, self._at) + 1 or self._at
        return self._data[begin : self._at]


class _Holes:
    """Counts the runs of NUL bytes in each 64 KiB of a file that contain any, behind the byte `begin`."""

    def __init__(self, path: Path, begin: int) -> None:
        self._path = path
        self._begin = begin
        self._runs = 0

    def see(self, line: bytes, end: int) -> None:
        """Raise IngestError if the part of the file before `end`, the end of `line`, is binary."""
        if end <= self._begin:
            return
        if end - self._begin > _WINDOW_BYTES:
            self._begin, self._runs = end - len(line), 0
        self._runs += len(_NUL_RUNS.findall(line))
        if self._runs > max(_MOST_HOLES, (end - self._begin) >> 10):
            raise IngestError(f"{self._path} is a binary file, not a text log: it has NUL bytes before byte {end:,}")


def line_end(head: bytes) -> bytes:
    """Return the line end of a log that begins with `head`: LF, or CR if `head` has lone CRs and no LF.

    In a log of nothing but a progress bar, a CR begins the bar again and ends no line.
    """
    return b"\r" if b"\n" not in head and b"\r" in head[:-1] and not _DRAWN_BAR.search(head) else b"\n"


def skip_hole(file: BinaryIO) -> int:
    """Move the read position behind the NUL bytes at the beginning of `file`; return the number of these bytes.

    If a log is truncated and its program continues to write at the old position, the log begins with NUL bytes. Fewer
    than four NUL bytes may be a part of UTF-16 or UTF-32 and are not skipped. In a file of nothing but NUL bytes, none
    are skipped.
    """
    skipped = 0
    while block := file.read(_HOLE_BYTES):
        text = block.lstrip(b"\0")
        skipped += len(block) - len(text)
        if text:
            break
    else:
        skipped = 0
    skipped = skipped if skipped >= _FEWEST_NULS else 0
    file.seek(skipped)
    return skipped


def checked_text(data: bytes, path: Path, faults: Faults) -> bytes:
    """Return `data`, the bytes of a file, and add their number to `faults.read_bytes`.

    Raises IngestError that names `path` if the file is UTF-16, compressed or binary.
    """
    refuse_no_text(path, data[:_PROBE_BYTES])
    faults.read_bytes += len(data)
    return data


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Return a context manager that converts an OSError in its body to an IngestError.

    The text of the IngestError contains `path` and the reason.
    """
    try:
        yield
    except (OSError, zipfile.BadZipFile) as error:
        raise IngestError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def refuse_no_text(path: Path, head: bytes) -> None:
    """Raise IngestError if the file at `path`, which begins with `head`, is UTF-16, compressed or binary.

    The message contains the remedy.
    """
    if head.startswith(_UTF16) or _looks_utf16(head):
        raise IngestError(f"{path} is UTF-16: convert it first, for example with `iconv -f UTF-16 -t UTF-8`")
    if head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", ZIP, b"BZh", b"\xfd7zXZ")) or head[257:262] == b"ustar":
        raise IngestError(f"{path} is an archive or compressed: unpack it first")
    rest = _HOLES.sub(b"", head)  # a crash leaves holes in a text, too
    is_text = b"\n" in rest or b"\r" in rest
    if head.count(0) > _BINARY_SHARE * len(head) and not (is_text and rest.count(0) <= _BINARY_SHARE * len(rest)):
        raise IngestError(f"{path} is a binary file, not a text log")


def refuse_binary(path: Path, head: bytes) -> None:
    """Raise IngestError if the file at `path`, which begins with `head`, has many control characters or NUL bytes.

    Text has neither.
    """
    refuse_no_text(path, head)
    if head.startswith(b":W&B"):
        raise IngestError(f"{path} is a binary file of W&B: export the history of the run as CSV or JSON lines")
    controls = len(head) - len(head.translate(None, _CONTROLS))
    if controls > _CONTROL_SHARE * len(head) or len(_NUL_RUNS.findall(head)) > max(_MOST_HOLES, len(head) >> 10):
        raise IngestError(f"{path} is a binary file, not a text log")


def is_binary(head: bytes) -> bool:
    """Return whether a file that begins with `head` is UTF-16, compressed or binary."""
    try:
        refuse_binary(Path(), head)
    except IngestError:
        return True
    return False


def _looks_utf16(head: bytes) -> bool:
    """Return whether `head` looks like Latin text in UTF-16 without a byte order mark.

    In such text, every second byte is zero and the other bytes are not.
    """
    even, odd = head[0::2], head[1::2]
    if len(odd) < 4:
        return False
    zeros = even.count(0) / len(even), odd.count(0) / len(odd)
    return max(zeros) > 0.8 and min(zeros) < 0.2


def sample_lines(path: Path, head: bytes | None = None) -> list[bytes]:
    """Return at most 2,000 complete lines from the beginning, the middle and the end of a file that begins with `head`.

    The last line in `head` is completed from the file, because a line may be longer than `head`. The last line of the
    file is included only if it is the only line.
    """
    more: list[bytes] = []
    try:
        size = path.stat().st_size
        with open_log(path) as file:
            seen = skip_hole(file)
            head = file.read(_WINDOW_BYTES) if head is None else head
            seen += len(head)
            end = line_end(head)
            file.seek(seen)
            head += file.readline(_LONGEST_SAMPLE) if end == b"\n" else b""
            for start in _window_starts(seen, size):
                file.seek(start)
                more += _whole_lines(file.read(_WINDOW_BYTES), end, is_first=False)
    except OSError:
        head = head or b""  # reading the file reports the error
    lines = _whole_lines(head.removeprefix(codecs.BOM_UTF8), line_end(head[:_WINDOW_BYTES]), is_first=True) + more
    return lines[:: len(lines) // _MAX_LINES + 1]


def _window_starts(seen: int, size: int) -> list[int]:
    """Return the offsets of the parts of a file that are read as a sample, after the first `seen` bytes.

    The file has `size` bytes. The parts do not overlap.
    """
    if size - seen <= 2 * _WINDOW_BYTES:
        return [start for start in (seen, seen + _WINDOW_BYTES) if start < size]
    return [(seen + size - _WINDOW_BYTES) // 2, size - _WINDOW_BYTES]


def _whole_lines(window: bytes, end: bytes, *, is_first: bool) -> list[bytes]:
    """Return the complete lines of `window`, a part of a file whose lines end with `end`.

    A first or last line that may be incomplete is left out.
    """
    lines = window.split(end)
    if is_first and len(lines) == 1:
        return lines
    return lines[0 if is_first else 1 : -1]


def torn_size(path: Path) -> int | None:
    """Return the size of a file whose last line has no line end and may therefore be incomplete; otherwise None."""
    with open_log(path) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        return None if file.read(1) in {b"\n", b"\r", b""} else size


def is_settled(path: Path) -> bool:
    """Return whether the last line of a log is complete: it has a line end, or no process has written for 600 s."""
    return torn_size(path) is None or time.time() - path.stat().st_mtime > SETTLED_SECONDS


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
        found["rank"] = int(rank[rank.lastindex or 0])
    if moment := _TIME.search(prefix):
        found["timestamp"] = moment[1].replace("/", "-")
    elif moment := FORM.search(prefix):
        found["timestamp"] = moment[0]
    elif moment := _CTIME.search(prefix):
        found["timestamp"] = dt.datetime.strptime(f"{moment[1]} +0000", "%b %d %H:%M:%S %Y %z").isoformat()
    return found


def shown(line: bytes) -> str:
    """Return the first 60 characters of a line for a message, without secrets and unprintable characters."""
    text = redacted_text(line[: 16 * SHOWN_CHARACTERS].decode(errors="replace").strip())
    return "".join(character if character.isprintable() else "�" for character in text[:SHOWN_CHARACTERS])
