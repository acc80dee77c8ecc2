"""Annotations: vertical marks on the curves of a run at restarts, checkpoints and incidents."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import common

from rankscope_contract.metrics import catalogue
from rankscope_contract.model.phases import LABEL, Phase
from rankscope_dashboards.boards.elements.panels import DATASOURCE
from rankscope_dashboards.boards.elements.selectors import SERVICE_RUN, service

_WINDOW: Final = "1m"
"""Length of a mark. It must contain at least two scrapes."""

_IN_CHECKPOINT: Final = service(f'{LABEL}="{Phase.CHECKPOINT}"')


def _annotation(name: str, colour: str, expression: str, title: str, text: str) -> builders.AnnotationQuery:
    made = builders.AnnotationQuery().name(name).datasource(DATASOURCE).enable(True).icon_color(colour)
    return made.expr(expression).step("15s").title_format(title).text_format(text)


ALERTS_OFF: Final = (
    builders.AnnotationQuery()
    .name("Annotations & Alerts")
    .type("dashboard")
    .built_in(1)
    .datasource(common.DataSourceRef(type_val="grafana", uid="-- Grafana --"))
    .enable(False)
    .hide(True)
    .icon_color("rgba(0, 211, 255, 1)")
)
"""Grafana's own marks, without which it adds them to a board: all alerts of all runs."""

RUN_ANNOTATIONS: Final = (
    _annotation(
        "Restarts",
        "purple",
        f"max by (run) (changes({catalogue.RUN_ATTEMPT.name}{SERVICE_RUN}[{_WINDOW}])) > 0",
        "Restart",
        "The run was launched again.",
    ),
    _annotation(
        "Checkpoints",
        "blue",
        f"max by (run) (increase({catalogue.PHASE_SECONDS.name}{_IN_CHECKPOINT}[{_WINDOW}])) > 0",
        "Checkpoint",
        "A rank was in the phase checkpoint.",
    ),
    _annotation(
        "Incidents",
        "red",
        f"min by (run, rank, rule, kind, tensor, step) ({catalogue.INCIDENT_AGE.name}{SERVICE_RUN}) < 15",
        "Incident: {{rule}}",
        "{{kind}} {{tensor}}, rank {{rank}}, step {{step}}",
    ),
)
"""Marks on the boards of one run. A reader can hide each of them with a switch at the top of the board."""
