"""Quantity `parameters`: parameters directly before and directly after the update by the optimizer."""

from __future__ import annotations

from typing import ClassVar

import torch

from rankscope_contract.model.kinds import Kind
from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.quantities.base import Quantity, QuantityOptions, Table


class Parameters(Quantity):
    """Two rows per parameter: `param_before` and `param_after` the update.

    `param_after` of a step is usually equal to `param_before` of the next step. A difference shows a change between two
    steps, such as a loaded checkpoint, weight averaging or an accidental write.
    """

    name: ClassVar[str] = "parameters"

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        super().__init__(monitored, options)
        count = len(self.monitored.parameters)
        self._before, self._after = range(count), range(count, 2 * count)

    @staticmethod
    def elsewhere(monitored: MonitoredModel) -> frozenset[int]:
        """Return the positions, in the list of all parameters of the model, of those that another rank publishes."""
        return monitored.elsewhere

    def entries(self) -> list[PlanEntry]:
        """Return the plan entries: `param_before` of all parameters, then `param_after` of all parameters."""
        return [*self.parameter_entries(Kind.PARAM_BEFORE), *self.parameter_entries(Kind.PARAM_AFTER)]

    def on_optimizer_step_begin(self, table: Table) -> None:
        """Measure the parameters before the update."""
        table.measure(self._updated_tensors(), self._before)

    def on_optimizer_step_end(self, table: Table) -> None:
        """Measure the parameters after the update."""
        table.measure(self._updated_tensors(), self._after)

    def _updated_tensors(self) -> list[torch.Tensor | None]:
        updated = self.monitored.framework.updated_tensor
        return [None if parameter is None else updated(parameter) for parameter in self.monitored.tensors()]
