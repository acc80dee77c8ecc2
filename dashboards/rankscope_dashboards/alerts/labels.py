"""Labels of alerts: all instances of an alert have the same ones, and its texts are readable without a run.

Grafana mixes up the values of two instances of a rule if the labels of one contain the labels of the other. Prometheus
treats an empty label as absent, so an expression with such series has several sets of labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rankscope_dashboards.deploy.alertmanager import NOT_APPLICABLE

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
