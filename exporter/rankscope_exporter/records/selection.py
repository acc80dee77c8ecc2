"""The statistics of a step on the host, and the selection of those (ops) to publish.

All ops are measured in one pass over a tensor. The publisher thread then masks the ops that are not published.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from rankscope_contract.model.kinds import BASELINE_OPS, COUNT_OPS, DEFAULT_OPS, VALUE_OPS
from rankscope_contract.rules import AnomalyRule
from rankscope_exporter.process.validation import listed

Ops = frozenset[str]

ALL_OPS: Final = (*VALUE_OPS, *COUNT_OPS)
EVERY_OP: Final[Ops] = frozenset(DEFAULT_OPS)
"""The default selection of ops: all except those that are published only if the configuration names them."""

NO_OP: Final[Ops] = frozenset()
"""The selection of ops for entries that are measured but not published."""

ALWAYS: Final = "numel"
"""The op `numel` (number of elements), which every row has.

A row without it counts as absent, and the store needs it to combine shards.
"""

FALLBACK: Final = "norm"
COUNTED_ANYWAY: Final = ("nans", "infs")
"""Ops that rules read even if they are not published.

For example, a NaN must be detected even if the number of NaN is not published.
"""

_ELSEWHERE: Final = ("shape", "dtype")
_OTHER_NAMES: Final = {"id": "mean"}


def chosen_ops(names: Sequence[str]) -> Ops:
    """Return the statistics that `names` selects.

    If `names` contains no statistic, select `norm`. `numel` is always selected.

    Raise ValueError if some names are statistics and others are unknown; the error contains the most similar known
    name. `shape` and `dtype` are accepted and ignored, because the plan of every rank contains them. `id`, the value
    of a single number, is read as `mean`.
    """
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"ops must be a list of statistics, not {names!r}")
    known = {_OTHER_NAMES.get(name, name) for name in names} & set(ALL_OPS)
    unknown = [name for name in names if name not in (*ALL_OPS, *_ELSEWHERE, *_OTHER_NAMES)]
    if known and unknown:
        raise ValueError(f"ops: {unknown[0]!r} is not a statistic; the statistics are {listed(ALL_OPS, unknown[0])}")
    return frozenset({*(known or {FALLBACK}), ALWAYS})


def op_notices(names: Sequence[str]) -> list[str]:
    """Return notices for the user about `names` that are accepted as ops, but have no effect or another meaning."""
    notices = []
    if not {_OTHER_NAMES.get(name, name) for name in names} & set(ALL_OPS):
        notices.append(f"ops {list(names)} contains no statistic, so norm is published; valid: {', '.join(ALL_OPS)}")
    if any(name in _ELSEWHERE for name in names):
        notices.append(
            "ops: shape and dtype are always published, in the plan of each rank and in `tensors` of the store"
        )
    if "id" in names:
        notices.append("ops: id is read as mean, which is the value of a single number")
    return notices


def rule_notices(rules: Iterable[AnomalyRule], published: Mapping[str, Ops]) -> list[str]:
    """Return a notice for each rule that reads an op that is not published.

    `published` has the published ops by kind.
    """
    notices = []
    for rule in rules:
        missing = [op for op in DEFAULT_OPS if op not in COUNTED_ANYWAY and _is_missed(rule, op, published)]
        if missing:
            notices.append(f"rule {rule.name} reads {', '.join(missing)}, which the setting ops does not publish")
    return notices


def _is_missed(rule: AnomalyRule, op: str, published: Mapping[str, Ops]) -> bool:
    return any(rule.judges(kind, op) and op not in ops for kind, ops in published.items() if ops)


@dataclass(frozen=True, slots=True)
class Finished:
    """The statistics of one step on the host. `values` is NaN for an entry that is absent or has no finite element.

    The arrays are numpy arrays, because a torch operation on the publisher thread would start a team of OpenMP threads.
    """

    values: npt.NDArray[np.float32]  # [len(VALUE_OPS), T]
    counts: npt.NDArray[np.int64]  # [len(COUNT_OPS), T], 0 where absent
    present: npt.NDArray[np.bool_]  # [T]


@dataclass(frozen=True, slots=True)
class Published:
    """Two masks, one for values and one for counts, with a row per statistic and a column per plan entry.

    True means that the number is published.
    """

    values: npt.NDArray[np.bool_]  # [len(VALUE_OPS), T]
    counts: npt.NDArray[np.bool_]  # [len(COUNT_OPS), T]

    def only(self, finished: Finished) -> Finished:
        """Return `finished` with NaN for values that are not published. Counts remain, because rules read them."""
        present = finished.present & self.counts[-1]
        values = np.where(self.values, finished.values, np.float32(np.nan))
        return replace(finished, values=values, present=present)


def carried_ops(choices: Iterable[Ops]) -> tuple[str, ...]:
    """Return the names of the floating-point statistics in a record, given the selected ops of each entry.

    The order is: default ops, ops that are selected by name, baselines.
    """
    wanted = EVERY_OP.union(*set(choices))
    return (*(op for op in VALUE_OPS if op in wanted), *BASELINE_OPS)


def masks(ops: Sequence[Ops]) -> Published | None:
    """Return the masks of plan entries with the selections `ops`; None if all have the default selection."""
    distinct = list(dict.fromkeys(ops))
    if distinct in ([], [EVERY_OP]):
        return None
    place = {choice: position for position, choice in enumerate(distinct)}
    rows = [[op in choice for op in ALL_OPS] for choice in distinct]
    mask = np.array(rows, np.bool_).T[:, [place[choice] for choice in ops]]
    assert COUNT_OPS[-1] == "numel"
    return Published(mask[: len(VALUE_OPS)], mask[len(VALUE_OPS) :])
