"""An alert as a value, from which the rule files of Prometheus and Grafana are generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

RUNBOOKS: Final = "docs/runbooks.md"
"""Default address of the runbooks page.

The option `--runbooks https://…` of the generator replaces it, for example by the address of a wiki page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A PromQL condition, with the texts and labels of the notification that is sent when the condition holds.

    - `runbook`: the heading on the runbooks page, or a complete URL.
    - `hold_for`: the time for which the condition must hold before the alert fires.
    - `panel`: the title of the panel that shows the condition.
    - `queried`: a template that queries Prometheus, appended to the description. Grafana templates cannot query, so the
      Grafana rule file does not contain it.
    """

    name: str
    expression: str
    summary: str
    description: str
    severity: str
    runbook: str
    rule: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    hold_for: str | None = None
    keep_firing_for: str | None = None
    panel: str = "State"
    queried: str = ""

    def all_labels(self) -> dict[str, str]:
        """Return the labels of the alert. Alertmanager groups notifications by the labels `run` and `rule`."""
        return {"severity": str(self.severity), "rule": self.rule or self.name, **self.labels}

    def annotations(self, runbooks: str) -> dict[str, str]:
        """Return the annotations of the alert, without the template `queried`.

        `runbooks` is the address of the runbooks page.
        """
        link = self.runbook if "://" in self.runbook else f"{runbooks}#{self.runbook.lower()}"
        return {"summary": self.summary, "description": self.description, "runbook_url": link}

    def document(self, runbooks: str = RUNBOOKS) -> dict[str, Any]:
        """Return the alert as an entry of a Prometheus rule file."""
        texts = self.annotations(runbooks)
        texts["description"] += self.queried
        entry: dict[str, Any] = {"alert": self.name, "expr": self.expression}
        if self.hold_for:
            entry["for"] = self.hold_for
        if self.keep_firing_for:
            entry["keep_firing_for"] = self.keep_firing_for
        return {**entry, "labels": self.all_labels(), "annotations": texts}


@dataclass(frozen=True, slots=True)
class AlertGroup:
    """Alerts that Prometheus or Grafana evaluates together, one after the other."""

    name: str
    alerts: Sequence[Alert]

    def document(self, runbooks: str = RUNBOOKS) -> dict[str, Any]:
        """Return the group of alerts as an entry of a Prometheus rule file."""
        return {"name": self.name, "rules": [alert.document(runbooks) for alert in self.alerts]}
