"""The monitored model: its adapter, its parameters and its optimizers; and models that consist of several chunks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn

from rankscope_exporter.adapters.base import Framework, is_temporarily_replaced
from rankscope_exporter.adapters.placement import loaded
from rankscope_exporter.model.name_patterns import Targets
from rankscope_exporter.model.parameter_names import NamedParameter, found_in_place
from rankscope_exporter.records.host_transfer import Row

T = TypeVar("T")


class Borrowed(Sequence[T]):
    """A list that does not keep its items alive; freed items disappear. For modules and optimizers, never for tensors.

    torch.utils.swap_tensors rejects a tensor with a weak reference.
    """

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._references = [weakref.ref(item) for item in items]

    def __iter__(self) -> Iterator[T]:
        return (item for reference in self._references if (item := reference()) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, position: Any) -> Any:
        return list(self)[position]

    def __setitem__(self, position: Any, value: Any) -> None:
        items = list(self)
        items[position] = value
        self._references = [weakref.ref(item) for item in items]


@dataclass(frozen=True, slots=True)
class MonitoredModel:
    """The monitored model as its framework wraps it, its parameters, and their optimizers."""

    framework: Framework
    parameters: tuple[NamedParameter, ...]
    optimizers: Borrowed[torch.optim.Optimizer]
    """An optimizer that replaces another one during training also replaces it here."""
    world_size: int = 1
    retired: set[int] = field(default_factory=set)
    """Positions of parameters that the model has replaced. The old tensor would repeat its last gradient."""
    compiled: set[str] = field(default_factory=set)
    """Parts of the training that were seen to run inside compiled code."""
    positions: tuple[int, ...] | None = None
    """Positions of the parameters in the whole model; None if these are all its parameters."""
    elsewhere: frozenset[int] = frozenset()
    """Positions, in the whole model, of parameters whose shared statistics another rank publishes."""

    def parameter(self, index: int) -> nn.Parameter | None:
        """Return parameter number `index`; None after the model replaced it or was freed."""
        named = self.parameters[index]
        found = self.framework.parameter(named)
        return self._from_optimizers(named) if found is None else found

    def found(self) -> list[nn.Parameter | None]:
        """Return the parameters by position, as `parameter` does. The caller must not keep the list.

        Runs several times in a sampled step, so models whose parameters never move are read without method calls.
        """
        if type(self.framework).parameter is Framework.parameter:
            found = found_in_place(self.parameters)
        else:
            found = [self.framework.parameter(named) for named in self.parameters]
        if any(item is None for item in found):
            pairs = zip(self.parameters, found, strict=True)
            return [self._from_optimizers(named) if item is None else item for named, item in pairs]
        return found

    def tensors(self) -> list[nn.Parameter | None]:
        """Return the parameters by position, None for retired or freed ones. The caller must not keep the list."""
        found = self.found()
        if not self.retired:
            return found
        return [None if owner in self.retired else item for owner, item in zip(self.owners(), found, strict=True)]

    def _from_optimizers(self, named: NamedParameter) -> nn.Parameter | None:
        """Return a parameter that `torch.func.functional_call` replaces at the moment; the optimizers still hold it."""
        if not is_temporarily_replaced(named.current()):
            return None
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        return next((item for group in groups for item in group["params"] if id(item) == named.identity), None)

    def in_model(self) -> set[int]:
        """Return the id() of each tensor that the model now has in the place of its parameters."""
        return {id(named.current()) for named in self.parameters}

    @property
    def device(self) -> torch.device:
        """Return the device of the first parameter; the CPU if there is none."""
        first = self.parameter(0) if self.parameters else None
        return torch.device("cpu") if first is None else first.device

    def owners(self) -> Sequence[int]:
        """Return the position of each parameter in the whole model."""
        return range(len(self.parameters)) if self.positions is None else self.positions

    @property
    def copies(self) -> int:
        """Return how many ranks compute gradients of the same elements from different data."""
        return self.framework.copies(self.world_size)

    @property
    def has_divided_state(self) -> bool:
        """Return whether an optimizer divides its state among replicas (`ZeroRedundancyOptimizer`)."""
        divided = loaded("torch.distributed.optim", "ZeroRedundancyOptimizer")
        return any(isinstance(item, divided) for item in self.optimizers)

    @property
    def state_elsewhere(self) -> frozenset[int]:
        """Return the part of `elsewhere` that also holds for optimizer state: nothing if the state is divided."""
        return frozenset() if self.has_divided_state else self.elsewhere

    def only(self, targets: Targets, without: frozenset[int] = frozenset()) -> MonitoredModel:
        """Return the model with the parameters that `targets` selects by name or alias, except those at `without`."""
        if targets.selects_all and not without:
            return self
        kept = [
            i
            for i, item in enumerate(self.parameters)
            if i not in without and targets.selects(item.name, *item.aliases)
        ]
        return replace(self, parameters=tuple(self.parameters[i] for i in kept), positions=tuple(kept))


def numbers_of(chunks: Sequence[nn.Module]) -> dict[int, int]:
    """Return the number of the first chunk with each parameter and module, by id(); empty for a single chunk."""
    found: dict[int, int] = {}
    for number, chunk in enumerate(chunks) if len(chunks) > 1 else ():
        for part in (*chunk.modules(), *chunk.parameters()):
            found.setdefault(id(part), number)
    return found


def as_one(chunks: Sequence[nn.Module]) -> nn.Module:
    """Return one module that contains all chunks, whose names then begin with their number; a single chunk as it is."""
    return chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks)


def with_chunk_number(row: Row) -> Row:
    """Return a row of a parameter or module of such a model, with the chunk number at the beginning of its name."""
    name: str = row["tensor"] if "tensor" in row else row["module"]
    return {**row, "vpp_stage": int(name.partition(".")[0])}
