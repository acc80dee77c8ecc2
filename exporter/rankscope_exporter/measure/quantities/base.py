"""Base class of quantities, which defines their plan entries and the events of a step at which they read tensors.

The module also defines the interface of the gate that opens at sampled steps and keeps hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Final, Protocol

from torch import nn

from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.adapters.base import GradientSource
from rankscope_exporter.adapters.hook_context import Gate, Hook, HookContext
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.adapters.parameter_hooks import Removable
from rankscope_exporter.adapters.parameter_names import NamedParameter, Targets, TensorSpec, target_notices
from rankscope_exporter.adapters.placement import FULL
from rankscope_exporter.measure.kernels.tensor_access import dtype_name
from rankscope_exporter.measure.table import Table
from rankscope_exporter.process.validation import RANKS, Checked, at_least, list_of, validate
from rankscope_exporter.records.plan import ParameterEntries, chosen_ops
from rankscope_exporter.records.record import ExpectedRows

BACKWARD: Final = "backward"
"""Name of a part of training that hooks do not detect if it runs inside compiled code: the backward pass."""

REMEDY: Final = "detach() and attach() again"
"""The advice at the end of notices about tensors and hooks that were replaced or removed after attach()."""

UPDATE: Final = "update"
"""Name of a part of training that hooks do not detect if it runs inside compiled code: the step of the optimizer."""


class SamplingGate(Gate, Protocol):
    """The gate of the hooks of one quantity, which is open at sampled steps.

    It keeps the handles of the hooks, and has the table to which the quantity writes the statistics of this step.
    """

    @property
    def table(self) -> Table:
        """The table for the statistics of the current step. Valid only if the quantity is measured at this step."""

    def keep(self, handle: Removable) -> None:
        """Store `handle`, the handle of a hook of the quantity. Its method `remove` is called at detach()."""

    def hook(self, hook: Hook, register: Callable[[], Removable | None], *, stays: bool = False) -> None:
        """Call the function `register`, which registers `hook`, immediately and again before each sampled step.

        The function `register` returns the handle of the hook, or None if the hook cannot be registered at this step.
        An error in the first call of `register` is raised. If `stays` is true, the hook remains registered between
        sampled steps.
        """


TargetNames = Annotated[tuple[str, ...], Checked(Targets)]
"""Type of a setting with names, globs and regular expressions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantityOptions:
    """The options that every quantity has. Subclasses add options.

    The constructor validates the values and raises ValueError with the name of the option if a value is invalid. A list
    becomes a tuple. An option of type bool accepts no other type. If a subclass changes the default value of a field,
    it must also repeat the annotation with the validation rule of the field.
    """

    targets: TargetNames = ("*",)
    """Parameters or, for a quantity that reads modules, modules: names, globs, or regular expressions after "re:"."""
    start_step: Annotated[int, at_least(0)] | None = None
    """Number of the first step to sample; null samples from the beginning."""
    every: Annotated[int, at_least(1)] | None = None
    """Sample every n-th step; null means the value of the monitor's `every`."""
    times: Annotated[int, at_least(0)] | None = None
    """Stop sampling after this number of sampled steps; null means no limit."""
    ranks: Annotated[tuple[int, ...], RANKS] | None = None
    """Numbers of the ranks that measure this quantity; null means all ranks."""
    ops: Annotated[tuple[str, ...], list_of(str, "a list of statistics"), Checked(chosen_ops)] | None = None
    """Statistics (ops) to publish; null means the value of the monitor's `ops`."""

    def __post_init__(self) -> None:
        validate(self)


