"""Parameters just before and just after the optimizer's update."""

from __future__ import annotations

from typing import ClassVar

import torch

from rankscope_contract.model.kinds import Kind
from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.quantities.base import Quantity, QuantityOptions, Table


class Parameters(Quantity):
    """Both are read, although one step's `after` is usually the next one's `before`.

    What changes a parameter between two steps (a checkpoint, an averaging trick, a stray write) is worth seeing.
    """

    name: ClassVar[str] = "parameters"

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        super().__init__(monitored, options)
        count = len(self.monitored.parameters)
        self._before, self._after = range(count), range(count, 2 * count)

    @staticmethod
    def elsewhere(monitored: MonitoredModel) -> frozenset[int]:
        """Return what another rank holds alike."""
        return monitored.elsewhere

    def entries(self) -> list[PlanEntry]:
        """Return all `param_before`, then all `param_after`."""
        return [
            *self.parameter_entries(Kind.PARAM_BEFORE),
            *self.parameter_entries(Kind.PARAM_AFTER),
        ]

    def on_optimizer_step_begin(self, table: Table) -> None:
        """Read the parameters that the update starts from."""
        table.measure(self._held(), self._before)

    def on_optimizer_step_end(self, table: Table) -> None:
        """Read the parameters that the update produced."""
        table.measure(self._held(), self._after)

    def _held(self) -> list[torch.Tensor | None]:
        held = self.monitored.framework.held
        return [None if parameter is None else held(parameter) for parameter in self.monitored.tensors()]
