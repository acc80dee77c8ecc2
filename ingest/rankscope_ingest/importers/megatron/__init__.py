"""Import text logs of Megatron-LM and its derivatives: rows for a few iterations each, and the lines between the rows.

    [2025-02-28 16:26:20] iteration 1/ 1000 | consumed samples: 256 | … | lm loss: 1.217489E+01 | grad norm: 5.127 |

A row consists of parts `key: value`. Rows with the same keys are parsed column by column (module `columns`), other rows
one by one (module `rows`). An incomplete row is reported as an unreadable line and not stored, because its last number
may lack digits.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from rankscope_contract.model.events import RunState
from rankscope_ingest.importers.common.importer import (
    NOT_MINE,
    Checkpoint,
    Detection,
    Faults,
    Imported,
    ImportedBlock,
    ImportedRun,
)
from rankscope_ingest.importers.common.lines import MAX_LINE_BYTES, line_end, open_log, refuse_no_text, shown, skip_hole
from rankscope_ingest.importers.megatron.block import AttemptCounter, Chunk, RowColumns
from rankscope_ingest.importers.megatron.chunks import ChunkLines, joined_row
from rankscope_ingest.importers.megatron.columns import (
    NO_NUMBER,
    NO_TIME,
    Alike,
    Group,
    Integers,
    Printers,
    read_groups,
    read_timers,
)
from rankscope_ingest.importers.megatron.other_lines import Companion, Companions
from rankscope_ingest.importers.megatron.rows import (
    HEAD_PATTERN,
    Row,
    clean,
    clean_bytes,
    fold,
    is_cut,
    main_loss,
    may_be_cut,
    parse_rows,
)

CHUNK_BYTES: Final = 8 << 20

_HEAD: Final = re.compile(HEAD_PATTERN.encode())
_OF_EPOCH: Final = re.compile(HEAD_PATTERN.encode() + rb"[^\n]*\bglobal_step\b")
"""A regular expression for a row whose iteration is the one within an epoch, as NeMo 2 prints it."""
_ARGUMENTS: Final = re.compile(rb"^ +\w+ \.{3,} \S", re.MULTILINE)
_SEARCHED_BYTES: Final = 16 << 20
_PROBE_BYTES: Final = 4096
_HEAD_BYTES: Final = 65_536
_TAIL_BYTES: Final = 1 << 20
_FINAL_BYTES: Final = 1 << 20
"""Size of a log from which its dialect does not change when it grows."""
_END_OF_HOLE: Final = re.compile(rb"(?<=\0{16})(?=[^\0\n])")
_PLACES: Final = 64
"""The largest number of records in one line of a log.

