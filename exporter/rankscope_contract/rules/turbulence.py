"""AnomalyTurbulence: fires on a magnitude far above (or below) its own moving average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

from rankscope_contract.model.kinds import JUDGED_OPS
from rankscope_contract.rules.base import AnomalyRule


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyTurbulence(AnomalyRule):
    """Fires if |x| > baseline · (1 + threshold). With `direction="both"`, also if |x| < baseline / (1 + threshold).

    The baseline starts at |x₀| and becomes 0.99 · baseline + 0.01 · |x| after each comparison. Non-finite values never
    change it. The rule evaluates only `ops`, by default norm and mean. The first `after_values` finite values of a
    series only form the baseline. If several rules evaluate a series, the smallest `after_values` counts for all.
    `scalars` has the names of scalars that it evaluates as well, such as "loss" and "grad_norm". A value of at most
    `floor` never is too high: the gradient of a bias before a batch normalisation is 0 except for rounding.
    """

    threshold: float
    direction: Literal["up", "both"] = "up"
    baseline: Literal["ema"] = "ema"
    ops: tuple[str, ...] = JUDGED_OPS
    after_values: int = 0
    scalars: tuple[str, ...] = ()
    floor: float = 0.0

    def __post_init__(self) -> None:
        AnomalyRule.__post_init__(self)
        self.check_threshold(self.threshold)
        self.check_threshold(self.floor)
        if not self.threshold > 0:
            raise ValueError(f"{self.name}: threshold must be above 0, not {self.threshold}")
        if self.direction not in ("up", "both"):
            raise ValueError(f"{self.name}: direction must be 'up' or 'both', not {self.direction!r}")
        unknown = [op for op in self.ops if op not in JUDGED_OPS]
        if unknown:
            raise ValueError(f"{self.name}: ops must be some of {', '.join(JUDGED_OPS)}, not {', '.join(unknown)}")
        if isinstance(self.after_values, bool) or not isinstance(self.after_values, int) or self.after_values < 0:
            raise ValueError(f"{self.name}: after_values must be an integer of at least 0, not {self.after_values!r}")
        if isinstance(self.scalars, str) or not all(isinstance(name, str) for name in self.scalars):
            raise ValueError(f'{self.name}: scalars must be a list of names such as ["loss"], not {self.scalars!r}')
        object.__setattr__(self, "scalars", tuple(self.scalars))
        object.__setattr__(self, "ops", tuple(self.ops))

    def judges(self, kind: str | None, op: str) -> bool:
        # The op must have a baseline and be one of the rule's ops, and `kind` must be one of the rule's kinds. Of
        # scalars, the rule evaluates those in `scalars`.
        if kind is None:
            return op == "value" and bool(self.scalars)
        return op in self.ops and self.covers(kind)

    def for_scalar(self, name: str) -> Self | None:
        return self if name in self.scalars else None

    def fires(self, op: str, value: Any, baseline: Any) -> Any:  # noqa: ARG002 - the signature of every rule
        # The result is False if the value or the baseline is NaN.
        high = (abs(value) > baseline * (1 + self.threshold)) & (abs(value) > self.floor)
        if self.direction == "up":
            return high
        return high | (abs(value) < baseline / (1 + self.threshold))

    def needed_values(self) -> int:
        return self.after_values

    def limit(self) -> float | None:
        return self.threshold
