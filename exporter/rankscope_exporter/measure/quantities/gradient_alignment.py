"""Quantity `direction`: share of the elements of a parameter for which gradient and momentum have the same sign."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import torch

from rankscope_exporter.adapters.parameter_names import local_tensor, real_parts
from rankscope_exporter.measure.kernels.signs import sums_of_signs
from rankscope_exporter.measure.quantities.optimizer_state import StateQuantity, in_use, kinds_of, state_tensor
from rankscope_exporter.measure.table import Table
from rankscope_exporter.records.record import Numbers

KIND: Final = "direction_agreement"
_MOMENTA: Final = ("exp_avg", "momentum_buffer")


class GradientAlignment(StateQuantity):
    """A feature of each parameter, between 0 and 1, with the agreement of the signs of gradient and momentum.

    It is (Σ sign(g)·sign(m) / n + 1) / 2 over its n elements.

    g is the gradient that the optimizer receives, and m the momentum before the optimizer step. If g or m is 0 or NaN,
    the element counts as half an agreement, because torch.sign of both is 0. A complex number counts as two elements.
    The feature is absent without a momentum, as before the first optimizer step.
    """

    name: ClassVar[str] = "direction"
    measures_tensors: ClassVar[bool] = False
    needed: ClassVar[str] = "momentum"

    def on_optimizer_step_begin(self, table: Table) -> None:
        if self.monitored.update.is_inside_backward:  # the other gradients are incomplete
            return
        names: list[str] = []
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        framework, parameters = self.monitored.framework, self.monitored.tensors(of_update=True)
        stepped = self.monitored.update.stepped
        states = self.monitored.states(parameters)
        found = in_use(parameters, states, len(self.monitored.optimizers))
        self._expected = [KIND] if kinds_of([own.optimizer for own in found]) else ()
        listed = zip(self.monitored.parameters, self.monitored.owners, parameters, states, strict=True)
        for named, owner, parameter, own in listed:
            gradient = None if parameter is None or owner in stepped else framework.gradient(parameter)
            momentum = None if own is None else _momentum(own.state)
            if gradient is not None and momentum is not None and not gradient.is_sparse:
                names.append(named.name)
                pairs.append((gradient, momentum))

        def compare(positions: Sequence[int]) -> None:
            parts = [[real_parts(local_tensor(item)) for item in pairs[i]] for i in positions]
            sums = sums_of_signs([(gradient, momentum) for gradient, momentum in parts], compiled=table.is_compiled)
            counts = [gradient.numel() for gradient, _ in parts]
            table.defer("features", sums, functools.partial(_rows, [names[i] for i in positions], counts))

        table.isolate(KIND, names, [momentum for _, momentum in pairs], compare)


def _momentum(state: Mapping[str, Any]) -> torch.Tensor | None:
    found = (state_tensor(state, key) for key in _MOMENTA)
    return next((momentum for momentum in found if momentum is not None), None)


def _rows(names: list[str], counts: list[int], sums: Numbers) -> list[dict[str, Any]]:
    agreements = (sums.astype(np.float64) / np.maximum(counts, 1) + 1) / 2
    return [
        {"kind": KIND, "module": name, "index": None, "micro_step": None, "value": value}
        for name, value in zip(names, agreements.astype(np.float32).tolist(), strict=True)
    ]