The place (a sort key) of a record is the number of its line times _PLACES, plus the index of the record within the
line. Places are therefore in the order of the log.
"""
_REMEMBERED: Final = 4096
_REMEMBERED_KEYS: Final = 64
_LAST_KEYS: Final = frozenset({"number_of_nan_iterations", "tflops"})


class MegatronText:
    """The importer of the text logs of Megatron-LM and its derivatives."""

    name = "megatron"

    def detect(self, path: Path, head: bytes) -> Detection:
        """Return the confidence that the file is a Megatron log: high if it has rows such as `iteration 1/ 1000 | …`.

        A long list of arguments may precede the first row, so up to 16 MiB are searched.
        """
        cleaned = clean_bytes(head)
        if _OF_EPOCH.search(cleaned):
            return NOT_MINE
        if rows := len(_HEAD.findall(cleaned)):
            return Detection(0.95, f"{rows} of its first lines are rows `iteration N/ M | …`")
        if path.is_dir() or not (_ARGUMENTS.search(head) or b"megatron" in head.lower()):
            return NOT_MINE
        return (
            Detection(0.9, "the file contains rows `iteration N/ M | …`, but not at its beginning")
            if _has_row(path)
            else NOT_MINE
        )

    def read(self, path: Path, faults: Faults) -> Iterator[Imported]:
        """Yield one block of records per chunk of the log (8 MiB), then the facts about the run."""
        reading = faults.reader or _Reading(faults)
        buffer = b""
        for data in _chunks(path, faults):
            buffer += data
            if not data and (offset := _offset_of(path, faults.read_bytes, buffer.count(b"\n"))) is not None:
                is_final = faults.read_bytes >= _FINAL_BYTES
                yield Checkpoint(reader=reading, offset=offset, lines=reading.lines, is_final=is_final)
            cut = buffer.rfind(b"\n") + 1 if data else len(buffer)
            if cut:
                whole = clean_bytes(buffer[:cut])
                block, used = reading.take(whole, is_last=not data)
                buffer = whole[used:] + buffer[cut:]
                if block is not None:
                    yield block
        yield reading.run()


def _chunks(path: Path, faults: Faults) -> Iterator[bytes]:
    """Yield the bytes of a file in chunks, and empty bytes after the last chunk.

    A line that is longer than the size limit is shortened.
    """
    with open_log(path) as file:
        hole = skip_hole(file)
        head = file.read(_HEAD_BYTES)
        faults.read_bytes = max(faults.read_bytes, hole)
        file.seek(faults.read_bytes)
        refuse_no_text(path, head[:_PROBE_BYTES])
        has_cr = line_end(head) == b"\r"
        data = file.read(CHUNK_BYTES)
        faults.read_bytes += len(data)
        length = 0  # of the current line so far
        begin = data.removeprefix(codecs.BOM_UTF8)
        while data:
            begin = _ended_holes(begin.replace(b"\r", b"\n") if has_cr else begin)
            end = begin.find(b"\n") if length > MAX_LINE_BYTES else 0
            if end >= 0 and begin:
                begin = begin[end:]
                length = len(begin) - 1 - begin.rfind(b"\n") if b"\n" in begin else length + len(begin)
                over = length - MAX_LINE_BYTES - 1
                yield begin[: len(begin) - over] if over > 0 else begin
            data = file.read(CHUNK_BYTES)
            faults.read_bytes += len(data)
            begin = data
    yield b""


def _offset_of(path: Path, end: int, lines: int) -> int | None:
    """Return the offset of the last `lines` complete lines before `end` and the line without end behind them.

    Return None if these lines are very long, or if lines of the log end in another way than with a line feed.
    """
    with open_log(path) as file:
        is_unusual = line_end(file.read(_HEAD_BYTES)) != b"\n"
        file.seek(max(0, end - _TAIL_BYTES))
        tail = file.read(min(end, _TAIL_BYTES))
    begin = len(tail)
    for _ in range(lines + 1):
        begin = tail.rfind(b"\n", 0, begin)
        if begin < 0:
            break
    if is_unusual or b"\0" in tail or (begin < 0 and end > _TAIL_BYTES):
        return None
    return end - len(tail) + begin + 1


def _ended_holes(data: bytes) -> bytes:
    """Return `data` with a line feed behind many NUL bytes, which a crash leaves in a file before the next row."""
    return _END_OF_HOLE.sub(b"\n", data) if b"\0" in data and data.strip(b"\0") else data


def _has_row(path: Path) -> bool:
    with open_log(path) as file:
        searched = 0
        before = b""
        while searched < _SEARCHED_BYTES and (data := file.read(1 << 20)):
            if _HEAD.search(clean_bytes(before + data)):
                return True
            before = data[-200:]
            searched += len(data)
    return False


@dataclass(slots=True)
class _Found:
    """The rows and the companion lines (validations, timers and others) of one chunk of a Megatron log.

    `groups` and `timers` are lines that were parsed as columns. `rows` and `companions` were parsed one by one; each of
    them is paired with its place in the log, by which all records are sorted.
    """

    groups: list[Group]
    timers: list[Alike]
    are_open: bool
    rows: list[tuple[int, Row]] = field(default_factory=list)
    companions: list[tuple[int, Companion]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A companion line (a line between the rows, such as a validation) with its place in the log.

    `step`, `attempt` and `time` are those to which the line belongs.
    """

    place: int
    companion: Companion
    step: int
    attempt: int
    time: int


