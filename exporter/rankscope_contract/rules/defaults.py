"""The anomaly rules that apply if the user configures none, on ranks, in alerts and for imports."""

from __future__ import annotations

from typing import Final

from rankscope_contract.model.kinds import Kind
from rankscope_contract.rules.base import AnomalyRule
from rankscope_contract.rules.nan import AnomalyNan
from rankscope_contract.rules.turbulence import AnomalyTurbulence

DEFAULT_RULES: Final[tuple[AnomalyRule, ...]] = (
    AnomalyNan(),
    AnomalyTurbulence(
        threshold=25.0, kinds=(Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED), ops=("norm",), after_values=100, floor=1e-4
    ),
)
"""The default rules.

In healthy training, the norms of small tensors reach 20 times their moving average, most often while the learning rate
rises in the first 100 steps. The threshold of 25 is above this ratio. The mean of a gradient is a small difference of
large sums. The ratio of the mean to its own moving average therefore has no meaning, and the default rules ignore the
mean. Norms that are 0 except for rounding reach 1e-5 and any ratio: the floor is ten times as high."""
