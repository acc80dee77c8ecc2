"""Build Grafana's alert rules file. Its expressions are the same as in the Prometheus rule file.

One invalid value in this file prevents the start of the Grafana server, and Grafana ignores unknown keys without a
message. This module therefore checks values, and the tests compare the keys with a complete list.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope_dashboards.alerts.alert import RUNBOOKS, Alert, AlertGroup
from rankscope_dashboards.boards.elements.names import LIVE_SOURCE
from rankscope_dashboards.provisioning.datasources import ORGANISATION

FOLDER: Final = "Training alerts"
"""Title of the folder of alert rules.

It differs from the title of the folder of boards, which has a fixed uid: some Grafana versions reject a second folder
with the same title."""

INTERVAL: Final = "30s"
"""Interval at which Grafana evaluates the alert rules. Grafana accepts only multiples of 10 s."""

MISSING_EVALUATIONS: Final = 2
"""Number of evaluations without a series after which an alert resolves.

The conditions of our alerts are filters, which return no series if they do not hold."""

MAX_UID_LENGTH: Final = 40
MAX_TITLE_LENGTH: Final = 190
QUERY, CONDITION = "A", "C"


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelIndex:
    """The panels of a board: the panel id of each title.

    `others` are the indexes of other boards, which are searched for titles that this board does not have.
    """

    board: str
    panels: Mapping[str, int]
    others: Sequence[PanelIndex] = ()

    def find(self, panel: str) -> tuple[str, int]:
        """Return the uid of the board and the id of the panel with this title.

        Raises LookupError if no board has the panel.
        """
        for index in (self, *self.others):
            if panel in index.panels:
                return index.board, index.panels[panel]
        raise LookupError(f"no board has a panel with the title {panel!r}")


def alert_rules(groups: Sequence[AlertGroup], index: PanelIndex, runbooks: str = RUNBOOKS) -> dict[str, Any]:
    """Return the content of `alerting/rules.yaml`. Raises ValueError for a text that Grafana would reject or modify."""
    return {"apiVersion": 1, "groups": [_group(group, index, runbooks) for group in groups]}


def _group(group: AlertGroup, index: PanelIndex, runbooks: str) -> dict[str, Any]:
    return {
        "orgId": ORGANISATION,
        "name": _escaped(group.name),
        "folder": FOLDER,
        "interval": INTERVAL,
        "rules": [_rule(alert, index, runbooks) for alert in group.alerts],
    }


def _rule(alert: Alert, index: PanelIndex, runbooks: str) -> dict[str, Any]:
    keep = {"keepFiringFor": alert.keep_firing_for} if alert.keep_firing_for else {}
    board, panel = index.find(alert.panel)
    return {
        "uid": _uid(alert),
        "title": _escaped(_title(alert)),
        "condition": CONDITION,
        "for": alert.hold_for or "0s",
        **keep,
        "missing_series_evals_to_resolve": MISSING_EVALUATIONS,
        "noDataState": "OK",  # no series: the condition does not hold; missing scrapes have a separate alert
        "execErrState": "Error",
        "isPaused": False,
        "dashboardUid": board,
        "panelId": panel,
        "labels": {name: _escaped(value) for name, value in alert.all_labels().items()},
        "annotations": {name: _checked(text) for name, text in alert.annotations(runbooks).items()},
        "data": [_query(alert.expression), _above_zero()],
    }


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
