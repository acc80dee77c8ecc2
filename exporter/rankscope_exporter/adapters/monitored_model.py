"""The monitored model: its adapter, its parameters and its optimizers; and models that consist of several chunks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn

from rankscope_exporter.adapters.base import Framework, is_stood_in_for
from rankscope_exporter.adapters.placement import loaded
from rankscope_exporter.model.name_patterns import Targets
from rankscope_exporter.model.parameter_names import NamedParameter
from rankscope_exporter.records.host_transfer import Row

T = TypeVar("T")


class Borrowed(MutableSequence[T]):
    """A list of those of its items that are still alive. For modules and optimizers, never for tensors.

    torch.utils.swap_tensors refuses a tensor with a weak reference.
    """

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._references = [weakref.ref(item) for item in items]

    def _alive(self) -> list[T]:
        found = (reference() for reference in self._references)
        return [item for item in found if item is not None]

    def _keep(self, items: Iterable[T]) -> None:
        self._references = [weakref.ref(item) for item in items]

    def __len__(self) -> int:
        return len(self._alive())

    def __getitem__(self, place: Any) -> Any:
        return self._alive()[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        items = self._alive()
        items[place] = value
        self._keep(items)

    def __delitem__(self, place: Any) -> None:
        items = self._alive()
        del items[place]
        self._keep(items)

    def insert(self, index: int, value: T) -> None:
        """Insert `value` before position `index`."""
        items = self._alive()
        items.insert(index, value)
        self._keep(items)


@dataclass(frozen=True, slots=True)
class MonitoredModel:
    """The monitored model as its framework wraps it, its parameters, and their optimizers."""

    framework: Framework
    parameters: tuple[NamedParameter, ...]
    optimizers: Borrowed[torch.optim.Optimizer]
    """One that takes the place of another while training runs does so here."""
    world_size: int = 1
    retired: set[int] = field(default_factory=set)
    """Positions of parameters that the model has replaced since: the old tensor would repeat its last gradient."""
    compiled: set[str] = field(default_factory=set)
    """Parts of the training that run inside compiled code, as far as they were seen to be compiled."""
    positions: tuple[int, ...] | None = None
    """Positions of the parameters among those of the whole model, when they are a part of them."""
    elsewhere: frozenset[int] = frozenset()
    """Positions, in the whole subject, of parameters of which another rank publishes what both have in common."""

    def parameter(self, index: int) -> nn.Parameter | None:
        """Return parameter number `index`; None once the model has replaced it, or is gone."""
        named = self.parameters[index]
        found = self.framework.parameter(named)
        return self._stood_in_for(named) if found is None else found

    def found(self) -> list[nn.Parameter | None]:
        """Return the parameters by position, as `parameter` does. Not to be kept: the list would keep them alive."""
        found = self.framework.found(self.parameters)
        if any(item is None for item in found):
            pairs = zip(self.parameters, found, strict=True)
            return [self._stood_in_for(named) if item is None else item for named, item in pairs]
        return found

    def tensors(self) -> list[nn.Parameter | None]:
        """Return the parameters by position, None where one is retired or gone. Not to be kept, as `found`."""
        found = self.found()
        if not self.retired:
            return found
        return [None if owner in self.retired else item for owner, item in zip(self.owners(), found, strict=True)]

    def _stood_in_for(self, named: NamedParameter) -> nn.Parameter | None:
        """Return from the optimizers a parameter that `torch.func.functional_call` has replaced for the moment."""
        if not is_stood_in_for(named.current()):
            return None
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        return next((item for group in groups for item in group["params"] if id(item) == named.identity), None)

    def in_model(self) -> set[int]:
        """Return the identities of the parameters that the model has now, where it had those that were found."""
        return {id(named.current()) for named in self.parameters}

    @property
    def device(self) -> torch.device:
        """Return the device of the first parameter; the CPU without one."""
        first = self.parameter(0) if self.parameters else None
        return torch.device("cpu") if first is None else first.device

    def owners(self) -> Sequence[int]:
        """Return the position of each parameter among those of the whole subject."""
        return range(len(self.parameters)) if self.positions is None else self.positions

    @property
    def copies(self) -> int:
        """Return how many ranks compute gradients of the same elements from different data."""
        return self.framework.copies(self.world_size)

    @property
    def state_elsewhere(self) -> frozenset[int]:
        """Return `elsewhere` as far as it holds for the state of the optimizers: not where that is divided."""
        divided = loaded("torch.distributed.optim", "ZeroRedundancyOptimizer")
        return frozenset() if any(isinstance(item, divided) for item in self.optimizers) else self.elsewhere

    def only(self, targets: Targets, without: frozenset[int] = frozenset()) -> MonitoredModel:
        """Return the subject with the parameters that `targets` selects by name or alias, less those at `without`."""
        if targets.selects_all and not without:
            return self
        kept = [
            i
            for i, item in enumerate(self.parameters)
            if i not in without and targets.selects(item.name, *item.aliases)
        ]
        return replace(self, parameters=tuple(self.parameters[i] for i in kept), positions=tuple(kept))


def numbers_of(chunks: Sequence[nn.Module]) -> dict[int, int]:
    """Return the chunk of each parameter and module by identity, the first that has it; nothing of one alone."""
    found: dict[int, int] = {}
    for number, chunk in enumerate(chunks) if len(chunks) > 1 else ():
        for part in (*chunk.modules(), *chunk.parameters()):
            found.setdefault(id(part), number)
    return found


def as_one(chunks: Sequence[nn.Module]) -> nn.Module:
    """Return a module that has all chunks, whose names begin with their numbers there; one alone as it is."""
    return chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks)


def with_chunk_number(row: Row) -> Row:
    """Return a row of a parameter or module of such a model, with the chunk that its name begins with."""
    name: str = row["tensor"] if "tensor" in row else row["module"]
    return {**row, "vpp_stage": int(name.partition(".")[0])}
