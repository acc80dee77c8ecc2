"""Which entries of a plan the page shows. Pure.

Labels tell the parts of a tensor apart, as `layers.0[1]`, but neither micro-batches nor calls nor model chunks; two
samples of one name would spoil the page. The record channel carries all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.records import PlanEntry


class MicroSteps:
    """The micro-batches of a plan, and which was the last one of a step."""

    def __init__(self, entries: Sequence[PlanEntry], kinds: frozenset[str]) -> None:
        found: dict[int, list[int]] = {}
        for position, entry in enumerate(entries):
            if entry.micro_step is not None and entry.kind in kinds:
                found.setdefault(entry.micro_step, []).append(position)
        self._positions = [(micro, pa.array(found[micro], pa.int32())) for micro in sorted(found, reverse=True)]

    def last(self, present: Any) -> int | None:
        """Return the last micro-batch of which anything is there, by whether each entry is; None without any."""
        for micro_step, positions in self._positions:
            if pc.any(present.take(positions), min_count=0).as_py():
                return micro_step
        return None


def distinct(entries: Sequence[PlanEntry], kinds: frozenset[str], last_micro_step: int | None) -> tuple[list[int], int]:
    """Return the positions to show, one for each kind and label, and how many series that leaves out.

    What stands for the whole step is preferred, else the last micro-batch; the first call of a module; a whole tensor
    before a part that is called like it; and otherwise what comes first. Other micro-batches and calls are the same
    series at another moment, and not left out.
    """
    named: dict[tuple[str, str], list[int]] = {}
    for position, entry in enumerate(entries):
        if entry.kind in kinds and not _is_later(entry, last_micro_step):
            named.setdefault((entry.kind, entry.label), []).append(position)
    shown = sorted(
        min(positions, key=lambda position: _order(entries[position], position)) for positions in named.values()
    )
    return shown, _ambiguous(entries, named)


def _is_later(entry: PlanEntry, last_micro_step: int | None) -> bool:
    return entry.micro_step is not None and (last_micro_step is None or entry.micro_step > last_micro_step)


def _order(entry: PlanEntry, position: int) -> tuple[int, ...]:
    micro_step = -1 if entry.micro_step is None else -2 - entry.micro_step
    whole = entry.micro_step is not None
    return (entry.index is not None, whole, micro_step, entry.call_seq or 0, position)


def _ambiguous(entries: Sequence[PlanEntry], named: Mapping[tuple[str, str], Iterable[int]]) -> int:
    return sum(
        len({(entries[position].index, entries[position].vpp_stage) for position in positions}) - 1
        for positions in named.values()
    )
