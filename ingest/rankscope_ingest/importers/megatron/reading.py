"""Walks a Megatron log, a stretch at a time: what must be remembered from one stretch to the next lives here.

Whatever is decided about a line may depend on the lines before it and on the few behind it that may continue it, on
nothing else: a log that has grown must give the same records first.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from rankscope_contract.events import RunState
from rankscope_ingest.importers.attempts import AttemptCounter
from rankscope_ingest.importers.base import Faults, ImportedBlock, ImportedRun
from rankscope_ingest.importers.lines import MAX_LINE_BYTES, shown
from rankscope_ingest.importers.megatron.assembly import RowColumns, Stretch
from rankscope_ingest.importers.megatron.columns import (
    NO_NUMBER,
    NO_TIME,
    Group,
    Integers,
    read_groups,
)
from rankscope_ingest.importers.megatron.companions import Companion, Companions
from rankscope_ingest.importers.megatron.joining import joined_row
from rankscope_ingest.importers.megatron.keys import fold
from rankscope_ingest.importers.megatron.printers import Printers
from rankscope_ingest.importers.megatron.rows import Row, clean, parse_rows
from rankscope_ingest.importers.megatron.stretches import Lines

_PLACES: Final = 64
"""Records in one line at most: place = line x _PLACES + record within the line, and gives the order of the log."""

_REMEMBERED: Final = 4096
_LAST_KEYS: Final = frozenset({"number_of_nan_iterations", "tflops"})


@dataclass(slots=True)
class _Found:
    """Rows and companions of a stretch, with their places."""

    groups: list[Group]
    rows: list[tuple[int, Row]] = field(default_factory=list)
    companions: list[tuple[int, Companion]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A companion with the step and attempt it belongs to."""

    place: int
    companion: Companion
    step: int
    attempt: int


class Reading:
    """Reads one log. `take` gets it stretch by stretch, each with whole lines only, except at the very end."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._companions = Companions()
        self._attempts = AttemptCounter()
        self._printers = Printers()
        self._last_keys: set[str] = set()  # of the rows that ended with a bar
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
        alike = np.flatnonzero(lines.is_row & ~single)
        groups, careful = read_groups(lines.rows(alike), alike)
        careful = np.concatenate([careful, np.flatnonzero(single)])
        opening = sorted(groups, key=lambda group: -int(group.lines[0]))
        rows = np.flatnonzero(lines.is_row)
        found = _Found(groups)
        used: set[int] = set()
        seen = -1
        for line in np.sort(np.concatenate([careful, np.flatnonzero(lines.is_companion)])).tolist():
            while opening and opening[-1].lines[0] < line:
                self._last_keys.add(fold(opening.pop().keys[-1]))
            if line in used or (line == lines.cut and not lines.is_row[line]):
                continue
            if lines.is_row[line]:
                used |= self._read_row(lines, line, found)
                continue
            row = int(np.searchsorted(rows, line)) - 1
            if row > seen:
                self._companions.row_seen()
                seen = row
            self._read_companion(lines, line, found)
        if len(rows) - 1 > seen:
            self._companions.row_seen()
        self._last_keys.update(fold(group.keys[-1]) for group in opening)
        self._faults.passed_over += lines.others() - len(used)
        return found

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
            if row.is_closed:
                self._last_keys.add(fold(row.parts[-1][0]))
            found.rows.append((line * _PLACES + position, row))
        return set(range(line + 1, line + 1 + used))

    def _is_whole(self, row: Row, *, is_end: bool, is_cut: bool) -> bool:
        """Return whether nothing of a row is missing, as far as one can tell.

        A row ends with a bar, except in dialects that never set one. The last line of a log may still be written: a
        bar at its end is the end of the row if other rows end with the same key.
        """
        if not row.parts:
            return False
        if is_cut:
            return row.is_closed and fold(row.parts[-1][0]) in self._last_keys | _LAST_KEYS
        return row.is_closed or (is_end and row.is_whole and not self._last_keys)

    def _assemble(self, found: _Found) -> ImportedBlock | None:
        rows = RowColumns.of(found.groups, found.rows, _PLACES, self._printers)
        order = np.argsort(rows.places, kind="stable")
        attempts = np.empty(len(order), np.int64)
        attempts[order] = self._attempts.attempts(rows.printers[order], rows.steps[order], rows.losses[order])
        said = self._place(found.companions, rows.places[order], rows.steps[order], attempts[order])
        if not len(order) and not said:
            return None
        companions = [one.companion for one in said]
        places = _with(rows.places, [one.place for one in said])
        positions = np.empty(len(places), np.int64)
        positions[np.argsort(places, kind="stable")] = np.arange(len(places))
        stretch = Stretch.of(
            positions,
            steps=_with(rows.steps, [one.step for one in said]),
            attempts=_with(attempts, [one.attempt for one in said]),
            ranks=_with(
                self._printers.ranks(rows.printers, rows.steps), [_or(one.rank, NO_NUMBER) for one in companions]
            ),
            times=_with(rows.times, [_or(one.ts, NO_TIME) for one in companions]),
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
        for companion in companions:
            stretch.add_companion(companion, int(positions[start]))
            start += 1

    def _place(
        self, companions: Sequence[tuple[int, Companion]], places: Integers, steps: Integers, attempts: Integers
    ) -> list[_Placed]:
        """Return the companions that say something new, each with the step of the row before it unless it has one."""
        placed = []
        before = np.searchsorted(places, [place for place, _ in companions]) - 1
        for (place, companion), row in zip(companions, before.tolist(), strict=True):
            step, attempt = self._step, self._attempt
            if row >= 0:
                step, attempt = int(steps[row]), int(attempts[row])
            step = _or(companion.step, step)
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


def _with(array: Integers, more: Sequence[int]) -> Integers:
    return np.concatenate([array, np.array(more, np.int64)])


def _or(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value
