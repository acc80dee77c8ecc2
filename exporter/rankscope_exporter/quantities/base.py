"""One measured quantity: the entries it adds to the plan, and the moments of a step at which it reads tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import nn

from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.adapters.base import GradientSource, Removable, TensorSpec
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.adapters.placement import Layout
from rankscope_exporter.base.validation import is_whole
from rankscope_exporter.model.name_patterns import Targets, target_notices
from rankscope_exporter.records.host_transfer import Numbers, Row
from rankscope_exporter.statistics.selection import chosen_ops
from rankscope_exporter.statistics.tensor_access import dtype_name

BACKWARD: Final = "backward"
"""A part of the training that may run inside compiled code, where no hook runs."""


class Table(Protocol):
    """Where a quantity writes during one sampled step; `rows` are relative to the quantity's own first entry."""

    def add(self, entries: Sequence[PlanEntry], owners: Sequence[int] | None = None) -> range | None:
        """Append entries that were not known before; None when the plan is full. `owners` are parameters."""
        ...

    def measure(self, tensors: Sequence[torch.Tensor | None], rows: range) -> None:
        """Take the statistics of `tensors` into entries `rows`; None leaves an entry absent."""
        ...

    def copy(self, source: range, target: range) -> None:
        """Set entries `target` equal to entries `source`, which were measured before."""
        ...

    def forget(self, rows: range) -> None:
        """Make entries absent that were measured before."""
        ...

    def forget_equal(self, rows: range, others: range) -> torch.Tensor:
        """Make those of `rows` absent whose statistics are, bit for bit, those of the entry beside them in `others`.

        Returns bool [len(rows)] on the device: which were measured and differ.
        """
        ...

    def defer(self, dataset: str, tensor: torch.Tensor, rows: Callable[[Numbers], Iterable[Row]]) -> None:
        """Have `rows` make rows of `dataset` of `tensor` once it is on the host; nothing waits for the device.

        `rows` is called on the publisher thread with a numpy array: `tensor` has an element type of numpy's.
        """
        ...

    def withdraw(self, dataset: str) -> None:
        """Forget what was deferred to `dataset` at this step: it is read anew."""
        ...

    def later(self, tensor: torch.Tensor, use: Callable[[Numbers], None]) -> None:
        """Call `use` on the publisher's thread with what `tensor` holds now, once it is on the host."""
        ...

    def write(self, dataset: str, row: Row) -> None:
        """Add a row of `dataset` that is known already."""
        ...


class SamplingGate(Protocol):
    """Tells a quantity's own hooks whether to read, and where to write."""

    @property
    def is_open(self) -> bool:
        """Whether the step under way is measured by this quantity."""
        ...

    @property
    def table(self) -> Table:
        """Where to write while the gate is open."""
        ...


class Hook(Protocol):
    """A guarded hook, which knows whether it is of use."""

    was_called: bool
    is_compiled: bool
    """Whether the hook was seen to be part of compiled code, where it does not run."""
    on_inactive_call: Callable[[], None]
    """Called instead of reading anything at a step that is not measured."""

    def __call__(self, *args: Any) -> None:
        """Read something if the step is measured."""
        ...


class ModelHookContext(Protocol):
    """What it takes to hook a model: everything registered goes through the error boundary and away at detach."""

    @property
    def micro_step(self) -> int:
        """Which training forward of the step is under way or was the last, from 0 on."""
        ...

    @property
    def in_forward(self) -> bool:
        """Whether a training forward of the whole model is under way."""
        ...

    @property
    def grad_enabled(self) -> bool:
        """Whether training computes gradients where the guarded hook that is running was called."""
        ...

    def keep(self, handle: Removable) -> None:
        """Remove `handle` at detach()."""
        ...

    def begins_steps(self, module: nn.Module) -> bool:
        """Return whether steps begin with the forward of `module`: a hook that comes with the step would miss it."""
        ...

    def tell(self, message: str) -> None:
        """Say something that its reader should know, on the console and as an event."""
        ...

    def guarded(self, where: str, function: Callable[..., None], gate: SamplingGate) -> Hook:
        """Return `function` as a hook: called while `gate` is open, timed, and never raising into training.

        Its result is dropped, gradients are off inside, nothing runs while a graph is being compiled, and it is inert
        after detach, in a forked child, and in a copy of the model.
        """
        ...

    def gradient_arrives(self) -> None:
        """Note that a gradient is on its way to a parameter, for a hook that comes before it is accumulated.

        The step that was under way may end with it, and the next one begin.
        """
        ...

    def between(self, function: Callable[[], None]) -> None:
        """Call `function` while no step begins or ends: what comes long after an update may meet its end."""
        ...


