"""Quantity `gradients`: the gradients of each parameter before reduction, after reduction, and after clipping.

Quantity `micro_gradients`; and sums of gradients over micro-batches that the framework reduces separately.

The sums are those of the rank's own gradients. The sums need as much memory as the gradients of all measured
parameters. They exist from the first to the last gradient of a sampled step. Sums are kept only while the training loop
accumulates gradients, and only if the device has enough memory. The dtype of a sum is that of the sums that the
framework computes itself.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final

import torch

from rankscope_contract.model.collective_format import bytes_text
from rankscope_contract.model.kinds import Kind
from rankscope_exporter.adapters.base import GradientSource
from rankscope_exporter.adapters.hook_context import HookContext
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.adapters.parameter_hooks import CallbackHandle, has_foreign_hooks
from rankscope_exporter.adapters.parameter_names import local_tensor
from rankscope_exporter.adapters.torch_private import version
from rankscope_exporter.measure.quantities.base import BACKWARD, Quantity, QuantityOptions, SamplingGate
from rankscope_exporter.measure.quantities.module_quantity import MicroGradientHooks
from rankscope_exporter.measure.table import Slots, Table
from rankscope_exporter.monitors.hardware import proc_table
from rankscope_exporter.process.validation import Allowed
from rankscope_exporter.records.plan import ParameterEntries
from rankscope_exporter.records.record import OF_MICRO_BATCHES, ExpectedRows

_PROC: Final = Path("/proc")
_GROUPS: Final = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Return the number of bytes that this process may allocate on `device`; 0 if unknown.

    On CUDA, this is the free memory of the driver plus the unused memory of torch's allocator. On a host, it is the
    smallest free memory of the system and of its control groups, divided by the number of ranks on this host, because
    all of them allocate at the same time.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type != "cpu":
        return 0
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return host_bytes() // (int(ranks) if ranks.isdecimal() and int(ranks) else 1)


def host_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Return the smallest number of free bytes among those of the host and of each control group of this process."""
    of_host = int(proc_table(proc / "meminfo").get("MemAvailable", 0))
    return max(0, min([of_host, *_left_in_groups(proc / "self/cgroup", groups)]))


