"""Alert rules of a deployment and the intervals of their groups.

Rules are created with `X-Disable-Provenance`, so users can edit them. A mark in each rule, an annotation that Grafana
leaves out of messages, states the content that was deployed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rankscope_dashboards.deploy.alertmanager import DETAIL
from rankscope_dashboards.grafana.changes import (
    OWNED,
    Action,
    Change,
    created,
    fingerprint,
    judged,
    removed,
    without_empty,
)
from rankscope_dashboards.grafana.content import Folder, RuleGroup
from rankscope_dashboards.grafana.routes import GROUPING, MUTED
from rankscope_dashboards.grafana.server import (
    EDITABLE,
    FOLDERS,
    GrafanaError,
    Server,
    object_path,
    segment,
)

MARK: Final = "__rankscope_deployed__"
RULES: Final = "/v1/provisioning/alert-rules"

CORE: Final = (
    *("title", "condition", "data", "for", "noDataState", "execErrState", "labels", "annotations"),
    *("folderUID", "ruleGroup"),
)
"""Keys of a rule that each supported release returns."""

LATER: Final = ("keep_firing_for", "missingSeriesEvalsToResolve", "isPaused", "notification_settings")
"""Keys of a rule that old releases drop without a message. They are compared only if the server returns them."""

KEEP_LAST: Final = {"execErrState": "KeepLast"}
"""The state of a rule whose query fails, from `KEEP_LAST_RELEASE` on: alerts do not resolve while Prometheus is away.

