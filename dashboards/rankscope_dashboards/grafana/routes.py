"""The route of our alerts in the notification policies of Grafana.

The route is added and removed with the request of Grafana's own pages, which sends the whole configuration of
notifications. After a change through the API of provisioning, the pages could no longer edit any policy.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rankscope_dashboards.deploy.alertmanager import DETAIL, GROUP_BY
from rankscope_dashboards.grafana.changes import Action, Change, without_empty
from rankscope_dashboards.grafana.server import EDITABLE, RefusedError, Server

POLICIES: Final = "/v1/provisioning/policies"
CONFIGURATION: Final = "/alertmanager/grafana/config/api/v1/alerts"
MUTE_TIMINGS: Final = "/v1/provisioning/mute-timings"
ALWAYS: Final = "rankscope-details"
"""Name of the mute timing of details of an incident, about which one message is sent. It is always active."""

MUTED: Final[Mapping[str, Any]] = {"mute_time_intervals": [ALWAYS]}
GROUPING: Final[Mapping[str, Any]] = {
    "group_by": ["grafana_folder", *GROUP_BY],
    "group_wait": "5s",
    "group_interval": "1m",
}
"""Grouping of our alerts, for the route and for the receiver of a rule.

Each incident has a group of its own: it does not wait for the group interval after another one."""

BY_HAND: Final = "add or remove the route by hand, see Notifications in docs/dashboards.md"
_EARLIER: Final = {"group_by": ["grafana_folder", "alertname", "run"], "routes": []}
"""Keys of the route of an earlier release, which did not mute details."""


class MuteTimings:
    """The mute timing of details."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def plan(self) -> list[Change]:
        """Return the change for the mute timing, which remains as it is if it exists."""
        is_there = ALWAYS in {one["name"] for one in self._server.get(MUTE_TIMINGS)}
        return [Change(kind="mute timing", uid=ALWAYS, action=Action.SAME if is_there else Action.CREATE)]

    def write(self, change: Change) -> None:
        """Create the mute timing."""
        timing = {"name": change.uid, "time_intervals": [{"times": [{"start_time": "00:00", "end_time": "24:00"}]}]}
        self._server.post(MUTE_TIMINGS, timing, headers=EDITABLE)


def route(receiver: str, folder_title: str) -> dict[str, Any]:
    """Return the route of all alerts whose rules are in a folder. Details of an incident are muted."""
    label, value = DETAIL
    details = {"receiver": receiver, "object_matchers": [[label, "=", value]], **MUTED}
    matchers = [["grafana_folder", "=", folder_title]]
    return {"receiver": receiver, "object_matchers": matchers, **GROUPING, "routes": [details]}


def our_routes(tree: dict[str, Any], folder_title: str) -> list[dict[str, Any]]:
    """Return the child routes of the tree that a deployment has added. A route that a user changed is not ours."""
    both = [(child, route(child.get("receiver", ""), folder_title)) for child in tree.get("routes") or []]
    return [child for child, ours in both if without_empty(child) in (ours, without_empty(ours | _EARLIER))]


def owner(tree: Mapping[str, Any]) -> str:
    """Return a sentence about the owner of a tree that Grafana's pages cannot edit; an empty text if they can."""
    names = {"file": "a provisioning file", "api": "the API, for example Terraform or an earlier release of Rankscope"}
    found = tree.get("provenance")
    return f"The notification policies belong to {names.get(found, found)}: pages cannot edit them." if found else ""


def set_route(server: Server, receiver: str | None, folder_title: str, copies: Path) -> Path | None:
    """Add the route to the tree, or remove it if `receiver` is None.

    Return the file with a copy of the earlier tree, or None if nothing had to be changed. The route becomes the first
    child, because the first matching route gets an alert, and it matches only our rules. Raises RefusedError, without
    a change, if the pages cannot edit the tree. A route that an earlier release added to such a tree is removed.
    """
    tree = server.get(POLICIES)
    ours = our_routes(tree, folder_title)
    new = [] if receiver is None else [route(receiver, folder_title)]
    if [without_empty(one) for one in ours] == new:
        return None
    is_of_api = tree.get("provenance") == "api" and receiver is None
    if (text := owner(tree)) and not is_of_api:
        raise RefusedError(f"{text} They are unchanged: {BY_HAND}")
    copy = copies / f"grafana-policies-{time.time_ns()}.json"
    copy.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    routes = new + [child for child in tree.get("routes") or [] if child not in ours]
    wanted = {name: value for name, value in tree.items() if name != "provenance"} | {"routes": routes}
    if is_of_api:
        server.put(POLICIES, wanted)
    else:
        _save(server, wanted)
    return copy


def _save(server: Server, tree: dict[str, Any]) -> None:
    """Replace the tree in the configuration of notifications, as the pages do. Raises RefusedError."""
    try:
        before = server.get(CONFIGURATION)
        # Grafana keeps the secrets of contact points, which the answer lacks, by the uids in the request.
        server.post(CONFIGURATION, before | {"alertmanager_config": before["alertmanager_config"] | {"route": tree}})
        after = server.get(CONFIGURATION)
    except RefusedError as error:
        text = "This release refuses the request with which pages change the policies. They are unchanged"
        raise RefusedError(f"{error}. {text}: {BY_HAND}") from error
    if without_empty(after["alertmanager_config"]["route"]) != without_empty(tree) or _secrets(before) != _secrets(
        after
    ):
        raise RefusedError("Grafana stored other policies or contact points than requested: compare with the copy")


def _secrets(configuration: Mapping[str, Any]) -> list[Any]:
    """Return the names of the secrets that are set, by contact point."""
    receivers = configuration["alertmanager_config"]["receivers"]
    key = "grafana_managed_receiver_configs"
    return [(one["name"], [point["secureFields"] for point in one.get(key) or ()]) for one in receivers]
