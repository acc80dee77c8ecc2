"""The anomaly rules that apply if the user configures none, on ranks, in alerts and for imports."""

from __future__ import annotations

from typing import Final

from rankscope_contract.model.kinds import Kind
from rankscope_contract.rules.base import AnomalyRule
from rankscope_contract.rules.nan import AnomalyNan
from rankscope_contract.rules.turbulence import AnomalyTurbulence

DEFAULT_RULES: Final[tuple[AnomalyRule, ...]] = (
    AnomalyNan(),
    AnomalyTurbulence(threshold=25.0, kinds=(Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED), ops=("norm",), after_values=100),
)
"""The norms of small tensors reach 20 times their average in healthy training, most often while the learning rate rises
in the first 100 steps. The mean of a gradient is a small difference of large sums: its ratio to its own average has no
meaning, so the default rules ignore it."""
