"""One alert as a value. Prometheus' rule file and Grafana's are both written from it, so that both say the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

RUNBOOKS: Final = "docs/runbooks.md"
"""Where the runbooks stand unless told otherwise; `--runbooks https://…` makes it the page on one's own wiki."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A condition, and what people are told when it holds.

    `runbook` is the heading on the page of runbooks, or an address of its own; `panel` the title of the panel that
    shows it. `looked_up` goes on where the description ends: Prometheus' templates can query, Grafana's cannot.
    """

    name: str
    expression: str
    summary: str
    description: str
    severity: str
    runbook: str
    rule: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    hold_for: str | None = None  # how long the condition must hold first
    keep_firing_for: str | None = None
    panel: str = "State"
    looked_up: str = ""

    def all_labels(self) -> dict[str, str]:
        """Return the labels of the alert: `rule` is what messages are grouped by."""
        return {"severity": str(self.severity), "rule": self.rule or self.name, **self.labels}

    def annotations(self, runbooks: str) -> dict[str, str]:
        """Return the texts; `runbooks` is the address of the page of runbooks."""
        link = self.runbook if "://" in self.runbook else f"{runbooks}#{self.runbook.lower()}"
        return {"summary": self.summary, "description": self.description, "runbook_url": link}

    def document(self, runbooks: str = RUNBOOKS) -> dict[str, Any]:
        """Return the rule as it stands in a Prometheus rule file."""
        texts = self.annotations(runbooks)
        texts["description"] += self.looked_up
        entry: dict[str, Any] = {"alert": self.name, "expr": self.expression}
        if self.hold_for:
            entry["for"] = self.hold_for
        if self.keep_firing_for:
            entry["keep_firing_for"] = self.keep_firing_for
        return {**entry, "labels": self.all_labels(), "annotations": texts}


@dataclass(frozen=True, slots=True)
class AlertGroup:
    """Alerts that are evaluated together, one after another."""

    name: str
    alerts: Sequence[Alert]

    def document(self, runbooks: str = RUNBOOKS) -> dict[str, Any]:
        """Return the group as it stands in a Prometheus rule file."""
        return {"name": self.name, "rules": [alert.document(runbooks) for alert in self.alerts]}
