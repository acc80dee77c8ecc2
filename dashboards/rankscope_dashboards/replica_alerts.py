"""Alerts on replicas that are no longer equal: ranks against each other, which no rank can judge by itself.

Each rank shows one number for all that a group of ranks should hold alike, with its step. Two scrapes may see two
steps, and only numbers of one step are compared. The service compares every step that the ranks send, and counts.
"""

from __future__ import annotations

from typing import Final

from rankscope_contract import metrics
from rankscope_contract.events import REPLICA_DESYNC, Severity
from rankscope_dashboards.alerts import Alert

WINDOW: Final = "2m"

_GROUP: Final = "(run, replicas)"
_WHAT_TO_ASK: Final = (
    "`rankscope anomalies {{ $labels.run }}` names the first tensor and the ranks, "
    "`rankscope diff {{ $labels.run }} --ranks A B` shows how far two of them are apart."
)


def replica_alerts() -> tuple[Alert, ...]:
    """Return the alert on what scrapes saw, and the one on what the service found."""
    return _comparison(), _counter()


def apart() -> str:
    """Return the PromQL that leaves one sample for each group of ranks that are apart at one and the same step."""
    value, step = metrics.REPLICA_HASH.name, metrics.REPLICA_HASH_STEP.name
    return (
        f"group by {_GROUP} (\n"
        f"  max by {_GROUP} ({value}) != min by {_GROUP} ({value})\n"
        f"  and max by {_GROUP} ({step}) == min by {_GROUP} ({step})\n)"
    )


def _comparison() -> Alert:
    return Alert(
        name=REPLICA_DESYNC,
        expression=apart(),
        summary="ranks {{ $labels.replicas }} of run {{ $labels.run }} no longer hold the same parameters",
        description="What they should hold bit for bit alike has different hashes at the same step. " + _WHAT_TO_ASK,
        severity=Severity.CRITICAL,
        runbook=REPLICA_DESYNC,
        keep_firing_for="1m",  # while one rank has the next step already, nothing can be compared
        panel="Replicas apart",
    )


def _counter() -> Alert:
    counter = f'{metrics.ANOMALIES_INGESTED.name}{{rule="{REPLICA_DESYNC}"}}'
    by = "sum by (run, rank, kind)"
    return Alert(
        name=f"{REPLICA_DESYNC}Events",
        # `increase` alone would miss a counter that is born above zero.
        expression=f"{by} (increase({counter}[{WINDOW}])) > 0\n  or\n"
        f"{by} ({counter} unless {counter} offset {WINDOW}) > 0",
        summary="replicas of run {{ $labels.run }} differ in {{ $labels.kind }}, rank {{ $labels.rank }}",
        description="The service compared the hashes that ranks sent of one step. The rank is unknown where more than "
        "one differs from the others, or no majority is right. " + _WHAT_TO_ASK,
        severity=Severity.CRITICAL,
        runbook=REPLICA_DESYNC,
        rule=REPLICA_DESYNC,
        panel="Replicas apart",
    )
