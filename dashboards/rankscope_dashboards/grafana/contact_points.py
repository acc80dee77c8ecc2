"""Contact points of a deployment, from a file in the form of Grafana's provisioning files.

Addresses and secrets are in the file, or in environment variables that the file names as `$NAME` or `${NAME}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from rankscope_dashboards.grafana.changes import Action, Change, fingerprint
from rankscope_dashboards.grafana.server import EDITABLE, GrafanaError, Server, object_path

CONTACT_POINTS: Final = "/v1/provisioning/contact-points"
REDACTED: Final = "[REDACTED]"
KIND: Final = "contact point"
MOST_INTEGRATIONS: Final = 20
"""Largest number of integrations of one contact point."""


class ContactPoints:
    """The contact points of a deployment. Each integration has a uid that is derived from the contact point's name."""

    def __init__(self, server: Server, points: Sequence[dict[str, Any]], *, force: bool) -> None:
        self._server = server
        self._points = points
        self._force = force

    def plan(self) -> list[Change]:
        """Return one change per integration. Changes contain no settings, because these can be secrets."""
        found = self._server.get(CONTACT_POINTS) if self._points else []
        return [self._plan(point, found) for point in self._points]

    def write(self, change: Change) -> None:
        """Create or update an integration."""
        (point,) = (one for one in self._points if one["uid"] == change.uid)
        if change.action is Action.CREATE:
            self._server.post(CONTACT_POINTS, point, headers=EDITABLE)
        else:
            self._server.put(object_path(CONTACT_POINTS, change.uid), point, headers=EDITABLE)

    def _plan(self, point: dict[str, Any], found: Sequence[Mapping[str, Any]]) -> Change:
        uid, name = point["uid"], point["name"]
        same_uid = next((one for one in found if one["uid"] == uid), None)
        action, reason = Action.SAME, ""
        if same_uid is None:
            others = [one for one in found if one["name"] == name and not is_our_contact_point(one)]
            action = Action.KEEP if others else Action.CREATE
            reason = "another contact point has this name: choose a different name in the file" if others else ""
        elif changed := changed_settings(point, same_uid):
            action = Action.UPDATE if self._force else Action.KEEP
            reason = f"on the server, these keys are different: {', '.join(changed)}"
            reason += "" if self._force else "; --force replaces them"
        return Change(kind=KIND, uid=uid, title=name, action=action, reason=reason)


def contact_uid(name: str, number: int) -> str:
    """Return the uid of an integration of a contact point."""
    return f"rankscope-{fingerprint([name, number])}"


def is_our_contact_point(point: Mapping[str, Any]) -> bool:
    """Return True if a deployment has created the integration: its uid is derived from its name."""
    return point["uid"] in {contact_uid(point["name"], number) for number in range(MOST_INTEGRATIONS)}


def read_contact_points(file: Path, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the integrations of a provisioning file, in the form of the API.

    Raises GrafanaError for an unreadable file, a missing key, or an environment variable that is not set.
    """
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
        points = [(point["name"], point["receivers"]) for point in document["contactPoints"]]
        return [
            {
                "uid": contact_uid(name, number),
                "name": name,
                "type": receiver["type"],
                "settings": _expanded(receiver["settings"], environment, file),
                "disableResolveMessage": receiver.get("disableResolveMessage", False),
            }
            for name, receivers in points
            for number, receiver in enumerate(receivers)
        ]
    except OSError as error:
        raise GrafanaError(f"cannot read the contact points in {file}: {error.strerror}") from error
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise GrafanaError(
            f"{file} is no file of contact points ({type(error).__name__} {error}): it needs the keys contactPoints, "
            "name, receivers, type and settings"
        ) from error


def changed_settings(point: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return the names of the keys and settings that differ, except secrets, which the server does not return."""
    names = [name for name in ("name", "type", "disableResolveMessage") if found.get(name) != point[name]]
    wanted = point["settings"]
    shown = {name: value for name, value in found.get("settings", {}).items() if value not in (REDACTED, "", None)}
    return names + [f"settings.{name}" for name, value in shown.items() if wanted.get(name) != value]


def _expanded(value: Any, environment: Mapping[str, str], file: Path) -> Any:
    """Return settings with each `$NAME` and `${NAME}` replaced by the value of the environment variable."""
    if isinstance(value, dict):
        return {name: _expanded(one, environment, file) for name, one in value.items()}
    if isinstance(value, list):
        return [_expanded(one, environment, file) for one in value]

    def replaced(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if found[0] == "$$":
            return "$"
        if name not in environment:
            raise GrafanaError(f"{file} names the environment variable {name}, which is not set")
        return environment[name]

    return re.sub(r"\$\$|\$\{(\w+)\}|\$([A-Za-z_]\w*)", replaced, value) if isinstance(value, str) else value
