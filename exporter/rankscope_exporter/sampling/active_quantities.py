"""All quantities of one attached model: which are due at a step, and the sheet they fill. On the training thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.adapters.base import GradientSource
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.quantities.base import ModelHookContext, Quantity
from rankscope_exporter.records.pending_step import PendingStep
from rankscope_exporter.sampling.active_quantity import ActiveQuantity
from rankscope_exporter.sampling.plan import Measurement, PlanRegistry, StepBuffers
from rankscope_exporter.sampling.sampling_config import QuantitySampling
from rankscope_exporter.statistics import Finished, HostCopy, StatisticsTable
from rankscope_exporter.statistics.selection import NO_OP, Ops

MAX_BACKLOG: Final = 64
"""Measured steps that may wait for the publisher; one more is counted as dropped rather than waited for."""


Part = tuple[Quantity, QuantitySampling]
PreparedQuantities = list[tuple[ActiveQuantity, QuantitySampling]]


class ActiveQuantities:
    """Begins, measures and ends the sampled part of each step."""

    def __init__(
        self,
        quantities: Sequence[Part],
        *,
        device: torch.device,
        boundary: ErrorBoundary,
        measurement: Measurement | None = None,
    ) -> None:
        self._boundary = boundary
        self.book = PlanRegistry()
        self._members: list[ActiveQuantity] = []
        self._per_gradient: list[ActiveQuantity] = []
        self._hooking: ModelHookContext | None = None
        first = sum(len(quantity.entries()) for quantity, _ in quantities)
        self._sheet = StepBuffers(self.book, StatisticsTable(first, device), measurement or Measurement())
        self.backlog = 0
        self.unsampled = 0  # steps not measured because the publisher was behind
        self.replace(self.prepare(quantities))

    def install(self, hooking: ModelHookContext) -> None:
        """Let the quantities register hooks of their own."""
        self._hooking = hooking
        hooking.keep(self)
        for member in self._members:
            member.install(hooking, self._boundary)

    def remove(self) -> None:
        """Remove the hooks of all quantities."""
        self._hooking = None
        for member in self._members:
            self._boundary.call(member.where, member.unhook)

    def prepare(self, parts: Sequence[Part]) -> PreparedQuantities:
        """Return what `take` will measure by, the hooks registered; who measures the same already goes on."""
        prepared: PreparedQuantities = []
        for quantity, terms in parts:
            member = next((known for known in self._members if known.measures_as(quantity)), None)
            if member is None or member.is_retired:
                member = ActiveQuantity(quantity)
                if self._hooking is not None:
                    member.install(self._hooking, self._boundary)
            member.is_kept_for_next = True
            prepared.append((member, terms))
        return prepared

    def replace(self, prepared: PreparedQuantities) -> None:
        """Measure by `prepared` from now on, between two steps; every schedule begins anew, unstretched."""
        members = [member for member, _ in prepared]
        for member in self._members:
            if member not in members:
                self._boundary.call(member.where, member.leave)
        self._settle(members)
        seat = [(f"rows of {member.quantity.name}", member, terms) for member, terms in prepared]
        for member in members:
            member.is_kept_for_next = False
        self._members = [
            member for where, member, terms in seat if self._boundary.call(where, member.activate, self._sheet, terms)
        ]
        self._listen()

    def discard(self, prepared: PreparedQuantities) -> None:
        """Take the hooks away that were registered for a `prepared` that will not be taken."""
        for member, _ in prepared:
            if member not in self._members:
                self._boundary.call(member.where, member.leave)

    def stretch(self, factor: int) -> None:
        """Measure every so many-th of the steps that are due, from the one that begins now on."""
        for member in self._members:
            member.schedule.stretch = factor

    @property
    def period(self) -> int:
        """Return after how many steps what is measured repeats itself, by the longest of the schedules."""
        return max((member.schedule.period for member in self._members if not member.schedule.is_over), default=1)

    def capture(self, prepared: PreparedQuantities) -> None:
        """Measure every step by `prepared` as well, between two steps, until it is `released`.

        What is measured already goes on, and its schedule counts as before. A quantity of it that `prepared` has with
        other options steps aside meanwhile: a tensor has one row at a step.
        """
        for member, terms in prepared:
            member.is_captured, member.is_kept_for_next = True, False
            if member not in self._members:
                self._activate_temporary(member, terms)
        self._listen()

    def release(self) -> None:
        """Measure no more than before `capture`."""
        guests = [member for member in self._members if member.is_temporary]
        self._members = [member for member in self._members if not member.is_temporary]
        for member in guests:
            self._boundary.call(member.where, member.leave)
        self._settle(self._members)
        self._listen()

    def is_current(self, prepared: PreparedQuantities) -> bool:
        """Return whether nobody of `prepared` has left, or was retired, since it was made."""
        return not any(m.is_retired or (m.window is not None and m not in self._members) for m, _ in prepared)

    def _activate_temporary(self, member: ActiveQuantity, terms: QuantitySampling) -> None:
        for known in self._members:
            if type(known.quantity) is type(member.quantity):
                known.suspend()
        member.is_temporary = True
        if self._boundary.call(f"rows of {member.quantity.name}", member.activate, self._sheet, terms):
            self._members.append(member)

    def _settle(self, staying: Sequence[ActiveQuantity]) -> None:
        """Have those that stay measure by their schedules alone."""
        for member in staying:
            member.is_captured = member.is_temporary = False
            if member.is_suspended:
                member.resume()

    def _listen(self) -> None:
        self._per_gradient = [member for member in self._members if member.quantity.hears("gradient_ready")]

    @property
    def is_over(self) -> bool:
        """Return whether all that was measured here will be no more; of a rank that measures nothing, False."""
        own = [member for member in self._members if not member.is_temporary]
        return bool(own) and all(member.schedule.is_over for member in own)

    def kinds(self) -> set[str]:
        """Return the kinds of everything that is measured, or will be."""
        return {kind for member in self._members for kind in member.quantity.kinds()}

    def published(self) -> dict[str, Ops]:
        """Return which statistics of each kind leave the rank."""
        found: dict[str, Ops] = {}
        for member in self._members:
            for kind in member.quantity.kinds():
                found[kind] = found.get(kind, NO_OP) | member.ops
        return found

    def quantity(self, name: str) -> Quantity | None:
        """Return the quantity of that name, if it is measured here."""
        return next((member.quantity for member in self._members if member.quantity.name == name), None)

    def begin(self, step: int) -> bool:
        """Note that a step begins; return whether any quantity is due."""
        is_due = False
        for member in self._members:
            is_due |= member.opens(step)
            if member.is_done:
                self._boundary.call(member.where, member.retire)
        if is_due and self.backlog >= MAX_BACKLOG:
            self.unsampled += 1
            is_due = False
            self.pause()
        for member in self._members:
            if member.is_open or member.coming.some_may_go:
                self._boundary.call(member.where, member.begins)
        return is_due

    def pause(self) -> None:
        """Measure nothing until the next step begins."""
        for member in self._members:
            member.is_open = False

    def notify(self, moment: str) -> None:
        """Tell every quantity that is due of a moment; one that fails costs its own rows alone."""
        with torch.no_grad():
            for member in self._members:
                if member.is_open:
                    where = f"{member.quantity.name} ({moment})"
                    self._boundary.call(where, getattr(member.quantity, moment), member.table)

    def gradient_ready(self, index: int, holder: GradientSource) -> None:
        """Tell the quantities that read gradients one by one."""
        for member in self._per_gradient:
            own = member.own_index(index)
            if member.is_open and own is not None:
                try:
                    member.quantity.gradient_ready(own, holder, member.table)
                except Exception as error:  # noqa: BLE001 - as the error boundary does, without another call for each gradient
                    self._boundary.report(f"{member.quantity.name} (gradient_ready)", error)

    def peek(self) -> tuple[Sequence[PlanEntry], Finished]:
        """Return the plan and what is measured of the step under way; waits for the device, for who asks for it."""
        return self.book.entries, self._sheet.table.look(len(self.book))

    def end(self, pending_step: PendingStep) -> None:
        """Put what was measured into `draft`."""
        for member in self._members:
            if member.is_open:
                self._boundary.call(member.where, member.quantity.step_ended)
                member.closes()
        pending_step.copy, pending_step.ops = HostCopy(self._sheet.table, len(self.book)), self.book.ops
        pending_step.deferred, pending_step.rows = self._sheet.take_rows()
        self.backlog += 1
