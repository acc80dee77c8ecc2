"""Walks a Megatron log, a stretch at a time: what must be remembered from one stretch to the next lives here.

Whatever is decided about a line may depend on the lines before it and on the few behind it that may continue it, on
nothing else: a log that has grown must give the same records first.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from rankscope_contract.model.events import RunState
from rankscope_ingest.importers.common.importer import Faults, ImportedBlock, ImportedRun
from rankscope_ingest.importers.common.lines import MAX_LINE_BYTES, shown
from rankscope_ingest.importers.common.restarts import AttemptCounter
from rankscope_ingest.importers.megatron.block import RowColumns, Stretch
from rankscope_ingest.importers.megatron.chunks import Lines, joined_row
from rankscope_ingest.importers.megatron.columns import Alike, Integers
from rankscope_ingest.importers.megatron.groups import NO_NUMBER, NO_TIME, Group, Printers, read_groups, read_timers
from rankscope_ingest.importers.megatron.keys import breaks_off, fold, main_loss, may_break_off
from rankscope_ingest.importers.megatron.other_lines import Companion, Companions
from rankscope_ingest.importers.megatron.rows import Row, clean, parse_rows

_PLACES: Final = 64
"""Records in one line at most: place = line x _PLACES + record within the line, and gives the order of the log."""

_REMEMBERED: Final = 4096
_REMEMBERED_KEYS: Final = 64
_LAST_KEYS: Final = frozenset({"number_of_nan_iterations", "tflops"})


@dataclass(slots=True)
class _Found:
    """Rows and companions of a stretch; those that were read one by one with their places."""

    groups: list[Group]
    timers: list[Alike]
    are_open: bool
    rows: list[tuple[int, Row]] = field(default_factory=list)
    companions: list[tuple[int, Companion]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A companion with the step and attempt it belongs to."""

    place: int
    companion: Companion
    step: int
    attempt: int


class _Seen:
    """Follows lines that were read in columns while others are read one by one."""

    def __init__(self, lines: Integers) -> None:
        self._lines = lines
        self._passed = 0

    def passed(self, line: int) -> bool:
        """Return whether there are some before `line` that were not before the line asked for last."""
        before = int(np.searchsorted(self._lines, line))
        moved, self._passed = before > self._passed, before
        return moved


