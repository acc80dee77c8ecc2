"""The story of one incident: its anomalies in causal order, the growth before it, and a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope_storage.api.summaries import AnomalyRow, anomalies
from rankscope_storage.connection import Connection
from rankscope_view.data.incidents import Incident

_SHOWN: Final = 40
_BEFORE: Final = 60
_AFTER: Final = 30
_ATTEMPTS: Final = """\
SELECT type, coalesce(attempt, 0) AS attempt, epoch(min(ts)) AS at, arg_min(message, ts) AS message, min(step) AS step
FROM events WHERE run = $run AND ts IS NOT NULL
  AND ((type = 'exit' AND coalesce(attempt, 0) = $attempt) OR (type = 'launch' AND coalesce(attempt, 0) = $attempt + 1))
GROUP BY ALL"""
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
class Story:
    """The content of the page of an incident beyond its first cause."""

    shown: tuple[AnomalyRow, ...]  # the first anomaly of each tensor, rank and rule
    total: int
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
    own = [each for each in listed if (each.attempt or 0) == (one.attempt or 0)]
    growth = tuple(each for each in own if _grows(each, one))
    keys = [each.key for each in sorted(found, key=lambda each: (each.attempt or 0, each.step or 0, each.key))]
    at = keys.index(one.key)
    return Story(
        shown=tuple(first_of_each(own)[:_SHOWN]),
        total=len(own),
        growth=growth,
        moments=_moments(connection, one, growth),
        not_measured=tuple(unmeasured(connection, one.run, steps)),
        beside=(keys[at - 1] if at else None, next(iter(keys[at + 1 :]), None)),
    )


def _grows(each: AnomalyRow, one: Incident) -> bool:
    is_before = each.step is not None and one.step is not None and each.step < one.step
    return is_before and bool(each.baseline) and (each.tensor, each.rank) == (one.tensor, one.rank)


def _moments(connection: Connection, one: Incident, growth: Sequence[AnomalyRow]) -> tuple[Moment, ...]:
    found = [
        Moment(at=at, icon="incident" if state == "opened" else "info", text=f"incident {state}")
        for at, state in one.states
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


def first_of_each(found: Sequence[AnomalyRow]) -> list[AnomalyRow]:
    """Return the first anomaly of each tensor, rank and rule, in the same order."""
    first: dict[tuple[Any, ...], AnomalyRow] = {}
    for row in found:
        first.setdefault((row.tensor or row.op, row.rule, row.rank), row)
    return list(first.values())


def unmeasured(connection: Connection, run: str, steps: tuple[int, int]) -> list[str]:
    """Return the families of quantities without a row in the closed range `steps`."""
    source = connection.relation("tensor_stats", run=run, steps=steps)
    rows = connection.query(
        f"SELECT DISTINCT kind FROM {source} WHERE run = $run AND step BETWEEN $first AND $last",
        {"run": run, "first": steps[0], "last": steps[1]},
    )
    kinds = rows["kind"].to_pylist()
    return [name for name, prefix in _FAMILIES.items() if not any(kind.startswith(prefix) for kind in kinds)]
