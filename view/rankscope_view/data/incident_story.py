"""The story of one incident: its anomalies in causal order, the growth before it, and a timeline."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rankscope_contract.model.events import CLOSED, RULES_OF_RUNS, subject_name
from rankscope_storage.api.summaries import AnomalyRow, anomalies
from rankscope_storage.connection import Connection
from rankscope_view.data.incidents import STATE_TEXTS, Incident, in_order

_BEFORE: Final = 60
_AFTER: Final = 30
_LAYER: Final = re.compile(r"^(.*?\b\d+)\b")
_CHECKPOINTS: Final = """\
SELECT max(step) FILTER (step < $first) AS before, min(step) FILTER (step >= $first) AS after FROM events
WHERE run = $run AND type = 'checkpoint' AND coalesce(attempt, 0) = $attempt AND step <= $last"""
_ATTEMPTS: Final = """\
SELECT type, coalesce(attempt, 0) AS attempt, epoch(min(if(type = 'launch', coalesce(started_at, ts), ts))) AS at,
  arg_min(message, ts) AS message, min(step) AS step
FROM events LEFT JOIN (SELECT attempt, started_at FROM attempts WHERE run = $run) USING (attempt) WHERE run = $run
  AND ((type = 'exit' AND coalesce(attempt, 0) = $attempt) OR (type = 'launch' AND coalesce(attempt, 0) = $attempt + 1))
  AND ts IS NOT NULL GROUP BY ALL"""
_FAMILIES: Final = {
    "activations": "act_",
    "gradients": "grad_",
    "weights": "param_",
    "optimizer state": ("exp_avg", "momentum"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Something that happened at a time in UTC seconds. `icon` names its mark."""

    at: float | None
    icon: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyGroup:
    """The first anomaly of a layer by one rule, with its number of others, their tensors and ranks."""

    first: AnomalyRow
    others: int
    tensors: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The content of the page of an incident beyond its first cause."""

    groups: tuple[AnomalyGroup, ...]  # in causal order
    total: int
    steps: tuple[int, int]  # first and last step of its anomalies
    ranks: tuple[int, ...]  # with an anomaly
    safe_checkpoint: int | None  # step of the newest checkpoint before the first sign
    bad_checkpoint: int | None  # step of the first checkpoint after it
    growth: tuple[AnomalyRow, ...]  # firings for the tensor of the first cause before it
    moments: tuple[Moment, ...]
    not_measured: tuple[str, ...]  # families of quantities without a row near the step
    beside: tuple[str | None, str | None]  # keys of the incidents before and after it, by step


def window(one: Incident) -> tuple[int, int]:
    """Return the steps that the page of an incident shows."""
    step = one.step or 0
    return max(0, step - _BEFORE), max(step, min(one.last_step or step, step + _AFTER)) + _AFTER


def incident_story(connection: Connection, one: Incident, found: Sequence[Incident]) -> Story:
    """Return the story of an incident, which is one of those `found` in its run."""
    steps = window(one)
    listed = anomalies(connection, one.run, top=1_000_000, steps=steps)
    near = [each for each in listed if (each.attempt or 0) == (one.attempt or 0)]
    growth = tuple(each for each in near if one.rule not in RULES_OF_RUNS and _grows(each, one))
    own = own_anomalies(near, one, found) if one.rule not in RULES_OF_RUNS else []
    keys = [each.key for each in sorted(found, key=in_order)]
    at = keys.index(one.key)
    safe, bad = _checkpoints(connection, one, growth)
    return Story(
        groups=tuple(grouped(own)),
        total=len(own),
        steps=(own[0].step or 0, own[-1].step or 0) if own else steps,
        ranks=tuple(sorted({*one.ranks, *(each.rank for each in own if each.rank is not None)})),
        safe_checkpoint=safe,
        bad_checkpoint=bad,
        growth=growth,
        moments=_moments(connection, one, growth),
        not_measured=tuple(unmeasured(connection, one.run, steps)),
        beside=(keys[at - 1] if at else None, next(iter(keys[at + 1 :]), None)),
    )


def own_anomalies(near: Sequence[AnomalyRow], one: Incident, found: Sequence[Incident]) -> list[AnomalyRow]:
    """Return the anomalies in `near`, in the order of steps, that belong to `one` and to no other incident in `found`.

    The anomalies of a step belong to the incident that began there, else to the latest one with the same rule and
    tensor, else to the latest one. An incident that is over has no anomalies after its last step.
    """
    peers = [each for each in found if (each.attempt or 0) == (one.attempt or 0) and each.rule not in RULES_OF_RUNS]
    subjects: dict[str, set[tuple[str | None, str | None]]] = {
        each.key: {(each.rule, subject_name(each.tensor, each.op))} for each in peers
    }
    own: list[AnomalyRow] = []
    for step, rows in itertools.groupby(near, key=lambda row: row.step):
        anomalies_of_step = list(rows)
        named = {(row.rule, subject_name(row.tensor, row.op)) for row in anomalies_of_step}
        active = [each for each in peers if _covers(each, step)]
        ranked = [(each.step == step, bool(named & subjects[each.key]), in_order(each), each) for each in active]
        holder = max(ranked, key=operator.itemgetter(0, 1, 2))[-1] if ranked else None
        if holder is None:  # an earlier sign of the tensor, too weak to have an incident
            own += [row for row in anomalies_of_step if _grows(row, one)]
            continue
        subjects[holder.key] |= named
        if holder.key == one.key or (holder.step, one.step) == (step, step):
            own += anomalies_of_step
    return own


def _covers(one: Incident, step: int | None) -> bool:
    if one.step is None or step is None:
        return one.step is step
    return one.step <= step and (one.is_open or one.last_step is None or step <= one.last_step)


def _grows(each: AnomalyRow, one: Incident) -> bool:
    is_before = each.step is not None and one.step is not None and each.step < one.step
    return is_before and bool(each.baseline) and (each.tensor, each.rank) == (one.tensor, one.rank)


def _moments(connection: Connection, one: Incident, growth: Sequence[AnomalyRow]) -> tuple[Moment, ...]:
    found = [
        Moment(
            at=at,
            icon="incident" if state in {"opened", "muted"} else "info",
            text=f"incident {STATE_TEXTS.get(state, state)}{f' by {one.closed_by}' if state == CLOSED else ''}",
        )
        for at, state in one.states
        if at is not None
    ]
    for first in growth[:1]:
        seconds = None if first.ts is None else first.ts.timestamp()
        where = "" if first.rank is None else f" on rank {first.rank}"
        found.append(Moment(at=seconds, icon="warning", text=f"{first.rule}{where}, step {first.step:,}"))
    for row in connection.query(_ATTEMPTS, {"run": one.run, "attempt": one.attempt or 0}).to_pylist():
        has_begun = row["type"] == "launch"
        reason = "" if has_begun or not row["message"] else f": {row['message'].splitlines()[0]}"
        text = f"attempt {row['attempt']} {'was started' if has_begun else 'ended'}{reason}"
        found.append(Moment(at=row["at"], icon="restart", text=text))
    return tuple(sorted(found, key=lambda moment: moment.at or 0.0))


def grouped(found: Sequence[AnomalyRow]) -> list[AnomalyGroup]:
    """Return anomalies grouped by layer and rule, in the order of the first one of each group.

    The layer is the name of a tensor up to its first number. Other tensors and scalars are groups of their own.
    """
    groups: dict[tuple[str | None, str | None], list[AnomalyRow]] = {}
    for row in found:
        name = subject_name(row.tensor, row.op) or ""
        layer = layer_of.group(1) if (layer_of := _LAYER.match(name)) else name
        groups.setdefault((layer, row.rule), []).append(row)
    return [
        AnomalyGroup(
            first=rows[0],
            others=len(rows) - 1,
            tensors=len({row.tensor for row in rows}),
            ranks=tuple(sorted({row.rank for row in rows if row.rank is not None})),
        )
        for rows in groups.values()
    ]


def _checkpoints(connection: Connection, one: Incident, growth: Sequence[AnomalyRow]) -> tuple[int | None, int | None]:
    """Return the step of the newest checkpoint before the first sign of an incident, and of the first one after it.

    Only checkpoints of its attempt, up to the last step of the incident, are considered.
    """
    signs = [row.step for row in growth if row.step is not None] + ([] if one.step is None else [one.step])
    if not signs:
        return None, None
    steps = {"first": min(signs), "last": one.last_step or max(signs)}
    parameters = {"run": one.run, "attempt": one.attempt or 0, **steps}
    row = connection.query(_CHECKPOINTS, parameters).to_pylist()[0]
    return row["before"], row["after"]


def unmeasured(connection: Connection, run: str, steps: tuple[int, int]) -> list[str]:
    """Return the families of quantities without a row in the closed range `steps`."""
    source = connection.relation("tensor_stats", run=run, steps=steps)
    rows = connection.query(
        f"SELECT DISTINCT kind FROM {source} WHERE run = $run AND step BETWEEN $first AND $last",
        {"run": run, "first": steps[0], "last": steps[1]},
    )
    kinds = rows["kind"].to_pylist()
    return [name for name, prefix in _FAMILIES.items() if not any(kind.startswith(prefix) for kind in kinds)]