class Reading:
    """Reads one log. `take` gets it stretch by stretch, each with whole lines only, except at the very end."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._companions = Companions()
        self._attempts = AttemptCounter()
        self._printers = Printers()
        self._last_keys: set[str] = set()  # of the rows that ended with a bar
        self._whole_keys: dict[tuple[str, ...], None] = {}  # of the rows with a loss
        self._once: dict[Hashable, None] = {}
        self._line = 0  # lines of earlier stretches
        self._step = NO_NUMBER
        self._attempt = 0
        self._planned = 0

    def take(self, data: bytes, *, is_last: bool) -> tuple[ImportedBlock | None, int]:
        """Read `data`; return what it says, and how many of its bytes were used: a wrapped row waits for its rest."""
        lines = Lines.of(data, is_end=is_last)
        if not is_last:
            lines = lines.first(lines.settled())
        if not len(lines):
            return None, 0
        for line in np.flatnonzero(lines.too_long).tolist():
            self._fault(line, f"longer than {MAX_LINE_BYTES:,} bytes: {shown(lines.raw(line))}…")
        block = self._assemble(self._read(lines))
        self._line += len(lines)
        return block, int(lines.lengths.sum())

    def run(self) -> ImportedRun:
        """Return what the log says of the run."""
        learnt = self._companions.facts()
        planned = self._planned or learnt.planned_steps
        state, reason = self._companions.ending or (None, None)
        if state is None and planned and self._step >= planned:
            state, reason = RunState.COMPLETED, "the last iteration was reached"
        return ImportedRun(
            state=state, reason=reason, planned_steps=planned, world_size=learnt.world_size, config=learnt.config
        )

    def _fault(self, line: int, text: str) -> None:
        self._faults.add(self._line + line + 1, text)

    def _read(self, lines: Lines) -> _Found:
        single = lines.may_go_on()
        if lines.cut >= 0:
            single[lines.cut] = lines.is_row[lines.cut]
            lines.is_companion[lines.cut] = lines.has_timers[lines.cut] = False
        alike = np.flatnonzero(lines.is_row & ~single)
        are_open = not self._last_keys and lines.are_open()
        groups, careful = read_groups(lines.chosen(alike), alike, are_open=are_open)
        careful = np.concatenate([careful, *(group.lines for group in groups if may_break_off(group.keys))])
        groups = [group for group in groups if not may_break_off(group.keys)]
        alike = np.flatnonzero(lines.has_timers)
        timers, _ = read_timers(lines.chosen(alike), alike)
        found = _Found(groups, timers, are_open=are_open)
        timed = np.sort(np.concatenate([np.empty(0, np.int64), *(one.lines for one in timers)]))
        lines.is_companion[timed] = False
        careful = np.concatenate([careful, np.flatnonzero(single | lines.is_companion)])
        used = self._read_one_by_one(lines, np.sort(careful), timed, found)
        self._faults.passed_over += lines.others() - len(timed) - used
        return found

    def _read_one_by_one(self, lines: Lines, careful: Integers, timed: Integers, found: _Found) -> int:
        """Read lines in their order; return how many lines behind them were parts of rows."""
        opening = sorted(found.groups, key=lambda group: -int(group.lines[0]))
        rows, timers = _Seen(np.flatnonzero(lines.is_row)), _Seen(timed)
        used: set[int] = set()
        for line in [*careful.tolist(), len(lines)]:
            while opening and opening[-1].lines[0] < line:
                self._learn(opening.pop().keys, is_closed=not found.are_open)
            if line in used:
                continue
            is_row = line < len(lines) and lines.is_row[line]
            if is_row:
                used |= self._read_row(lines, line, found)
                continue
            if rows.passed(line):
                self._companions.row_seen()
            if timers.passed(line):
                self._companions.timers_seen()
            if line < len(lines):
                self._read_companion(lines, line, found)
        return len(used)

    def _read_companion(self, lines: Lines, line: int, found: _Found) -> None:
        said, is_ours = self._companions.read(clean(lines.text(line)))
        found.companions += [(line * _PLACES + i, one) for i, one in enumerate(said[:_PLACES])]
        self._faults.passed_over += not is_ours

    def _read_row(self, lines: Lines, line: int, found: _Found) -> set[int]:
        """Read the rows of a line one by one; return the lines behind it that belong to them."""
        text = clean(lines.text(line))
        rows = [row for piece in text.rstrip("\r\n").split("\r") for row in parse_rows(piece)]
        used = 0
        if rows:
            joined, used = joined_row(text, lambda behind: lines.continuation(line + behind))
            rows = joined or rows
        for position, row in enumerate(rows[:_PLACES]):
            if not self._is_whole(row, is_end=position == len(rows) - 1, is_cut=line == lines.cut):
                self._fault(line, f"a row that breaks off: {shown(text.encode())}")
                continue
            if row.odd_parts:
                self._fault(line, f"part of the row makes no sense: {shown(text.encode())}")
            self._learn(row.keys, is_closed=row.is_closed)
            found.rows.append((line * _PLACES + position, row))
        return set(range(line + 1, line + 1 + used))

    def _learn(self, keys: tuple[str, ...], *, is_closed: bool) -> None:
        """Remember how a whole row looks."""
        if is_closed:
            self._last_keys.add(fold(keys[-1]))
        if len(self._whole_keys) < _REMEMBERED_KEYS and main_loss(keys) is not None:
            self._whole_keys[keys] = None

    def _is_whole(self, row: Row, *, is_end: bool, is_cut: bool) -> bool:
        """Return whether nothing of a row is missing, as far as one can tell.

        A row ends with a bar, except in dialects that never set one. The last line of a log may still be written: a
        bar at its end is the end of the row if other rows end with the same key.
        """
        if not row.parts or breaks_off(row.keys, self._whole_keys):
            return False
        if is_cut:
            return row.is_closed and fold(row.parts[-1][0]) in self._last_keys | _LAST_KEYS
        return row.is_closed or (is_end and row.is_whole and not self._last_keys)

    def _assemble(self, found: _Found) -> ImportedBlock | None:
        rows = RowColumns.of(found.groups, found.rows, _PLACES, self._printers)
        order = np.argsort(rows.places, kind="stable")
        attempts = np.empty(len(order), np.int64)
        attempts[order] = self._attempts.attempts(rows.printers[order], rows.steps[order], rows.losses[order])
        known = rows.places[order], rows.steps[order], attempts[order]
        timed = np.concatenate([np.empty(0, np.int64), *(one.lines * _PLACES for one in found.timers)])
        steps, own_attempts = self._before(timed, *known)
        said = self._place(found.companions, *known)
        places = np.concatenate([rows.places, timed, [one.place for one in said]]).astype(np.int64)
        if not len(places):
            return None
        positions = np.empty(len(places), np.int64)
        positions[np.argsort(places, kind="stable")] = np.arange(len(places))
        companions = [one.companion for one in said]
        ranks = [_or(one.rank, NO_NUMBER) for one in companions]
        times = [_or(one.ts, NO_TIME) for one in companions]
        stretch = Stretch.of(
            positions,
            steps=_joined(rows.steps, steps, [one.step for one in said]),
            attempts=_joined(attempts, own_attempts, [one.attempt for one in said]),
            ranks=_joined(self._printers.ranks(rows.printers, rows.steps), np.full(len(timed), NO_NUMBER), ranks),
            times=_joined(rows.times, np.full(len(timed), NO_TIME), times),
        )
        self._fill(stretch, found, positions, companions)
        if len(order):
            last = order[-1]
            self._step, self._attempt = int(rows.steps[last]), int(attempts[last])
            self._planned = int(rows.planned[last])
        return stretch.block()

    def _fill(self, stretch: Stretch, found: _Found, positions: Integers, companions: Sequence[Companion]) -> None:
        start = 0
        for group in found.groups:
            stretch.add_group(group, positions[start : start + len(group.lines)])
            start += len(group.lines)
        for _, row in found.rows:
            stretch.add_row(row, int(positions[start]))
            start += 1
        for alike in found.timers:
            stretch.add_timers(alike, positions[start : start + len(alike.lines)])
            start += len(alike.lines)
        for companion in companions:
            stretch.add_companion(companion, int(positions[start]))
            start += 1

    def _before(
        self, wanted: Integers, places: Integers, steps: Integers, attempts: Integers
    ) -> tuple[Integers, Integers]:
        """Return step and attempt of the row before each of the wanted places."""
        rows = np.searchsorted(places, wanted)
        return np.append(self._step, steps)[rows], np.append(self._attempt, attempts)[rows]

    def _place(
        self, companions: Sequence[tuple[int, Companion]], places: Integers, steps: Integers, attempts: Integers
    ) -> list[_Placed]:
        """Return the companions that say something new, each with the step of the row before it unless it has one."""
        placed = []
        wanted = np.array([place for place, _ in companions], np.int64)
        before = zip(*(one.tolist() for one in self._before(wanted, places, steps, attempts)), strict=True)
        for (place, companion), (last, attempt) in zip(companions, before, strict=True):
            step = _or(companion.step, last)
            if companion.once is not None and not self._is_first((companion.once, step, attempt)):
                continue
            if companion.scalars or companion.events:
                placed.append(_Placed(place, companion, step, attempt))
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
