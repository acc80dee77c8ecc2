"""AnomalyTurbulence: a magnitude far above (or below) its own moving average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rankscope_contract.model.kinds import JUDGED_OPS
from rankscope_contract.rules.base import AnomalyRule


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyTurbulence(AnomalyRule):
    """Fires when |x| > baseline · (1 + threshold), strictly.

    With `direction="both"` it also fires when |x| < baseline / (1 + threshold).

    The baseline is |x₀|, then 0.99 · baseline + 0.01 · |x|, compared before it is updated; non-finite values never
    enter it. Only `ops` (norm and mean by default) are judged.
    """

    threshold: float
    direction: Literal["up", "both"] = "up"
    baseline: Literal["ema"] = "ema"
    ops: tuple[str, ...] = JUDGED_OPS

    def __post_init__(self) -> None:
        AnomalyRule.__post_init__(self)
        self.check_threshold(self.threshold)
        if not self.threshold > 0:
            raise ValueError(f"{self.name}: threshold must be above 0, not {self.threshold}")
        if self.direction not in ("up", "both"):
            raise ValueError(f"{self.name}: direction is 'up' or 'both', not {self.direction!r}")
        unknown = [op for op in self.ops if op not in JUDGED_OPS]
        if unknown:
            raise ValueError(f"{self.name}: ops are {', '.join(JUDGED_OPS)}, not {', '.join(unknown)}")
        object.__setattr__(self, "ops", tuple(self.ops))

    def judges(self, kind: str | None, op: str) -> bool:
        """Return whether `op` keeps a baseline and `kind` is covered."""
        return kind is not None and op in self.ops and self.covers(kind)

    def fires(self, op: str, value: Any, baseline: Any) -> Any:  # noqa: ARG002 - the signature of every rule
        """Return whether the magnitude left its band; false for a NaN value or baseline."""
        high = abs(value) > baseline * (1 + self.threshold)
        if self.direction == "up":
            return high
        return high | (abs(value) < baseline / (1 + self.threshold))

    def limit(self) -> float | None:
        """Return the threshold, a ratio above the baseline."""
        return self.threshold
