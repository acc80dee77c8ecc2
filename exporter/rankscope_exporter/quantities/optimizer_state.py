"""The optimizer's state of every parameter, after the step: Adam's moments, SGD's momentum, anything by name."""

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
from rankscope_exporter.quantities.base import Quantity, QuantityOptions, Table
from rankscope_exporter.statistics.tensor_access import dtype_name

# Key in `optimizer.state[parameter]` -> kind, by the option that says the optimizer keeps it.
ADAM_STATE: Final = (("exp_avg", Kind.EXP_AVG), ("exp_avg_sq", Kind.EXP_AVG_SQ))
MOMENTUM_STATE: Final = (("momentum_buffer", Kind.MOMENTUM),)
KIND_OF_STATE: Final[dict[str, str]] = dict((*ADAM_STATE, *MOMENTUM_STATE))
"""Every other state has its own name as kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStateOptions(QuantityOptions):
    """Which state is read."""

    names: tuple[str, ...] = ()
    """Keys of further tensors in `optimizer.state[parameter]`, or globs: "max_exp_avg_sq", "square_avg", "*"."""

    def __post_init__(self) -> None:
        QuantityOptions.__post_init__(self)
        if isinstance(self.names, list):
            object.__setattr__(self, "names", tuple(self.names))
        Targets(self.names)


class OptimizerState(Quantity):
    """What the optimizers keep is known from their options, since state itself appears only in the first step.

    State that `names` asks for is found when it appears, at the first measured step that has it.
    """

    name: ClassVar[str] = "optimizer_state"
    options_class: ClassVar[type[QuantityOptions]] = OptimizerStateOptions

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        super().__init__(monitored, options)
        self._kept = _kept_state(monitored.optimizers)
        assert isinstance(self.options, OptimizerStateOptions)
        self._named = Targets(self.options.names)
        self._found: dict[str, tuple[list[int], range | None]] = {}  # further key -> parameters that have it, and rows

    @staticmethod
    def elsewhere(monitored: MonitoredModel) -> frozenset[int]:
        """Return what another rank holds alike, its optimizer's state included."""
        return monitored.state_elsewhere

    def entries(self) -> list[PlanEntry]:
        """Return the entries of each kept kind in turn."""
        return [entry for _, kind in self._kept for entry in self.parameter_entries(kind)]

    def on_optimizer_step_end(self, table: Table) -> None:
        """Read the state the step left."""
        kept = self.monitored.framework.kept(self.monitored.tensors(), self.monitored.optimizers)
        states: list[Mapping[str, Any]] = [{} if own is None else own.state for own in kept]
        count = len(states)
        for position, (key, _) in enumerate(self._kept):
            rows = range(position * count, (position + 1) * count)
            table.measure([_tensor(state, key) for state in states], rows)
        if self._named.patterns:
            self._look_for_more(states, table)
        for key, (owners, found) in self._found.items():
            if found is not None:
                table.measure([_tensor(states[owner], key) for owner in owners], found)

    def _look_for_more(self, states: list[Mapping[str, Any]], table: Table) -> None:
        known = {*self._found, *(key for key, _ in self._kept)}
        for key in dict.fromkeys(key for state in states for key in self._further(state) if key not in known):
            owners = [index for index, state in enumerate(states) if _tensor(state, key) is not None]
            entries = [self._entry(key, index, states[index][key]) for index in owners]
            positions = self.monitored.owners()
            self._found[key] = owners, table.add(entries, [positions[index] for index in owners])

    def _further(self, state: Mapping[str, Any]) -> Iterator[str]:
        # `step` is a number that Adam keeps as a tensor; whoever wants it names it.
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
        if shape != entry.shape:  # a number beside the parameter, the same for all its parts
            entry = replace(entry, placement=self.placement, shard_group=None, shape=shape)
        return replace(entry, dtype=dtype_name(value.dtype))


def _tensor(state: Mapping[str, Any], key: str) -> torch.Tensor | None:
    value = state.get(key)
    return value if isinstance(value, torch.Tensor) else None


def _kept_state(optimizers: Sequence[torch.optim.Optimizer]) -> tuple[tuple[str, Kind], ...]:
    kept: list[tuple[str, Kind]] = []
    if any("betas" in optimizer.defaults for optimizer in optimizers):
        kept += ADAM_STATE
    if any(group.get("momentum") for optimizer in optimizers for group in optimizer.param_groups):
        kept += MOMENTUM_STATE
    return tuple(kept)
