"""The plain meaning of the rules: one series, one value at a time. Every faster evaluator is tested against this one.

Values and stored baselines are float32, recursion and comparison are float64 over them.
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


def evaluate(rules: Sequence[AnomalyRule], kind: str | None, op: str, series: Iterable[float]) -> Iterator[Firing]:
    """Yield what fires along `series`. The first rule in order that may judge `op` and fires names the alert.

    A rule that may not judge `op` never swallows the verdict of a later one.
    """
    judging = [rule for rule in rules if rule.judges(kind, op)]
    baseline = math.nan
    for position, raw in enumerate(series):
        value = to_float32(raw)
        before, after = baseline, next_baseline(baseline, value)
        # The first observation is its own baseline: it can never be turbulent.
        against = after if math.isnan(before) else before
        for rule in judging:
            if rule.fires(op, value, against):
                yield Firing(position, rule, value, before)
                break
        baseline = after
