"""Quantity `adam_updates`: histograms of Adam's update of each element, and of the ratio of Adam's two moments."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

import torch

from rankscope_exporter.adapters.base import ParameterState
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.base.validation import at_least
from rankscope_exporter.model.parameter_names import local_tensor, real_parts
from rankscope_exporter.quantities.base import Quantity, QuantityOptions, Table
from rankscope_exporter.quantities.optimizer_state import ADAM_STATE, in_use, state_tensor
from rankscope_exporter.records.host_transfer import Numbers, Row
from rankscope_exporter.records.pending_step import ExpectedRows

UPDATE, RATIO = KINDS = ("adam_update", "adam_ratio")

_CHUNK: Final = 1 << 22  # elements at a time: histc counts in float32, which is exact up to 2^24, and memory is bounded
_OTHER_FORMULAS: Final = (torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)
_EDGES: Final = 3  # below, above and nonfinite come before the bins


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamUpdatesOptions(QuantityOptions):
    """Options of the quantity `adam_updates`: the bins of both histograms."""

    bins: Annotated[int, at_least(1)] = 30
    low: float = -1.0
    high: float = 1.0
    """Values outside of the range from `low` to `high` are counted separately, not in the bins."""

    def __post_init__(self) -> None:
        QuantityOptions.__post_init__(self)
        if not self.low < self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")

    @property
    def scheme(self) -> str:
        """Return the range and number of the bins as text, for the column `scheme` of the dataset `histograms`."""
        return f"linear:{self.low:g}:{self.high:g}:{self.bins}"


class AdamUpdates(Quantity):
    """Two histograms per parameter, from the optimizer state after step t, over all elements in float32.

    With m̂ = exp_avg / (1 - β1^t) and v̂ = exp_avg_sq / (1 - β2^t) (max_exp_avg_sq with amsgrad), `adam_update` is m̂ /
    (√v̂ + ε), which the optimizer multiplies by the learning rate in this step. `adam_ratio` is m̂ / √v̂ (Kingma and Ba
    2015, algorithm 1). A complex number counts as two elements, as in Adam.
    """

    name: ClassVar[str] = "adam_updates"
    measures_tensors: ClassVar[bool] = False
    options_class: ClassVar[type[QuantityOptions]] = AdamUpdatesOptions
    options: AdamUpdatesOptions
    _is_expected = False

    @staticmethod
    def elsewhere(monitored: MonitoredModel) -> frozenset[int]:
        """Return the positions of parameters with optimizer state that another rank publishes.

        A position counts in the list of all parameters of the model. The state of these parameters is whole on each
        rank, not divided among ranks.
        """
        return monitored.state_elsewhere

    def on_optimizer_step_end(self, table: Table) -> None:
        """Compute the histograms of all parameters with Adam state."""
        tensors, optimizers = self.monitored.tensors(), self.monitored.optimizers
        states = self.monitored.states(tensors)
        self._is_expected = any(map(_has_options_of_adam, in_use(tensors, states, len(optimizers))))
        pairs = zip(self.monitored.parameters, states, strict=True)
        found = {named.name: own for named, own in pairs if own is not None and _is_adam(own)}
        names, kept = list(found), list(found.values())

        def count(positions: Sequence[int]) -> None:
            counted = [_histograms(kept[i].state, kept[i].group, self.options) for i in positions]
            rows = functools.partial(self._rows, [names[i] for i in positions])
            table.defer("histograms", torch.stack(counted), rows)

        table.isolate("histograms", names, [own.state["exp_avg"] for own in kept], count)

    def expected(self) -> ExpectedRows:
        """Return both histograms, unless no optimizer has the options of Adam."""
        return ExpectedRows(
            self.name, frozenset(KINDS if self._is_expected else ()), "the state has no moments of Adam"
        )

    def _rows(self, names: list[str], numbers: Numbers) -> Iterable[Row]:
        for name, of_kinds in zip(names, numbers.tolist(), strict=True):
            for kind, (below, above, nonfinite, *counts) in zip(KINDS, of_kinds, strict=True):
                yield {
                    "kind": kind,
                    "tensor": name,
                    "scheme": self.options.scheme,
                    "below": below,
                    "above": above,
                    "nonfinite": nonfinite,
                    "counts": counts,
                }


def _has_options_of_adam(own: ParameterState) -> bool:
    return {"betas", "eps"} <= own.group.keys() and not isinstance(own.optimizer, _OTHER_FORMULAS)


def _is_adam(own: ParameterState) -> bool:
    moments = (state_tensor(own.state, key) for key, _ in ADAM_STATE)
    return _has_options_of_adam(own) and "step" in own.state and all(moment is not None for moment in moments)


def _histograms(state: Mapping[str, Any], group: Mapping[str, Any], bins: AdamUpdatesOptions) -> torch.Tensor:
    """Return two histograms, of the update and of the ratio, as int64 [2, 3 + bins] on the device of the state.

    The first three columns are the numbers of values that are below `low`, above `high`, and not finite.
    """
    first = real_parts(local_tensor(state["exp_avg"])).reshape(-1)
    second = real_parts(local_tensor(state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"])).reshape(-1)
    (beta1, beta2), epsilon, step = group["betas"], group["eps"], state["step"]
    total = torch.zeros(len(KINDS), _EDGES + bins.bins, dtype=torch.int64, device=first.device)
    for m, v in zip(torch.split(first, _CHUNK), torch.split(second, _CHUNK), strict=True):
        corrected = m.float() / (1 - beta1**step)
        root = (v.float() / (1 - beta2**step)).sqrt_()
        total[0] += _counts(corrected / (root + epsilon), bins)
        total[1] += _counts(corrected / root, bins)
    return total


def _counts(values: torch.Tensor, bins: AdamUpdatesOptions) -> torch.Tensor:
    finite = values.isfinite()
    edges = (finite & (values < bins.low), finite & (values > bins.high), ~finite)
    # The documentation of histc does not define the bin of a value that is not finite.
    inside = torch.histc(values.masked_fill(~finite, bins.high + 1), bins.bins, bins.low, bins.high)
    return torch.cat([torch.stack([edge.sum() for edge in edges]), inside.to(torch.int64)])
