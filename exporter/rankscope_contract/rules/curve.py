"""CurveRule: fires on a value far above the earlier values of its series, such as a spike of the loss.

Ranks judge each value when it is logged. Imports judge all rows of a table together, with the same comparison.

Reference implementation of the rules: one series, one value at a time.

Tests compare every faster implementation with it. Tensor statistics and stored baselines are float32 and scalars are
float64, as in the store. The recursion of the baseline and the comparisons are computed in float64.
"""

from __future__ import annotations

import math
import statistics
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal

from rankscope_contract.rules import AnomalyRule
from rankscope_contract.rules.anomaly import DEFAULT_RULES
from rankscope_contract.rules.score import SCORE_RULES

FEWEST_ROWS: Final = 19
"""Number of values before the first one that is judged: rules apply from the 20th row on."""

LAST_ROWS: Final = 7
"""Number of values of a second median. On a falling curve, the median of 19 values is far above the newest values."""

RISEN_ROWS: Final = 5
RISE: Final = 1.25
"""A rise is 5 values in a row of 1.25 times the ratio, and of the lowest median; the median has risen by this, too."""

LOGARITHMIC_SHARE: Final = 0.75
LOGARITHMIC_MOST: Final = 7.5
TINY: Final = sys.float_info.min
_LARGER_RISE: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveRule(AnomalyRule):
    """Fires for a scalar in `names` of at least `ratio` times the median of its last 19 values, or of its last 7.

    The lower median counts. At least `fewest` values must exist, and nine tenths of the last `rows` must be positive.
    The value must also exceed the median by `deviations` median deviations of these rows, and in a logarithmic scale
    by three quarters of that number or 7.5: where values often reach multiples of the median, a multiple is not an
    anomaly. A deviation is measured between values in a row, so that a falling curve does not hide a spike. The rule
    fires once, at the row that completes `in_a_row` such rows, by the median of 19 values only. If that is one row,
    it fires again at each further row up to the first one below `ratio` times the same median: a loss that does not
    return is no spike that is over. It also fires at the fifth row in a row of at least 1.25 times `ratio` times the
    lowest median of 19 values of the series, while this median is 1.25 times that of the 19 values before or more: a
    loss that grows by a few percent per row is never far above the rows before it.

    With `above="highest"`, the value is compared with the highest value before it, and must rise more than three times
    as far as any value before it. A schedule that returns to an earlier value or rises in equal stairs is no anomaly.

    Only imports use `rates` and `skips_pauses`. Values of `rates`, such as tokens per second, are judged by their
    reciprocal. With `skips_pauses`, rows next to an evaluation or a checkpoint do not count.
    """

    ratio: float
    names: tuple[str, ...]
    rows: int = 50
    fewest: int = FEWEST_ROWS
    above: Literal["median", "highest"] = "median"
    rates: tuple[str, ...] = ()
    deviations: float = 10.0
    in_a_row: int = 1
    skips_pauses: bool = False

    def __post_init__(self) -> None:
        AnomalyRule.__post_init__(self)
        self.check_threshold(self.ratio)
        self.check_names("names", "rates")

    @property
    def holds(self) -> bool:
        """Return whether the rule fires until the values have returned."""
        return self.above == "median" and self.in_a_row == 1

    def judges(self, kind: str | None, op: str) -> bool:
        return kind is None and op == "value"

    def for_scalar(self, name: str) -> None:  # noqa: ARG002 - the signature of every rule
        return

    def limit(self) -> float | None:
        return self.ratio

    def message(self, name: str, value: float, before: float) -> str:
        """Return the text of an event. `before` is the median or the highest value before `value`."""
        reference = "the highest value" if self.above == "highest" else "a median"
        return f"{self.name}: {name} is {value:.6g}, {reference} before it is {before:.6g}"

    def compare(self, value: float, window: Sequence[float]) -> float | None:
        """Return the median before `value` if it is above the limit, otherwise None. `window` has the values before."""
        middle = statistics.median(window[-FEWEST_ROWS:])
        if self.holds:
            middle = min(middle, statistics.median(window[-LAST_ROWS:]))
        return middle if self.is_far(value, middle, window) else None

    def rises(self, value: float, lowest: float, window: Sequence[float]) -> bool:
        """Return whether `value` is above the limit of `lowest`, and the median of `window` rises."""
        newest, before = window[-FEWEST_ROWS:], window[-2 * FEWEST_ROWS : -FEWEST_ROWS] or window
        rises = statistics.median(newest) >= RISE * statistics.median(before)
        return rises and self.is_far(value, lowest, window)

    def is_far(self, value: float, middle: float, window: Sequence[float]) -> bool:
        """Return whether `value` is above the limit, compared with `middle` and the deviations of `window`."""
        if not value >= self.ratio * middle > 0 or not _low(window) > 0:
            return False
        logarithms = [math.log(max(one, TINY)) for one in window]
        is_far = value - middle >= self.deviations * _spread(window)
        least = min(LOGARITHMIC_SHARE * self.deviations, LOGARITHMIC_MOST) * _spread(logarithms)
        return is_far and math.log(value) - math.log(middle) >= least