class _Reading:
    """Reads one Megatron log chunk by chunk, and holds the state between the chunks.

    `take` must be called with chunks of complete lines. The result for a line depends only on the lines before it and
    on the few next lines that may be its continuation. A log that has grown therefore yields the previous records
    first, in the same order.
    """

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._companions = Companions()
        self._attempts = AttemptCounter()
        self._printers = Printers()
        self._last_keys: set[str] = set()  # of the rows that ended with a bar
        self._whole_keys: dict[tuple[str, ...], None] = {}  # of the rows with a loss
        self._once: dict[Hashable, None] = {}
        self.lines = 0
        """Number of lines in earlier chunks."""
        self._last = [NO_NUMBER, 0, NO_TIME]  # step, attempt and time of the last row
        self._planned = 0

    def take(self, data: bytes, *, is_last: bool) -> tuple[ImportedBlock | None, int]:
        """Return the block of records in `data`, and the number of bytes that were read.

        A wrapped row at the end of `data` is not read, because its rest may follow in the next chunk.
        """
        lines = ChunkLines.of(data, is_end=is_last)
        if not is_last:
            lines = lines.first(lines.settled())
        if not len(lines):
            return None, 0
        for line in np.flatnonzero(lines.too_long).tolist():
            self._fault(line, f"longer than {MAX_LINE_BYTES:,} bytes: {shown(lines.raw(line))}…")
        block = self._assemble(self._read(lines))
        self.lines += len(lines)
        return block, int(lines.lengths.sum())

    def run(self) -> ImportedRun:
        """Return the facts about the run that the log contains."""
        facts = self._companions.facts()
        planned = self._planned or facts.planned_steps
        state, reason = self._companions.ending or (None, None)
        if state is None and planned and self._last[0] >= planned:
            state, reason = RunState.COMPLETED, f"the last planned iteration, {planned}, was reached"
        return ImportedRun(
            state=state, reason=reason, planned_steps=planned, world_size=facts.world_size, config=facts.config
        )

    def _fault(self, line: int, text: str) -> None:
        self._faults.add(self.lines + line + 1, text)

    def _read(self, lines: ChunkLines) -> _Found:
        single = lines.may_continue()
        if lines.cut >= 0:
            single[lines.cut] = lines.is_row[lines.cut]
            lines.is_companion[lines.cut] = lines.has_timers[lines.cut] = False
        alike = np.flatnonzero(lines.is_row & ~single)
        are_open = not self._last_keys and lines.are_open()
        groups, left = read_groups(lines.chosen(alike), alike, are_open=are_open)
        left = np.concatenate([left, *(group.lines for group in groups if may_be_cut(group.keys))])
        groups = [group for group in groups if not may_be_cut(group.keys)]
        alike = np.flatnonzero(lines.has_timers)
        timers, _ = read_timers(lines.chosen(alike), alike)
        found = _Found(groups, timers, are_open=are_open)
        timed = np.sort(np.concatenate([np.empty(0, np.int64), *(group.lines for group in timers)]))
        lines.is_companion[timed] = False
        left = np.concatenate([left, np.flatnonzero(single | lines.is_companion)])
        used = self._read_one_by_one(lines, np.sort(left), timed, found)
        self._faults.passed_over += lines.others() - len(timed) - used
        return found

    def _read_one_by_one(self, lines: ChunkLines, left: Integers, timed: Integers, found: _Found) -> int:
        """Parse one by one the lines that the column parser could not parse; `left` has their line numbers.

        Return how many further lines were continuations of wrapped rows.
        """
        opening = sorted(found.groups, key=lambda group: -int(group.lines[0]))
        rows = np.flatnonzero(lines.is_row)
        rows_before = timers_before = 0
        used: set[int] = set()
        for line in [*left.tolist(), len(lines)]:
            while opening and opening[-1].lines[0] < line:
                self._learn(opening.pop().keys, is_closed=not found.are_open)
            if line in used:
                continue
            if line < len(lines) and lines.is_row[line]:
                used |= self._read_row(lines, line, found)
                continue
            # Rows and timers that were parsed in columns change the state of the companions, too.
            earlier_rows, rows_before = rows_before, int(np.searchsorted(rows, line))
            earlier_timers, timers_before = timers_before, int(np.searchsorted(timed, line))
            if rows_before > earlier_rows:
                self._companions.row_seen()
            if timers_before > earlier_timers:
                self._companions.timers_seen()
            if line < len(lines):
                companions, is_known = self._companions.read(clean(lines.text(line)))
                found.companions += [(line * _PLACES + i, item) for i, item in enumerate(companions[:_PLACES])]
                self._faults.passed_over += not is_known
        return len(used)

    def _read_row(self, lines: ChunkLines, line: int, found: _Found) -> set[int]:
        """Parse the rows on one line of the log; return the line numbers of the lines that continue a wrapped row."""
        text = clean(lines.text(line))
        rows = [row for piece in text.rstrip("\r\n").split("\r") for row in parse_rows(piece)]
        used = 0
        if rows:
            joined, used = joined_row(text, lambda after: lines.continuation(line + after))
            rows = joined or rows
        for position, row in enumerate(rows[:_PLACES]):
            if not self._is_whole(row, is_end=position == len(rows) - 1, is_torn=line == lines.cut):
                self._fault(line, f"incomplete row: {shown(text.encode())}")
                continue
            if row.odd_parts:
                self._fault(line, f"part of the row is unreadable: {shown(text.encode())}")
            self._learn(row.keys, is_closed=row.is_closed)
            found.rows.append((line * _PLACES + position, row))
        return set(range(line + 1, line + 1 + used))

    def _learn(self, keys: tuple[str, ...], *, is_closed: bool) -> None:
        """Remember the keys of a complete row; later rows are compared with them to find incomplete rows."""
        if is_closed:
            self._last_keys.add(fold(keys[-1]))
        if len(self._whole_keys) < _REMEMBERED_KEYS and main_loss(keys) is not None:
            self._whole_keys[keys] = None

    def _is_whole(self, row: Row, *, is_end: bool, is_torn: bool) -> bool:
        """Return whether a row of a Megatron log is complete, as far as this can be derived from the log.

        A complete row ends with a bar (`|`), except in dialects that print no bar at the end. The last line of a log
        may be incomplete even with a bar at its end. Such a line counts as complete only if its last key is one with
        which earlier rows end, or one that is known as the last key of Megatron's rows.
        """
        if not row.parts or is_cut(row.keys, self._whole_keys):
            return False
        if is_torn:
            return row.is_closed and fold(row.parts[-1][0]) in self._last_keys | _LAST_KEYS
        return row.is_closed or (is_end and row.is_whole and not self._last_keys)

    def _assemble(self, found: _Found) -> ImportedBlock | None:
        rows = RowColumns.of(found.groups, found.rows, _PLACES, self._printers)
        order = np.argsort(rows.places, kind="stable")
        attempts = np.empty(len(order), np.int64)
        attempts[order] = self._attempts.attempts(rows.printers[order], rows.steps[order], rows.losses[order])
        known = rows.places[order], rows.steps[order], attempts[order], rows.times[order]
        timed = np.concatenate([np.empty(0, np.int64), *(group.lines * _PLACES for group in found.timers)])
        timer_steps, timer_attempts, _ = self._before(timed, *known)
        placed = self._place(found.companions, *known)
        places = np.concatenate([rows.places, timed, [item.place for item in placed]]).astype(np.int64)
        if not len(places):
            return None
        positions = np.empty(len(places), np.int64)
        positions[np.argsort(places, kind="stable")] = np.arange(len(places))
        companions = [item.companion for item in placed]
        ranks = [_or(item.rank, NO_NUMBER) for item in companions]
        chunk = Chunk.of(
            positions,
            steps=_joined(rows.steps, timer_steps, [item.step for item in placed]),
            attempts=_joined(attempts, timer_attempts, [item.attempt for item in placed]),
            ranks=_joined(self._printers.ranks(rows.printers, rows.steps), np.full(len(timed), NO_NUMBER), ranks),
            times=_joined(rows.times, np.full(len(timed), NO_TIME), [item.time for item in placed]),
        )
        self._fill(chunk, found, positions, companions)
        if len(order):
            last = order[-1]
            self._last = [int(rows.steps[last]), int(attempts[last]), int(rows.times[last])]
            self._planned = int(rows.planned[last])
        return chunk.block()

    def _fill(self, chunk: Chunk, found: _Found, positions: Integers, companions: Sequence[Companion]) -> None:
        start = 0
        for group in found.groups:
            chunk.add_group(group, positions[start : start + len(group.lines)])
            start += len(group.lines)
        for _, row in found.rows:
            chunk.add_row(row, int(positions[start]))
            start += 1
        for alike in found.timers:
            chunk.add_timers(alike, positions[start : start + len(alike.lines)])
            start += len(alike.lines)
        for companion in companions:
            chunk.add_companion(companion, int(positions[start]))
            start += 1

    def _before(self, wanted: Integers, places: Integers, *columns: Integers) -> list[Integers]:
        """Return, for each place in `wanted`, the step, the attempt and the time of the last row before it in the log.

        A place is a sort key: the line number and the index of the record within the line. `places` and `columns` have
        one value per row.
        """
        rows = np.searchsorted(places, wanted)
        return [np.append(last, column)[rows] for last, column in zip(self._last, columns, strict=True)]

    def _place(self, companions: Sequence[tuple[int, Companion]], *known: Integers) -> list[_Placed]:
        """Return the companion lines (lines between the rows) with their steps and attempts, without repetitions.

        A companion line that contains no step gets the step of the row before it, and an event without a time its time.
        A line of the start of a process belongs to the attempt that begins with it.
        """
        placed = []
        wanted = np.array([place for place, _ in companions], np.int64)
        before = [column.tolist() for column in self._before(wanted, *known)]
        after = np.append(known[2], -1)[np.searchsorted(known[0], wanted)].tolist()  # attempt of the row behind
        for (place, companion), last, own, time, later in zip(companions, *before, after, strict=True):
            step, attempt = _or(companion.step, last), own
            if companion.once and companion.once[0] == "start" and (later > own or (later < 0 and step < last)):
                step, attempt = _or(companion.step, NO_NUMBER), max(later, own + 1)
            if companion.once is not None and not self._is_first((companion.once, step, attempt)):
                continue
            if companion.scalars or companion.events:
                ts = _or(companion.ts, time if companion.events else NO_TIME)
                placed.append(_Placed(place, companion, step, attempt, ts))
        return placed

    def _is_first(self, key: Hashable) -> bool:
        if key in self._once:
            return False
        self._once[key] = None
        if len(self._once) > _REMEMBERED:
            self._once.pop(next(iter(self._once)))
        return True


def _joined(first: Integers, second: Integers, more: Sequence[int]) -> Integers:
    return np.concatenate([first, second, np.array(more, np.int64)])


def _or(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


IMPORTER = MegatronText()
