"""Alerts on the state of runs and of the service. The service determines the state of a run, and PromQL only reads it.

A dead rank cannot report its own death. All alerts except ServiceDown therefore use metrics of the service. ServiceDown
fires when the service itself does not respond.
"""

from __future__ import annotations

from typing import Final

from rankscope_contract.metrics import catalogue
from rankscope_contract.model.events import RunState, Severity
from rankscope_dashboards.alerts.alert import Alert
from rankscope_dashboards.deploy.prometheus import SERVICE_JOB

LOSS_WINDOW: Final = "5m"
"""Time for which the alert on lost records is active after a loss of records."""

SERVICE_DOWN_FOR: Final = "30s"


def lifecycle_alerts() -> tuple[Alert, ...]:
    """Return the alerts on runs and on the service, most urgent first."""
    return (_run_failed(), _run_stalled(), _rank_gone(), _ingest_losing(), _service_down())


def _run_failed() -> Alert:
    return Alert(
        name="RunFailed",
        expression=_in_state(RunState.FAILED),
        summary="run {{ $labels.run }} failed",
        description="A rank ended with an exception, or stopped responding without an exit event. "
        "`rankscope summary {{ $labels.run }}` shows the rank and the reason.",
        severity=Severity.CRITICAL,
        runbook="RunFailed",
    )


def _run_stalled() -> Alert:
    # No `for`: the service already waits for `stalled_after_seconds` before it sets the state to stalled.
    return Alert(
        name="RunStalled",
        expression=_in_state(RunState.STALLED),
        summary="run {{ $labels.run }} is stalled",
        description="All ranks respond, but no rank has completed a step for longer than stalled_after_seconds. "
        "Likely causes: a collective or a data loader that waits forever. "
        "`rankscope stacks {{ $labels.run }}` shows the stack of each rank.",
        severity=Severity.CRITICAL,
        runbook="RunStalled",
    )


def _rank_gone() -> Alert:
    return Alert(
        name="RankGone",
        expression=f"max by (run, rank) ({catalogue.RANK_VANISHED.name}) == 1",
        summary="rank {{ $labels.rank }} of run {{ $labels.run }} stopped responding and sent no exit event",
        description="The service receives no heartbeat and no response from the rank. Likely causes: process killed, "
        'out of memory, host down, network down. The run has the state "failed" until the rank responds again.',
        severity=Severity.WARNING,
        runbook="RankGone",
        panel="Ranks up",
    )


def _ingest_losing() -> Alert:
    counter = catalogue.LOST_RECORDS.name
    return Alert(
        name="IngestLosing",
        # `increase` alone would miss the loss if the first sample of the run's counter is above zero.
        expression=f"sum by (run) (increase({counter}[{LOSS_WINDOW}])) > 0\n  or\n"
        f"sum by (run) ({counter} unless {counter} offset {LOSS_WINDOW}) > 0",
        summary="records of run {{ $labels.run }} are lost",
        description="Records of ranks were overwritten, or lost with their process, before the service read them. The "
        "history in the store has a gap. Training is not affected.",
        severity=Severity.WARNING,
        runbook="IngestLosing",
        panel="Lost records",
    )


def _service_down() -> Alert:
    up = f'up{{job="{SERVICE_JOB}"}}'
    return Alert(
        name="ServiceDown",
        # group() replaces the value 0 by 1: Grafana evaluates the same expression and requires a value above zero.
        expression=f"group by (job, instance) ({up} == 0)\n  or\nabsent({up})",
        summary="the Rankscope service does not respond",
        description="Until the service responds again, no step is stored and no alert on runs can fire. Ranks keep "
        "records in their rings and spools as far as these have capacity. Training continues.",
        severity=Severity.CRITICAL,
        runbook="ServiceDown",
        hold_for=SERVICE_DOWN_FOR,
        panel="Since last commit",
    )


def _in_state(state: RunState) -> str:
    return f'max by (run) ({catalogue.RUN_STATE.name}{{state="{state}"}}) == 1'
