"""Annotations: vertical marks on the curves of a run at restarts, checkpoints and incidents."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import common

from rankscope_contract.metrics import catalogue
from rankscope_contract.metrics.spec import MetricSpec
from rankscope_contract.model.phases import LABEL, Phase
from rankscope_dashboards.boards.elements.panels import DATASOURCE
from rankscope_dashboards.boards.elements.selectors import AHEAD, OF_JOB, service
from rankscope_storage.base import service_catalogue

_MERGED: Final = 300
"""Time in seconds within which checkpoints at consecutive times of evaluation are one mark: those of several ranks."""


def _annotation(name: str, colour: str, expression: str, title: str, text: str) -> builders.AnnotationQuery:
    made = builders.AnnotationQuery().name(name).datasource(DATASOURCE).enable(True).icon_color(colour)
    return made.expr(expression).step("15s").title_format(title).text_format(text)


def _changes(metric: MetricSpec, *matchers: str, how: str = "last", aggregation: str = "max by (run)") -> str:
    """Return PromQL for the changes of the values of `metric`, live or stored, each of them at one time of evaluation.

    Grafana evaluates marks at about 100 times, whatever the time range. The interval between these times is therefore
    the window of a mark, and its values are compared with those of the hour before. The mark is at the start of it.
    """
    series = [f"{metric.name}{service(*more, *matchers)}" for more in ((), (OF_JOB,))]

    def within(window: str) -> str:
        return f"{aggregation} ({' or '.join(f'{how}_over_time({one}{window})' for one in series)})"

    now = within(AHEAD)
    return f"({now} unless {now} == {within('[1h]')})"


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

_SAVED: Final = _changes(catalogue.PHASE_SECONDS, f'{LABEL}="{Phase.CHECKPOINT}"', aggregation="max by (run, rank)")

RUN_ANNOTATIONS: Final = (
    _annotation(
        "Restarts",
        "purple",
        f'count_values by (run) ("attempt", {_changes(service_catalogue.RUN_ATTEMPT)} > 0)',
        "Restart",
        "Attempt {{attempt}} of the run began.",
    ),
    _annotation(
        "Checkpoints",
        "blue",
        # Without a label of the time, Grafana joins the marks at consecutive times of evaluation.
        f'count_values by (run) ("at", group by (run) {_SAVED} * '
        f"(time() - time() % scalar(clamp_min(vector($__interval_ms / 1000), {_MERGED}))))",
        "Checkpoint",
        "A rank was in the phase checkpoint.",
    ),
    _annotation(
        "Incidents",
        "red",
        _changes(
            service_catalogue.INCIDENT_AGE, how="present", aggregation="group by (run, rank, rule, kind, tensor, step)"
        ),
        "Incident: {{rule}}",
        "{{kind}} {{tensor}}, rank {{rank}}, step {{step}}",
    ),
)
"""Marks on the boards of one run. A reader can hide each of them with a switch at the top of the board."""
