"""One measured quantity: the entries it adds to the plan, and the moments of a step at which it reads tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from rankscope_contract.records import PlanEntry
from rankscope_exporter.frameworks import Framework
from rankscope_exporter.naming import NamedParameter, local_tensor


@dataclass(frozen=True, slots=True)
class Subject:
    """What is monitored: the model as its framework wraps it, its parameters, and their optimizers."""

    framework: Framework
    parameters: tuple[NamedParameter, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    world_size: int = 1
    retired: set[int] = field(default_factory=set)
    """Positions of parameters that the model has replaced since: the old tensor would repeat its last gradient."""

    def tensors(self) -> list[torch.nn.Parameter | None]:
        """Return the parameters by position, None where one is retired."""
        if not self.retired:
            return [named.parameter for named in self.parameters]
        return [None if i in self.retired else named.parameter for i, named in enumerate(self.parameters)]


class Table:
    """Where a quantity writes during one sampled step; `rows` are relative to the quantity's own first entry."""

    def measure(self, tensors: Sequence[torch.Tensor | None], rows: range) -> None:
        """Take the statistics of `tensors` into entries `rows`; None leaves an entry absent."""
        raise NotImplementedError

    def copy(self, source: range, target: range) -> None:
        """Set entries `target` equal to entries `source`, which were measured before."""
        raise NotImplementedError

    def forget(self, rows: range) -> None:
        """Make entries absent that were measured before."""
        raise NotImplementedError


class Quantity:
    """Reads tensors at fixed moments of a sampled step. All calls come from the training thread, gradients off."""

    name: ClassVar[str]

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    def entries(self) -> list[PlanEntry]:
        """Return the entries this quantity fills, in the order of its rows."""
        raise NotImplementedError

    def step_begins(self, table: Table) -> None:
        """A sampled step begins; the table is empty."""

    def gradient_ready(self, index: int, table: Table) -> None:
        """Parameter `index` has just accumulated its gradient, inside the backward pass."""

    def backward_ends(self, table: Table) -> None:
        """All gradients have accumulated; a framework that reduces them has not yet written them back."""

    def backward_ended(self, table: Table) -> None:
        """The framework, too, has finished the backward pass."""

    def before_update(self, table: Table) -> None:
        """An optimizer is about to step."""

    def after_update(self, table: Table) -> None:
        """An optimizer has stepped."""

    def parameter_entries(self, kind: str, placement: str) -> list[PlanEntry]:
        """Return one entry of `kind` for each parameter."""
        return [
            PlanEntry(
                kind=kind,
                tensor=named.name,
                placement=placement,
                dtype=str(named.parameter.dtype).removeprefix("torch."),
                shape=tuple(local_tensor(named.parameter).shape),
                module=named.module,
                aliases=named.aliases,
            )
            for named in self.subject.parameters
        ]

    @property
    def placement(self) -> str:
        """Return how a parameter lies on the ranks."""
        return "replica" if self.subject.framework.replicated else "full"
