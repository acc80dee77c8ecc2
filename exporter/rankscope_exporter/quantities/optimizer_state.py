"""The optimizer's state of every parameter, after the step: Adam's moments, SGD's momentum."""

from __future__ import annotations

from typing import ClassVar, Final

import torch

from rankscope_contract.kinds import Kind
from rankscope_contract.records import PlanEntry
from rankscope_exporter.quantities.base import Quantity, QuantityOptions, Subject, Table

# Key in `optimizer.state[parameter]` -> kind, by the option that says the optimizer keeps it.
ADAM_STATE: Final = (("exp_avg", Kind.EXP_AVG), ("exp_avg_sq", Kind.EXP_AVG_SQ))
MOMENTUM_STATE: Final = (("momentum_buffer", Kind.MOMENTUM),)


class OptimizerState(Quantity):
    """What the optimizers keep is known from their options, since state itself appears only in the first step."""

    name: ClassVar[str] = "optimizer_state"

    def __init__(self, subject: Subject, options: QuantityOptions | None = None) -> None:
        super().__init__(subject, options)
        self._kept = _kept_state(subject.optimizers)

    def entries(self) -> list[PlanEntry]:
        """Return the entries of each kept kind in turn."""
        return [entry for _, kind in self._kept for entry in self.parameter_entries(kind, self.placement)]

    def after_update(self, table: Table) -> None:
        """Read the state the step left."""
        parameters = self.subject.tensors()
        count = len(parameters)
        for position, (key, _) in enumerate(self._kept):
            table.measure(
                [self._state_of(parameter, key) for parameter in parameters],
                range(position * count, (position + 1) * count),
            )

    def _state_of(self, parameter: torch.nn.Parameter | None, key: str) -> torch.Tensor | None:
        if parameter is None:
            return None
        for optimizer in self.subject.optimizers:
            state = optimizer.state.get(parameter)
            if state is not None:
                value = state.get(key)
                return value if isinstance(value, torch.Tensor) else None
        return None


def _kept_state(optimizers: tuple[torch.optim.Optimizer, ...]) -> tuple[tuple[str, Kind], ...]:
    kept: list[tuple[str, Kind]] = []
    if any("betas" in optimizer.defaults for optimizer in optimizers):
        kept += ADAM_STATE
    if any(group.get("momentum") for optimizer in optimizers for group in optimizer.param_groups):
        kept += MOMENTUM_STATE
    return tuple(kept)
