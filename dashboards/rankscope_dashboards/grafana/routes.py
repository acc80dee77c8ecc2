"""The route of our alerts in the notification policies of Grafana.

Grafana's API replaces the complete tree of policies. The tree is therefore written only on request, after a copy of it
was saved, and with a change of one route.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rankscope_dashboards.grafana.server import EDITABLE, GrafanaError, Server

POLICIES: Final = "/v1/provisioning/policies"
GROUPING: Final[Mapping[str, Any]] = {
    "group_by": ["grafana_folder", "alertname", "run"],
    "group_wait": "5s",
    "group_interval": "1m",
}
"""Grouping of our alerts, for the route and for the receiver of a rule.

Each run has groups of its own: a fault of one run does not wait for the group interval after a fault of another run.
"""


def route(receiver: str, folder_title: str) -> dict[str, Any]:
    """Return the route of all alerts whose rules are in a folder."""
    return {"receiver": receiver, "object_matchers": [["grafana_folder", "=", folder_title]], **GROUPING}


def our_routes(tree: dict[str, Any], folder_title: str) -> list[dict[str, Any]]:
    """Return the child routes of the tree that a deployment has added. A route that a user changed is not ours."""
    children = tree.get("routes") or []
    return [child for child in children if _content(child) == route(child.get("receiver", ""), folder_title)]


def add_route(server: Server, receiver: str, folder_title: str, copies: Path) -> Path | None:
    """Add the route to the tree; return the file with a copy of the earlier tree, or None if the route exists.

    It becomes the first child, because the first matching route gets an alert, and it matches only our rules.
    """
    tree = server.get(POLICIES)
    ours = our_routes(tree, folder_title)
    wanted = route(receiver, folder_title)
    if [_content(one) for one in ours] == [wanted]:
        return None
    others = [child for child in tree.get("routes") or [] if child not in ours]
    return _replace(server, tree, [wanted, *others], copies)


def remove_route(server: Server, folder_title: str, copies: Path) -> Path | None:
    """Remove the route from the tree; return the file with a copy of the earlier tree, or None if there is no route."""
    tree = server.get(POLICIES)
    ours = our_routes(tree, folder_title)
    if not ours:
        return None
    return _replace(server, tree, [child for child in tree["routes"] if child not in ours], copies)


def _content(child: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in child.items() if value not in (None, [], False) and name != "provenance"}


def _replace(server: Server, tree: dict[str, Any], routes: list[dict[str, Any]], copies: Path) -> Path:
    """Save a copy of the tree, write it with other child routes, and check the result."""
    provenance = tree.get("provenance", "")
    if provenance not in {"", "api"}:
        raise GrafanaError(
            f"the notification policies belong to {provenance!r}: add the route there instead of with --add-route"
        )
    copy = copies / f"grafana-policies-{time.time_ns()}.json"
    copy.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    others = {name: value for name, value in tree.items() if name not in {"routes", "provenance"}}
    server.put(POLICIES, others | ({"routes": routes} if routes else {}), headers={} if provenance else EDITABLE)
    stored = [_content(child) for child in server.get(POLICIES).get("routes") or []]
    if stored != [_content(child) for child in routes]:
        raise GrafanaError(f"Grafana stored other notification policies than requested: compare them with {copy}")
    return copy
