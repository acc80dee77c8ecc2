"""All alerts of Rankscope in groups, and the Prometheus rule file that contains these groups.

This module defines the alerts on the state of runs and of the service, and those on the GPUs of the ranks. The service
determines the state of a run, and PromQL only reads it. A dead rank cannot report its own death. All alerts on that
state except ServiceDown therefore use metrics of the service. ServiceDown fires when the service itself does not
respond.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rankscope_contract.metrics import hardware
from rankscope_contract.model.events import GPU_ECC, GPU_THROTTLED, GPU_XID, INGEST_LOSING, RunState, Severity
from rankscope_contract.rules import AnomalyRule
from rankscope_contract.rules.anomaly import DEFAULT_RULES
from rankscope_dashboards.alerts.alert import (
    GPU_ERRORS,
    LAST_COMMIT,
    LOST_DATA,
    NOT_KNOWN,
    RANKS_UP,
    RUNBOOKS,
    THROTTLED_GPUS,
    Alert,
    AlertGroup,
    unless,
)
from rankscope_dashboards.alerts.anomaly import (
    KEEP_FIRING_FOR,
    WINDOW,
    anomaly_alerts,
    of_tensors,
    rule_disagreement,
    score_alert,
)
from rankscope_dashboards.alerts.counters import held, increased
from rankscope_dashboards.alerts.incidents import incident_alerts
from rankscope_dashboards.alerts.replicas import replica_alerts
from rankscope_dashboards.deploy.prometheus import SERVICE_JOB
from rankscope_storage.base import service_catalogue

LOSS_WINDOW: Final = "5m"
"""Time for which the alert on lost records is active after a loss."""

SERVICE_DOWN_FOR: Final = "30s"
NOT_SCRAPED: Final = "an unknown address"
"""Value of the label `instance` of the alert ServiceDown if Prometheus does not scrape the service."""


def lifecycle_alerts() -> tuple[Alert, ...]:
    """Return the alerts on runs and on the service, most urgent first."""
    return (_run_failed(), _run_stalled(), _rank_gone(), _ingest_losing(), _service_down())


def _run_failed() -> Alert:
    return Alert(
        name="RunFailed",
        # topk: a failure can have had two reasons before the service went away.
        expression=f"topk by (run) (1, max by (run, rank, reason) {held(service_catalogue.RUN_FAILURE)}) == 1",
        summary=f"run {{{{ $labels.run }}}} failed{unless('reason', NOT_KNOWN, ': {{ $labels.reason }}')}"
        + unless("rank", NOT_KNOWN, ", rank {{ $labels.rank }}"),
        description="A rank ended with an exception, or stopped responding without an exit event. "
        "`rankscope summary {{ $labels.run }}` shows the rank and the reason.",
        severity=Severity.CRITICAL,
    )


def _run_stalled() -> Alert:
    matcher = f'{{state="{RunState.STALLED}"}}'
    # No `for`: the service already waits for `stalled_after_seconds` before it sets the state to stalled.
    return Alert(
        name="RunStalled",
        expression=f"max by (run) {held(service_catalogue.RUN_STATE, matcher)} == 1",
        summary="run {{ $labels.run }} is stalled",
        description="All ranks respond, but no rank has completed a step for longer than stalled_after_seconds. "
        "Likely causes: a collective or a data loader that waits forever. "
        "`rankscope stacks {{ $labels.run }}` shows the stack of each rank.",
        severity=Severity.CRITICAL,
    )


def _rank_gone() -> Alert:
    return Alert(
        name="RankGone",
        expression=f"max by (run, rank) {held(service_catalogue.RANK_VANISHED)} == 1",
        summary="rank {{ $labels.rank }} of run {{ $labels.run }} stopped responding and sent no exit event",
        description="The service receives no heartbeat and no response from the rank. Likely causes: process killed, "
        'out of memory, host down, network down. The run has the state "failed" until the rank responds again.',
        severity=Severity.WARNING,
        panel=RANKS_UP,
    )


def _ingest_losing() -> Alert:
    return Alert(
        name=INGEST_LOSING,
        expression=increased(service_catalogue.LOST_RECORDS, service_catalogue.LOST_RECORDS_AGE, ("run",), LOSS_WINDOW),
        summary="records of run {{ $labels.run }} are lost",
        description="Records of ranks were overwritten, or lost with their process, before the service read them. The "
        "history in the store has a gap. Training is not affected.",
        severity=Severity.WARNING,
        panel=LOST_DATA,
    )


def _service_down() -> Alert:
    up = f'up{{job="{SERVICE_JOB}"}}'
    return Alert(
        name="ServiceDown",
        # group() replaces the value 0 by 1: Grafana evaluates the same expression and requires a value above zero.
        # absent() returns no instance.
        expression=f"group by (job, instance) ({up} == 0)\n  or\n"
        f'label_replace(absent({up}), "instance", "{NOT_SCRAPED}", "", "")',
        summary="the Rankscope service at {{ $labels.instance }} does not respond",
        description="Until the service responds again, no step is stored and no alert on runs can fire. Ranks keep "
        "records in their rings and spools as far as these have capacity. Training continues.",
        severity=Severity.CRITICAL,
        rule=None,  # the alert is about no run: a route for runs or rules must not receive it
        hold_for=SERVICE_DOWN_FOR,
        panel=LAST_COMMIT,
    )


ERROR_WINDOW: Final = "10m"
"""Time for which a GPU alert on errors is active after the error."""

THROTTLED_FOR: Final = f"{hardware.THROTTLED_SECONDS // 60}m"

_BY: Final = "max by (run, rank, gpu)"
_GPU_TEXT: Final = "GPU {{ $labels.gpu }} of run {{ $labels.run }} rank {{ $labels.rank }}"


def hardware_alerts() -> tuple[Alert, ...]:
    """Return the GPU alerts, most urgent first."""
    throttled = f'{hardware.GPU_THROTTLED.name}{{reason=~"{"|".join(hardware.BAD_THROTTLE_REASONS)}"}}'
    return (
        Alert(
            name=GPU_XID,
            expression=_new(hardware.GPU_XID_ERRORS.name),
            summary=f"critical driver error (XID) on {_GPU_TEXT}",
            description="The event of type `xid` in the store contains the XID number and its meaning.",
            severity=Severity.CRITICAL,
            panel=GPU_ERRORS,
        ),
        Alert(
            name=GPU_ECC,
            expression=_new(f'{hardware.GPU_ECC_ERRORS.name}{{type="uncorrected"}}'),
            summary=f"uncorrectable memory error on {_GPU_TEXT}",
            description="A value that training uses may be wrong, or the driver killed the process that used the "
            "memory.",
            severity=Severity.CRITICAL,
            panel=GPU_ERRORS,
        ),
        Alert(
            name=GPU_THROTTLED,
            expression=f"max by (run, rank, gpu) ({throttled}) == 1",
            summary=f"{_GPU_TEXT} is throttled by heat or power supply",
            description=f"The GPU has reduced its clock rates for {THROTTLED_FOR}. One slow rank delays all other "
            "ranks.",
            severity=Severity.WARNING,
            hold_for=THROTTLED_FOR,
            panel=THROTTLED_GPUS,
        ),
    )


def _new(counter: str) -> str:
    """Return PromQL that holds while `counter` has increased within ERROR_WINDOW.

    The first sample does not count as an increase: the driver's counter can be above zero before a run starts.
    """
    return f"{_BY} (increase({counter}[{ERROR_WINDOW}])) > 0"


def rule_file(
    rules: Sequence[AnomalyRule] = DEFAULT_RULES, *, runbooks: str = RUNBOOKS, **times: str
) -> dict[str, Any]:
    """Return a Prometheus rule file with all alerts; `runbooks` is the address of the runbooks page.

    `rules` and `times` are the arguments of `alert_groups`.
    """
    return {"groups": [group.document(runbooks) for group in alert_groups(rules, **times)]}


def alert_groups(
    rules: Sequence[AnomalyRule] = DEFAULT_RULES, *, window: str = WINDOW, keep_firing_for: str = KEEP_FIRING_FOR
) -> tuple[AlertGroup, ...]:
    """Return all alerts in groups; `rules` are the anomaly rules on tensors for which there are alerts.

    `window` is the time for which an alert that counts firings is active after a firing. `keep_firing_for` is the time
    for which an alert that compares scraped values remains active after the comparison became false.
    """
    anomalies = anomaly_alerts(rules, window=window, keep_firing_for=keep_firing_for)
    return (
        AlertGroup("rankscope-anomaly", (*anomalies, score_alert(), *incident_alerts(window))),
        AlertGroup("rankscope-replicas", replica_alerts()),
        AlertGroup("rankscope-lifecycle", lifecycle_alerts()),
        AlertGroup("rankscope-hardware", hardware_alerts()),
        AlertGroup("rankscope-self-check", [rule_disagreement(rule) for rule in of_tensors(rules)]),
    )
