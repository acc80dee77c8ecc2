"""The firings of rules for a whole series, by the reference evaluator."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rankscope_contract.rules import AnomalyRule
from rankscope_contract.rules.curve import SeriesEvaluator, to_float32


class Found(NamedTuple):
    position: int
    rule: AnomalyRule
    value: float
    baseline: float


def evaluate(rules: Sequence[AnomalyRule], kind: str | None, op: str, series: Iterable[float]) -> Iterator[Found]:
    evaluator = SeriesEvaluator(rules, kind, op)
    for position, raw in enumerate(series):
        if (firing := evaluator.observe(raw)) is not None:
            yield Found(position, firing.rule, raw if op == "value" else to_float32(raw), firing.baseline)