Older releases reject it. The alert on the data source has another state than OK, and keeps it."""

KEEP_LAST_RELEASE: Final = (11, 0)
RECEIVER_KEY: Final = "notification_settings"
_UNSET: Final = (None, False, "", "0s")
"""Values of a later key that is not set."""

PLACEHOLDER: Final = "rankscope-interval-"
_SERVER_MODEL: Final = {"intervalMs": 1000, "maxDataPoints": 43200}


class Rules:
    """The alert rules of a deployment, in one folder. `receiver` is the contact point of their notifications."""

    def __init__(
        self, server: Server, groups: Sequence[RuleGroup], folder: Folder, *, receiver: str | None, force: bool
    ) -> None:
        self._server = server
        self._folder = folder
        self._force = force
        self._intervals = {rule["uid"]: group.interval_seconds for group in groups for rule in group.rules}
        self._rules = {
            rule["uid"]: rule | _chosen(rule, receiver, server.release) for group in groups for rule in group.rules
        }

    def plan(self) -> list[Change]:
        """Return one change per rule, and one per deployed rule that is no longer shipped."""
        found = {rule["uid"]: rule for rule in self._server.get(RULES)}
        wanted = [self._plan(rule, found) for rule in self._rules.values()]
        others = (rule for uid, rule in found.items() if uid not in self._rules and is_deployed(rule))
        return wanted + [self._dropped(rule) for rule in others]

    def write(self, change: Change) -> None:
        """Create, update or delete a rule."""
        if change.action is Action.DELETE:
            self._server.delete(object_path(RULES, change.uid))
            return
        body = marked_rule(change.payload, self._intervals[change.uid])
        if change.action is Action.CREATE:
            self._server.post(RULES, body, headers=EDITABLE)
        else:
            self._server.put(object_path(RULES, change.uid), body, headers=EDITABLE)

    def dropped_keys(self) -> list[str]:
        """Return the keys of our rules that this release of Grafana has dropped."""
        found = {rule["uid"]: rule for rule in self._server.get(RULES)}
        both = [(rule, found[uid]) for uid, rule in self._rules.items() if uid in found]
        return [name for name in LATER if any(wanted.get(name) and name not in old for wanted, old in both)]

    def _plan(self, wanted: dict[str, Any], rules: Mapping[str, dict[str, Any]]) -> Change:
        uid, title = wanted["uid"], wanted["title"]
        found = rules.get(uid)
        if found is None:
            name = self._folder.uid, title
            others = [other for other, rule in rules.items() if (rule["folderUID"], rule["title"]) == name]
            return created(Change(kind="rule", uid=uid, title=title, payload=wanted), others)
        if RECEIVER_KEY not in wanted and found.get(RECEIVER_KEY):
            wanted = wanted | {RECEIVER_KEY: found[RECEIVER_KEY]}  # an earlier deployment or a user has chosen it
        mark = rule_mark(found)
        has_interval = mark is None or mark["interval"] == self._intervals[uid]
        is_same = rule_content(wanted) == rule_content(found) and _later_are(wanted, found)
        action, reason = judged(is_same=is_same and has_interval, is_ours=is_rule_unchanged(found), force=self._force)
        if mark is None and self._server.get(object_path(RULES, uid)).get("provenance") == "file":
            action, reason = Action.KEEP, OWNED
        old, new = (rule_content(one) | _later(one) for one in (found, wanted))
        return Change(kind="rule", uid=uid, title=title, action=action, reason=reason, old=old, new=new, payload=wanted)

    def _dropped(self, rule: dict[str, Any]) -> Change:
        """Return the change for a rule of an earlier release, or for a placeholder of an interrupted deployment."""
        reason = "the interval of its group is set" if is_placeholder(rule) else "no longer shipped"
        may = self._force or is_rule_unchanged(rule)
        return removed("rule", rule["uid"], rule["title"], may=may, reason=reason)


class Groups:
    """The evaluation intervals of the groups of rules.

    Grafana gives a new group an interval of 60 s. A change of the interval updates each rule of the group, and old
    releases then mark these rules as created by the API, which users cannot edit. A placeholder rule therefore gets the
    interval first, and rules that are created later inherit it. `Rules` deletes the placeholder.
    """

    def __init__(self, server: Server, groups: Sequence[RuleGroup], folder: Folder, *, force: bool) -> None:
        self._server = server
        self._groups = {group.name: group for group in groups}
        self._folder = folder
        self._force = force

    def plan(self) -> list[Change]:
        """Return one change per group."""
        return [self._plan(group) for group in self._groups.values()]

    def write(self, change: Change) -> None:
        """Set the interval of a group. Raises GrafanaError if the folder of the rules does not exist."""
        if self._server.find(object_path(FOLDERS, self._folder.uid)) is None:
            # 9.4 accepts rules of a folder that does not exist, and no user sees them.
            raise GrafanaError(f"the folder {self._folder.title!r} was deleted: run the same command again")
        group = self._groups[change.uid]
        placeholder = _placeholder(group.name, self._folder.uid)
        if self._rule(placeholder["uid"]) is None:
            self._server.post(RULES, marked_rule(placeholder, group.interval_seconds), headers=EDITABLE)
        self._server.put(self._path(group.name), {"interval": group.interval_seconds}, headers=EDITABLE)
        for rule in self._server.get(self._path(group.name))["rules"]:
            self._restore(rule["uid"], placeholder["uid"])

    def _restore(self, uid: str, placeholder: str) -> None:
        """Create a rule again if the change of the interval has made it read-only for users."""
        rule = self._rule(uid)
        if uid != placeholder and rule is not None and rule.pop("provenance", "") == "api":
            self._server.delete(object_path(RULES, uid))
            self._server.post(
                RULES, {name: rule[name] for name in rule if name not in {"id", "updated"}}, headers=EDITABLE
            )

    def _rule(self, uid: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self._server.find(object_path(RULES, uid))
        return found

    def _plan(self, group: RuleGroup) -> Change:
        found = self._server.find(self._path(group.name))
        wanted = group.interval_seconds
        if found is None:
            return Change(kind="group", uid=group.name, action=Action.CREATE, reason=f"every {wanted} s")
        old = found["interval"]
        foreign = [rule["title"] for rule in found["rules"] if not is_deployed(rule)]
        placeholders = [rule for rule in found["rules"] if is_placeholder(rule)]
        marks = [rule_mark(rule) for rule in found["rules"] if rule not in placeholders]
        is_ours = all(mark is not None and mark["interval"] == old for mark in marks)
        # A placeholder remains after an interrupted deployment.
        is_same = old == wanted and not placeholders
        action, reason = judged(is_same=is_same, is_ours=is_ours and not foreign, force=self._force)
        if foreign and action is not Action.SAME:
            action, reason = Action.KEEP, f"its interval is {old} s; it has rules of others: {', '.join(foreign)}"
        elif action is not Action.SAME:
            reason = f"its interval is {old} s, not {wanted} s" + (f"; {reason}" if reason else "")
        return Change(kind="group", uid=group.name, action=action, reason=reason)

    def _path(self, group: str) -> str:
        return f"/v1/provisioning/folder/{segment(self._folder.uid)}/rule-groups/{segment(group)}"


def _chosen(rule: Mapping[str, Any], receiver: str | None, release: tuple[int, int]) -> dict[str, Any]:
    """Return the keys of a rule that depend on the release, and the one that sends its alerts to `receiver`.

    Details of an incident are muted.
    """
    label, value = DETAIL
    muted = MUTED if rule["labels"].get(label) == value else {}
    keep = KEEP_LAST if release >= KEEP_LAST_RELEASE and rule["execErrState"] == "OK" else {}
    return keep | ({RECEIVER_KEY: {"receiver": receiver, **GROUPING, **muted}} if receiver else {})


def marked_rule(rule: dict[str, Any], interval_seconds: int) -> dict[str, Any]:
    """Return a rule with the mark: the hash of its core, the values of later keys, and the interval of its group."""
    mark = {"core": fingerprint(rule_content(rule)), "interval": interval_seconds, "later": _later(rule)}
    return rule | {"annotations": {**rule.get("annotations", {}), MARK: json.dumps(mark, sort_keys=True)}}


def rule_mark(rule: dict[str, Any]) -> dict[str, Any] | None:
    """Return the mark of a rule; None if it was not deployed."""
    text = (rule.get("annotations") or {}).get(MARK)
    return None if text is None else json.loads(text)


def is_deployed(rule: dict[str, Any]) -> bool:
    """Return True if a deployment has created the rule."""
    return rule_mark(rule) is not None


def is_placeholder(rule: dict[str, Any]) -> bool:
    """Return True if the rule exists only to set the interval of its group."""
    return str(rule["uid"]).startswith(PLACEHOLDER)


def is_rule_unchanged(rule: dict[str, Any]) -> bool:
    """Return True if a rule is as it was deployed."""
    mark = rule_mark(rule)
    return mark is not None and mark["core"] == fingerprint(rule_content(rule)) and _later_are(mark["later"], rule)


def rule_content(rule: Mapping[str, Any]) -> dict[str, Any]:
    """Return the compared part of a rule, without the mark and without values that the server adds."""
    content = {name: rule.get(name) for name in CORE}
    content["annotations"] = {name: text for name, text in (rule.get("annotations") or {}).items() if name != MARK}
    content["data"] = [
        query | {"model": {k: v for k, v in query["model"].items() if _SERVER_MODEL.get(k) != v}}
        for query in rule["data"]
    ]
    found: dict[str, Any] = without_empty(content)
    return found


def _later(rule: Mapping[str, Any]) -> dict[str, Any]:
    return {name: rule[name] for name in LATER if rule.get(name) is not None}


def _later_are(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Return True if the later keys that the server returns have the wanted values."""
    for name in LATER:
        expected, value = wanted.get(name), found.get(name)
        if value is None:  # the release drops the key, or it is not set
            continue
        if isinstance(value, dict):  # the server adds keys to the settings of notifications
            if expected is None or not expected.items() <= value.items():
                return False
        elif value != expected and not (value in _UNSET and expected in _UNSET):
            return False
    return True


def _placeholder(group: str, folder: str) -> dict[str, Any]:
    """Return a rule that never fires."""
    never = {"refId": "A", "type": "math", "expression": "0"}
    query = {"refId": "A", "datasourceUid": "__expr__", "relativeTimeRange": {"from": 0, "to": 0}, "model": never}
    states = {"condition": "A", "for": "0s", "noDataState": "OK", "execErrState": "OK", "data": [query]}
    named = {"uid": f"{PLACEHOLDER}{fingerprint(group)}", "title": f"Interval of {group}"[:190]}
    return {**named, "orgID": 1, "folderUID": folder, "ruleGroup": group, **states}
