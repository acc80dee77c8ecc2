"""The plan of a rank, and its versions.

The plan is the ordered list of entries to which the numbers of a record refer. The statistics table has the same
entries. Some entries are unknown at attach: the state of an optimizer appears with the first update, and the shapes of
activations are known after a module has run. An entry keeps its row of the statistics table. Entries that were added
after attach, and that are absent for many sampled steps, are dropped. A record refers to the version of the plan with
which it was measured, so that the numbers of earlier records keep their meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.records.plan_entries import ParameterEntries, Placed, PlanItem, PlanVersion, Spec, entry_at
from rankscope_exporter.statistics.selection import EVERY_OP, Ops

MAX_ENTRIES: Final = 200_000
"""Largest number of entries in a plan. It limits the memory of a script that creates new tensor names without end.

An entry needs 64 bytes in every statistics table.
"""


class PlanRegistry:
    """All entries of the plan of a rank, by table row. Only the training thread uses this object.

    A row that was dropped belongs to no entry of the plan until an entry is added.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._items: list[PlanItem] = []
        self._owners: list[int] = []
        self._ops: list[Ops] = []
        self.left_out = 0  # entries that did not fit
        self._max_entries = max_entries
        self._released: dict[tuple[tuple[Any, ...], ...], range] = {}
        self._abandoned: dict[range, int] = {}  # sampled steps since the quantity of these rows was removed
        self._dropped: set[int] = set()
        self._shared: set[int] = set()  # rows that a suspended quantity and the one in its place both have
        self._version: PlanVersion | None = None

    def __len__(self) -> int:
        return len(self._items) - len(self._dropped)

    @property
    def size(self) -> int:
        """The number of table rows, including those of entries that were dropped."""
        return len(self._items)

    def entry(self, row: int) -> PlanEntry:
        """Return the entry at table row `row`."""
        return entry_at(row, self._items[row])

    def specs(self, rows: range) -> Sequence[Spec | None]:
        """Return shape and dtype of the entries at `rows`, if they were added together and have not changed since.

        Otherwise, return None for each of them.
        """
        first = self._items[rows.start] if rows else None
        if not isinstance(first, Placed) or any(item is not first for item in self._items[rows.start : rows.stop]):
            return [None] * len(rows)
        return first.entries.specs(range(rows.start - first.first, rows.stop - first.first))

    def version(self) -> PlanVersion:
        """Return the present plan. The object is the same until the plan changes."""
        if self._version is None:
            rows: Sequence[int] = range(len(self._items))
            if self._dropped:
                rows = tuple(row for row in rows if row not in self._dropped)
            self._version = PlanVersion(
                rows,
                tuple(self._items[row] for row in rows),
                tuple(self._owners[row] for row in rows),
                tuple(self._ops[row] for row in rows),
            )
        return self._version

    def add(
        self, entries: Sequence[PlanEntry], owners: Sequence[int] | None = None, ops: Ops = EVERY_OP
    ) -> range | None:
        """Add `entries` and return their table rows.

        If the plan is full, count the entries as dropped and return None.

        If the same series exist and `release` was called for them, return their existing rows. `owners` has the
        position of the parameter of each entry, -1 for none. The rank publishes the statistics `ops` of the entries.
        """
        released = self._released.pop(tuple(entry.series for entry in entries), None) if self._released else None
        if released is not None:
            self._abandoned.pop(released, None)
            self._shared.update(released)
            self.publish(released, ops)
            return released
        if len(self) + len(entries) > self._max_entries:
            self.left_out += len(entries)
            return None
        first = self._dropped.pop() if self._dropped and len(entries) == 1 else len(self._items)
        rows = range(first, first + len(entries))
        owners = [-1] * len(entries) if owners is None else owners
        items = [Placed(entries, first)] * len(entries) if isinstance(entries, ParameterEntries) else entries
        self._items[first : rows.stop], self._owners[first : rows.stop] = items, owners
        self._ops[first : rows.stop] = [ops] * len(entries)
        self._version = None
        return rows

    def drop(self, rows: Iterable[int]) -> None:
        """Remove the entries at `rows` from the plan. Other entries get these table rows later.

        Entries for which `release` was called and which `add` has returned again remain until `reclaim`.
        """
        self._dropped.update(row for row in rows if row not in self._shared)
        while self._dropped and len(self._items) - 1 in self._dropped:
            self._dropped.discard(len(self._items) - 1)
            del self._items[-1], self._owners[-1], self._ops[-1]
        self._version = None

    def is_of_parameter(self, row: int) -> bool:
        """Return whether the entry at table row `row` belongs to a parameter."""
        return self._owners[row] >= 0

    def replace(self, row: int, entry: PlanEntry) -> None:
        """Replace the entry at table row `row` by `entry`, which has the same series."""
        self._items[row] = entry
        self._version = None

    def release(self, rows: range) -> None:
        """Allow the next call of `add` with the same series to return the existing rows `rows`.

        `rows` is the result of one earlier call of `add`.
        """
        if rows:
            self._released[self._series(rows)] = rows

    def reclaim(self, rows: range) -> None:
        """Keep the entries at `rows`, although `release` was called for them. One call of `add` has returned `rows`."""
        if rows:
            self._released.pop(self._series(rows), None)
            self._abandoned.pop(rows, None)
            self._shared.difference_update(rows)

    def abandon(self, rows: range) -> None:
        """Begin to count the age of the released entries at `rows`, because their quantity was removed."""
        if rows and self._released.get(self._series(rows)) == rows:
            self._abandoned[rows] = 0

    def abandoned(self) -> tuple[int, int]:
        """Add a sampled step to the ages of abandoned entries. Return their number, and the sum of their ages."""
        self._abandoned = {rows: age + 1 for rows, age in self._abandoned.items()}
        ages = [(len(rows), age) for rows, age in self._abandoned.items()]
        return sum(count for count, _ in ages), sum(count * age for count, age in ages)

    def drop_abandoned(self) -> None:
        """Remove the abandoned entries from the plan."""
        abandoned, self._abandoned = self._abandoned, {}
        self._released = {series: rows for series, rows in self._released.items() if rows not in abandoned}
        for rows in abandoned:
            self._shared.difference_update(rows)
            self.drop(rows)

    def publish(self, rows: range, ops: Ops) -> None:
        """Set the statistics `ops` that the rank publishes for the entries at `rows`, from now on."""
        if any(choice != ops for choice in self._ops[rows.start : rows.stop]):
            self._ops[rows.start : rows.stop] = [ops] * len(rows)
            self._version = None

    def _series(self, rows: range) -> tuple[tuple[Any, ...], ...]:
        return tuple(self.entry(row).series for row in rows)