def _low(window: Sequence[float]) -> float:
    """Return the quantile 0.1 with linear interpolation."""
    ordered, place = sorted(window), 0.1 * (len(window) - 1)
    below = math.floor(place)
    return ordered[below] + (place - below) * (ordered[min(below + 1, len(ordered) - 1)] - ordered[below])


def _spread(window: Sequence[float]) -> float:
    """Return the median distance of two values in a row, as a median deviation: a trend does not widen it."""
    return statistics.median(abs(after - before) for before, after in pairwise(window)) / math.sqrt(2)


@dataclass(slots=True)
class Curve:
    """The last finite values of one series, and how its last values compared with the rule."""

    values: list[float] = field(default_factory=list)
    count: int = 0
    highest: float = -math.inf
    rise: float = 0.0  # the largest rise of the highest value that was no anomaly
    above: int = 0  # number of rows above the limit, up to the last row
    lowest: float = math.inf  # the lowest median of 19 values
    risen: int = 0  # number of rows of at least RISE times the ratio times the lowest median, up to the last row
    held: float = math.nan  # the median before the first firing, while the values have not returned

    def observe(self, rule: CurveRule, value: float) -> float | None:
        """Add `value`; if the rule fires for it, return the median or the highest value before it, otherwise None."""
        if not math.isfinite(value):
            return None
        before = self.compared(rule, value)
        self.above = 0 if before is None else self.above + 1
        fired = before if self.above == rule.in_a_row else None
        if not rule.holds:
            return fired
        if not value >= rule.ratio * self.held:
            self.held = math.nan if fired is None else fired
        return None if math.isnan(self.held) else self.held

    def compared(self, rule: CurveRule, value: float) -> float | None:
        """Add a finite `value`; if it is above the limit, return the value that it was compared with."""
        before: float | None = None
        if self.count >= rule.fewest:
            if rule.above == "highest":
                is_steep = value - self.highest > _LARGER_RISE * self.rise
                before = self.highest if is_steep and value >= rule.ratio * self.highest > 0 else None
            elif value >= rule.ratio * min(self.values):  # as is the median
                before = rule.compare(value, self.values)
        if rule.holds:
            self.risen = self.risen + 1 if value >= RISE * rule.ratio * self.lowest else 0
            if before is None and self.risen >= RISEN_ROWS and rule.rises(value, self.lowest, self.values):
                before = self.lowest
        if value > self.highest >= 0 and before is None:
            self.rise = max(self.rise, value - self.highest)
        self.highest = max(self.highest, value)
        self.values = [*self.values[1 - rule.rows :], value] if rule.rows > 1 else [value]
        self.count += 1
        if rule.holds and self.count >= rule.fewest:
            self.lowest = min(self.lowest, statistics.median(self.values[-FEWEST_ROWS:]))
        return before


RANK_RULES: Final = (
    *DEFAULT_RULES,
    *SCORE_RULES,
    CurveRule(name="LossSpike", ratio=2.0, deviations=12.0, names=("loss",)),
    CurveRule(name="LearningRateJump", ratio=1.5, names=("learning_rate",), above="highest"),
)
"""The rules that apply on ranks if the user configures none."""

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
    """Return the number of values of a series of `kind` and `op` that form the baseline before a rule fires."""
    return min((n for rule in rules if rule.judges(kind, op) and (n := rule.needed_values()) is not None), default=0)


@dataclass(frozen=True, slots=True)
class Firing:
    """A firing: the first rule that fired for one value of a series."""

    rule: AnomalyRule
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
        self._missing_values = needed_values(self._judging, kind, op)
        self._baseline = math.nan
        self.compared = math.nan
        """The baseline with which the last value was compared; NaN if there was none."""

    @property
    def baseline(self) -> float:
        """Return the baseline of the next value; NaN before a finite value, and until the rules have enough values."""
        return math.nan if self._missing_values > 0 else self._baseline

    def observe(self, raw: float) -> Firing | None:
        """Return a firing of the first rule, in configured order, that fires for the value `raw`; None if none fires.

        Then update the baseline.
        """
        value = raw if self._op == "value" else to_float32(raw)  # statistics of tensors are float32, scalars are not
        is_early = self._missing_values > 0
        before = math.nan if is_early else self._baseline
        if value:  # 0: the gradient did not reach the tensor
            self._baseline = next_baseline(self._baseline, value)
            self._missing_values -= math.isfinite(value)
        # The first value is compared with itself. AnomalyTurbulence therefore never fires for it.
        self.compared = self._baseline if math.isnan(before) and not is_early else before
        found = None
        for rule in self._judging:
            if rule.fires(self._op, value, self.compared):
                found = Firing(rule, before)
                break
        for curve_rule, curve in self._curves:
            middle = curve.observe(curve_rule, value)
            if found is None and middle is not None:
                found = Firing(curve_rule, middle)
        return found
