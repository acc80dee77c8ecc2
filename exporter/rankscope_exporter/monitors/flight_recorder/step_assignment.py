"""Assigns entries of the flight record to steps, and counts entries that torch overwrote before they were read. No I/O.

An entry belongs to the last step that began before the entry was created. It becomes a row of the dataset `collectives`
when its step has ended and its collective is finished on this rank, or when torch has overwritten the entry.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rankscope_exporter.monitors.flight_recorder.entry import Entry
from rankscope_exporter.monitors.flight_recorder.torch_api import Raw

MOST_STEPS: Final = 16_384
"""Number of recent steps with a stored start time. torch has overwritten the entries of older steps."""

_AT_THE_END: Final = 1 << 62


@dataclass(slots=True)
class AssignedEntries:
    """Result of one reading of the flight record.

    It has complete rows of the dataset `collectives`, and the number of entries that torch overwrote before they were
    read.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    overwritten: int = 0


@dataclass(slots=True)
class _Held:
    """An entry of the flight record that is not a row of the dataset `collectives` yet.

    `call_seq` is the position of the entry among all collectives of its step.
    """

    entry: Entry
    has_step: bool = False
    step: int | None = None
    call_seq: int | None = None
    is_kept: bool = True  # torch has not overwritten it
    is_behind_gap: bool = False  # the entries just before it were overwritten


class StepAssignment:
    """Assigns the entries of repeated readings to steps.

    Each reading contains the complete record of each recorder of this process.
    """

    def __init__(self, after: Mapping[str, int] | None = None) -> None:
        """`after` maps the name of each flight recorder to the `record_id` of the last entry that was already read.

        By default, no entry was read before.
        """
        self._begins: deque[tuple[int, int | None]] = deque(maxlen=MOST_STEPS)
        self._ended_us = 0
        self.last_id: dict[str, int] = dict(after or {})
        self._held: dict[tuple[str, int], _Held] = {}
        self._counts: dict[int | None, int] = {}
        self._incomplete: set[int | None] = set()  # steps without `call_seq`: some entries were overwritten

    def step_ended(self, step: int | None, began_us: int, ended_us: int) -> None:
        """Store the start and the end of a step.

        Call this method in the order of the steps, and before entries of the step are passed to the method `take`.
        """
        self._begins.append((began_us, step))
        self._ended_us = max(self._ended_us, ended_us)

    def take(
        self, readings: Mapping[str, Sequence[Raw]], ranks: Mapping[str, tuple[int, ...]], *, is_last: bool = False
    ) -> AssignedEntries:
        """Return the rows of the dataset `collectives` that are complete, in the order of the collectives.

        The entries in `readings` are sorted by `record_id`.
        """
        taken = AssignedEntries()
        for recorder, raws in readings.items():
            taken.overwritten += self._read(recorder, raws, ranks)
        until = _AT_THE_END if is_last else self._ended_us
        begins = list(self._begins)
        found = [held for held in self._held.values() if held.entry.created_us < until and not held.has_step]
        for held in sorted(found, key=_order):
            self._assign(held, begins)
        done = [
            (key, held)
            for key, held in self._held.items()
            if held.has_step and (held.entry.is_over or not held.is_kept or is_last)
        ]
        for key, _ in done:
            del self._held[key]
        rows = sorted((held for _, held in done), key=_order)
        taken.rows = [held.entry.row(held.step, held.call_seq, is_kept=held.is_kept) for held in rows]
        # Counts of the last step are kept, because it may have calls after its end.
        last = self._begins[-1][1] if self._begins else None
        self._counts = {step: count for step, count in self._counts.items() if step == last}
        self._incomplete &= {last}
        return taken

    def _read(self, recorder: str, raws: Sequence[Raw], ranks: Mapping[str, tuple[int, ...]]) -> int:
        """Store the new entries in `raws`, and update the stored entries that are not rows yet.

        Return the number of entries that torch overwrote before they were read.
        """
        last = self.last_id.get(recorder, -1)
        if raws and int(raws[-1]["record_id"]) < last:
            self._renumber(recorder)
            last = -1
        for key, held in self._held.items():
            held.is_kept = held.is_kept and key[0] != recorder
        missed = 0
        for raw in raws:
            number = int(raw["record_id"])
            if number > last:
                self._held[recorder, number] = _Held(Entry.of(raw, ranks), is_behind_gap=number > last + 1)
                missed += number - last - 1
                last = number
            elif (known := self._held.get((recorder, number))) is not None:
                known.entry, known.is_kept = known.entry.updated(raw), True
        self.last_id[recorder] = last
        return missed

    def _renumber(self, recorder: str) -> None:
        """Give stored entries of `recorder` negative numbers: it has restarted and counts entries from 0 again."""
        for key in [key for key in self._held if key[0] == recorder and key[1] >= 0]:
            self._held[recorder, -1 - key[1]] = self._held.pop(key)

    def _assign(self, held: _Held, begins: Sequence[tuple[int, int | None]]) -> None:
        position = bisect.bisect_right(begins, held.entry.created_us, key=lambda begin: begin[0]) - 1
        step = held.step = None if position < 0 else begins[position][1]
        held.has_step = True
        if held.is_behind_gap:
            self._incomplete.add(step)
        if step not in self._incomplete:
            held.call_seq = self._counts.get(step, 0)
            self._counts[step] = held.call_seq + 1


def _order(held: _Held) -> tuple[int, int]:
    return held.entry.created_us, held.entry.record_id
