"""The alerts as Grafana takes them from a file: the expressions of the Prometheus rule file, letter for letter.

One wrong value in this file keeps a Grafana server from starting, and a key that it does not know is dropped without a
word. Hence the checks here, and a closed list of keys in the tests.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope_dashboards.alerts import RUNBOOKS, Alert, AlertGroup
from rankscope_dashboards.grafana_sources import ORGANISATION
from rankscope_dashboards.layout import LIVE_SOURCE

FOLDER: Final = "Training alerts"
"""Not the boards' folder: that one has a uid of its own, and some versions refuse a second folder of the same title."""

INTERVAL: Final = "30s"
"""Grafana takes multiples of 10 s alone."""

MISSING_EVALUATIONS: Final = 2
"""A condition that filters has no series when all is well, so this is what resolves an alert."""

LONGEST_UID: Final = 40
LONGEST_TITLE: Final = 190
QUERY, CONDITION = "A", "C"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The board on which alerts are shown, and its panels' numbers by title; `others` have what it does not."""

    board: str
    panels: Mapping[str, int]
    others: Sequence[Shown] = ()

    def of(self, panel: str) -> tuple[str, int]:
        """Return the board that has the panel, and its number there. Raises LookupError."""
        for shown in (self, *self.others):
            if panel in shown.panels:
                return shown.board, shown.panels[panel]
        raise LookupError(f"no board has a panel {panel!r}")


def alert_rules(groups: Sequence[AlertGroup], shown: Shown, runbooks: str = RUNBOOKS) -> dict[str, Any]:
    """Return `alerting/rules.yaml`. Raises ValueError for a text that Grafana would refuse or change."""
    return {"apiVersion": 1, "groups": [_group(group, shown, runbooks) for group in groups]}


def _group(group: AlertGroup, shown: Shown, runbooks: str) -> dict[str, Any]:
    return {
        "orgId": ORGANISATION,
        "name": _expanded(group.name),
        "folder": FOLDER,
        "interval": INTERVAL,
        "rules": [_rule(alert, shown, runbooks) for alert in group.alerts],
    }


def _rule(alert: Alert, shown: Shown, runbooks: str) -> dict[str, Any]:
    keep = {"keepFiringFor": alert.keep_firing_for} if alert.keep_firing_for else {}
    board, panel = shown.of(alert.panel)
    return {
        "uid": _uid(alert),
        "title": _expanded(_title(alert)),
        "condition": CONDITION,
        "for": alert.hold_for or "0s",
        **keep,
        "missing_series_evals_to_resolve": MISSING_EVALUATIONS,
        "noDataState": "OK",  # no rows is health; that nothing is scraped is an alert of its own
        "execErrState": "Error",
        "isPaused": False,
        "dashboardUid": board,
        "panelId": panel,
        "labels": {name: _expanded(value) for name, value in alert.all_labels().items()},
        "annotations": {name: _kept(text) for name, text in alert.annotations(runbooks).items()},
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
    """Return the condition, since Grafana wants one; whatever our expressions leave over is above zero."""
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
    """Return a title that no other alert has."""
    title = " ".join((alert.name, *alert.labels.values()))
    if len(title) > LONGEST_TITLE:
        raise ValueError(f"{title!r} is longer than the {LONGEST_TITLE} characters that Grafana takes for a title")
    return title


def _uid(alert: Alert) -> str:
    """Return what names the rule for ever: its words, or where these do not fit, their hash."""
    title = _title(alert)
    uid = "-".join(("rankscope", *re.findall(r"[A-Z]+[a-z0-9]*|[a-z0-9]+", title))).lower()
    if re.fullmatch(r"[A-Za-z0-9 ]+", title) and len(uid) <= LONGEST_UID:
        return uid
    return f"rankscope-{hashlib.sha256(title.encode()).hexdigest()[:20]}"


def _expanded(text: str) -> str:
    """Return `text` as it is to stand where Grafana replaces variables: a dollar is written twice."""
    return text.replace("$", "$$")


def _kept(text: str) -> str:
    """Return an annotation, in which `$labels` stays as it is and only `${` would be replaced."""
    if "${" in text:
        raise ValueError(f"Grafana would replace '${{' in {text!r}: write it without the brace")
    return text
