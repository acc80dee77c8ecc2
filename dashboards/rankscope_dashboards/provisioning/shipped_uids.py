"""Uids of all alert rules that a release or a commit of Rankscope has provisioned in Grafana.

Grafana keeps a provisioned rule that is no longer in the file: it fires on, and users cannot delete it. The rules file
therefore deletes each uid of this list that has no rule any more. Add the uid of a new rule, and never remove one.
"""

from __future__ import annotations

from typing import Final

SHIPPED_UIDS: Final = (
    "rankscope-16b0a5f3545d180111bf",  # RuleDisagreement AnomalyTurbulence: too long for a uid of words
    "rankscope-anomaly-incident",
    "rankscope-anomaly-nan",
    "rankscope-anomaly-nan-events",
    "rankscope-anomaly-turbulence",
    "rankscope-anomaly-turbulence-events",
    "rankscope-anomaly-without-service",
    "rankscope-datasource-unreachable",
    "rankscope-gpu-ecc-uncorrected",
    "rankscope-gpu-throttled",
    "rankscope-gpu-xid",
    "rankscope-ingest-losing",
    "rankscope-rank-gone",
    "rankscope-replica-desync",
    "rankscope-replica-desync-events",
    "rankscope-rule-disagreement-anomaly-nan",
    "rankscope-run-failed",
    "rankscope-run-stalled",
    "rankscope-service-down",
)
