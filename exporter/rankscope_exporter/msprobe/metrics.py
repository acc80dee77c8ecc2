"""Statistics of a step as the existing tool's getters return them: by tag, then by statistic, numbers as tensors. Pure.

Its statistics are over all elements: beside a NaN they are NaN here too, beside an Inf the norm is Inf. `zeros` is a
share there. A tensor that does not exist has no entry.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from rankscope_contract.kinds import VALUE_OPS
from rankscope_contract.records import PlanEntry
from rankscope_exporter.msprobe.tags import tag

Metrics = dict[str, dict[str, torch.Tensor]]


class Measured(Protocol):
    """One tensor at one step."""

    @property
    def entry(self) -> PlanEntry:
        """What it is."""
        ...

    @property
    def numbers(self) -> Mapping[str, Any]:
        """Its statistics, None for one that does not exist."""
        ...


def metrics_of(rows: Iterable[Measured], ops: Sequence[str], rank: int) -> Metrics:
    """Return the statistics `ops` of `rows`."""
    found: Metrics = {}
    for row in rows:
        entry = row.entry
        where = {"index": entry.index, "micro_step": entry.micro_step, "vpp_stage": entry.vpp_stage}
        found[tag(entry.kind, entry.tensor, rank, **where)] = {
            op: torch.tensor(statistic(op, row.numbers), dtype=torch.float64, device="cpu") for op in ops
        }
    return found


def statistic(op: str, numbers: Mapping[str, Any]) -> float:
    """Return one statistic over all elements; NaN for what is not known."""
    nans, infs, value = numbers.get("nans") or 0, numbers.get("infs") or 0, numbers.get(op)
    if op in VALUE_OPS and nans:
        return math.nan
    if op in VALUE_OPS and infs:
        return math.inf if op == "norm" else math.nan
    if op == "norm" and numbers.get("numel") == 0:
        return 0.0
    if value is None:
        return math.nan
    if op == "zeros":
        return value / numbers["numel"] if numbers.get("numel") else math.nan
    return float(value)
