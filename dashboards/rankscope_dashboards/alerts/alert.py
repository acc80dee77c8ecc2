"""An alert as a value, from which the rule files of Prometheus and Grafana are generated: texts, labels and panel.

All instances of an alert have the same labels, and its texts are readable without a run. Grafana mixes up the values
of two instances of a rule if the labels of one contain the labels of the other. Prometheus treats an empty label as
absent, so an expression with such series has several sets of labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rankscope_dashboards.deploy.alertmanager import DETAIL, NOT_APPLICABLE


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel, identified by the uid of its board and by its title."""

    board: str
    title: str


_OVERVIEW: Final = "rankscope-run-overview"
_RANKS: Final = "rankscope-ranks"
_INCIDENTS: Final = "rankscope-incidents"
_PIPELINE: Final = "rankscope-pipeline"

STATE: Final = Panel(_OVERVIEW, "State")
RANKS_UP: Final = Panel(_OVERVIEW, "Ranks up")
LOST_DATA: Final = Panel(_PIPELINE, "Lost data")
ANOMALIES: Final = Panel(_INCIDENTS, "Anomalies")
SCORES: Final = Panel(_INCIDENTS, "Scores of the rules")
REPLICAS: Final = Panel(_RANKS, "Replica divergence")
LAST_COMMIT: Final = Panel(_PIPELINE, "Since last commit")
GPU_ERRORS: Final = Panel(_RANKS, "GPU errors")
THROTTLED_GPUS: Final = Panel(_RANKS, "Throttled GPUs")
"""Panels that messages about alerts link to: the only table of boards and titles of panels for alerts.

The ids of the panels are read from the board files by title, so that a panel that does not exist is an error when the
files are generated.
"""

RUN: Final = "$labels.run"
"""The run of an alert in its templates."""

NOT_KNOWN: Final = "unknown"
"""Value of the labels `rank`, `step` and `reason` of an alert if they are not known."""

_OPTIONAL: Final = {
    "rank": NOT_KNOWN,
    "step": NOT_KNOWN,
    "kind": NOT_APPLICABLE,
    "tensor": NOT_APPLICABLE,
    "op": NOT_APPLICABLE,
}


def with_all_labels(expression: str, names: Sequence[str]) -> str:
    """Return PromQL with the samples of `expression`, each with all labels `names`."""
    for name in names:
        expression = f'label_replace({expression}, "{name}", "{_OPTIONAL[name]}", "{name}", "")'
    return expression


def unless(label: str, absent: str, text: str) -> str:
    """Return a template that adds `text` unless `label` has the value `absent`."""
    return f'{{{{ if eq $labels.{label} "{absent}" }}}}{{{{ else }}}}{text}{{{{ end }}}}'


def guarded(text: str) -> str:
    """Return the template `text` with "unknown" in place of the run in an alert without a run.

    Without this, Grafana 9.4 would write "run [no value]". All other labels are present if the run is.
    """
    run = f"{{{{ {RUN} }}}}"
    return text.replace(run, f"{{{{ if {RUN} }}}}{run}{{{{ else }}}}{NOT_KNOWN}{{{{ end }}}}")


RUNBOOKS: Final = ""
"""Default address of the runbooks page: none, because a link in a message must be absolute.

`rankscope dashboards provision --runbooks-url https://…` sets it, for example to the address of a wiki page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A PromQL condition, with the texts and labels of the notification that is sent when the condition holds.

    - `severity`, `rule`: values of these labels. The default of `rule` is the name of the alert. None: the series that
      `expression` returns have the label, or the alert is not about a run and has no label `rule`.
    - `runbook`: the heading on the runbooks page, or a complete URL. The default is the name of the alert.
    - `hold_for`: the time for which the condition must hold before the alert fires.
    - `panel`: the panel that shows the condition.
    - `is_detail`: another alert notifies about the incident to which this alert belongs.
    - `queried`: a template that queries Prometheus, appended to the description. Grafana templates cannot query, so the
      Grafana rule file does not contain it.
    """

    name: str
    expression: str
    summary: str
    description: str
    severity: str | None
    runbook: str = ""
    rule: str | None = ""
    labels: dict[str, str] = field(default_factory=dict)
    hold_for: str | None = None
    keep_firing_for: str | None = None
    panel: Panel = STATE
    is_detail: bool = False
    queried: str = ""

    def all_labels(self) -> dict[str, str]:
        """Return the labels of the alert. Alertmanager groups notifications by `run`, `rule` and `step`."""
        severity = {} if self.severity is None else {"severity": str(self.severity)}
        rule = {} if self.rule is None else {"rule": self.rule or self.name}
        return {**severity, **rule, **self.labels, **(dict([DETAIL]) if self.is_detail else {})}

    def annotations(self, runbooks: str) -> dict[str, str]:
        """Return the annotations of the alert, without the template `queried`.

        `runbooks` is the address of the runbooks page. There is no `runbook_url` unless it is absolute.
        """
        runbook = self.runbook or self.name
        link = runbook if "://" in runbook else f"{runbooks}#{runbook.lower()}"
        texts = {"summary": guarded(self.summary), "description": guarded(self.description)}
        return texts | ({"runbook_url": link} if "://" in link else {})

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
