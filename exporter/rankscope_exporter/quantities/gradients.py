"""Gradients: this rank's own (`grad_unreduced`), reduced over ranks (`grad_reduced`), and as clipping left them."""

from __future__ import annotations

from typing import ClassVar

import torch

from rankscope_contract.model.kinds import Kind
from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.adapters.base import GradientSource
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.model.parameter_names import local_tensor
from rankscope_exporter.quantities.base import BACKWARD, Hooking, Quantity, QuantityOptions, SamplingGate, Table
from rankscope_exporter.quantities.micro_batches import GradientsOptions, MicroBatchSums
from rankscope_exporter.records.host_transfer import Numbers


class Gradients(Quantity):
    """The first two are read as backward leaves them, before the loop clips: over all micro-batches of the step so far.

    `grad_clipped` is what the optimizer sees, and absent where that is bit for bit the reduced gradient. With a
    gradient scaler the first two carry the loss scale; what the scaler and clipping make of them is in the third.

    Where the framework reduces each micro-batch, `grad_unreduced` of several is the sum that `MicroBatchSums` keeps.

    A gradient that does not exist (unused or frozen parameter, `zero_grad` since) is absent, never a stale value.
    """

    name: ClassVar[str] = "gradients"
    options_class: ClassVar[type[QuantityOptions]] = GradientsOptions
    options: GradientsOptions

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        super().__init__(monitored, options)
        self._sums = MicroBatchSums(self.monitored, wanted=self.options.sum_micro_batches)
        count = len(self.monitored.parameters)
        self._unreduced, self._reduced = range(count), range(count, 2 * count)
        self._clipped = range(2 * count, 3 * count)
        self._batched = monitored.framework.local_until_backward_ends
        # A loop that reduces by itself between backward and step is seen at the step only.
        self._reduced_by_loop = monitored.copies > 1 and not monitored.framework.reduces
        framework = monitored.framework
        # Where nobody reduces and no backward pass was seen, the loop has made gradients by torch.autograd.grad.
        self._assigned_by_loop = not (
            monitored.copies > 1 or framework.reduces or framework.reduces_after_last_backward
        )
        owners = self.monitored.owners()
        self._elsewhere = frozenset(i for i, owner in enumerate(owners) if owner in self.monitored.elsewhere)
        self._mixed = False
        self._arrived: set[int] = set()  # whose gradients a backward pass has told of
        self._left: list[tuple[int, int] | None] = []  # identity and version of each gradient as backward left it
        # A gradient scaler changes gradients without telling their version. Whether one does is learnt at the first
        # update, where all are measured; None before that.
        self._changed_unseen: bool | None = None

    def entries(self) -> list[PlanEntry]:
        """Return all `grad_unreduced`, then all `grad_reduced`, then all `grad_clipped`."""
        return [
            *self.parameter_entries(Kind.GRAD_UNREDUCED, local=True),
            *self.parameter_entries(Kind.GRAD_REDUCED, reduced=True),
            *self.parameter_entries(Kind.GRAD_CLIPPED),
        ]

    def install(self, hooking: Hooking, gate: SamplingGate) -> None:
        """Hook nothing yet: gradients are summed up here only where nobody else does."""
        self._sums.install(hooking, gate)

    def on_step_begin(self, table: Table) -> None:  # noqa: ARG002 - the signature of every moment
        """Nothing of this step has been reduced yet."""
        self._mixed = False
        self._left = []
        self._arrived.clear()
        self._sums.on_step_begin()

    def on_step_end(self) -> None:
        """Let go of what was summed up."""
        self._sums.release()

    def on_gradient_ready(self, index: int, holder: GradientSource, table: Table) -> None:
        """Read one gradient before it is reduced in place, or sharded."""
        if self._batched or self._mixed or self._sums.are_kept:
            return
        self._arrived.add(index)
        gradient, row = holder.grad, self._unreduced[index : index + 1]
        if gradient is None:  # of several micro-batches this framework keeps no sum
            self._sums.learn()
            table.forget(row)
        else:
            table.measure([gradient], row)

    def on_gradients_ready(self, table: Table) -> None:
        """Read all local gradients in one pass."""
        if self._sums.are_kept:
            self._read_sums(table)
        elif self._mixed:
            # Accumulation without no_sync(): the sum of reduced micro-batches and a local one is neither kind.
            self._sums.learn()
            table.forget(self._unreduced)
        elif self._batched:
            own = (None if parameter is None else parameter.grad for parameter in self.monitored.tensors())
            table.measure(list(own), self._unreduced)

    def on_backward_end(self, table: Table) -> None:
        """Read the reduced gradients; without a reduction they are the local ones."""
        if self.monitored.framework.reduces_in_backward():
            self._mixed = True
            if self.monitored.framework.reduces_after_last_backward:  # no further micro-batch comes
                self._finish_sums(table)
            table.measure(self._own(self._gradients()), self._reduced)
        elif self.monitored.copies > 1 or self.monitored.framework.reduces_after_last_backward:
            return
        elif self._elsewhere:
            table.measure(self._own(self._gradients()), self._reduced)
        else:
            table.copy(self._unreduced, self._reduced)
        self._left = [_sight(gradient) for gradient in self._gradients()]

    def _read_sums(self, table: Table) -> None:
        table.measure(self._sums.tensors(), self._unreduced)

    def _finish_sums(self, table: Table) -> None:
        if self._sums.are_kept:  # the last pass may have been one that no hook tells of
            self._read_sums(table)
            self._sums.release()
        elif not self._batched and len(self._arrived) < sum(gradient is not None for gradient in self._gradients()):
            self._sums.learn()

    def on_optimizer_step_begin(self, table: Table) -> None:
        """Read what a loop with its own reduction gives the optimizer, and what was changed since backward."""
        self._sums.release()
        gradients = self._gradients()
        if self._reduced_by_loop:
            table.measure(self._own(gradients), self._reduced)
        elif self._left:
            self._read_clipped(gradients, table)
        elif self._assigned_by_loop:
            whole = gradients
            if (
                BACKWARD in self.monitored.compiled
            ):  # what was changed since the backward pass is what clipping has left
                whole = [gradient if _is_fresh(gradient) else None for gradient in gradients]
                changed = [None if _is_fresh(gradient) else gradient for gradient in gradients]
                table.measure(self._own(changed), self._clipped)
            table.measure(whole, self._unreduced)
            table.measure(self._own(whole), self._reduced)

    def _read_clipped(self, gradients: list[torch.Tensor | None], table: Table) -> None:
        pairs = zip(gradients, self._left, strict=True)
        changed = [gradient if _sight(gradient) != left else None for gradient, left in pairs]
        copies = self.monitored.framework.optimizer_takes_copies
        changed = self._own(gradients if copies or self._changed_unseen is not False else changed)
        if all(gradient is None for gradient in changed):
            return
        table.measure(changed, self._clipped)
        # Clipping multiplies by 1 where nothing is too long, which shows in the version and not in the numbers.
        differs = table.forget_equal(self._clipped, self._reduced)
        if self._changed_unseen is None and not copies:
            unseen = [place for place, pair in enumerate(zip(gradients, self._left, strict=True)) if _same(*pair)]
            table.later(differs[unseen].any(), self._learn)
            self._changed_unseen = True  # until the answer is there

    def _learn(self, unseen: Numbers) -> None:
        self._changed_unseen = bool(unseen)

    def _own(self, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return reduced gradients, without those that another rank publishes."""
        if not self._elsewhere:
            return gradients
        return [
            None if index in self._elsewhere and not _is_partial(gradient) else gradient
            for index, gradient in enumerate(gradients)
        ]

    def _gradients(self) -> list[torch.Tensor | None]:
        gradient = self.monitored.framework.gradient
        return [None if parameter is None else gradient(parameter) for parameter in self.monitored.tensors()]


def _is_partial(gradient: torch.Tensor | None) -> bool:
    """Return whether a gradient is a term of a sum that nobody has made yet, whatever its parameter is."""
    return any(placement.is_partial() for placement in getattr(gradient, "placements", ()))


def _is_fresh(gradient: torch.Tensor | None) -> bool:
    """Return whether a gradient is as a first backward pass has made it: nothing was added or multiplied in place."""
    return gradient is not None and local_tensor(gradient)._version == 0  # noqa: SLF001 - torch has no public name


def _same(gradient: torch.Tensor | None, left: tuple[int, int] | None) -> bool:
    return gradient is not None and _sight(gradient) == left


def _sight(gradient: torch.Tensor | None) -> tuple[int, int] | None:
    """Return what differs once a gradient was replaced or changed in place."""
    if gradient is None:
        return None
    return id(gradient), local_tensor(gradient)._version  # noqa: SLF001 - torch has no public name
