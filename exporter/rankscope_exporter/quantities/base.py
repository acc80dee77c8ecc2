"""Base class of quantities: the entries it adds to the plan, and the events of a step at which it reads tensors.

This module also defines the services that a quantity receives: the table of a sampled step, the gate that opens at
sampled steps, and the registration of hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import nn

from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.adapters.base import GradientSource, TensorSpec
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.adapters.parameter_hooks import Removable
from rankscope_exporter.adapters.placement import Layout
from rankscope_exporter.base.validation import is_whole
from rankscope_exporter.model.name_patterns import Targets, target_notices
from rankscope_exporter.records.host_transfer import Numbers, Row
from rankscope_exporter.statistics.selection import chosen_ops
from rankscope_exporter.statistics.tensor_access import dtype_name

BACKWARD: Final = "backward"
"""Name of the part of training that no hook sees when it runs inside compiled code: the backward pass."""


class Table(Protocol):
    """The destination of one quantity's measurements at a sampled step. Rows count from the quantity's first entry."""

    def add(self, entries: Sequence[PlanEntry], owners: Sequence[int] | None = None) -> range | None:
        """Append new entries to the plan and return their rows; None if the plan is full.

        `owners` are the positions of the parameters to which the entries belong.
        """
        ...

    def measure(self, tensors: Sequence[torch.Tensor | None], rows: range) -> None:
        """Write the statistics of `tensors` to `rows`. None leaves an entry absent."""
        ...

    def copy(self, source: range, target: range) -> None:
        """Copy the statistics of `source`, which were measured before, to `target`."""
        ...

    def forget(self, rows: range) -> None:
        """Make entries absent that were measured before."""
        ...

    def forget_equal(self, rows: range, others: range) -> torch.Tensor:
        """Make each of `rows` absent if its statistics are bit for bit those of the same position in `others`.

        Return bool [len(rows)] on the device: True for entries that were measured and differ.
        """
        ...

    def defer(self, dataset: str, tensor: torch.Tensor, rows: Callable[[Numbers], Iterable[Row]]) -> None:
        """Add the rows that `rows` makes of `tensor` to `dataset`, after the tensor was copied to the host.

        Training does not wait for the device. The publisher thread calls `rows` with a numpy array, so the dtype of
        `tensor` must exist in numpy.
        """
        ...

    def withdraw(self, dataset: str) -> None:
        """Drop the rows of `dataset` that were deferred at this step, because the tensors are read again."""
        ...

    def later(self, tensor: torch.Tensor, use: Callable[[Numbers], None]) -> None:
        """Call `use` on the publisher thread with the present values of `tensor`, after their copy to the host."""
        ...

    def write(self, dataset: str, row: Row) -> None:
        """Add a row of `dataset` whose values are already on the host."""
        ...


class SamplingGate(Protocol):
    """The state of sampling, as a quantity's own hooks read it."""

    @property
    def is_open(self) -> bool:
        """True if the current step is sampled for this quantity."""
        ...

    @property
    def table(self) -> Table:
        """The table of the sampled step, valid while the gate is open."""
        ...


class Hook(Protocol):
    """A hook inside the error boundary, which records whether it runs at all."""

    was_called: bool
    is_compiled: bool
    """True if Dynamo compiled the hook into its caller, where it does not run."""
    on_inactive_call: Callable[[], None]
    """Called instead of the hook at a step that is not sampled."""

    def __call__(self, *args: Any) -> None:
        """Run the hook if the step is sampled."""
        ...


class ModelHookContext(Protocol):
    """Services for hooks on a model. Every registered hook is inside the error boundary and is removed at detach."""

    @property
    def micro_step(self) -> int:
        """Number of the current or latest training forward of the step, from 0."""
        ...

    @property
    def in_forward(self) -> bool:
        """True while a training forward of the whole model runs."""
        ...

    @property
    def grad_enabled(self) -> bool:
        """True if gradients were enabled when the current hook was called."""
        ...

    def keep(self, handle: Removable) -> None:
        """Remove `handle` at detach()."""
        ...

    def begins_steps(self, module: nn.Module) -> bool:
        """Return whether a step begins with the forward of `module`, so that a hook registered per step is too late."""
        ...

    def tell(self, message: str) -> None:
        """Report a notice to the user, on the console and as an event."""
        ...

    def guarded(self, where: str, function: Callable[..., None], gate: SamplingGate) -> Hook:
        """Return `function` as a hook that runs while `gate` is open, is timed, and never raises into training.

        Its result is dropped and gradients are disabled inside. It does nothing while a graph is compiled, after
        detach, in a forked child, and in a copy of the model.
        """
        ...

    def gradient_arrives(self) -> None:
        """Report that a gradient is about to be accumulated. This may end the current step and begin the next one."""
        ...

    def between(self, function: Callable[[], None]) -> None:
        """Call `function` while no step begins or ends. Needed by calls that may run long after an update."""
        ...


