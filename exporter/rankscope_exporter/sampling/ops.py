"""Which statistics of a tensor are published: names in, a choice out. Pure; all are measured, in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rankscope_contract.kinds import COUNT_OPS, VALUE_OPS
from rankscope_contract.rules import AnomalyRule
from rankscope_exporter.checks import did_you_mean

Ops = frozenset[str]

ALL_OPS: Final = (*VALUE_OPS, *COUNT_OPS)
EVERY_OP: Final[Ops] = frozenset(ALL_OPS)
NO_OP: Final[Ops] = frozenset()
"""Of what is measured and not published at all."""

ALWAYS: Final = "numel"
"""A row without it does not exist, and shards are put together by it."""

FALLBACK: Final = "norm"
COUNTED_ANYWAY: Final = ("nans", "infs")
"""Judged whether they are published or not: a NaN must not pass because nobody wanted its count in the store."""

_ELSEWHERE: Final = ("shape", "dtype")
_OTHER_NAMES: Final = {"id": "mean"}


def chosen_ops(names: Sequence[str]) -> Ops:
    """Return the statistics that `names` mean; `norm` where none is one. Raises ValueError, naming the nearest.

    `shape` and `dtype` stand in the plan of every rank, and the `id` of the existing tool, the value of a single
    number, is its mean.
    """
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"ops is a list of statistics, not {names!r}")
    known = {_OTHER_NAMES.get(name, name) for name in names} & EVERY_OP
    unknown = [name for name in names if name not in (*ALL_OPS, *_ELSEWHERE, *_OTHER_NAMES)]
    if known and unknown:
        hint = did_you_mean(unknown[0], ALL_OPS)
        raise ValueError(f"ops: {unknown[0]!r} is no statistic; there are {', '.join(ALL_OPS)}.{hint}")
    return frozenset({*(known or {FALLBACK}), ALWAYS})


def remarks(names: Sequence[str]) -> list[str]:
    """Return what the reader should know of `names` that chosen_ops accepts."""
    told = []
    if not {_OTHER_NAMES.get(name, name) for name in names} & EVERY_OP:
        told.append(f"ops {list(names)} names no statistic, norm is published; there are {', '.join(ALL_OPS)}")
    if any(name in _ELSEWHERE for name in names):
        told.append("ops: shape and dtype are always there, in the plan of each rank and in `tensors` of the store")
    if "id" in names:
        told.append("ops: id is read as mean, which of a single number is the number")
    return told


def unjudged(rules: Iterable[AnomalyRule], published: Mapping[str, Ops]) -> list[str]:
    """Return a sentence for each rule that judges what is not published; `published` is by kind."""
    told = []
    for rule in rules:
        missing = [op for op in ALL_OPS if op not in COUNTED_ANYWAY and _is_missed(rule, op, published)]
        if missing:
            told.append(f"rule {rule.name} has no {', '.join(missing)} to judge, which ops leaves out")
    return told


def _is_missed(rule: AnomalyRule, op: str, published: Mapping[str, Ops]) -> bool:
    return any(rule.judges(kind, op) and op not in ops for kind, ops in published.items() if ops)
