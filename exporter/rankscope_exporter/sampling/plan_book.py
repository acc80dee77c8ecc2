"""The plan of a rank while it grows: entries in the order in which they were first needed.

Parameters are known when the monitor is attached; activations only once a module has run. An entry never moves and
never leaves, so a position means the same in every table, and a plan is told by its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rankscope_contract.records import Plan, PlanEntry
from rankscope_exporter.record import NamedPlan
from rankscope_exporter.sampling.ops import EVERY_OP, Ops

MAX_ENTRIES: Final = 200_000
"""64 bytes each in every table; a model that makes up names without end must not fill the memory."""


class PlanBook:
    """Grows on the training thread; the publisher may ask for a plan of any length that has been."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self.entries: list[PlanEntry] = []
        self.owners: list[int] = []
        """By entry: the position of the parameter it belongs to, -1 for none."""
        self.ops: list[Ops] = []
        """By entry: which statistics leave the rank. What stands there stays as it is, so that a step that waits for
        the publisher keeps its own: another choice is another list."""
        self.left_out = 0  # entries that found the book full
        self._max_entries = max_entries
        self._released: dict[tuple[PlanEntry, ...], range] = {}
        self._named: NamedPlan | None = None

    def __len__(self) -> int:
        return len(self.entries)

    def add(
        self, entries: Sequence[PlanEntry], owners: Sequence[int] | None = None, ops: Ops = EVERY_OP
    ) -> range | None:
        """Append `entries` and return their positions; None, and counted, when they do not fit any more.

        Where the same ones stand already, and whoever added them has released them, these are returned.
        """
        released = self._released.pop(tuple(entries), None) if self._released else None
        if released is not None:
            self.publish(released, ops)
            return released
        first = len(self.entries)
        if first + len(entries) > self._max_entries:
            self.left_out += len(entries)
            return None
        self.owners += [-1] * len(entries) if owners is None else owners
        self.ops += [ops] * len(entries)
        self.entries += entries
        return range(first, first + len(entries))

    def release(self, rows: range) -> None:
        """Let the entries of one `add` be filled by whoever adds the same ones again."""
        if rows:
            self._released[tuple(self.entries[rows.start : rows.stop])] = rows

    def reclaim(self, rows: range) -> None:
        """Let the entries of one `add`, which were released, be filled by whoever added them, and nobody else."""
        if rows:
            self._released.pop(tuple(self.entries[rows.start : rows.stop]), None)

    def publish(self, rows: range, ops: Ops) -> None:
        """Have the statistics `ops` of the entries `rows` leave the rank from now on."""
        if any(choice != ops for choice in self.ops[rows.start : rows.stop]):
            self.ops = [*self.ops[: rows.start], *[ops] * len(rows), *self.ops[rows.stop :]]

    def plan(self, length: int) -> NamedPlan:
        """Return the plan of the first `length` entries; for the publisher, since naming one costs milliseconds."""
        if self._named is None or len(self._named.plan.entries) != length:
            self._named = NamedPlan.of(Plan(tuple(self.entries[:length])))
        return self._named
