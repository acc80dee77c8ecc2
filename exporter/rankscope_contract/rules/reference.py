"""Reference implementation of the rules: one series, one value at a time.

Tests compare every faster implementation with it. Tensor statistics and stored baselines are float32 and scalars are
float64, as in the store. The recursion of the baseline and the comparisons are computed in float64.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rankscope_contract.rules.base import AnomalyRule
from rankscope_contract.rules.curve import Curve, CurveRule

EMA_KEEP: Final = 0.99
EMA_TAKE: Final = 0.01
"""Factors in the recursion of the baseline of |x|: baseline ← 0.99 · baseline + 0.01 · |x|.

Both factors are literals, because 1 - 0.99 is not equal to 0.01 in binary floating point.
"""

_FLOAT32: Final = struct.Struct("<f")


def to_float32(value: float) -> float:
    """Return `value` rounded to float32. Values beyond the float32 range become ±Inf, as in hardware."""
    try:
        return float(_FLOAT32.unpack(_FLOAT32.pack(value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def next_baseline(baseline: float, value: float) -> float:
    """Return the float32 baseline that follows from `baseline` and a new `value`.

    A NaN baseline means that no baseline exists yet. Non-finite values do not change the baseline.
    """
    if not math.isfinite(value):
        return baseline
    if math.isnan(baseline):
        return to_float32(abs(value))
    return to_float32(EMA_KEEP * baseline + EMA_TAKE * abs(value))


def needed_values(rules: Sequence[AnomalyRule], kind: str | None, op: str) -> int:
    """Return the number of finite values of a series of `kind` and `op` before its baseline exists for the rules."""
    return min((n for rule in rules if rule.judges(kind, op) and (n := rule.needed_values()) is not None), default=0)


@dataclass(frozen=True, slots=True)
class Firing:
    """A firing: the first rule that fired for one value of a series."""

    position: int
    rule: AnomalyRule
    value: float
    baseline: float  # before the observation; NaN at the first one


class SeriesEvaluator:
    """Evaluates rules for the successive values of one series, and updates the baseline of the series.

    Rules that do not evaluate the kind and op of the series are skipped.
    """

    def __init__(self, rules: Sequence[AnomalyRule], kind: str | None, op: str, scalar: str | None = None) -> None:
        """Create the evaluator. `scalar` is the name of a scalar, for which `kind` is None and `op` is "value"."""
        if scalar is None:
            self._judging = [rule for rule in rules if rule.judges(kind, op)]
        else:
            self._judging = [rule for each in rules if (rule := each.for_scalar(scalar)) is not None]
        curve_rules = (rule for rule in rules if isinstance(rule, CurveRule) and scalar in rule.names)
        self._curves = [(rule, Curve()) for rule in curve_rules]
        self._op = op
        self._stored_as_float64 = op == "value"  # scalars; statistics of tensors are float32
        self._missing_values = needed_values(self._judging, kind, op)
        self._baseline = math.nan
        self._position = -1
        self.compared = math.nan
        """The baseline with which the last value was compared; NaN if there was none."""

    @property
    def baseline(self) -> float:
        """Return the baseline with which the next value is compared.

        It is NaN before the first finite value, and until the rules have enough values.
        """
        return math.nan if self._missing_values > 0 else self._baseline

    def observe(self, raw: float) -> Firing | None:
        """Return a firing of the first rule, in configured order, that fires for the value `raw`; None if none fires.

        Then update the baseline.
        """
        self._position += 1
        value = raw if self._stored_as_float64 else to_float32(raw)
        before, is_early = self.baseline, self._missing_values > 0
        self._baseline = next_baseline(self._baseline, value)
        self._missing_values -= math.isfinite(value)
        # The first value is compared with itself. AnomalyTurbulence therefore never fires for it.
        self.compared = self._baseline if math.isnan(before) and not is_early else before
        fires = (rule for rule in self._judging if rule.fires(self._op, value, self.compared))
        found = next((Firing(self._position, rule, value, before) for rule in fires), None)
        for curve_rule, curve in self._curves:
            middle = curve.observe(curve_rule, value)
            if found is None and middle is not None:
                found = Firing(self._position, curve_rule, value, middle)
        return found


def evaluate(rules: Sequence[AnomalyRule], kind: str | None, op: str, series: Iterable[float]) -> Iterator[Firing]:
    """Yield the firings for the values in `series`, in order."""
    evaluator = SeriesEvaluator(rules, kind, op)
    for raw in series:
        firing = evaluator.observe(raw)
        if firing is not None:
            yield firing