class Hooking(ModelHookContext, Protocol):
    """What a quantity is given: the hooking of the model, with hooks that come and go with the quantity's own steps."""

    def hook(self, hook: Hook, register: Callable[[], Removable | None], *, stays: bool = False) -> None:
        """Have `register` put `hook` in its place, now and for every step that is measured; raises what it raises.

        It returns None where that cannot be done this time, and is asked again for the next such step. A hook that
        `stays` is not removed between these steps.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantityOptions:
    """What every quantity can be told; a subclass adds its own. Checked at construction."""

    targets: tuple[str, ...] = ("*",)
    """Names, globs, or regular expressions behind "re:"; of parameters, or of modules where modules are measured."""
    start_step: int | None = None
    """The first step to measure; null measures from the beginning."""
    every: int | None = None
    """Measure every n-th step; null is the monitor's own `every`."""
    times: int | None = None
    """Stop after so many measured steps; null never stops."""
    ranks: tuple[int, ...] | None = None
    """Measure on these ranks alone; null is all."""
    ops: tuple[str, ...] | None = None
    """Which statistics are published; null is the monitor's own `ops`."""

    def __post_init__(self) -> None:
        for name in ("targets", "ranks", "ops"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
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
    """Reads tensors at fixed moments of a sampled step. All calls come from the training thread, gradients off."""

    name: ClassVar[str]
    options_class: ClassVar[type[QuantityOptions]] = QuantityOptions
    of_modules: ClassVar[bool] = False
    """Whether targets name modules rather than parameters."""
    measures_tensors: ClassVar[bool] = True
    """Whether it has statistics of tensors, of which `ops` chooses."""

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        self.options = options or self.options_class()
        self.targets = Targets(self.options.targets)
        self._offered = monitored
        self.monitored = monitored if self.of_modules else monitored.only(self.targets, self.elsewhere(monitored))

    @staticmethod
    def elsewhere(monitored: MonitoredModel) -> frozenset[int]:  # noqa: ARG004 - for quantities that are the same on ranks
        """Return the positions of parameters of which another rank publishes all that this quantity has."""
        return frozenset()

    def notices(self) -> list[str]:
        """Return a sentence for each target that selects no parameter; modules are the quantity's own business."""
        if self.of_modules:
            return []
        names = (name for item in self._offered.parameters for name in (item.name, *item.aliases))
        return target_notices(self.targets, names, "parameter")

    def entries(self) -> list[PlanEntry]:
        """Return the entries this quantity fills, in the order of its rows; more may be added later."""
        return []

    def kinds(self) -> set[str]:
        """Return the kinds of all entries, also of those to come: their counters exist from the start."""
        return {entry.kind for entry in self.entries()}

    def owners(self, count: int) -> list[int]:
        """Return for each of the `count` entries the parameter it belongs to: all parameters, kind after kind."""
        own = self.monitored.owners()
        return [own[i % len(own)] for i in range(count)] if len(own) else []

    def install(self, hooking: Hooking, gate: SamplingGate) -> None:
        """Register hooks of its own; called once, when the model is attached."""

    def on_step_begin(self, table: Table) -> None:
        """A sampled step begins; the table is empty."""

    def on_gradient_ready(self, index: int, holder: GradientSource, table: Table) -> None:
        """Parameter `index` has just accumulated its gradient in `holder`, inside the backward pass."""

    def on_gradients_ready(self, table: Table) -> None:
        """All gradients have accumulated; a framework that reduces them has not yet written them back."""

    def on_backward_end(self, table: Table) -> None:
        """The framework, too, has finished the backward pass."""

    def on_optimizer_step_begin(self, table: Table) -> None:
        """An optimizer is about to step."""

    def on_optimizer_step_end(self, table: Table) -> None:
        """An optimizer has stepped."""

    def on_step_end(self) -> None:
        """The sampled step is over, whether an optimizer has stepped or not."""

    def parameter_entries(self, kind: str, *, local: bool = False, reduced: bool = False) -> list[PlanEntry]:
        """Return one entry of `kind` for each parameter: of this rank's own gradient, of the reduced one, or others."""
        count = len(self.monitored.parameters)
        return [self.parameter_entry(kind, index, local=local, reduced=reduced) for index in range(count)]

    def parameter_entry(
        self, kind: str, index: int, *, local: bool = False, reduced: bool = False, micro_step: int | None = None
    ) -> PlanEntry:
        """Return the entry of `kind` for parameter `index`."""
        framework = self.monitored.framework
        named, parameter = self.monitored.parameters[index], self.monitored.parameter(index)
        layout, form = Layout("full"), TensorSpec(named.shape, named.dtype)  # of one that is gone, which has no rows
        if parameter is not None and local:
            layout = framework.local_layout(parameter, self.monitored.world_size)
            form = framework.local_spec(parameter) or framework.form(parameter)
        elif parameter is not None:
            layout = framework.layout(parameter)
            form = (framework.reduced_spec if reduced else framework.form)(parameter)
        return PlanEntry(
            kind=kind,
            tensor=named.name,
            vpp_stage=None if parameter is None else framework.vpp_stage(parameter),
            micro_step=micro_step,
            placement=layout.placement,
            shard_group=layout.shard_group,
            dtype=dtype_name(form.dtype),
            shape=form.shape,
            module=named.module,
            aliases=named.aliases,
        )

    @property
    def placement(self) -> str:
        """Return how what is not sharded lies on the ranks."""
        return "replica" if self.monitored.framework.replicated else "full"
