"""The plain meaning of the rules: one series, one value at a time. Every faster evaluator is tested against this one.

Statistics of tensors and stored baselines are float32, scalars float64, as they stand in the store; recursion and
comparison are float64 over them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rankscope_contract.rules.base import AnomalyRule

EMA_KEEP: Final = 0.99
EMA_TAKE: Final = 0.01
"""baseline ← 0.99 · baseline + 0.01 · |x|; both factors as written, since 1 - 0.99 is not 0.01 in binary."""

_FLOAT32: Final = struct.Struct("<f")


def to_float32(value: float) -> float:
    """Return `value` rounded to float32, beyond its range to ±Inf as the hardware does."""
    try:
        return float(_FLOAT32.unpack(_FLOAT32.pack(value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def next_baseline(baseline: float, value: float) -> float:
    """Return the float32 baseline after `value`; NaN stands for "none yet", non-finite values change nothing."""
    if not math.isfinite(value):
        return baseline
    if math.isnan(baseline):
        return to_float32(abs(value))
    return to_float32(EMA_KEEP * baseline + EMA_TAKE * abs(value))


@dataclass(frozen=True, slots=True)
class Firing:
    """The first rule that fired on one observation of a series."""

    position: int
    rule: AnomalyRule
    value: float
    baseline: float  # before the observation; NaN at the first one


class SeriesEvaluator:
    """One series and its baseline. A rule that may not judge `op` never swallows the verdict of a later one."""

    def __init__(self, rules: Sequence[AnomalyRule], kind: str | None, op: str) -> None:
        self._judging = [rule for rule in rules if rule.judges(kind, op)]
        self._op = op
        self._stored_as_float64 = op == "value"  # scalars; statistics of tensors are float32
        self._baseline = math.nan
        self._position = -1

    @property
    def baseline(self) -> float:
        """What the next value will be compared with; NaN before the first finite one."""
        return self._baseline

    def observe(self, raw: float) -> Firing | None:
        """Judge the next value; the first rule in order that fires names the alert."""
        self._position += 1
        value = raw if self._stored_as_float64 else to_float32(raw)
        before = self._baseline
        self._baseline = next_baseline(before, value)
        # The first observation is its own baseline: it can never be turbulent.
        against = self._baseline if math.isnan(before) else before
        for rule in self._judging:
            if rule.fires(self._op, value, against):
                return Firing(self._position, rule, value, before)
        return None


def evaluate(rules: Sequence[AnomalyRule], kind: str | None, op: str, series: Iterable[float]) -> Iterator[Firing]:
    """Yield what fires along `series`."""
    evaluator = SeriesEvaluator(rules, kind, op)
    for raw in series:
        firing = evaluator.observe(raw)
        if firing is not None:
            yield firing