class Hooking(ModelHookContext, Protocol):
    """Services for the hooks of one quantity, which are registered only for the quantity's sampled steps."""

    def hook(self, hook: Hook, register: Callable[[], Removable | None], *, stays: bool = False) -> None:
        """Call `register` now and before each sampled step to register `hook`; an error of the first call is raised.

        `register` returns None if the hook cannot be registered this time. A hook with `stays` remains registered
        between sampled steps.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantityOptions:
    """The options of every quantity; a subclass adds its own. Validated at construction: ValueError names the field.

    A list becomes a tuple, and a field of type bool accepts no other type.
    """

    targets: tuple[str, ...] = ("*",)
    """Names, globs, or regular expressions after "re:", of parameters; of modules for quantities that read modules."""
    start_step: int | None = None
    """First step to sample; null samples from the beginning."""
    every: int | None = None
    """Sample every n-th step; null is the monitor's own `every`."""
    times: int | None = None
    """Stop after this number of sampled steps; null never stops."""
    ranks: tuple[int, ...] | None = None
    """Sample only on these ranks; null is all ranks."""
    ops: tuple[str, ...] | None = None
    """Statistics to publish; null is the monitor's own `ops`."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, list):
                object.__setattr__(self, item.name, tuple(value))
            if item.type == "bool" and not isinstance(value, bool):
                raise ValueError(f"{item.name} is true or false, not {value!r}")
        self._check_whole("start_step", 0)
        self._check_whole("every", 1)
        self._check_whole("times", 0)
        ranks = () if self.ranks is None else self.ranks
        if not isinstance(ranks, tuple) or not all(is_whole(rank) and rank >= 0 for rank in ranks):
            raise ValueError(f"ranks is a list of rank numbers, not {self.ranks!r}")
        Targets(self.targets)
        if self.ops is not None:
            chosen_ops(self.ops)

    def _check_whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is not None and not (is_whole(value) and value >= least):
            raise ValueError(f"{name} is a whole number from {least} on, not {value!r}")


class Quantity:
    """A family of measurements that reads tensors at fixed events of a sampled step.

    All methods run on the training thread with gradients disabled. A quantity is added by adding a file with a subclass
    that has its own `name`; a subclass without a name of its own is a base class of quantities.
    """

    name: ClassVar[str]
    options_class: ClassVar[type[QuantityOptions]] = QuantityOptions
    of_modules: ClassVar[bool] = False
    """True if targets name modules and not parameters."""
    measures_tensors: ClassVar[bool] = True
    """True if it publishes statistics of tensors, which `ops` selects."""

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        self.options = options or self.options_class()
        self.targets = Targets(self.options.targets)
        self._offered = monitored
        self.monitored = monitored if self.of_modules else monitored.only(self.targets, self.elsewhere(monitored))

    @staticmethod
    def elsewhere(monitored: MonitoredModel) -> frozenset[int]:  # noqa: ARG004 - for quantities that are the same on ranks
        """Return the positions of parameters for which another rank publishes all rows of this quantity."""
        return frozenset()

    def notices(self) -> list[str]:
        """Return a notice for each target that selects no parameter; a quantity that reads modules reports its own."""
        if self.of_modules:
            return []
        names = (name for item in self._offered.parameters for name in (item.name, *item.aliases))
        return target_notices(self.targets, names, "parameter")

    def entries(self) -> list[PlanEntry]:
        """Return the plan entries of this quantity in the order of its rows; more may be added later."""
        return []

    def kinds(self) -> set[str]:
        """Return the kinds of all entries, also of entries to be added later: their counters exist from the start."""
        return {entry.kind for entry in self.entries()}

    def owners(self, count: int) -> list[int]:
        """Return the position of the parameter of each of `count` entries: all parameters, kind after kind."""
        own = self.monitored.owners()
        return [own[i % len(own)] for i in range(count)] if len(own) else []

    def install(self, hooking: Hooking, gate: SamplingGate) -> None:
        """Register the quantity's own hooks. Called once, when the model is attached."""

    def on_step_begin(self, table: Table) -> None:
        """Handle the beginning of a sampled step; the table is empty."""

    def on_gradient_ready(self, index: int, holder: GradientSource, table: Table) -> None:
        """Handle the gradient that parameter `index` has just accumulated in `holder`, inside the backward pass."""

    def on_gradients_ready(self, table: Table) -> None:
        """Handle the end of accumulation: the framework has not yet written reduced gradients back."""

    def on_backward_end(self, table: Table) -> None:
        """Handle the end of the backward pass, after the framework has finished its own work in it."""

    def on_optimizer_step_begin(self, table: Table) -> None:
        """Handle the beginning of an optimizer step."""

    def on_optimizer_step_end(self, table: Table) -> None:
        """Handle the end of an optimizer step."""

    def on_step_end(self) -> None:
        """Handle the end of a sampled step, whether or not an optimizer has stepped."""

    def parameter_entries(self, kind: str, *, local: bool = False, reduced: bool = False) -> list[PlanEntry]:
        """Return one entry of `kind` per parameter: `local` for a rank's own gradient, `reduced` for a reduced one."""
        count = len(self.monitored.parameters)
        return [self.parameter_entry(kind, index, local=local, reduced=reduced) for index in range(count)]

    def parameter_entry(
        self, kind: str, index: int, *, local: bool = False, reduced: bool = False, micro_step: int | None = None
    ) -> PlanEntry:
        """Return the plan entry of `kind` for parameter `index`."""
        framework = self.monitored.framework
        named, parameter = self.monitored.parameters[index], self.monitored.parameter(index)
        layout, spec = Layout("full"), TensorSpec(named.shape, named.dtype)  # for a freed parameter, which has no rows
        if parameter is not None and local:
            layout = framework.local_layout(parameter, self.monitored.world_size)
            spec = framework.local_spec(parameter)
        elif parameter is not None:
            layout = framework.layout(parameter)
            spec = (framework.reduced_spec if reduced else framework.spec)(parameter)
        return PlanEntry(
            kind=kind,
            tensor=named.name,
            vpp_stage=None if parameter is None else framework.vpp_stage(parameter),
            micro_step=micro_step,
            placement=layout.placement,
            shard_group=layout.shard_group,
            dtype=dtype_name(spec.dtype),
            shape=spec.shape,
            module=named.module,
            aliases=named.aliases,
        )

    @property
    def placement(self) -> str:
        """Return the placement of tensors that are not sharded: "replica" or "full"."""
        return "replica" if self.monitored.framework.traits.replicated else "full"
