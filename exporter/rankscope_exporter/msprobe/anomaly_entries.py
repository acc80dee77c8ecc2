"""Anomalies as the existing tool's `anomaly.json` has them. Pure.

There the statistic is not in the key, so that of several anomalies of one tensor only the last one is left; here each
has a key of its own, and the fields are the tool's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rankscope_contract.events import Event, EventType
from rankscope_contract.msprobe.layout import their_step
from rankscope_exporter.msprobe.tags import tag

NOT_KNOWN = -1


class Steps(NamedTuple):
    """Our number of a step, and of the step that is the tool's 0."""

    ours: int
    first: int


def entries(
    events: Iterable[Event], steps: Steps, *, rank: int, pp_stage: int, group_mates: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """Yield key and JSON text of each anomaly of a tensor among the `events` of a step."""
    keys: set[str] = set()
    for event in events:
        if event.type != EventType.ANOMALY or event.tensor is None or event.kind is None:
            continue
        name = tag(event.kind, event.tensor, rank, micro_step=event.micro_step, vpp_stage=event.vpp_stage)
        theirs = max(0, their_step(event.kind, steps.ours, steps.first))
        call = NOT_KNOWN if event.call_id is None else event.call_id
        entry = {
            "rank": rank,
            "step": theirs,
            "micro_step": event.micro_step or 0,
            "pp_stage": pp_stage if event.pp_stage is None else event.pp_stage,
            "vpp_stage": event.vpp_stage or 0,
            "call_id": call,
            "tag_name": name,
            "message": _message(event, name, theirs),
            "group_mates": list(group_mates),
        }
        key = _unused(f"{name}_step_{theirs}_call_{call}", event.op, keys)
        keys.add(key)
        yield key, json.dumps(entry, ensure_ascii=False)


def _unused(key: str, op: str | None, keys: set[str]) -> str:
    candidates = [key, f"{key}_{op}", *(f"{key}_{op}_{number}" for number in range(2, len(keys) + 3))]
    return next(candidate for candidate in candidates if candidate not in keys)


def _message(event: Event, name: str, step: int) -> str:
    return (
        f"Rule {event.rule} reports anomaly signal in ('{name}', '{event.op}') at step {step}, "
        f"current value {_number(event.value)}, history mean {_number(event.baseline)}."
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value
