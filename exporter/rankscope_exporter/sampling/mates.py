"""Which parameters another rank publishes for this one: what is the same on both by construction. No communication.

Sameness is never assumed: a framework says of each parameter that it keeps ranks equal, or an attribute does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from rankscope_contract.events import Event, EventType, Severity
from rankscope_exporter.frameworks import Framework
from rankscope_exporter.naming import NamedParameter

DP, TP = "dp_group", "tp_group"


@dataclass(frozen=True, slots=True)
class Mates:
    """What is left to others: positions of parameters, what the store is told of it, what a reader should know."""

    positions: frozenset[int] = frozenset()
    events: tuple[Event, ...] = ()
    complaints: tuple[str, ...] = ()


def find_mates(framework: Framework, parameters: Sequence[NamedParameter], groups: dict[str, Any]) -> Mates:
    """Return what the first ranks of `groups`, by DP and TP, publish for this one."""
    positions: set[int] = set()
    events, complaints = [], []
    for name, group in groups.items():
        if group is None:
            continue
        try:
            ranks = dist.get_process_group_ranks(group)
            here = ranks.index(dist.get_rank())
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            complaints.append(f"{name} is no process group of this rank, which publishes everything: {error}")
            continue
        same = [i for i, named in enumerate(parameters) if _is_same(framework, named, name, ranks)]
        if len(ranks) > 1 and not same:
            complaints.append(f"{name}: no parameter is known to be the same on its ranks: each publishes everything")
        if here > 0 and same:
            positions.update(same)
            events.append(_event(name, ranks, len(same), len(parameters)))
    return Mates(frozenset(positions), tuple(events), tuple(complaints))


def _is_same(framework: Framework, named: NamedParameter, name: str, ranks: Sequence[int]) -> bool:
    parameter = framework.parameter(named)
    if parameter is None or framework.is_same_on(parameter, ranks):
        return parameter is not None
    # Megatron marks every parameter; those of experts are reduced over another group.
    of_tp = name == TP and getattr(parameter, "tensor_model_parallel", None) is False
    return of_tp and getattr(parameter, "allreduce", True) is not False


def _event(name: str, ranks: Sequence[int], same: int, all_: int) -> Event:
    text = f"{name}: rank {ranks[0]} publishes what {same} of {all_} parameters have in common on its ranks"
    details = {"group": name, "published_by": ranks[0], "ranks": list(ranks), "parameters": same}
    return Event(type=EventType.NOTE, severity=Severity.INFO, message=text, details=json.dumps(details))