def _left_in_groups(membership: Path, groups: Path) -> Iterator[int]:
    """Yield the number of free bytes of each control group with a limit, from the group of this process to the root."""
    try:
        lines = [line.partition(":")[2].partition(":") for line in membership.read_text().splitlines()]
    except OSError:
        return
    for controllers, _, path in lines:
        if not controllers and path:
            yield from _left_along(groups, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            yield from _left_along(groups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _left_along(root: Path, path: str, limit: str, usage: str) -> Iterator[int]:
    own = Path(path.lstrip("/"))
    for group in (own, *own.parents):
        try:
            yield int((root / group / limit).read_text()) - int((root / group / usage).read_text())
        except (OSError, ValueError):  # "max", or a group that is not mounted here
            continue


_SHARE: Final = 4
"""Divisor of the free memory: if `sum_micro_batches` is null, sums may use at most a quarter of the free memory."""


_THREE_VALUES: Final = Allowed("true, false or null", lambda value: isinstance(value, bool))


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsOptions(QuantityOptions):
    """Options of the quantity `gradients`, for sums of gradients over micro-batches.

    These sums are needed if the framework does not keep them.
    """

    sum_micro_batches: Annotated[bool, _THREE_VALUES] | None = None
    """Keep the sum of this rank's own gradients over micro-batches that are reduced separately.

    True: always keep the sum; false: never. Null: keep the sum if it fits into a quarter of the free memory, but only
    from the step on at which the monitor knows that the loop accumulates micro-batches that are reduced separately.
    """


class MicroBatchSums:
    """The sums of this rank's own gradients over the micro-batches of one step, by position of the parameter."""

    def __init__(self, monitored: MonitoredModel, *, wanted: bool | None) -> None:
        self._monitored = monitored
        self._wanted = wanted
        self.is_known = False
        """True if the loop is known to accumulate micro-batches that are reduced separately: later steps need sums."""
        self._sums: dict[int, torch.Tensor] = {}
        self.reported: set[str] = set()
        """The topics of published notices about these sums, which state that `grad_unreduced` may be absent."""
        self.hooks: MicroGradientHooks | None = None
        self._hooking: HookContext
        self.are_kept = False
        """True if the gradients of the current step are added to the sums of this object."""

    def install(self, hooking: HookContext, gate: SamplingGate) -> None:
        """Prepare the gradient hooks. They are registered at the first step that needs sums of gradients."""
        self._hooking = hooking
        where = "adding a gradient to the sum over micro-batches"
        self.hooks = MicroGradientHooks(self._monitored, hooking, gate, where, self._hook_of)
        gate.keep(CallbackHandle(self.release))

    def on_step_begin(self) -> None:
        """Release the gradient sums of the last step, and start new ones if they are needed and fit into the memory."""
        self.release()
        if self.hooks is not None and self._is_needed() and self._fits():
            self.are_kept = True
            self.hooks.register()

    def release(self) -> None:
        """Release all sums of gradients."""
        self.are_kept = False
        self._sums.clear()

    def tensors(self) -> list[torch.Tensor | None]:
        """Return the present sums of gradients by parameter position; None for a parameter without a gradient."""
        return [self._sums.get(index) for index in range(len(self._monitored.parameters))]

    def _is_needed(self) -> bool:
        if self._wanted is not None:
            return self._wanted
        each = self._monitored.framework.traits.reduces_each_micro_batch
        return each is True or (each is None and self.is_known)

    def _fits(self) -> bool:
        parameters = [item for item in self._monitored.tensors() if item is not None and item.requires_grad]
        if not parameters:
            return False
        framework = self._monitored.framework
        elements = [(math.prod(framework.local_spec(item).shape), framework.reduced_spec(item)) for item in parameters]
        size = sum(count * spec.dtype.itemsize for count, spec in elements)
        free = free_bytes(self._monitored.device)
        fits = bool(self._wanted) or size * _SHARE <= free
        self.report_once("kept" if fits else "absent", bytes_text(size), bytes_text(free))
        return fits

    def _hook_of(self, index: int, parameter: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
        return functools.partial(self._add, index, self._monitored.framework.reduced_spec(parameter).dtype)

    def _add(self, index: int, dtype: torch.dtype, gradient: torch.Tensor) -> None:
        self._hooking.gradient_arrives()
        if not self.are_kept or self.hooks is None:
            return
        if self.hooks.may_be_reduced(index):
            self.report_once("hooks")
            return
        own, earlier = local_tensor(gradient).detach(), self._sums.get(index)
        try:
            if earlier is None:
                self._sums[index] = own.to(dtype, copy=True)
            elif earlier.is_sparse and not own.is_sparse:
                self._sums[index] = own.to(dtype) + earlier
            else:
                earlier.add_(own)
        except torch.OutOfMemoryError:  # the memory of the sums is returned, which may be enough for training
            self.release()
            self._wanted = False
            self.report_once("spent")

    def report_once(self, topic: str, *sizes: str) -> None:
        """Publish the notice `topic` the first time: `grad_unreduced` may be absent."""
        if topic not in self.reported:
            self.reported.add(topic)
            self._hooking.tell_once(f"gradients: {_NOTICES[topic].format(*sizes)}")


_NOTICES: Final = {
    "hooks": "grad_unreduced is absent for parameters with hooks of other code, which may have reduced their gradients",
    "kept": "the sum of this rank's own gradients takes {} of memory at sampled steps",
    "absent": "grad_unreduced is absent if micro-batches are reduced one by one, because the sum of their gradients "
    "would take {} of {} of free memory: set sum_micro_batches = true to keep the sum, or measure micro_gradients, "
    "which needs no sum",
    "spent": "out of memory while micro-batches were summed: grad_unreduced is absent from now on",
}


class MicroGradients(Quantity):
    """Measures the unreduced gradient of each backward pass, as `grad_unreduced` with a `micro_step`.

    A hook on the parameter receives the gradient before it is accumulated, also with bucket views. If a framework runs
    several micro-batches at the same time, the n-th gradient of a parameter in a step is that of micro-batch n.
    """

    name: ClassVar[str] = "micro_gradients"

    def install(self, hooking: HookContext, gate: SamplingGate) -> None:
        self._hooking, self._gate = hooking, gate
        self._interleaved = self.monitored.framework.traits.interleaves_micro_batches
        self._is_hooked = False  # whether other code has hooks on gradients
        where = "measuring the gradient of a micro-batch"
        hook_of = lambda index, _: functools.partial(self._read, index)  # noqa: E731 - short
        self._hooks = MicroGradientHooks(self.monitored, hooking, gate, where, hook_of)
        self._hooks.register()

    def on_step_begin(self, table: Table) -> None:  # noqa: ARG002 - the signature of every event
        self._passes = [0] * len(self.monitored.parameters)
        self._hooks.register()  # on parameters that were unfrozen since the last step

    def expected(self) -> ExpectedRows:
        is_read = BACKWARD not in self.monitored.compiled and self.monitored.is_trained() and not self._is_hooked
        return ExpectedRows(self.name, frozenset({OF_MICRO_BATCHES} if is_read else ()))

    def _read(self, index: int, gradient: torch.Tensor) -> None:
        self._hooking.gradient_arrives()
        if not self._gate.is_open or self.monitored.owners[index] in self.monitored.update.stepped:
            return
        micro_step = self._passes[index] if self._interleaved else self._hooking.micro_step
        self._passes[index] += 1
        if self._hooks.may_be_reduced(index):
            self._is_hooked = True
            self._hooking.tell_once(f"gradients: {_NOTICES['hooks']}")
            return
        table = self._gate.table
        entry = lambda: [self.parameter_entry(Kind.GRAD_UNREDUCED, index, local=True, micro_step=micro_step)]  # noqa: E731
        slots = table.add((index, micro_step), entry, [self.monitored.owners[index]])
        table.measure([gradient], slots)


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
        traits = monitored.framework.traits
        # Unless the framework keeps the sums itself, and the option does not ask for sums.
        self._may_sum = self.options.sum_micro_batches or traits.reduces_each_micro_batch is not False
        self._batched = traits.local_until_backward_ends
        self._reduces_after_last = traits.reduces_after_last_backward
        # A reduction by the loop, between backward and step, is visible only at the step.
        self._reduced_by_loop = monitored.copies > 1 and not traits.reduces
        # Without a reduction and without a backward pass, the loop computes gradients by torch.autograd.grad.
        self._assigned_by_loop = not (monitored.copies > 1 or traits.reduces or self._reduces_after_last)
        owners = self.monitored.owners
        self._elsewhere = frozenset(i for i, owner in enumerate(owners) if owner in self.monitored.elsewhere)
        self._mixed = False
        self._arrived: set[int] = set()  # positions of parameters with a gradient from a hook
        self._has_reduced = False  # whether the reduced gradients of this step were measured after a backward pass
        self._frozen = FrozenRows()
        self._may_compute = False

    def entries(self) -> ParameterEntries:
        if self.monitored.framework.has_plain_gradients(self.monitored.world_size):  # takes a third of the time
            return self.parameter_entries(Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED, Kind.GRAD_CLIPPED)
        return (
            self.parameter_entries(Kind.GRAD_UNREDUCED, local=True)
            + self.parameter_entries(Kind.GRAD_REDUCED, reduced=True)
            + self.parameter_entries(Kind.GRAD_CLIPPED)
        )

    def expected(self) -> ExpectedRows:
        # `grad_clipped` is absent if it is equal to `grad_reduced`.
        kinds = set()
        if self.monitored.is_trained():
            kinds = {Kind.GRAD_REDUCED} if len(self._elsewhere) < len(self.monitored.parameters) else set()
            if self.monitored.copies > 1 and not self._sums.reported:
                kinds.add(Kind.GRAD_UNREDUCED)
        return ExpectedRows(self.name, frozenset(kinds))

    def install(self, hooking: HookContext, gate: SamplingGate) -> None:
        self._sums.install(hooking, gate)

    def on_step_begin(self, table: Table) -> None:  # noqa: ARG002 - the signature of every event
        self._batched = self.monitored.framework.traits.local_until_backward_ends  # a new DDP has others
        self._frozen.stepped.clear()
        self._frozen.kept.clear()
        self._frozen.saved = None
        self._mixed = self._has_reduced = False
        self._arrived.clear()
        if self._may_sum:
            self._sums.on_step_begin()

    def on_step_end(self, table: Table) -> None:
        if self._sums.are_kept:
            self._sums.release()
        if self._frozen.saved is not None:
            self._frozen.restore(table)

    def on_gradient_ready(self, index: int, holder: GradientSource, table: Table) -> None:
        # Before the framework reduces the gradient in place or shards it. Gradients that are complete until the pass
        # ends are measured together then, except those that an optimizer step inside the backward pass uses: a
        # framework that shards gradients has reduced them before this optimizer step.
        if self.monitored.update.is_inside_backward and not self._batched:
            parameter = self.monitored.parameter(index)
            gradient = None if parameter is None else self.monitored.framework.gradient(parameter)
            if index not in self._elsewhere or _is_partial(gradient):
                table.measure([gradient], _one(table.slots[Kind.GRAD_REDUCED], index))
            return
        if self._mixed or self._sums.are_kept:
            return
        self._arrived.add(index)
        if self._batched != self.monitored.update.is_inside_backward:
            return
        if self._frozen.stepped and not self._is_computed_by_optimizer():
            self._frozen.protect(table)
        gradient, slot = holder.grad, _one(table.slots[Kind.GRAD_UNREDUCED], index)
        if gradient is None:  # this framework keeps no sum of several micro-batches
            self._sums.is_known = True
            table.forget(slot)
        else:
            table.measure([gradient], slot)

    def on_gradients_ready(self, table: Table) -> None:
        if self._frozen.stepped and not self._is_computed_by_optimizer():
            self._frozen.protect(table)
        if self._sums.are_kept:
            table.measure(self._sums.tensors(), table.slots[Kind.GRAD_UNREDUCED])
        elif self._mixed:
            # Accumulation without no_sync(): the sum of reduced micro-batches and a local one is neither kind.
            self._sums.is_known = True
            table.forget(table.slots[Kind.GRAD_UNREDUCED])
        elif self._batched:
            # A gradient that no backward pass of this step has reached is left over from an earlier step.
            arrived, own = set(self.monitored.update.arrived), []
            for owner, item in zip(self.monitored.owners, self.monitored.tensors(), strict=True):
                found = None if item is None or owner not in arrived else item.grad
                if found is not None and self._reduced_by_loop and item is not None and has_foreign_hooks(item):
                    self._sums.report_once("hooks")
                    found = None
                own.append(found)
            table.measure(own, table.slots[Kind.GRAD_UNREDUCED])

    def on_backward_end(self, table: Table) -> None:
        # An evaluation of a pipeline also divides the gradients that it finds.
        if self._frozen.stepped and not self._is_computed_by_optimizer():
            self._frozen.protect(table)
        is_reduced = self.monitored.framework.reduces_in_backward()
        if is_reduced:
            self._mixed = True
            if self._reduces_after_last:  # no further micro-batch comes
                self._finish_sums(table)
        elif self.monitored.copies > 1 or self._reduces_after_last:
            return
        if is_reduced or self._elsewhere:
            table.measure(self._own(self.monitored.gradients()), table.slots[Kind.GRAD_REDUCED])
        else:  # without a reduction, the reduced gradients are the rank's own gradients
            table.copy(table.slots[Kind.GRAD_UNREDUCED], table.slots[Kind.GRAD_REDUCED])
        self._has_reduced = True

    def _finish_sums(self, table: Table) -> None:
        if self._sums.are_kept:  # the last pass may have called no hook
            table.measure(self._sums.tensors(), table.slots[Kind.GRAD_UNREDUCED])
            self._sums.release()
        elif not self._batched and len(self._arrived) < sum(item is not None for item in self.monitored.gradients()):
            self._sums.is_known = True

    def on_optimizer_step_begin(self, table: Table) -> None:
        if self.monitored.update.is_inside_backward:
            return
        if self._sums.are_kept:
            self._sums.release()
        gradients, slots = self.monitored.gradients(), table.slots
        own = self._own(gradients) if self._elsewhere else gradients
        read, owners = self.monitored.update.positions, self.monitored.owners
        stepped = range(len(owners)) if read is None else [i for i, owner in enumerate(owners) if owner in read]
        self._frozen.stepped.update(stepped)
        self._may_compute = not self.monitored.update.arrived  # the optimizer itself, inside of its step
        if self._reduced_by_loop:
            table.measure(own, slots[Kind.GRAD_REDUCED])
        elif self._has_reduced:
            # All gradients: neither a gradient scaler nor clipping through `.data` changes their version.
            table.measure(own, slots[Kind.GRAD_CLIPPED])
            table.forget_equal(slots[Kind.GRAD_CLIPPED], slots[Kind.GRAD_REDUCED])
        elif self._assigned_by_loop:
            whole = gradients
            if BACKWARD in self.monitored.compiled:  # a gradient that changed since backward was clipped
                whole = [gradient if _is_fresh(gradient) else None for gradient in gradients]
                changed = [None if _is_fresh(gradient) else gradient for gradient in gradients]
                table.measure(self._own(changed), slots[Kind.GRAD_CLIPPED])
            table.measure(whole, slots[Kind.GRAD_UNREDUCED])
            table.measure(self._own(whole), slots[Kind.GRAD_REDUCED])

    def _is_computed_by_optimizer(self) -> bool:
        return self._may_compute and self.monitored.update.is_running

    def _own(self, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the reduced gradients that this rank publishes, and None for each one that another rank publishes."""
        if not self._elsewhere:
            return gradients
        pairs = enumerate(gradients)
        return [None if index in self._elsewhere and not _is_partial(item) else item for index, item in pairs]


class FrozenRows:
    """The rows of parameters after the step of their optimizer. Later passes of the training step do not change them.

    The rows are saved only if another backward pass begins in the same step.
    """

    def __init__(self) -> None:
        self.stepped: set[int] = set()
        """Positions of parameters whose optimizer has stepped, and whose present rows are not saved yet."""
        self.kept: set[int] = set()
        """Positions of parameters whose rows are saved."""
        self.saved: torch.Tensor | None = None

    def protect(self, table: Table) -> None:
        """Save the rows of the parameters `stepped` before a backward pass changes rows."""
        self.restore(table)
        self.kept |= self.stepped
        self.stepped.clear()
        self.saved = table.save()

    def restore(self, table: Table) -> None:
        """Write the saved rows to `table`, except those of parameters whose optimizer has stepped again."""
        kept = self.kept - self.stepped
        if kept and self.saved is not None:
            table.restore(self.saved, table.slots.values(), sorted(kept))


def _one(slots: Slots | None, position: int) -> Slots | None:
    return None if slots is None else slots[position]


def _is_partial(gradient: torch.Tensor | None) -> bool:
    """Return whether a gradient is a DTensor with partial sums, which are not yet reduced over the ranks."""
    return any(placement.is_partial() for placement in getattr(gradient, "placements", ()))


def _is_fresh(gradient: torch.Tensor | None) -> bool:
    """Return whether a gradient was not changed in place since the first backward pass that computed it."""
    return gradient is not None and not gradient.is_inference() and version(local_tensor(gradient)) == 0
