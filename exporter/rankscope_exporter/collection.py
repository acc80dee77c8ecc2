"""All quantities of one attached model: which are due at a step, and the sheet they fill. On the training thread."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from rankscope_exporter.drafts import Draft
from rankscope_exporter.frameworks.base import Holder
from rankscope_exporter.guard import Guard
from rankscope_exporter.plan_book import PlanBook
from rankscope_exporter.quantities.base import Hooking, Quantity
from rankscope_exporter.schedule import Schedule, Timing
from rankscope_exporter.statistics import HostCopy, StatisticsTable
from rankscope_exporter.windows import Measurement, Sheet, TableWindow

MAX_BACKLOG: Final = 64
"""Measured steps that may wait for the publisher; one more is counted as dropped rather than waited for."""


@dataclass(slots=True)
class _Member:
    quantity: Quantity
    window: TableWindow
    schedule: Schedule
    due: bool = False

    def own_index(self, index: int) -> int | None:
        """Return where the quantity itself counts parameter `index` of the subject; None when it leaves it out."""
        positions = self.quantity.subject.positions
        if positions is None:
            return index
        place = bisect.bisect_left(positions, index)
        return place if place < len(positions) and positions[place] == index else None


class Collection:
    """Begins, measures and ends the sampled part of each step."""

    def __init__(
        self,
        quantities: Sequence[tuple[Quantity, Timing]],
        *,
        device: torch.device,
        guard: Guard,
        measurement: Measurement | None = None,
    ) -> None:
        self._guard = guard
        self.book = PlanBook()
        self._members: list[_Member] = []
        parts = [(quantity, quantity.entries(), timing) for quantity, timing in quantities]
        table = StatisticsTable(sum(len(entries) for _, entries, _ in parts), device)
        self._sheet = Sheet(self.book, table, measurement or Measurement())
        for quantity, entries, timing in parts:
            rows = self.book.add(entries, quantity.owners())
            first = len(self.book) if rows is None else rows.start
            self._members.append(_Member(quantity, TableWindow(self._sheet, first), Schedule(timing)))
        self._per_gradient = [member for member in self._members if member.quantity.hears("gradient_ready")]
        self.backlog = 0
        self.unsampled = 0  # steps not measured because the publisher was behind

    def install(self, hooking: Hooking) -> None:
        """Let the quantities register hooks of their own."""
        for member in self._members:
            name = member.quantity.name
            self._guard.call(f"hooks of {name}", member.quantity.install, hooking, _Gate(member))

    def kinds(self) -> set[str]:
        """Return the kinds of everything that is measured, or will be."""
        return {kind for member in self._members for kind in member.quantity.kinds()}

    def quantity(self, name: str) -> Quantity | None:
        """Return the quantity of that name, if it is measured here."""
        return next((member.quantity for member in self._members if member.quantity.name == name), None)

    def begin(self, step: int) -> bool:
        """Note that a step begins; return whether any quantity is due."""
        for member in self._members:
            member.due = member.schedule.begins(step)
        if any(member.due for member in self._members) and self.backlog >= MAX_BACKLOG:
            self.unsampled += 1
            self.pause()
        return any(member.due for member in self._members)

    def pause(self) -> None:
        """Measure nothing until the next step begins."""
        for member in self._members:
            member.due = False

    def each(self, moment: str) -> None:
        """Tell every quantity that is due of a moment; one that fails costs its own rows alone."""
        with torch.no_grad():
            for member in self._members:
                if member.due:
                    where = f"{member.quantity.name} ({moment})"
                    self._guard.call(where, getattr(member.quantity, moment), member.window)

    def gradient_ready(self, index: int, holder: Holder) -> None:
        """Tell the quantities that read gradients one by one."""
        for member in self._per_gradient:
            own = member.own_index(index)
            if member.due and own is not None:
                member.quantity.gradient_ready(own, holder, member.window)

    def end(self, draft: Draft) -> None:
        """Put what was measured into `draft`."""
        for member in self._members:
            if member.due:
                member.due = False
                member.schedule.taken()
        draft.copy = HostCopy(self._sheet.table, len(self.book))
        draft.deferred, draft.rows = self._sheet.take_rows()
        self.backlog += 1


class _Gate:
    """Tells a quantity's own hooks whether to read, and where to write."""

    def __init__(self, member: _Member) -> None:
        self._member = member

    @property
    def is_open(self) -> bool:
        return self._member.due

    @property
    def table(self) -> TableWindow:
        return self._member.window
