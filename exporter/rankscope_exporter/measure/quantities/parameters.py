"""Quantity `parameters`: parameters directly before and directly after the update, and the norm of the update."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch

from rankscope_contract.model.kinds import Kind
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.adapters.parameter_names import local_tensor, real_parts
from rankscope_exporter.measure.quantities.base import UPDATE, Quantity, QuantityOptions
from rankscope_exporter.measure.table import Table
from rankscope_exporter.records.plan import ParameterEntries
from rankscope_exporter.records.record import ExpectedRows, Numbers, Row

UPDATE_NORM: Final = "update_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametersOptions(QuantityOptions):
    """Options of the quantity `parameters`."""

    updates: bool = False
    """If true, also measure the feature `update_norm`, the norm of the difference that the update makes.

    At sampled steps, this needs memory for one more copy of the parameters.
    """


class Parameters(Quantity):
    """Measures two rows per parameter, `param_before` and `param_after` the update, and optionally `update_norm`.

    `update_norm` is a feature: the norm of the difference that the update makes.

    `param_after` of a step is usually equal to `param_before` of the next step. A difference between these two rows
    shows a change between the two steps, such as a loaded checkpoint, weight averaging or an accidental write.
    """

    name: ClassVar[str] = "parameters"
    options_class: ClassVar[type[QuantityOptions]] = ParametersOptions
    options: ParametersOptions

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        super().__init__(monitored, options)
        self._copies: list[torch.Tensor | None] = []  # of the parameters before the first update of the step
        self._moved: list[tuple[list[str], torch.Tensor]] = []
        self._names = [named.name for named in self.monitored.parameters]

    @staticmethod
    def elsewhere(monitored: MonitoredModel) -> frozenset[int]:
        return monitored.elsewhere

    def entries(self) -> ParameterEntries:
        return self.parameter_entries(Kind.PARAM_BEFORE, Kind.PARAM_AFTER)

    def on_optimizer_step_begin(self, table: Table) -> None:
        if self.monitored.update.stepped:  # an optimizer has already updated parameters in this step
            return
        tensors = self.monitored.framework.updated_tensors(self.monitored.tensors())
        table.measure(tensors, table.slots[Kind.PARAM_BEFORE])
        if self.options.updates and not self._copies:
            copies = self._copies = [None] * len(tensors)

            def keep(positions: Sequence[int]) -> None:
                for position in positions:
                    tensor = tensors[position]
                    copies[position] = None if tensor is None else _values(tensor).clone()

            table.isolate("copies", self._names, tensors, keep)

    def on_optimizer_step_end(self, table: Table) -> None:
        # With several optimizers, the values after the last one count.
        tensors = self.monitored.framework.updated_tensors(self.monitored.tensors())
        table.measure(tensors, table.slots[Kind.PARAM_AFTER])
        moved = self._moved = []

        def compare(positions: Sequence[int]) -> None:
            norms = {}
            for position in positions:
                before, after = self._copies[position], tensors[position]
                if before is not None and after is not None and before.shape == _values(after).shape:
                    norms[self._names[position]] = _distance(before, _values(after))
            if norms:
                moved.append((list(norms), torch.stack(list(norms.values()))))

        if self._copies:
            table.isolate(UPDATE_NORM, self._names, tensors, compare)

    def expected(self) -> ExpectedRows:
        kinds: set[str] = {Kind.PARAM_AFTER} if self.monitored.is_trained() else set()
        if kinds and UPDATE not in self.monitored.compiled:  # no hook runs before an update in compiled code
            kinds |= {Kind.PARAM_BEFORE, *([UPDATE_NORM] if self.options.updates else [])}
        return ExpectedRows(self.name, frozenset(kinds))

    def on_step_end(self, table: Table) -> None:
        for names, norms in self._moved:
            table.defer("features", norms, functools.partial(_rows, names))
        self._copies, self._moved = [], []


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return real_parts(local_tensor(tensor.detach()))


def _distance(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    precise = torch.promote_types(before.dtype, torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(after.to(precise) - before.to(precise))
    return norm.float()


def _rows(names: list[str], norms: Numbers) -> Iterable[Row]:
    for name, norm in zip(names, norms.tolist(), strict=True):
        yield {"kind": UPDATE_NORM, "module": name, "index": None, "micro_step": None, "value": norm}
