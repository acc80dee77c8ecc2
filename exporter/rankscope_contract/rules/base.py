"""Base class of the anomaly rules. A rule has a name, kinds that it evaluates, and one condition."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

from rankscope_contract.model.events import Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyRule:
    """A condition on each series of one rank. `name` is unique within a configuration and is a label of the alert.

    `kinds` limits the rule to these kinds of quantity. With None the rule evaluates all kinds, and scalars.
    """

    name: str = ""
    kinds: tuple[str, ...] | None = None
    severity: str = Severity.WARNING
    summary: str = ""
    runbook: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", type(self).__name__)
        if self.kinds is not None:
            object.__setattr__(self, "kinds", tuple(self.kinds))

    def judges(self, kind: str | None, op: str) -> bool:
        """Return whether the rule evaluates the op `op` of tensors of `kind`. `kind` is None for a scalar."""
        raise NotImplementedError

    def for_scalar(self, name: str) -> Self | None:  # noqa: ARG002 - some rules depend on the name
        """Return the rule that applies to the scalar `name`; None if the rule does not evaluate it."""
        return self if self.judges(None, "value") else None

    def fires(self, op: str, value: Any, baseline: Any) -> Any:
        """Return whether the rule fires for `value` of op `op`: a bool for a float, an array of bool for an array.

        `baseline` is the baseline before `value`. A NaN baseline means that no baseline exists yet; comparisons with
        NaN are false.
        """
        raise NotImplementedError

    def limit(self) -> float | None:
        """Return the threshold, which the metric `rankscope_rule_threshold` exports; None if the rule has none."""
        raise NotImplementedError

    def needed_values(self) -> int | None:
        """Return the number of finite values before the rule can fire on a series; None if it needs no baseline."""
        return None

    def check_threshold(self, threshold: Any) -> None:
        """Raise ValueError unless `threshold` is a number other than NaN that a float can represent."""
        try:
            number = math.nan if isinstance(threshold, bool | str) else float(threshold)
        except (TypeError, OverflowError):
            number = math.nan
        if math.isnan(number):
            shown = repr(threshold) if len(repr(threshold)) < 40 else f"{repr(threshold)[:30]}…"
            raise ValueError(f"{self.name}: threshold must be a number, not {shown}")

    def check_names(self, *fields: str) -> None:
        """Store tuples in the given fields. Raise ValueError unless they contain lists of names."""
        for field in fields:
            given: object = getattr(self, field)
            if isinstance(given, str) or not all(isinstance(one, str) for one in getattr(self, field)):
                raise ValueError(f'{self.name}: {field} must be a list of names such as ["loss"], not {given!r}')
            object.__setattr__(self, field, tuple(getattr(self, field)))

    def covers(self, kind: str | None) -> bool:
        return self.kinds is None or kind in self.kinds
