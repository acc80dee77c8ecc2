"""Quantity `optimizer_state`: the state of every parameter after the update, such as Adam's moments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import torch

from rankscope_contract.model.kinds import Kind
from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.model.name_patterns import Targets
from rankscope_exporter.model.parameter_names import local_tensor
from rankscope_exporter.quantities.base import Quantity, QuantityOptions, Table, TargetNames
from rankscope_exporter.statistics.tensor_access import dtype_name

# Key in `optimizer.state[parameter]` and kind, for optimizers with `betas` and for those with `momentum`.
ADAM_STATE: Final = (("exp_avg", Kind.EXP_AVG), ("exp_avg_sq", Kind.EXP_AVG_SQ))
MOMENTUM_STATE: Final = (("momentum_buffer", Kind.MOMENTUM),)
KIND_OF_STATE: Final[dict[str, str]] = dict((*ADAM_STATE, *MOMENTUM_STATE))
"""The kind of each key in `optimizer.state[parameter]`.

For a key that is not in this dictionary, the kind is the key.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStateOptions(QuantityOptions):
    """Options of the quantity `optimizer_state`: the state to measure in addition to moments and momentum."""

    names: TargetNames = ()
    """Keys, or globs, of additional tensors in `optimizer.state[parameter]`: "max_exp_avg_sq", "square_avg", "*"."""


class OptimizerState(Quantity):
    """Measures one row per parameter for each kind of optimizer state.

    The kinds follow from the options of the optimizers, because the state itself appears only in the first step.
    Tensors of the state that the option `names` selects are added at the first sampled step at which they exist.
    """

    name: ClassVar[str] = "optimizer_state"
    options_class: ClassVar[type[QuantityOptions]] = OptimizerStateOptions
    options: OptimizerStateOptions

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        super().__init__(monitored, options)
        self._kinds = _kinds_of(monitored.optimizers)
        self._named = Targets(self.options.names)
        self._found: dict[str, tuple[list[int], range | None]] = {}  # additional key -> its parameters and rows

    @staticmethod
    def elsewhere(monitored: MonitoredModel) -> frozenset[int]:
        """Return the positions of parameters with optimizer state that another rank publishes.

        A position counts in the list of all parameters of the model. The state of these parameters is whole on each
        rank, not divided among ranks.
        """
        return monitored.state_elsewhere

    def entries(self) -> list[PlanEntry]:
        """Return the plan entries: one per parameter for the first kind of state, then for the next kind."""
        return [entry for _, kind in self._kinds for entry in self.parameter_entries(kind)]

    def on_optimizer_step_end(self, table: Table) -> None:
        """Measure the optimizer state after the update."""
        known = self.monitored.framework.optimizer_states(self.monitored.tensors(), self.monitored.optimizers)
        states: list[Mapping[str, Any]] = [{} if own is None else own.state for own in known]
        count = len(states)
        for position, (key, _) in enumerate(self._kinds):
            rows = range(position * count, (position + 1) * count)
            table.measure([_tensor(state, key) for state in states], rows)
        if self._named.patterns:
            self._add_named(states, table)
        for key, (owners, found) in self._found.items():
            if found is not None:
                table.measure([_tensor(states[owner], key) for owner in owners], found)

    def _add_named(self, states: list[Mapping[str, Any]], table: Table) -> None:
        known = {*self._found, *(key for key, _ in self._kinds)}
        for key in dict.fromkeys(key for state in states for key in self._selected(state) if key not in known):
            owners = [index for index, state in enumerate(states) if _tensor(state, key) is not None]
            entries = [self._entry(key, index, states[index][key]) for index in owners]
            positions = self.monitored.owners()
            self._found[key] = owners, table.add(entries, [positions[index] for index in owners])

    def _selected(self, state: Mapping[str, Any]) -> Iterator[str]:
        # Adam keeps `step`, a number, as a tensor. It is read only if it is named explicitly.
        return (
            key
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
            and self._named.selects(key)
            and (value.numel() > 1 or key in self._named.patterns)
        )

    def _entry(self, key: str, index: int, value: torch.Tensor) -> PlanEntry:
        entry = self.parameter_entry(KIND_OF_STATE.get(key, key), index)
        shape = tuple(local_tensor(value).shape)
        if shape != entry.shape:  # one number for the parameter, equal for all its parts
            entry = replace(entry, placement=self.placement, shard_group=None, shape=shape)
        return replace(entry, dtype=dtype_name(value.dtype))


def _tensor(state: Mapping[str, Any], key: str) -> torch.Tensor | None:
    value = state.get(key)
    return value if isinstance(value, torch.Tensor) else None


def _kinds_of(optimizers: Sequence[torch.optim.Optimizer]) -> tuple[tuple[str, Kind], ...]:
    kinds: list[tuple[str, Kind]] = []
    if any("betas" in optimizer.defaults for optimizer in optimizers):
        kinds += ADAM_STATE
    if any(group.get("momentum") for optimizer in optimizers for group in optimizer.param_groups):
        kinds += MOMENTUM_STATE
    return tuple(kinds)
