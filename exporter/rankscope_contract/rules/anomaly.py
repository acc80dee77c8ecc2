"""The rules `AnomalyNan` and `AnomalyTurbulence`, and the rules that apply if the user configures none.

Ranks, alerts and imports use the same rules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Self

from rankscope_contract.model.events import Severity
from rankscope_contract.model.kinds import JUDGED_OPS, VALUE_OPS, Kind
from rankscope_contract.rules import AnomalyRule

_INFINITY = float("inf")

LIMITED: Final = "(?i).*(loss|losses|norm|norms)([^a-z].*)?"
NOT_LIMITED: Final = (
    "(?i)(.*[^a-z])?(scale|scaler|mask|bytes|time|seconds|ms|tokens|count|num|coef|coefficient)([^a-z].*)?"
)
"""Regular expressions for whole names, in the syntax that Python and Prometheus share.

A limit applies to a name that matches the first and not the second, such as `grad_norm` but not `loss_scale`.
"""


def is_limited(name: str) -> bool:
    """Return whether a limit on magnitudes applies to the scalar `name`, because it is a loss or a norm."""
    return re.fullmatch(LIMITED, name) is not None and re.fullmatch(NOT_LIMITED, name) is None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyTurbulence(AnomalyRule):
    """Fires if |x| > baseline · (1 + threshold). With `direction="both"`, also if |x| < baseline / (1 + threshold).

    The baseline starts at |x₀| and becomes 0.99 · baseline + 0.01 · |x| after each comparison. Values that are 0 or not
    finite do not enter it: a gradient is 0 at the steps that do not reach its tensor, such as an expert that is rarely
    chosen. The rule evaluates only `ops`, by default norm and mean. The first `after_values` other values of a series
    only form the baseline. If several rules evaluate a series, the smallest `after_values` counts for all.
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
        self.check_names("scalars")
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
