"""Quantity `gradients`: the gradients of each parameter before reduction, after reduction, and after clipping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch

from rankscope_contract.model.kinds import Kind
from rankscope_exporter.adapters.base import GradientSource
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.model.parameter_names import local_tensor
from rankscope_exporter.quantities.base import BACKWARD, Hooking, Quantity, QuantityOptions, SamplingGate, Table
from rankscope_exporter.quantities.micro_batches import GradientsOptions, MicroBatchSums
from rankscope_exporter.records.pending_step import ExpectedRows
from rankscope_exporter.records.plan_entries import ParameterEntries


class Gradients(Quantity):
    """Three rows per parameter: `grad_unreduced`, `grad_reduced` and `grad_clipped`.

    `grad_unreduced` and `grad_reduced` are read at the end of the backward pass, before clipping. They are sums over
    the micro-batches of the step so far. `grad_clipped` is the gradient that the optimizer receives. It is absent if it
    is equal to the reduced gradient bit for bit. With a gradient scaler, `grad_unreduced` and `grad_reduced` are
    multiplied by the loss scale, and `grad_clipped` is the gradient after the scaler and the clipping. If the framework
    reduces each of several micro-batches, `grad_unreduced` is the sum over the micro-batches that the monitor itself
    computes. A gradient that does not exist is absent, never a stale value: the parameter is unused or frozen, or
    `zero_grad` ran after the backward pass and before the reading of the gradient.

    The rows of a parameter do not change after its optimizer has stepped, unless this optimizer steps again in the same
    step. A later backward pass, for the loss of another optimizer, may leave another gradient in the parameter.
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
        self._has_reduced = False  # whether the reduced gradients of this step were measured after a backward pass
        self._frozen = FrozenRows((self._unreduced, self._reduced, self._clipped))
        self._table: Table | None = None  # of the present step

    def entries(self) -> ParameterEntries:
        """Return the plan entries: `grad_unreduced` of all parameters, then `grad_reduced`, then `grad_clipped`."""
        if self.monitored.framework.has_plain_gradients(self.monitored.world_size):  # takes a third of the time
            return self.parameter_entries(Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED, Kind.GRAD_CLIPPED)
        return (
            self.parameter_entries(Kind.GRAD_UNREDUCED, local=True)
            + self.parameter_entries(Kind.GRAD_REDUCED, reduced=True)
            + self.parameter_entries(Kind.GRAD_CLIPPED)
        )

    def expected(self) -> ExpectedRows:
        """Return the kinds of gradients that exist whenever some parameter is trained.

        `grad_clipped` is absent if it is equal to `grad_reduced`. Without other ranks, `grad_unreduced` repeats
        `grad_reduced`.
        """
        kinds = set()
        if self.is_trained():
            kinds = {Kind.GRAD_REDUCED} if len(self._elsewhere) < len(self.monitored.parameters) else set()
            if self.monitored.copies > 1 and not self._sums.are_reported:
                kinds.add(Kind.GRAD_UNREDUCED)
        return ExpectedRows(self.name, frozenset(kinds))

    def install(self, hooking: Hooking, gate: SamplingGate) -> None:
        """Prepare the sums of gradients over micro-batches, which are needed for frameworks that keep no such sums."""
        self._sums.install(hooking, gate)

    def on_step_begin(self, table: Table) -> None:
        """Reset the state at the beginning of a step, when no gradient is reduced yet."""
        self._table = table
        self._frozen = FrozenRows((self._unreduced, self._reduced, self._clipped))
        self._mixed = False
        self._has_reduced = False
        self._arrived.clear()
        self._sums.on_step_begin()

    def on_step_end(self) -> None:
        """Release the sums of gradients over micro-batches, and restore the rows of parameters that have stepped."""
        self._sums.release()
        if self._table is not None:
            self._frozen.restore(self._table)
            self._table = None

    def on_gradient_ready(self, index: int, holder: GradientSource, table: Table) -> None:
        """Measure one gradient inside a gradient hook, before the framework reduces it in place or shards it.

        Gradients that are complete until the backward pass ends are measured together then, except the gradients that
        an optimizer step inside the backward pass uses. A framework that shards gradients has reduced them before this
        optimizer step.
        """
        if self.monitored.update.is_inside_backward and not self._batched:
            parameter = self.monitored.parameter(index)
            gradient = None if parameter is None else self.monitored.framework.gradient(parameter)
            if index not in self._elsewhere or _is_partial(gradient):
                table.measure([gradient], self._reduced[index : index + 1])
            return
        if self._mixed or self._sums.are_kept:
            return
        self._arrived.add(index)
        if self._batched != self.monitored.update.is_inside_backward:
            return
        self._frozen.protect(table)
        gradient, row = holder.grad, self._unreduced[index : index + 1]
        if gradient is None:  # this framework keeps no sum of several micro-batches
            self._sums.learn()
            table.forget(row)
        else:
            table.measure([gradient], row)

    def on_gradients_ready(self, table: Table) -> None:
        """Measure the rank's own gradients of all parameters at the same time, before they are reduced.

        A gradient that no backward pass of this step has reached is left over from an earlier step.
        """
        self._frozen.protect(table)
        if self._sums.are_kept:
            self._read_sums(table)
        elif self._mixed:
            # Accumulation without no_sync(): the sum of reduced micro-batches and a local one is neither kind.
            self._sums.learn()
            table.forget(self._unreduced)
        elif self._batched:
            tensors = enumerate(self.monitored.tensors())
            own = (None if item is None or i not in self._arrived else item.grad for i, item in tensors)
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
        self._has_reduced = True

    def _read_sums(self, table: Table) -> None:
        table.measure(self._sums.tensors(), self._unreduced, are_derived=True)

    def _finish_sums(self, table: Table) -> None:
        if self._sums.are_kept:  # the last pass may have called no hook
            self._read_sums(table)
            self._sums.release()
        elif not self._batched and len(self._arrived) < sum(gradient is not None for gradient in self._gradients()):
            self._sums.learn()

    def on_optimizer_step_begin(self, table: Table) -> None:
        """Measure gradients that the training loop has reduced, and gradients that changed since the backward pass."""
        if self.monitored.update.is_inside_backward:
            return
        self._sums.release()
        gradients = self._gradients()
        read = self.monitored.update.positions
        self._frozen.add(i for i, owner in enumerate(self.monitored.owners()) if read is None or owner in read)
        if self._reduced_by_loop:
            table.measure(self._own(gradients), self._reduced)
        elif self._has_reduced:
            # All gradients: neither a gradient scaler nor clipping through `.data` changes their version.
            table.measure(self._own(gradients), self._clipped)
            table.forget_equal(self._clipped, self._reduced)
        elif self._assigned_by_loop:
            whole = gradients
            if BACKWARD in self.monitored.compiled:  # a gradient that changed since backward was clipped
                whole = [gradient if _is_fresh(gradient) else None for gradient in gradients]
                changed = [None if _is_fresh(gradient) else gradient for gradient in gradients]
                table.measure(self._own(changed), self._clipped)
            table.measure(whole, self._unreduced)
            table.measure(self._own(whole), self._reduced)

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
        return [
            None if parameter is None else gradient(parameter) for parameter in self.monitored.tensors(of_update=True)
        ]


