"""Read the lines of text logs in bounded memory, reject files that are not text, and convert lines to records.

Each importer parses its own lines and returns the objects on them. The module `objects` converts these objects to
records.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers.common.choices import MAX_BYTES, MAX_RECORDS, Choices
from rankscope_ingest.importers.common.failures import FailureLine, FailureLines
from rankscope_ingest.importers.common.importer import FROM_LOG, BlockBuilder, Faults, Imported
from rankscope_ingest.importers.common.objects import ObjectReader
from rankscope_ingest.importers.common.records import Record
from rankscope_ingest.importers.common.values import micros

MAX_LINE_BYTES: Final = 1 << 20
SHOWN_CHARACTERS: Final = 60
MAX_WAITING: Final = 10_000

_COLOUR: Final = re.compile(r"\x1b\[[0-9;?]{0,16}[A-Za-z]")
_RANK: Final = re.compile(
    r"\[\s*(?:rank[ _]?|default)(\d{1,9})\s*\]|\brank(?:[ _=]|: ?)(\d{1,9})\b|^\s*(\d{1,9}):(?=\s)", re.IGNORECASE
)
"""A regular expression for the rank before a log message, as torchrun, srun and common training scripts print it."""
_TIME: Final = re.compile(r"\b(\d{4}[-/]\d{2}[-/]\d{2}[ T]\d{2}:\d{2}:\d{2}(?:[.,]\d{1,9})?(?:Z|[-+]\d{2}:?\d{2})?)")

_WINDOW_BYTES: Final = 65_536
_HOLE_BYTES: Final = 1 << 20
_FEWEST_NULS: Final = 4
_LONGEST_SAMPLE: Final = 1 << 24
_DRAWN_BAR: Final = re.compile(rb"(?:it/s|s/it)[,\]]")
_NUL_RUNS: Final = re.compile(rb"\0+")
_MOST_HOLES: Final = 8  # crashes leave few holes; a binary file has NUL bytes everywhere
_HOLES: Final = re.compile(rb"\0{16,}")
_NULS: Final = re.compile(rb"\0{2,}")
_MAX_LINES: Final = 2_000
_UTF16: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_PROBE_BYTES: Final = 4096
_BINARY_SHARE: Final = 0.3
_CONTROLS: Final = bytes({*range(1, 32)} - set(b"\b\t\n\v\f\r\x1a\x1b"))
_CONTROL_SHARE: Final = 0.02  # text has none of these characters


def read_log(
    path: Path,
    faults: Faults,
    documents: Callable[[int, bytes], Iterable[Mapping[str, Any]]],
    counts: Mapping[str, int],
    *,
    max_bytes: int = MAX_LINE_BYTES,
    numbers_rows: Callable[[], bool] = lambda: False,
) -> Iterator[Imported]:
    """Yield blocks of the records in a text log, then the facts about the run.

    `documents` is called with the number (from 1) and the bytes of each line; it returns the objects on the line and
    records unreadable lines in `faults`. `counts` are numbers of lines by kind; they are stored with the run. A line of
    more than `max_bytes` bytes is skipped. If `numbers_rows` returns true and the records have no counter, the number
    of a record is its step. The step and the loss are decided over the first records; `faults.choices` contains the
    decision of an earlier import, if there is one, and later the decision about this log.
    """
    builder = BlockBuilder()
    records = _LogRecords(builder, faults, numbers_rows, torn_size(path))
    objects, failures = records.objects, records.failures
    number = 0
    for number, line in read_lines(path, faults, max_bytes=max_bytes):
        records.line(number, line, documents(number, line))
        if builder.is_full and (block := builder.take()):
            yield block
    records.add_waiting()
    if block := builder.take():
        yield block
    faults.notes += filter(None, [objects.choices.note()])
    faults.notes += (
        f"{contradiction} ({count:,} records): --reimport decides again"
        for contradiction, count in objects.contradictions.items()
    )
    if objects.are_writers_interleaved:
        faults.notes.append(
            "records of several writers alternate: each writer is an attempt; the last is shown by default"
        )
    if objects.keys:
        run = objects.run({"lines": number, **counts})
        state, reason = (run.state, run.reason) if run.state or not failures.ending else failures.ending
        yield dataclasses.replace(run, state=state, reason=reason)


class _LogRecords:
    """Adds the records and the failures of a log to blocks, in the order of their lines.

    The first ones wait until the step and the loss are decided over 2,000 objects or the first megabyte from the first
    object on. Text before the first object has no influence on the decision.
    """

    def __init__(
        self, builder: BlockBuilder, faults: Faults, numbers_rows: Callable[[], bool], torn: int | None
    ) -> None:
        self.objects = ObjectReader(Choices.from_json(faults.choices or {}), faults.unkept)
        self.failures = FailureLines()
        self._builder = builder
        self._faults = faults
        self._numbers_rows = numbers_rows
        self._waiting: list[tuple[int, Mapping[str, Any] | FailureLine]] = []
        self._waiting_failures: set[tuple[str, int | None]] = set()  # keys, since the last object
        self._objects = 0  # number of objects that wait or were added
        self._first_byte = 0  # position behind the line of the first object
        self._is_decided = False
        self._torn = torn
        self._held: list[tuple[int, FailureLine]] = []  # of the last line, which may be incomplete

    def line(self, number: int, line: bytes, documents: Iterable[Mapping[str, Any]]) -> None:
        """Add line `number` with the objects `documents`."""
        self._waiting += self._held  # another line follows, so the line before is complete
        self._held = []
        before = len(self._waiting)
        self._waiting += ((number, document) for document in documents)
        if added := len(self._waiting) - before:
            self._first_byte = self._first_byte if self._objects else self._faults.read_bytes
            self._objects += added
            self._waiting_failures.clear()
        # The text of a failure may follow a progress bar on its line.
        if (not added or b"it/s" in line or b"s/it" in line) and self.failures.is_possible(line):
            is_torn = self._torn is not None and self._faults.read_bytes >= self._torn
            (self._held if is_torn else self._waiting).extend((number, failure) for failure in self._failures_on(line))
        is_enough = self._objects >= MAX_RECORDS or self._faults.read_bytes - self._first_byte >= MAX_BYTES
        if self._is_decided or (self._objects and is_enough):
            self.add_waiting()

    def add_waiting(self) -> None:
        """Decide the step and the loss if they are not decided yet, and add all records that wait."""
        known: dict[int, Record] = {}
        if not self._is_decided:
            documents = [(at, item) for at, (_, item) in enumerate(self._waiting) if not isinstance(item, FailureLine)]
            known = {at: self.objects.record(document) for at, document in documents}
            self.objects.choose(list(known.values()), numbers_rows=self._numbers_rows(), loss=self._faults.loss)
            self._faults.choices = self.objects.choices.to_json()
            self._is_decided = True
        for at, (number, item) in enumerate(self._waiting):
            if isinstance(item, FailureLine):
                self._add_failure(item)
                continue
            self.objects.add(item, self._builder, record=known.get(at))
            if self.objects.ambiguous:
                self.objects.report_ambiguous(self._faults, number)
            if self.failures.ending and self.objects.has_advanced:
                self.failures.record_seen()
        self._waiting.clear()
        self._waiting_failures.clear()

    def _failures_on(self, line: bytes) -> Iterator[FailureLine]:
        """Yield the failures on `line`, without those that wait already: they may be many before the first object."""
        for part in filter(self.failures.is_possible, line.split(b"\r")):
            text = without_colours(part.decode(errors="replace")).strip()
            failure = self.failures.found_in(text, prefix_fields(text))
            if failure and failure.key not in self._waiting_failures and len(self._waiting_failures) < MAX_WAITING:
                self._waiting_failures.add(failure.key)
                yield failure

    def _add_failure(self, failure: FailureLine) -> None:
        """Add an event for `failure`, at the step of the last record, unless it has one."""
        if event := self.failures.event(failure):
            self._builder.record_of_event(rank=failure.rank, ts=micros(failure.timestamp), origin=FROM_LOG)
            self._builder.event(**event)


def read_lines(
    path: Path,
    faults: Faults,
    *,
    max_bytes: int = MAX_LINE_BYTES,
    is_valid: Callable[[bytes], bool] | None = None,
) -> Iterator[tuple[int, bytes]]:
    """Yield the number (from 1) and the bytes of each line, without the line end and without a UTF-8 byte order mark.

    A line of more than `max_bytes` bytes is skipped and recorded in `faults`; `faults.read_bytes` is updated after each
    line. The parts of a line between NUL bytes, which a crash or a truncation leaves in a file, are yielded one by one,
    unless `is_valid` returns true for the whole line: then the NUL bytes are a part of its text.
    Raises IngestError if the file is UTF-16, compressed or binary.
    """
    with path.open("rb") as file:
        faults.read_bytes += skip_hole(file)
        begin = file.tell()
        head = file.read(_WINDOW_BYTES)
        refuse_binary(path, head)
        file.seek(begin)
        number = 0
        is_rest = is_skipped = False  # the rest of a long line: it is skipped, except behind many NUL bytes
        for line in _pieces(file, max_bytes + 1, line_end(head)):
            size = len(line)
            faults.read_bytes += size
            number += not is_rest
            if not (is_rest or size > max_bytes or b"\0" in line):
                yield number, line.rstrip(b"\r\n") if number > 1 else line.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n")
                continue
            is_long = size > max_bytes and not line.endswith((b"\n", b"\r"))
            if is_long and not is_rest:
                faults.add(number, f"longer than {max_bytes:,} bytes: {shown(line)}…")
            is_skipped = (is_rest and is_skipped) or (is_long and not line.endswith(b"\0"))
            is_rest = is_long
            if is_skipped:
                continue
            if is_valid and not is_rest and is_valid(line.rstrip(b"\r\n")):
                yield number, line.rstrip(b"\r\n")
                continue
            for part in filter(bytes.strip, _NULS.split(line.strip(b"\0"))):
                yield number, part.replace(b"\0", b"").rstrip(b"\r\n")


def _pieces(file: BinaryIO, size: int, end: bytes) -> Iterator[bytes]:
    """Return the lines of `file`; each line ends with `end`. A line of more than `size` bytes is returned in pieces."""
    if end == b"\n":
        return iter(functools.partial(file.readline, size), b"")
    text = io.TextIOWrapper(file, encoding="latin-1", newline="")  # ends lines with LF, CR or both
    return (piece.encode("latin-1") for piece in iter(functools.partial(text.readline, size), ""))


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
    """Return a context manager that converts an OSError in its body to an IngestError.

    The text of the IngestError contains `path` and the reason.
    """
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
    rest = _HOLES.sub(b"", head)  # a crash leaves holes in a text, too
    is_text = b"\n" in rest or b"\r" in rest
    if head.count(0) > _BINARY_SHARE * len(head) and not (is_text and rest.count(0) <= _BINARY_SHARE * len(rest)):
        raise IngestError(f"{path} is a binary file, not a text log")


def refuse_binary(path: Path, head: bytes) -> None:
    """Raise IngestError if the file at `path`, which begins with `head`, has many control characters or NUL bytes.

    Text has neither. The importer of Megatron logs does not call this function: it finds rows behind any bytes.
    """
    refuse_no_text(path, head)
    if head.startswith(b":W&B"):
        raise IngestError(f"{path} is a binary file of W&B: export the history of the run as CSV or JSON lines")
    controls = len(head) - len(head.translate(None, _CONTROLS))
    if controls > _CONTROL_SHARE * len(head) or len(_NUL_RUNS.findall(head)) > max(_MOST_HOLES, len(head) >> 10):
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


def sample_lines(path: Path, head: bytes | None = None) -> list[bytes]:
    """Return at most 2,000 complete lines from the beginning, the middle and the end of a file that begins with `head`.

    The last line in `head` is completed from the file, because a line may be longer than `head`. The last line of the
    file is included only if it is the only line.
    """
    more: list[bytes] = []
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
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
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        return None if file.read(1) in {b"\n", b"\r", b""} else size


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
        found["timestamp"] = moment[1].replace("/", "-")
    return found


def shown(line: bytes) -> str:
    """Return the first 60 characters of a line for a message. Unprintable characters are replaced."""
    text = line[: 2 * SHOWN_CHARACTERS].decode(errors="replace").strip()
    return "".join(character if character.isprintable() else "�" for character in text[:SHOWN_CHARACTERS])
