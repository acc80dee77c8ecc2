"""Which collective belongs to which step, and which were overwritten before they were read. Pure: entries to rows.

An entry belongs to the step that began last before it was made. It becomes a row when this rank is through with it, or
when nothing more will be known of it; until then, and until its step has ended, it is held.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rankscope_exporter.monitors.flight_recorder.entry import Entry
from rankscope_exporter.monitors.flight_recorder.torch_api import Raw

MOST_STEPS: Final = 16_384
"""Beginnings of steps that are remembered, the latest: what is older was overwritten, where steps have collectives."""

_AT_THE_END: Final = 1 << 62


@dataclass(slots=True)
class AssignedEntries:
    """What one reading brought."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    overwritten: int = 0


@dataclass(slots=True)
class _Held:
    """An entry without a row. `call_seq` counts all collectives of the step, and is known with the step."""

    entry: Entry
    has_step: bool = False
    step: int | None = None
    call_seq: int | None = None
    is_kept: bool = True  # torch still has it
    is_behind_hole: bool = False  # those just before it were overwritten


class StepAssignment:
    """Follows the recorders of one process, each by its name, through readings of the whole record."""

    def __init__(self, after: Mapping[str, int] | None = None) -> None:
        """Begin behind the entry that `after` names for a recorder, else with the first there was."""
        self._begins: deque[tuple[int, int | None]] = deque(maxlen=MOST_STEPS)
        self._ended_us = 0
        self.last_id: dict[str, int] = dict(after or {})
        self._held: dict[tuple[str, int], _Held] = {}
        self._counts: dict[int | None, int] = {}
        self._in_part: set[int | None] = set()  # steps whose calls cannot be counted, since some were overwritten

    def step_ended(self, step: int | None, began_us: int, ended_us: int) -> None:
        """Note a step; in order, and before a reading that is to have its entries."""
        self._begins.append((began_us, step))
        self._ended_us = max(self._ended_us, ended_us)

    def take(
        self, readings: Mapping[str, Sequence[Raw]], ranks: Mapping[str, tuple[int, ...]], *, is_last: bool = False
    ) -> AssignedEntries:
        """Return the rows that are whole now, in the order of the calls; `readings` are sorted by `record_id`."""
        taken = AssignedEntries()
        for recorder, raws in readings.items():
            taken.overwritten += self._read(recorder, raws, ranks)
        until = _AT_THE_END if is_last else self._ended_us
        begins = list(self._begins)
        for held in self._in_order(until):
            if not held.has_step:
                self._place(held, begins)
        done = [
            (key, held)
            for key, held in self._held.items()
            if held.has_step and (held.entry.is_over or not held.is_kept or is_last)
        ]
        for key, _ in done:
            del self._held[key]
        rows = sorted((held for _, held in done), key=lambda held: (held.entry.created_us, held.entry.record_id))
        taken.rows = [held.entry.row(held.step, held.call_seq, is_kept=held.is_kept) for held in rows]
        self._forget_counts()
        return taken

    def _read(self, recorder: str, raws: Sequence[Raw], ranks: Mapping[str, tuple[int, ...]]) -> int:
        """Take in what is new, and what has changed of what is held; return how many entries were missed."""
        last = self.last_id.get(recorder, -1)
        if raws and int(raws[-1]["record_id"]) < last:
            self._begin_anew(recorder)
            last = -1
        for key, held in self._held.items():
            held.is_kept = held.is_kept and key[0] != recorder
        missed = 0
        for raw in raws:
            number = int(raw["record_id"])
            if number > last:
                self._held[recorder, number] = _Held(Entry.of(raw, ranks), is_behind_hole=number > last + 1)
                missed += number - last - 1
                last = number
            elif (known := self._held.get((recorder, number))) is not None:
                known.entry, known.is_kept = known.entry.later(raw), True
        self.last_id[recorder] = last
        return missed

    def _begin_anew(self, recorder: str) -> None:
        """Torch counts from 0 again: what is held of before gets numbers of its own."""
        for key in [key for key in self._held if key[0] == recorder and key[1] >= 0]:
            self._held[recorder, -1 - key[1]] = self._held.pop(key)

    def _in_order(self, until: int) -> Iterator[_Held]:
        found = [held for held in self._held.values() if held.entry.created_us < until]
        yield from sorted(found, key=lambda held: (held.entry.created_us, held.entry.record_id))

    def _place(self, held: _Held, begins: Sequence[tuple[int, int | None]]) -> None:
        position = bisect.bisect_right(begins, held.entry.created_us, key=lambda begin: begin[0]) - 1
        step = held.step = None if position < 0 else begins[position][1]
        held.has_step = True
        if held.is_behind_hole:
            self._in_part.add(step)
        if step not in self._in_part:
            held.call_seq = self._counts.get(step, 0)
            self._counts[step] = held.call_seq + 1

    def _forget_counts(self) -> None:
        """Keep what the last step has counted: its calls may go on behind its end."""
        last = self._begins[-1][1] if self._begins else None
        self._counts = {step: count for step, count in self._counts.items() if step == last}
        self._in_part &= {last}
