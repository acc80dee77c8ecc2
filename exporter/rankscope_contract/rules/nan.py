"""AnomalyNan: non-finite elements, a non-finite scalar, or a magnitude beyond a fixed limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rankscope_contract.model.events import Severity
from rankscope_contract.model.kinds import VALUE_OPS
from rankscope_contract.rules.base import AnomalyRule

_INFINITY = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyNan(AnomalyRule):
    """Fires on NaN, on Inf (`infs=False` restores the original tool's rule), and with a `threshold` on |x| > threshold.

    Of a tensor the counts `nans` and `infs` are judged, since its norm, min, max and mean leave non-finite elements
    out; with a threshold those four are judged as well. Of a scalar the value itself is judged.
    """

    threshold: float | None = None
    infs: bool = True
    severity: str = Severity.CRITICAL

    def __post_init__(self) -> None:
        AnomalyRule.__post_init__(self)
        if self.threshold is not None:
            self.check_threshold(self.threshold)

    def judges(self, kind: str | None, op: str) -> bool:
        """Return whether `op` can show a non-finite element, or a magnitude where a threshold is set."""
        if not self.covers(kind):
            return False
        if op == "infs":
            return self.infs
        return op in ("nans", "value") or (op in VALUE_OPS and self.threshold is not None)

    def fires(self, op: str, value: Any, baseline: Any) -> Any:  # noqa: ARG002 - the signature of every rule
        """Return the verdict on a count of elements, or on a float statistic or scalar."""
        if op in ("nans", "infs"):
            return value > 0
        verdict = value != value  # noqa: PLR0124 - true for NaN alone, for floats and arrays alike
        if self.infs:
            verdict = verdict | (abs(value) == _INFINITY)
        if self.threshold is not None:
            verdict = verdict | (abs(value) > self.threshold)
        return verdict

    def limit(self) -> float | None:
        """Return the limit on the magnitude, None without one."""
        return self.threshold
