"""Build Grafana's alert rules file. Its expressions are the same as in the Prometheus rule file.

The file has one alert more: DatasourceUnreachable. If Grafana cannot query Prometheus, all other rules are in the state
normal, so that this outage is one message instead of a message about each rule.

One invalid value in this file prevents the start of the Grafana server, and Grafana ignores unknown keys without a
message. This module therefore checks values, and the tests compare the keys with a complete list.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope_contract.model.events import Severity
from rankscope_dashboards.alerts.alert import LAST_COMMIT, RUN, RUNBOOKS, Alert, AlertGroup, Panel
from rankscope_dashboards.deploy.prometheus import LIVE_SOURCE, seconds
from rankscope_dashboards.provisioning.datasources import ORGANISATION

FOLDER: Final = "Training alerts"
"""Title of the folder of alert rules.

It differs from the title of the folder of boards, which has a fixed uid: some Grafana versions reject a second folder
with the same title."""

INTERVAL: Final = "10s"
"""Interval at which Grafana evaluates the alert rules: its minimum. Grafana accepts only multiples of 10 s."""

MISSING_EVALUATIONS: Final = 2
"""Smallest number of evaluations without a series after which an alert resolves.

The conditions of our alerts are filters, which return no series if they do not hold. Grafana's time for which an alert
keeps firing applies only to series that are returned, so that an alert with such a time needs more evaluations."""

UNREACHABLE_FOR: Final = "30s"
"""Time for which Grafana cannot query Prometheus until a message is sent. A restart of Prometheus takes less."""

MAX_UID_LENGTH: Final = 40
MAX_TITLE_LENGTH: Final = 190
QUERY, CONDITION = "A", "C"


PanelIds = Mapping[str, Mapping[str, int]]
"""The ids of panels, by the uid of the board and by the title of the panel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _States:
    """States of a rule in Grafana if its query returns no series, and if its query fails."""

    no_data: str
    error: str


# No series: the condition does not hold. A failed query is not about a run, and the watch alert reports it.
_CONDITION: Final = _States(no_data="OK", error="OK")
_WATCH: Final = _States(no_data="Alerting", error="Alerting")


def panel_ids(boards: Iterable[str]) -> PanelIds:
    """Return the ids of all panels of `boards`, the texts of board files. Rows can contain panels."""
    documents = [json.loads(text) for text in boards]
    return {board["uid"]: dict(_titled(board["panels"])) for board in documents}


def alert_rules(groups: Sequence[AlertGroup], panels: PanelIds, runbooks: str = RUNBOOKS) -> dict[str, Any]:
    """Return the content of `alerting/rules.yaml`.

    Raises ValueError for a text that Grafana would reject or modify, and LookupError for a panel that no board has.
    """
    made = [_group(group, panels, runbooks, _CONDITION) for group in groups]
    made.append(_group(AlertGroup("rankscope-data-source", [_unreachable()]), panels, runbooks, _WATCH))
    return {"apiVersion": 1, "groups": made}


def _titled(panels: Iterable[dict[str, Any]]) -> Iterable[tuple[str, int]]:
    for panel in panels:
        yield panel["title"], panel["id"]
        yield from _titled(panel.get("panels", []))


def _unreachable() -> Alert:
    """Return the alert on a data source that Grafana cannot query. Its query always returns one series, which is 0."""
    return Alert(
        name="DatasourceUnreachable",
        expression="vector(0)",
        summary=f"Grafana cannot query Prometheus (data source {LIVE_SOURCE})",
        description="Until Grafana can query Prometheus again, it sends no alert on runs, ranks or the service. "
        "Training and the service continue.",
        severity=Severity.CRITICAL,
        rule=None,  # the alert is about no run: a route for runs or rules must not receive it
        hold_for=UNREACHABLE_FOR,
        panel=LAST_COMMIT,
    )


def _group(group: AlertGroup, panels: PanelIds, runbooks: str, states: _States) -> dict[str, Any]:
    return {
        "orgId": ORGANISATION,
        "name": _escaped(group.name),
        "folder": FOLDER,
        "interval": INTERVAL,
        "rules": [_rule(alert, panels, runbooks, states) for alert in group.alerts],
    }


