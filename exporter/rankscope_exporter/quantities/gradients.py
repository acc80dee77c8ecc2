"""Quantity `gradients`: the gradients of each parameter before reduction, after reduction, and after clipping."""

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
    """Three rows per parameter: `grad_unreduced`, `grad_reduced` and `grad_clipped`.

    `grad_unreduced` and `grad_reduced` are read at the end of the backward pass, before clipping. They are sums over
    the micro-batches of the step so far. `grad_clipped` is the gradient that the optimizer receives. It is absent if it
    is equal to the reduced gradient bit for bit. With a gradient scaler, `grad_unreduced` and `grad_reduced` are
    multiplied by the loss scale, and `grad_clipped` is the gradient after the scaler and the clipping. If the framework
    reduces each of several micro-batches, `grad_unreduced` is the sum over the micro-batches that the monitor itself
    computes. A gradient that does not exist is absent, never a stale value: the parameter is unused or frozen, or
    `zero_grad` ran after the backward pass and before the reading of the gradient.
    """

    name: ClassVar[str] = "gradients"
    options_class: ClassVar[type[QuantityOptions]] = GradientsOptions
    options: GradientsOptions

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        super().__init__(monitored, options)
        self._sums = MicroBatchSums(self.monitored, wanted=self.options.sum_micro_batches)
        count, traits = len(self.monitored.parameters), monitored.framework.traits
        self._unreduced, self._reduced = range(count), range(count, 2 * count)
        self._clipped = range(2 * count, 3 * count)
        self._batched = traits.local_until_backward_ends
        self._reduces_after_last = traits.reduces_after_last_backward
        # A reduction by the loop, between backward and step, is visible only at the step.
        self._reduced_by_loop = monitored.copies > 1 and not traits.reduces
        # Without a reduction and without a backward pass, the loop computes gradients by torch.autograd.grad.
        self._assigned_by_loop = not (monitored.copies > 1 or traits.reduces or self._reduces_after_last)
        owners = self.monitored.owners()
        self._elsewhere = frozenset(i for i, owner in enumerate(owners) if owner in self.monitored.elsewhere)
        self._mixed = False
        self._arrived: set[int] = set()  # positions of parameters with a gradient from a hook
        self._left: list[tuple[int, int] | None] = []  # id() and version of each gradient after backward
        # A gradient scaler changes gradients without a change of their version. The first update, at which all are
        # measured, shows whether one does; None before.
        self._changed_unseen: bool | None = None

    def entries(self) -> list[PlanEntry]:
        """Return the plan entries: `grad_unreduced` of all parameters, then `grad_reduced`, then `grad_clipped`."""
        return [
            *self.parameter_entries(Kind.GRAD_UNREDUCED, local=True),
            *self.parameter_entries(Kind.GRAD_REDUCED, reduced=True),
            *self.parameter_entries(Kind.GRAD_CLIPPED),
        ]

    def install(self, hooking: Hooking, gate: SamplingGate) -> None:
        """Prepare the sums of gradients over micro-batches, which are needed for frameworks that keep no such sums."""
        self._sums.install(hooking, gate)

    def on_step_begin(self, table: Table) -> None:  # noqa: ARG002 - the signature of every event
        """Reset the state at the beginning of a step, when no gradient is reduced yet."""
        self._mixed = False
        self._left = []
        self._arrived.clear()
        self._sums.on_step_begin()

    def on_step_end(self) -> None:
        """Release the sums of gradients over micro-batches."""
        self._sums.release()

    def on_gradient_ready(self, index: int, holder: GradientSource, table: Table) -> None:
        """Measure one gradient inside a gradient hook, before the framework reduces it in place or shards it."""
        if self._batched or self._mixed or self._sums.are_kept:
            return
        self._arrived.add(index)
        gradient, row = holder.grad, self._unreduced[index : index + 1]
        if gradient is None:  # this framework keeps no sum of several micro-batches
            self._sums.learn()
            table.forget(row)
        else:
            table.measure([gradient], row)

    def on_gradients_ready(self, table: Table) -> None:
        """Measure the rank's own gradients of all parameters at the same time, before they are reduced."""
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
        """Measure the reduced gradients. Without a reduction, the reduced gradients are the rank's own gradients."""
        if self.monitored.framework.reduces_in_backward():
            self._mixed = True
            if self._reduces_after_last:  # no further micro-batch comes
                self._finish_sums(table)
            table.measure(self._own(self._gradients()), self._reduced)
        elif self.monitored.copies > 1 or self._reduces_after_last:
            return
        elif self._elsewhere:
            table.measure(self._own(self._gradients()), self._reduced)
        else:
            table.copy(self._unreduced, self._reduced)
        self._left = [_fingerprint(gradient) for gradient in self._gradients()]

    def _read_sums(self, table: Table) -> None:
        table.measure(self._sums.tensors(), self._unreduced)

    def _finish_sums(self, table: Table) -> None:
        if self._sums.are_kept:  # the last pass may have called no hook
            self._read_sums(table)
            self._sums.release()
        elif not self._batched and len(self._arrived) < sum(gradient is not None for gradient in self._gradients()):
            self._sums.learn()

    def on_optimizer_step_begin(self, table: Table) -> None:
        """Measure gradients that the training loop has reduced, and gradients that changed since the backward pass."""
        self._sums.release()
        gradients = self._gradients()
        if self._reduced_by_loop:
            table.measure(self._own(gradients), self._reduced)
        elif self._left:
            self._read_clipped(gradients, table)
        elif self._assigned_by_loop:
            whole = gradients
            if BACKWARD in self.monitored.compiled:  # a gradient that changed since backward was clipped
                whole = [gradient if _is_fresh(gradient) else None for gradient in gradients]
                changed = [None if _is_fresh(gradient) else gradient for gradient in gradients]
                table.measure(self._own(changed), self._clipped)
            table.measure(whole, self._unreduced)
            table.measure(self._own(whole), self._reduced)

    def _read_clipped(self, gradients: list[torch.Tensor | None], table: Table) -> None:
        pairs = zip(gradients, self._left, strict=True)
        changed = [gradient if _fingerprint(gradient) != left else None for gradient, left in pairs]
        copies = self.monitored.framework.traits.optimizer_takes_copies
        changed = self._own(gradients if copies or self._changed_unseen is not False else changed)
        if all(gradient is None for gradient in changed):
            return
        table.measure(changed, self._clipped)
        # Clipping may multiply by 1, which changes the version and not the numbers.
        differs = table.forget_equal(self._clipped, self._reduced)
        if self._changed_unseen is None and not copies:
            unseen = [
                place
                for place, (gradient, left) in enumerate(zip(gradients, self._left, strict=True))
                if gradient is not None and _fingerprint(gradient) == left
            ]
            table.later(differs[unseen].any(), self._learn)
            self._changed_unseen = True  # until the comparison has arrived on the host

    def _learn(self, unseen: Numbers) -> None:
        self._changed_unseen = bool(unseen)

    def _own(self, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the reduced gradients that this rank publishes, and None for each one that another rank publishes."""
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
    """Return whether a gradient is a DTensor with partial sums, which are not yet reduced over the ranks."""
    return any(placement.is_partial() for placement in getattr(gradient, "placements", ()))


def _is_fresh(gradient: torch.Tensor | None) -> bool:
    """Return whether a gradient was not changed in place since the first backward pass that computed it."""
    return gradient is not None and local_tensor(gradient)._version == 0  # noqa: SLF001 - torch has no public name


def _fingerprint(gradient: torch.Tensor | None) -> tuple[int, int] | None:
    """Return the id() and the version of a gradient; None if there is none.

    The result differs after the gradient was replaced or changed in place.
    """
    if gradient is None:
        return None
    return id(gradient), local_tensor(gradient)._version  # noqa: SLF001 - torch has no public name
