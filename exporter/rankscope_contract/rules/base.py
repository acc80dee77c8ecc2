"""What every rule has: a name, the series it judges, and one predicate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rankscope_contract.model.events import Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyRule:
    """A condition on one series of one rank. `name` is unique within a configuration and labels the alert.

    `kinds` limits the rule to those kinds of quantity; None judges all of them, scalars included.
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
        """Return whether the rule may judge statistic `op` of a tensor of `kind` (None: a scalar)."""
        raise NotImplementedError

    def fires(self, op: str, value: Any, baseline: Any) -> Any:
        """Return the verdict on statistic `op` given the `baseline` before it: floats give a bool, arrays an array.

        A baseline that does not exist yet is NaN, with which no comparison is true.
        """
        raise NotImplementedError

    def limit(self) -> float | None:
        """Return the configured threshold, as exported in `rankscope_rule_threshold`; None without one."""
        raise NotImplementedError

    def check_threshold(self, threshold: Any) -> None:
        """Raise ValueError unless `threshold` is a number that a float can hold, and not NaN."""
        try:
            number = math.nan if isinstance(threshold, bool | str) else float(threshold)
        except (TypeError, OverflowError):
            number = math.nan
        if math.isnan(number):
            shown = repr(threshold) if len(repr(threshold)) < 40 else f"{repr(threshold)[:30]}…"
            raise ValueError(f"{self.name}: threshold is a number, not {shown}")

    def covers(self, kind: str | None) -> bool:
        """Return whether `kind` is among the rule's kinds."""
        return self.kinds is None or kind in self.kinds
