"""AnomalyNan: fires on non-finite elements, on a non-finite scalar, or on a magnitude above a fixed limit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from rankscope_contract.model.events import Severity
from rankscope_contract.model.kinds import VALUE_OPS
from rankscope_contract.rules.base import AnomalyRule
from rankscope_contract.rules.scalars import is_limited

_INFINITY = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyNan(AnomalyRule):
    """Fires on NaN and Inf; with a `threshold`, also if |x| > threshold. `infs=False` ignores Inf.

    For a tensor the rule evaluates the counts `nans` and `infs`, because the other statistics cover finite elements
    only. With a threshold it also evaluates these other statistics. For a scalar it evaluates the value. The threshold
    applies to losses and norms, and not to other scalars such as numbers of bytes.
    """

    threshold: float | None = None
    infs: bool = True
    severity: str = Severity.CRITICAL

    def __post_init__(self) -> None:
        AnomalyRule.__post_init__(self)
        if self.threshold is not None:
            self.check_threshold(self.threshold)

    def judges(self, kind: str | None, op: str) -> bool:
        # The rule evaluates the counts of NaN and infinite elements, and scalars. With a threshold it also evaluates
        # the other statistics.
        if not self.covers(kind):
            return False
        if op == "infs":
            return self.infs
        return op in ("nans", "value") or (op in VALUE_OPS and self.threshold is not None)

    def for_scalar(self, name: str) -> Self | None:
        # Only a loss and a norm have the threshold.
        if not self.judges(None, "value"):
            return None
        return self if self.threshold is None or is_limited(name) else replace(self, threshold=None)

    def fires(self, op: str, value: Any, baseline: Any) -> Any:  # noqa: ARG002 - the signature of every rule
        # The rule fires for a count above 0. It also fires for a float that is non-finite, or has a magnitude above the
        # threshold.
        if op in ("nans", "infs"):
            return value > 0
        verdict = value != value  # noqa: PLR0124 - true only for NaN, for floats and for arrays
        if self.infs:
            verdict = verdict | (abs(value) == _INFINITY)
        if self.threshold is not None:
            verdict = verdict | (abs(value) > self.threshold)
        return verdict

    def limit(self) -> float | None:
        return self.threshold