class Quantity:
    """A family of measurements that reads tensors at fixed events of a sampled step.

    All methods of a quantity run on the training thread with gradients disabled. To add a quantity, add a file with a
    subclass that sets `name`. A subclass without a name is a base class of quantities. The class has many methods,
    because each event has its own.
    """

    name: ClassVar[str]
    options_class: ClassVar[type[QuantityOptions]] = QuantityOptions
    of_modules: ClassVar[bool] = False
    """True if the targets of this quantity are names of modules; False if they are names of parameters."""
    measures_tensors: ClassVar[bool] = True
    """True if the quantity publishes statistics of tensors. The option `ops` selects these statistics."""

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        self.options = options or self.options_class()
        self.targets = Targets(self.options.targets)
        self._offered = monitored
        self.monitored = monitored if self.of_modules else monitored.only(self.targets, self.elsewhere(monitored))

    @staticmethod
    def elsewhere(monitored: MonitoredModel) -> frozenset[int]:  # noqa: ARG004 - for quantities that are the same on ranks
        """Return the positions, among all parameters, of those for which another rank publishes all rows."""
        return frozenset()

    def notices(self) -> list[str]:
        """Return notices: for each target without a parameter. Quantities of modules report theirs on finding these."""
        if self.of_modules:
            return []
        names = (name for item in self._offered.parameters for name in (item.name, *item.aliases))
        return target_notices(self.targets, names, "parameter")

    def entries(self) -> ParameterEntries:
        """Return the plan entries of this quantity, one for each parameter and kind. It may add further ones later."""
        return ParameterEntries()

    @functools.cached_property
    def first_entries(self) -> ParameterEntries:
        """The entries that the quantity has before training starts. They are built once."""
        return self.entries()

    def kinds(self) -> set[str]:
        """Return the kinds of all entries, also of later ones: a counter for each kind exists from the start."""
        return self.first_entries.kinds

    def expected(self) -> ExpectedRows:
        """Return the kinds of rows that the present step must have, because it has had an update.

        Kinds without rows at several such steps are reported. A subclass leaves out kinds that are absent by
        definition, such as gradients of frozen parameters.
        """
        return ExpectedRows(self.name)

    def install(self, hooking: HookContext, gate: SamplingGate) -> None:
        """Register the hooks of the quantity. Called once, when the monitor is attached to the model."""

    def on_step_begin(self, table: Table) -> None:
        """Handle the beginning of a sampled step. `table`, the table for the statistics of this step, is empty then."""

    def on_forward_failed(self, table: Table) -> None:
        """Delete all data of a micro-batch whose forward pass raised; a further attempt has the same number."""

    def on_gradient_ready(self, index: int, holder: GradientSource, table: Table) -> None:
        """Handle a gradient that was accumulated just now, inside the backward pass.

        `index` is the position of its parameter in `self.monitored.parameters`. `holder.grad` is this rank's own
        gradient, summed over the micro-batches of the step so far.
        """

    def on_gradients_ready(self, table: Table) -> None:
        """Handle the end of a pass's accumulation; reduced gradients are not yet written to the parameters."""

    def on_backward_end(self, table: Table) -> None:
        """Handle the end of a backward pass, after the framework has finished its work in this pass."""

    def on_optimizer_step_begin(self, table: Table) -> None:
        """Handle the beginning of an optimizer step."""

    def on_optimizer_step_end(self, table: Table) -> None:
        """Handle the end of an optimizer step."""

    def on_step_end(self, table: Table) -> None:
        """Handle the end of a sampled step, whether or not an optimizer has stepped."""

    def parameter_entries(self, *kinds: str, local: bool = False, reduced: bool = False) -> ParameterEntries:
        """Return one plan entry per parameter for the first of `kinds`, then for the next kind.

        The shape, dtype and placement of an entry are those of this rank's own gradient if `local` is true, those of
        the reduced gradient if `reduced` is true, and otherwise those of the parameter.
        """
        # Quantities that are built together share the descriptions. Later, parameters may have changed.
        shared = {} if "first_entries" in vars(self) else self.monitored.descriptions
        key = local, reduced
        if key not in shared:
            found = zip(self.monitored.parameters, self.monitored.found(), strict=True)
            shared[key] = [self._described(*item, local=local, reduced=reduced) for item in found]
        return ParameterEntries((kind, shared[key]) for kind in kinds)

    def parameter_entry(
        self, kind: str, index: int, *, local: bool = False, micro_step: int | None = None
    ) -> PlanEntry:
        """Return the plan entry of `kind` for parameter `index`."""
        described = self._described(self.monitored.parameters[index], self.monitored.parameter(index), local=local)
        return replace(PlanEntry(kind, *described), micro_step=micro_step)

    def _described(
        self, named: NamedParameter, parameter: nn.Parameter | None, *, local: bool = False, reduced: bool = False
    ) -> tuple[Any, ...]:
        """Return the fields of the plan entries of a parameter in the order of `PlanEntry`, without the kind."""
        framework = self.monitored.framework
        if parameter is None:  # freed: it has no rows
            layout, spec = FULL, TensorSpec(named.shape, named.dtype)
        elif local:
            layout = framework.local_layout(parameter, self.monitored.world_size)
            spec = framework.local_spec(parameter)
        else:
            layout = framework.layout(parameter)
            spec = framework.reduced_spec(parameter) if reduced else framework.spec(parameter)
        vpp_stage = None if parameter is None else framework.vpp_stage(parameter)
        of_tensor = layout.placement, layout.shard_group, dtype_name(spec.dtype), spec.shape
        return (named.name, None, vpp_stage, None, None, *of_tensor, named.module, named.aliases)
