"""Alerts on the life of runs and of the service itself. The service decides a state; PromQL only reads it.

A rank that died cannot say so, hence all but one of these come from the service's page; the one that is left tells
that the service is gone.
"""

from __future__ import annotations

from typing import Final

from rankscope_contract import metrics
from rankscope_contract.events import RunState, Severity
from rankscope_dashboards.alerts import Alert
from rankscope_dashboards.prometheus_config import SERVICE_JOB

LOSS_WINDOW: Final = "5m"
SERVICE_SILENCE: Final = "30s"


def lifecycle_alerts() -> tuple[Alert, ...]:
    """Return the alerts, the most urgent first."""
    return (_run_failed(), _run_stalled(), _rank_gone(), _ingest_losing(), _service_down())


def _run_failed() -> Alert:
    return Alert(
        name="RunFailed",
        expression=_in_state(RunState.FAILED),
        summary="run {{ $labels.run }} failed",
        description="A rank ended with an exception, or vanished without a word. "
        "`rankscope summary {{ $labels.run }}` names the rank and why.",
        severity=Severity.CRITICAL,
        runbook="RunFailed",
    )


def _run_stalled() -> Alert:
    # No `for`: the service has waited for as long as its settings say before it calls a run stalled.
    return Alert(
        name="RunStalled",
        expression=_in_state(RunState.STALLED),
        summary="run {{ $labels.run }} makes no steps",
        description="All ranks are alive, and none has made a step for longer than stalled_after_seconds: "
        "a collective that waits for ever, or a loader that does. "
        "`rankscope stacks {{ $labels.run }}` says which rank stands where.",
        severity=Severity.CRITICAL,
        runbook="RunStalled",
    )


def _rank_gone() -> Alert:
    return Alert(
        name="RankGone",
        expression=f"max by (run, rank) ({metrics.RANK_VANISHED.name}) == 1",
        summary="rank {{ $labels.rank }} of run {{ $labels.run }} vanished without a word",
        description="Neither heartbeat nor answer, and no last word: killed, out of memory, or its host or network is "
        "down. The run counts as failed until the rank is heard of again.",
        severity=Severity.WARNING,
        runbook="RankGone",
        panel="Ranks up",
    )


def _ingest_losing() -> Alert:
    counter = metrics.LOST_RECORDS.name
    return Alert(
        name="IngestLosing",
        # `increase` alone would miss the loss of a run whose counter begins above zero.
        expression=f"sum by (run) (increase({counter}[{LOSS_WINDOW}])) > 0\n  or\n"
        f"sum by (run) ({counter} unless {counter} offset {LOSS_WINDOW}) > 0",
        summary="records of run {{ $labels.run }} are lost",
        description="Steps that ranks published were overwritten, or died with their process, before the service had "
        "them: history has a hole. Training is not affected.",
        severity=Severity.WARNING,
        runbook="IngestLosing",
        panel="Lost records",
    )


def _service_down() -> Alert:
    up = f'up{{job="{SERVICE_JOB}"}}'
    return Alert(
        name="ServiceDown",
        # group() makes 1 of the 0: Grafana, which takes the same text, asks for a value above zero.
        expression=f"group by (job, instance) ({up} == 0)\n  or\nabsent({up})",
        summary="Rankscope's service does not answer",
        description="No step is stored, and no alert on runs can fire, while it is away. Ranks keep what they can in "
        "their rings and spools, and training goes on.",
        severity=Severity.CRITICAL,
        runbook="ServiceDown",
        hold_for=SERVICE_SILENCE,
        panel="Since last commit",
    )


def _in_state(state: RunState) -> str:
    return f'max by (run) ({metrics.RUN_STATE.name}{{state="{state}"}}) == 1'
