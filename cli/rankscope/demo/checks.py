"""Checks at the end of the demo. They compare the store and the received alerts with the expected run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope.demo.receiver import Alert, Sender
from rankscope_storage.base.datasets import TENSOR_ROW_KEY
from rankscope_storage.base.escaping import sql_identifier

Query = Callable[[str], list[tuple[Any, ...]]]
"""Function that executes one SQL statement on the store and returns the rows."""

KINDS_OF_EVERY_STEP: Final = ("grad_unreduced", "grad_reduced")
KINDS_OF_OPTIMIZER_STEPS: Final = ("param_before", "param_after", "exp_avg", "exp_avg_sq")
MAX_GRADIENT_NORM: Final = 1.0
"""Norm to which the training script clips the gradients.

At a step with a larger total norm, the statistics of the clipped gradients are stored in addition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault that the training script of the demo injects."""

    step: int
    rank: int
    tensor: str
    rule: str
    skips_step: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRun:
    """The configuration of the demo, from which the expected rows and alerts are derived."""

    run: str
    ranks: int
    steps: int
    tensors: int
    faults: Sequence[Fault] = ()
    senders: Sequence[Sender] = (Sender.EMBEDDED,)

    def rows_of(self, kind: str) -> int:
        """Return the expected number of rows of `kind`. A step that the optimizer skips has only rows of gradients."""
        skipped = sum(fault.skips_step for fault in self.faults)
        steps = self.steps if kind in KINDS_OF_EVERY_STEP else self.steps - skipped
        return self.ranks * steps * self.tensors


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check of the demo: whether it passed, and a text."""

    holds: bool
    text: str


def checks(expected: ExpectedRun, query: Query, alerts: Sequence[Alert]) -> Iterator[Check]:
    """Yield the results of all checks of the demo."""
    yield from _rows(expected, query)
    yield _no_duplicate(query)
    yield _no_gap(expected, query)
    yield _state(expected, query)
    yield from _incidents(expected, alerts)
    yield from _alerts(expected, alerts)


def are_reported(faults: Sequence[Fault], alerts: Sequence[Alert]) -> bool:
    """Return whether Alertmanager has sent a notification about each fault."""
    return {(fault.rule, str(fault.rank)) for fault in faults} <= {(rule, rank) for _, rule, rank in _reported(alerts)}


def _reported(alerts: Sequence[Alert]) -> set[tuple[str, str, str]]:
    """Return the run, the rule and the rank of each alert in the messages of Alertmanager."""
    return {
        (labels.get("run", ""), labels.get("rule", labels.get("alertname", "")), labels.get("rank", ""))
        for alert in alerts
        if alert.sender is Sender.ALERTMANAGER
        for labels in alert.labels
    }


def _rows(expected: ExpectedRun, query: Query) -> Iterator[Check]:
    stored: dict[str, int] = dict(query("select kind, count(*) from tensor_stats group by kind"))
    for kind in (*KINDS_OF_EVERY_STEP, *KINDS_OF_OPTIMIZER_STEPS):
        wanted, found = expected.rows_of(kind), stored.pop(kind, 0)
        yield Check(wanted == found, f"{kind}: {found:,} of {wanted:,} expected rows")
    too_long = f"value > {MAX_GRADIENT_NORM} and not isnan(value)"
    ((clipped,),) = query(f"select count(*) from scalars where name = 'grad_norm' and {too_long}")  # noqa: S608 - a constant of this module
    wanted, found = clipped * expected.tensors, stored.pop("grad_clipped", 0)
    yield Check(wanted == found, f"grad_clipped: {found:,} of {wanted:,} expected rows")
    yield Check(not stored, "no rows of other kinds" if not stored else f"rows of unexpected kinds: {stored}")


def _no_duplicate(query: Query) -> Check:
    key = ", ".join(sql_identifier(name) for name in TENSOR_ROW_KEY)
    ((doubled,),) = query(f"select count(*) from (select 1 from tensor_stats group by {key} having count(*) > 1)")  # noqa: S608 - column names of the contract
    return Check(doubled == 0, f"{doubled} rows of tensor statistics stored more than once")


def _no_gap(expected: ExpectedRun, query: Query) -> Check:
    by_rank = query(
        "select rank, count(distinct step), min(step), max(step) from scalars where name = 'loss' group by rank"
    )
    wanted = [(rank, expected.steps, 1, expected.steps) for rank in range(expected.ranks)]
    whole = sorted(by_rank) == wanted
    return Check(whole, f"every step of every rank has its loss{'' if whole else f': {sorted(by_rank)}'}")


def _state(expected: ExpectedRun, query: Query) -> Check:
    states = query("select run, state from runs")
    return Check(states == [(expected.run, "completed")], f"runs and their states: {states}")


def _incidents(expected: ExpectedRun, alerts: Sequence[Alert]) -> Iterator[Check]:
    """Check that the service sent exactly one message per injected fault.

    The message must name the rank, tensor and step.
    """
    received = [alert for alert in alerts if alert.sender is Sender.EMBEDDED]
    wanted = len(expected.faults)
    yield Check(len(received) == wanted, f"{len(received)} messages from the service, {wanted} expected")
    for fault in expected.faults:
        naming = [alert for alert in received if _names(alert, fault)]
        place = f"rank {fault.rank}, {fault.tensor}, step {fault.step}"
        yield Check(len(naming) == 1, f"{len(naming)} message names {place}")


def _alerts(expected: ExpectedRun, alerts: Sequence[Alert]) -> Iterator[Check]:
    """Check that Alertmanager sent a notification about each injected fault, and about nothing else."""
    if Sender.ALERTMANAGER not in expected.senders:
        return
    reported = _reported(alerts)
    for fault in expected.faults:
        found = (expected.run, fault.rule, str(fault.rank)) in reported
        yield Check(found, f"Alertmanager reports {fault.rule} on rank {fault.rank}")
    others = sorted(
        reported
        - {(expected.run, fault.rule, str(rank)) for fault in expected.faults for rank in range(expected.ranks)}
    )
    yield Check(not others, f"Alertmanager reports nothing else{f': {others}' if others else ''}")


def _names(alert: Alert, fault: Fault) -> bool:
    return {f"rank: {fault.rank}", f"tensor: {fault.tensor}", f"step: {fault.step}"} <= set(alert.text.splitlines())
