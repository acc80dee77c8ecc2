"""Alerts on replica divergence: ranks that should have equal parameters have different ones.

No rank can detect this alone. Each rank exports one hash over all tensors that must be bit-identical in its replica
group, and the step of this hash. Two scrapes may read different steps, so that the alert compares only hashes of the
same step. In addition, the service compares every step that the ranks send, and counts the differences.
"""

from __future__ import annotations

from typing import Final

from rankscope_contract.metrics import catalogue
from rankscope_contract.model.events import REPLICA_DESYNC, Severity
from rankscope_dashboards.alerts.alert import REPLICAS, Alert, with_all_labels
from rankscope_dashboards.alerts.counters import increased
from rankscope_storage.base import service_catalogue

WINDOW: Final = "2m"
"""Time for which the alert on replica divergence is active after the service found a difference."""

_GROUP: Final = "(run, replicas)"
_COMMANDS: Final = (
    "`rankscope anomalies {{ $labels.run }}` shows the first divergent tensor and its ranks. "
    "`rankscope diff {{ $labels.run }} --ranks A B` shows the size of the difference between two ranks."
)


def replica_alerts() -> tuple[Alert, ...]:
    """Return the two alerts on replica divergence.

    The first one compares the scraped hashes. The second one reports the differences that the service found by
    comparing every step.
    """
    return _comparison_alert(), _counting_alert()


def divergence_expression() -> str:
    """Return PromQL with one sample for each replica group whose ranks export different hashes of the same step."""
    value, step = catalogue.REPLICA_HASH.name, catalogue.REPLICA_HASH_STEP.name
    return (
        f"group by {_GROUP} (\n"
        f"  max by {_GROUP} ({value}) != min by {_GROUP} ({value})\n"
        f"  and max by {_GROUP} ({step}) == min by {_GROUP} ({step})\n)"
    )


def _comparison_alert() -> Alert:
    return Alert(
        name=REPLICA_DESYNC,
        expression=divergence_expression(),
        summary="replica divergence on ranks {{ $labels.replicas }} of run {{ $labels.run }}",
        description="Tensors that must be bit-identical on these ranks have different hashes at the same step. "
        + _COMMANDS,
        severity=Severity.CRITICAL,
        keep_firing_for="1m",  # the hashes are not comparable while one rank already exports the next step
        panel=REPLICAS,
        is_detail=True,
    )


def _counting_alert() -> Alert:
    counter, age = service_catalogue.ANOMALIES_INGESTED, service_catalogue.ANOMALIES_INGESTED_AGE
    found = increased(counter, age, ("run", "rank", "kind"), WINDOW, matcher=f'{{rule="{REPLICA_DESYNC}"}}')
    return Alert(
        name=f"{REPLICA_DESYNC}Events",
        expression=with_all_labels(found, ("rank", "kind")),
        summary="replicas of run {{ $labels.run }} differ in {{ $labels.kind }}, rank {{ $labels.rank }}",
        description="The service compared the hashes that the ranks sent for the same step. The rank is unknown where "
        "more than one rank differs from the others, or no majority is right. " + _COMMANDS,
        severity=Severity.CRITICAL,
        runbook=REPLICA_DESYNC,
        rule=REPLICA_DESYNC,
        panel=REPLICAS,
        is_detail=True,
    )