def _rule(alert: Alert, panels: PanelIds, runbooks: str, states: _States) -> dict[str, Any]:
    keep = {"keepFiringFor": alert.keep_firing_for} if alert.keep_firing_for else {}
    kept_evaluations = seconds(alert.keep_firing_for or "0s") / seconds(INTERVAL)
    panel = _panel_id(alert.panel, panels)
    # Grafana makes the links of a message from the two annotations. It finds the alerts of a panel by the two keys.
    links = {"__dashboardUid__": alert.panel.board, "__panelId__": str(panel)}
    if RUN in alert.summary:
        # These links have no run and no time: the board would show another run.
        address = f"{{{{ externalURL }}}}d/{alert.panel.board}?var-run={{{{ {RUN} | urlquery }}}}&from=now-1h&to=now"
        links["board"] = f"{{{{ if {RUN} }}}}{address}{{{{ end }}}}"
    return {
        "uid": _uid(alert),
        "title": _escaped(_title(alert)),
        "condition": CONDITION,
        "for": alert.hold_for or "0s",
        **keep,
        "missing_series_evals_to_resolve": max(MISSING_EVALUATIONS, round(kept_evaluations)),
        "noDataState": states.no_data,
        "execErrState": states.error,
        "isPaused": False,
        "dashboardUid": alert.panel.board,
        "panelId": panel,
        "labels": {name: _escaped(value) for name, value in alert.all_labels().items()},
        "annotations": {name: _checked(text) for name, text in (alert.annotations(runbooks) | links).items()},
        "data": [_query(alert.expression), _above_zero()],
    }


def _panel_id(panel: Panel, panels: PanelIds) -> int:
    try:
        return panels[panel.board][panel.title]
    except KeyError:
        raise LookupError(f"the board {panel.board} has no panel with the title {panel.title!r}") from None


def _query(expression: str) -> dict[str, Any]:
    return {
        "refId": QUERY,
        "datasourceUid": LIVE_SOURCE,
        "relativeTimeRange": {"from": 300, "to": 0},
        "model": {"refId": QUERY, "instant": True, "range": False, "expr": expression},
    }


def _above_zero() -> dict[str, Any]:
    """Return the threshold condition that Grafana requires: above zero.

    All values that our expressions return are above zero.
    """
    return {
        "refId": CONDITION,
        "datasourceUid": "__expr__",
        "relativeTimeRange": {"from": 0, "to": 0},
        "model": {
            "refId": CONDITION,
            "type": "threshold",
            "expression": QUERY,
            "conditions": [{"evaluator": {"type": "gt", "params": [0]}}],
        },
    }


def _title(alert: Alert) -> str:
    """Return the title of the Grafana rule: the name of the alert and the values of its additional labels.

    Titles are unique among all alerts.
    """
    title = " ".join((alert.name, *alert.labels.values()))
    if len(title) > MAX_TITLE_LENGTH:
        raise ValueError(
            f"{title!r} has {len(title)} characters; Grafana accepts titles of up to {MAX_TITLE_LENGTH} characters"
        )
    return title


def _uid(alert: Alert) -> str:
    """Return the uid of the rule, which is always the same: the words of its title, or a hash of the title.

    The hash is used if Grafana does not permit the words as a uid.
    """
    title = _title(alert)
    uid = "-".join(("rankscope", *re.findall(r"[A-Z]+[a-z0-9]*|[a-z0-9]+", title))).lower()
    if re.fullmatch(r"[A-Za-z0-9 ]+", title) and len(uid) <= MAX_UID_LENGTH:
        return uid
    return f"rankscope-{hashlib.sha256(title.encode()).hexdigest()[:20]}"


def _escaped(text: str) -> str:
    """Return `text` with each dollar sign doubled, for values in which Grafana replaces variables."""
    return text.replace("$", "$$")


def _checked(text: str) -> str:
    """Return the text of an annotation unchanged.

    Raises ValueError if it contains `${`, which Grafana would replace.
    """
    if "${" in text:
        raise ValueError(f"Grafana would replace '${{' in {text!r}: write $ without the brace")
    return text
