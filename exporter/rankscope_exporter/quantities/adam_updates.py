"""How far Adam moves each element: histograms of its update, and of the ratio of its two moments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch

from rankscope_exporter.adapters.base import ParameterState
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.model.parameter_names import local_tensor, real_parts
from rankscope_exporter.quantities.base import Quantity, QuantityOptions, Table
from rankscope_exporter.records.host_transfer import Numbers, Row

UPDATE, RATIO = KINDS = ("adam_update", "adam_ratio")

_CHUNK: Final = 1 << 22  # elements at a time: histc counts in float32, which is exact up to 2^24, and memory is bounded
_OTHER_FORMULAS: Final = (torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)
_EDGES: Final = 3  # below, above, nonfinite stand before the counts


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamUpdatesOptions(QuantityOptions):
    """The bins of both histograms."""

    bins: int = 30
    low: float = -1.0
    high: float = 1.0
    """What lies outside of low … high is counted beside the bins."""

    def __post_init__(self) -> None:
        QuantityOptions.__post_init__(self)
        self._check_whole("bins", 1)
        if not self.low < self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")

    @property
    def scheme(self) -> str:
        """Return the bins as the `scheme` column says them."""
        return f"linear:{self.low:g}:{self.high:g}:{self.bins}"


class AdamUpdates(Quantity):
    """With the state after step t, in float32, element by element (Kingma and Ba 2015, algorithm 1):

    m̂ = exp_avg / (1 - β1^t), v̂ = exp_avg_sq / (1 - β2^t) (max_exp_avg_sq with amsgrad);
    `adam_update` is m̂ / (√v̂ + ε), what the learning rate was multiplied with in this step; `adam_ratio` is m̂ / √v̂.
    A complex number is two elements, as Adam takes it.
    """  # noqa: D400 - the formula goes on

    name: ClassVar[str] = "adam_updates"
    measures_tensors: ClassVar[bool] = False
    options_class: ClassVar[type[QuantityOptions]] = AdamUpdatesOptions

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        super().__init__(monitored, options)
        assert isinstance(self.options, AdamUpdatesOptions)
        self._bins = self.options

    @staticmethod
    def elsewhere(monitored: MonitoredModel) -> frozenset[int]:
        """Return what another rank holds alike, its optimizer's state included."""
        return monitored.state_elsewhere

    def on_optimizer_step_end(self, table: Table) -> None:
        """Count the elements of every parameter that an Adam has updated."""
        kept = self.monitored.framework.kept(self.monitored.tensors(), self.monitored.optimizers)
        names, counted = [], []
        for named, own in zip(self.monitored.parameters, kept, strict=True):
            if own is not None and _is_adam(own):
                names.append(named.name)
                counted.append(_histograms(own.state, own.group, self._bins))
        if counted:
            table.defer("histograms", torch.stack(counted), lambda numbers: self._rows(names, numbers))

    def _rows(self, names: list[str], numbers: Numbers) -> Iterable[Row]:
        for name, of_kinds in zip(names, numbers.tolist(), strict=True):
            for kind, (below, above, nonfinite, *counts) in zip(KINDS, of_kinds, strict=True):
                yield {
                    "kind": kind,
                    "tensor": name,
                    "scheme": self._bins.scheme,
                    "below": below,
                    "above": above,
                    "nonfinite": nonfinite,
                    "counts": counts,
                }


def _is_adam(kept: ParameterState) -> bool:
    known = {"betas", "eps"} <= kept.group.keys() and not isinstance(kept.optimizer, _OTHER_FORMULAS)
    return known and {"exp_avg", "exp_avg_sq", "step"} <= kept.state.keys()


def _histograms(state: Mapping[str, Any], group: Mapping[str, Any], bins: AdamUpdatesOptions) -> torch.Tensor:
    """Return int64 [2, 3 + bins]: of update and ratio, what is below, above and not finite, then the bins."""
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
    # What is not finite would belong to no bin, but histc does not say so.
    inside = torch.histc(values.masked_fill(~finite, bins.high + 1), bins.bins, bins.low, bins.high)
    return torch.cat([torch.stack([edge.sum() for edge in edges]), inside.to(torch.int64)])
