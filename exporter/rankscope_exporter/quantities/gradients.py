"""Gradients: this rank's own (`grad_unreduced`), and after the reduction over ranks (`grad_reduced`)."""

from __future__ import annotations

from typing import ClassVar

import torch

from rankscope_contract.kinds import Kind
from rankscope_contract.records import PlanEntry
from rankscope_exporter.quantities.base import Quantity, QuantityOptions, Subject, Table


class Gradients(Quantity):
    """Both are read as backward leaves them, before the loop clips: over all micro-batches of the step so far.

    A gradient that does not exist (unused or frozen parameter, `zero_grad` since) is absent, never a stale value.
    """

    name: ClassVar[str] = "gradients"

    def __init__(self, subject: Subject, options: QuantityOptions | None = None) -> None:
        super().__init__(subject, options)
        count = len(self.subject.parameters)
        self._unreduced, self._reduced = range(count), range(count, 2 * count)
        self._batched = subject.framework.local_until_backward_ends
        # A loop that reduces by itself between backward and step is seen at the step only.
        self._reduced_by_loop = subject.world_size > 1 and not subject.framework.replicated
        self._mixed = False

    def entries(self) -> list[PlanEntry]:
        """Return all `grad_unreduced`, then all `grad_reduced`."""
        local = "partial" if self.subject.world_size > 1 else self.placement
        return [
            *self.parameter_entries(Kind.GRAD_UNREDUCED, local),
            *self.parameter_entries(Kind.GRAD_REDUCED, self.placement),
        ]

    def step_begins(self, table: Table) -> None:  # noqa: ARG002 - the signature of every moment
        """Nothing of this step has been reduced yet."""
        self._mixed = False

    def gradient_ready(self, index: int, table: Table) -> None:
        """Read one gradient before its bucket is reduced in place."""
        if not self._batched and not self._mixed:
            table.measure([self._gradients()[index]], self._unreduced[index : index + 1])

    def backward_ends(self, table: Table) -> None:
        """Read all local gradients in one pass."""
        if self._mixed:
            # Accumulation without no_sync(): the sum of reduced micro-batches and a local one is neither kind.
            table.forget(self._unreduced)
        elif self._batched:
            table.measure(self._gradients(), self._unreduced)

    def backward_ended(self, table: Table) -> None:
        """Read the reduced gradients; without a reduction they are the local ones."""
        if self.subject.framework.reduces_in_backward():
            self._mixed = True
            table.measure(self._gradients(), self._reduced)
        elif self.subject.world_size == 1:
            table.copy(self._unreduced, self._reduced)

    def before_update(self, table: Table) -> None:
        """Read what a loop with its own reduction gives the optimizer."""
        if self._reduced_by_loop:
            table.measure(self._gradients(), self._reduced)

    def _gradients(self) -> list[torch.Tensor | None]:
        return [None if parameter is None else parameter.grad for parameter in self.subject.tensors()]
