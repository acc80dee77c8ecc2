"""What must be true after the demo, asked of the store itself and of the receiver. Each check says what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope.demo.receiver import Alert, Way
from rankscope_contract.escaping import sql_identifier
from rankscope_contract.records import TENSOR_ROW_KEY

Query = Callable[[str], list[tuple[Any, ...]]]
"""Rows of one SQL statement over the store."""

AT_EVERY_STEP: Final = ("grad_unreduced", "grad_reduced")
WHERE_THE_OPTIMIZER_RAN: Final = ("param_before", "param_after", "exp_avg", "exp_avg_sq")
LONGEST_GRADIENT: Final = 1.0
"""The script clips gradients whose norm together is greater; they are stored once more as they are then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that the training script breaks on purpose."""

    step: int
    rank: int
    tensor: str
    rule: str
    skips_step: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the demo set out to do, and what must therefore be found."""

    run: str
    ranks: int
    steps: int
    tensors: int
    faults: Sequence[Fault] = ()
    ways: Sequence[Way] = (Way.EMBEDDED,)

    def rows_of(self, kind: str) -> int:
        """Return the rows that `kind` must have: a skipped step has gradients, but nothing of the optimizer."""
        skipped = sum(fault.skips_step for fault in self.faults)
        steps = self.steps if kind in AT_EVERY_STEP else self.steps - skipped
        return self.ranks * steps * self.tensors


@dataclass(frozen=True, slots=True)
class Check:
    """One statement about the outcome, and whether it holds."""

    holds: bool
    text: str


def checks(plan: Plan, query: Query, alerts: Sequence[Alert]) -> Iterator[Check]:
    """Yield every check."""
    yield from _rows(plan, query)
    yield _no_duplicate(query)
    yield _no_gap(plan, query)
    yield _state(plan, query)
    yield from _incidents(plan, alerts)
    yield from _alerts(plan, alerts)


def delays(plan: Plan, query: Query, alerts: Sequence[Alert]) -> Iterator[tuple[Fault, Way, float]]:
    """Yield how many seconds after the bad step each way first told of it."""
    begun: dict[int, float] = dict(
        query("select step, epoch(min(ts)) from events where type = 'anomaly' group by step")
    )
    for fault in plan.faults:
        for way in plan.ways:
            told = [alert.at for alert in alerts if alert.way is way and _tells_of(alert, fault)]
            if told and fault.step in begun:
                yield fault, way, min(told) - begun[fault.step]


def told_by_alertmanager(alerts: Sequence[Alert], faults: Sequence[Fault]) -> list[bool]:
    """Return of each fault whether Alertmanager told of it."""
    told = [alert for alert in alerts if alert.way is Way.ALERTMANAGER]
    return [any(_tells_of(alert, fault) for alert in told) for fault in faults]


def _tells_of(alert: Alert, fault: Fault) -> bool:
    if alert.way is Way.EMBEDDED:
        return _names(alert, fault)
    return any((labels.get("rule"), labels.get("rank")) == (fault.rule, str(fault.rank)) for labels in alert.labels)


def _rows(plan: Plan, query: Query) -> Iterator[Check]:
    stored: dict[str, int] = dict(query("select kind, count(*) from tensor_stats group by kind"))
    for kind in (*AT_EVERY_STEP, *WHERE_THE_OPTIMIZER_RAN):
        wanted, found = plan.rows_of(kind), stored.pop(kind, 0)
        yield Check(wanted == found, f"{kind}: {found:,} rows of {wanted:,}")
    too_long = f"value > {LONGEST_GRADIENT} and not isnan(value)"
    ((clipped,),) = query(f"select count(*) from scalars where name = 'grad_norm' and {too_long}")  # noqa: S608 - our own number
    wanted, found = clipped * plan.tensors, stored.pop("grad_clipped", 0)
    yield Check(wanted == found, f"grad_clipped: {found:,} rows of {wanted:,}")
    yield Check(not stored, "no other kind of tensor row" if not stored else f"rows nobody asked for: {stored}")


def _no_duplicate(query: Query) -> Check:
    key = ", ".join(sql_identifier(name) for name in TENSOR_ROW_KEY)
    ((doubled,),) = query(f"select count(*) from (select 1 from tensor_stats group by {key} having count(*) > 1)")  # noqa: S608 - our own column names
    return Check(doubled == 0, f"{doubled} row keys stored twice")


def _no_gap(plan: Plan, query: Query) -> Check:
    by_rank = query(
        "select rank, count(distinct step), min(step), max(step) from scalars where name = 'loss' group by rank"
    )
    wanted = [(rank, plan.steps, 1, plan.steps) for rank in range(plan.ranks)]
    whole = sorted(by_rank) == wanted
    return Check(whole, f"every step of every rank has its loss{'' if whole else f': {sorted(by_rank)}'}")


def _state(plan: Plan, query: Query) -> Check:
    states = query("select run, state from runs")
    return Check(states == [(plan.run, "completed")], f"runs and their states: {states}")


def _incidents(plan: Plan, alerts: Sequence[Alert]) -> Iterator[Check]:
    """The service itself sends one message per incident, which names everything."""
    told = [alert for alert in alerts if alert.way is Way.EMBEDDED]
    wanted = len(plan.faults)
    yield Check(len(told) == wanted, f"{len(told)} messages from the service, {wanted} expected")
    for fault in plan.faults:
        naming = [alert for alert in told if _names(alert, fault)]
        what = f"rank {fault.rank}, {fault.tensor}, step {fault.step}"
        yield Check(len(naming) == 1, f"{len(naming)} message names {what}")


def _alerts(plan: Plan, alerts: Sequence[Alert]) -> Iterator[Check]:
    """Prometheus and Alertmanager tell of each fault too, and of nothing else."""
    if Way.ALERTMANAGER not in plan.ways:
        return
    told = {_of_run(labels) for alert in alerts if alert.way is Way.ALERTMANAGER for labels in alert.labels}
    for fault in plan.faults:
        found = (plan.run, fault.rule, str(fault.rank)) in told
        yield Check(found, f"Alertmanager tells of {fault.rule} on rank {fault.rank}")
    others = sorted(told - {(plan.run, fault.rule, str(rank)) for fault in plan.faults for rank in range(plan.ranks)})
    yield Check(not others, f"Alertmanager tells of nothing else{f': {others}' if others else ''}")


def _of_run(labels: Mapping[str, str]) -> tuple[str, str, str]:
    return labels.get("run", ""), labels.get("rule", labels.get("alertname", "")), labels.get("rank", "")


def _names(alert: Alert, fault: Fault) -> bool:
    return {f"rank: {fault.rank}", f"tensor: {fault.tensor}", f"step: {fault.step}"} <= set(alert.text.splitlines())