class FrozenRows:
    """The rows of parameters after the step of their optimizer. Later passes of the training step do not change them.

    `groups` are the rows of all parameters for each kind. The rows are saved only if another backward pass begins in
    the same step.
    """

    def __init__(self, groups: Sequence[range]) -> None:
        self._groups = groups
        self._stepped: set[int] = set()  # positions of parameters whose rows are not saved yet
        self._kept: set[int] = set()  # positions of parameters whose rows are saved
        self._saved: torch.Tensor | None = None

    def add(self, positions: Iterable[int]) -> None:
        """Freeze the present rows of the parameters at `positions`."""
        self._stepped.update(positions)
        self._kept -= self._stepped

    def protect(self, table: Table) -> None:
        """Save the frozen rows before a backward pass changes rows."""
        if self._stepped:
            self.restore(table)
            self._kept |= self._stepped
            self._stepped.clear()
            self._saved = table.save(range(self._groups[0].start, self._groups[-1].stop))

    def restore(self, table: Table) -> None:
        """Write the saved rows to `table`."""
        if self._kept and self._saved is not None:
            table.restore(self._saved, [rows[position] for rows in self._groups for position in sorted(self._kept)])


def _is_partial(gradient: torch.Tensor | None) -> bool:
    """Return whether a gradient is a DTensor with partial sums, which are not yet reduced over the ranks."""
    return any(placement.is_partial() for placement in getattr(gradient, "placements", ()))


def _is_fresh(gradient: torch.Tensor | None) -> bool:
    """Return whether a gradient was not changed in place since the first backward pass that computed it."""
    return gradient is not None and not gradient.is_inference() and local_tensor(gradient)._version == 0  # noqa: SLF001 - torch has no public name
