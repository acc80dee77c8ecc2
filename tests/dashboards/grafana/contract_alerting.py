"""Alert rules, contact points, notification policies and mute timings of the contract server."""

import copy
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from tests.dashboards.grafana.contract_content import NOT_MODELLED, NULL, Answer, Caller, Request, message

MOST_TITLE_CHARACTERS: Final = 190
SCHEDULER_SECONDS: Final = 10
NEW_GROUP_SECONDS: Final = 60
TIME: Final = "2026-11-24T14:13:02Z"
KNOWN_TYPES: Final = ("webhook", "email", "slack", "telegram", "pagerduty", "teams", "discord", "opsgenie")
KEPT: Final = ("condition", "noDataState", "execErrState", "annotations", "labels")
LATER_KEYS: Final = {
    "keep_firing_for": "0s",
    "missingSeriesEvalsToResolve": None,
    "isPaused": False,
    "notification_settings": None,
}
"""Keys that 9.4 drops, with their values if they are not set. Later releases keep them (not recorded)."""

CONFLICT: Final = (
    "a conflicting alert rule is found: rule title under the same organisation and folder should be unique"
)
BAD_REQUEST: Final = message(400, "bad request data")
DEFAULT_RECEIVER: Final = "grafana-default-email"
SECRETS: Final = ("authorization_credentials", "password", "token")


@dataclass
class Alerting:
    """Alerting of one organisation. `mistakes`: rules that the server accepted although they cannot work."""

    # `keeps_later_keys`: keep the keys of rules that 9.4 drops, as the documentation of later releases describes.

    keeps_later_keys: bool = False
    rules: dict[str, dict[str, Any]] = field(default_factory=dict)
    intervals: dict[tuple[str, str], int] = field(default_factory=dict)
    contact_points: list[dict[str, Any]] = field(default_factory=list)
    policies: dict[str, Any] = field(default_factory=dict)
    mute_timings: dict[str, dict[str, Any]] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)
    has_folder: Callable[[str], bool] = lambda _uid: True
    has_source: Callable[[str], bool] = lambda _uid: True

    def __post_init__(self) -> None:
        self._ids = itertools.count(1)
        email = {"name": "email receiver", "type": "email", "settings": {"addresses": "<example@email.com>"}}
        self.contact_points.append({"uid": "", **email, "disableResolveMessage": False})
        self.policies |= {"receiver": DEFAULT_RECEIVER, "group_by": ["grafana_folder", "alertname"]}

    def routes(self) -> list[tuple[str, str, Callable[..., Answer]]]:
        base = "/api/v1/provisioning"
        return [
            ("GET", f"{base}/alert-rules", self._list_rules),
            ("POST", f"{base}/alert-rules", self._create_rule),
            ("GET", f"{base}/alert-rules/([^/]+)", self._get_rule),
            ("PUT", f"{base}/alert-rules/([^/]+)", self._update_rule),
            ("DELETE", f"{base}/alert-rules/([^/]+)", self._delete_rule),
            ("GET", f"{base}/folder/([^/]+)/rule-groups/([^/]+)", self._get_group),
            ("PUT", f"{base}/folder/([^/]+)/rule-groups/([^/]+)", self._update_group),
            ("GET", f"{base}/contact-points", self._list_contact_points),
            ("POST", f"{base}/contact-points", self._create_contact_point),
            ("PUT", f"{base}/contact-points/([^/]+)", self._update_contact_point),
            ("DELETE", f"{base}/contact-points/([^/]+)", self._delete_contact_point),
            ("GET", f"{base}/policies", lambda *_: Answer(200, copy.deepcopy(self.policies))),
            ("PUT", f"{base}/policies", self._update_policies),
            ("GET", "/api/alertmanager/grafana/config/api/v1/alerts", self._configuration),
            ("POST", "/api/alertmanager/grafana/config/api/v1/alerts", self._save_configuration),
            ("GET", f"{base}/mute-timings", lambda *_: Answer(200, list(self.mute_timings.values()))),
            ("POST", f"{base}/mute-timings", self._create_mute_timing),
            ("DELETE", f"{base}/mute-timings/([^/]+)", self._delete_mute_timing),
        ]

    def holds_rules(self, folder: str) -> bool:
        return any(rule["folderUID"] == folder for rule in self.rules.values())

    def delete_rules(self, folder: str) -> None:
        self.rules = {uid: rule for uid, rule in self.rules.items() if rule["folderUID"] != folder}

    def add_rule(self, wanted: dict[str, Any], provenance: str) -> dict[str, Any]:
        """Store a rule as the server does, without a check, and return it."""
        old = self.rules.get(wanted["uid"])
        stored = {
            "id": old["id"] if old else next(self._ids),
            "uid": wanted["uid"],
            "orgID": 1,
            "folderUID": wanted["folderUID"],
            "ruleGroup": wanted["ruleGroup"],
            "title": wanted["title"],
            "data": [self._query(query) for query in wanted["data"]],
            "updated": TIME,
            "for": wanted.get("for", "0s"),
            **{name: wanted[name] for name in KEPT if name in wanted},
            **({name: wanted.get(name, unset) for name, unset in LATER_KEYS.items()} if self.keeps_later_keys else {}),
        }
        self.rules[wanted["uid"]] = stored | ({"provenance": provenance} if provenance else {})
        self.intervals.setdefault((stored["folderUID"], stored["ruleGroup"]), NEW_GROUP_SECONDS)
        return self.rules[wanted["uid"]]

    def _query(self, query: dict[str, Any]) -> dict[str, Any]:
        model = {"intervalMs": 1000, "maxDataPoints": 43200, **query["model"]}
        return {"queryType": "", **query, "model": model}

    def _list_rules(self, _request: Request, _caller: Caller) -> Answer:
        return Answer(200, [_without_provenance(rule) for rule in self.rules.values()])

    def _get_rule(self, _request: Request, _caller: Caller, uid: str) -> Answer:
        return Answer(200, self.rules[uid]) if uid in self.rules else message(500, "could not find alert rule")

    def _create_rule(self, request: Request, _caller: Caller) -> Answer:
        return self._store(201, request.body, _provenance(request), is_taken=request.body["uid"] in self.rules)

    def _update_rule(self, request: Request, _caller: Caller, uid: str) -> Answer:
        if uid not in self.rules:
            return NULL
        old, new = self.rules[uid].get("provenance", ""), _provenance(request)
        if old not in {new, ""}:
            return message(500, f"cannot changed provenance from '{old}' to '{new}'")
        return self._store(200, {**request.body, "uid": uid}, new)

    def _store(self, status: int, wanted: dict[str, Any], provenance: str, *, is_taken: bool = False) -> Answer:
        error = self._error(wanted)
        if error is None and (is_taken or self._title_is_taken(wanted)):
            error = message(500, CONFLICT)
        if error is None:
            self._note_mistakes(wanted)
        return error or Answer(status, self.add_rule(wanted, provenance))

    def _note_mistakes(self, wanted: dict[str, Any]) -> None:
        sources = {query["datasourceUid"] for query in wanted["data"]} - {"__expr__"}
        checks = {
            "folder": self.has_folder(wanted["folderUID"]),
            "condition": wanted["condition"] in {query["refId"] for query in wanted["data"]},
            "data source": all(map(self.has_source, sources)),
            "uid": re.fullmatch(r"[A-Za-z0-9_-]{1,40}", wanted["uid"]) is not None,
            "for": "for" in wanted,
        }
        self.mistakes += [f"{wanted['uid']}: {name}" for name, is_right in checks.items() if not is_right]

    def _error(self, wanted: dict[str, Any]) -> Answer | None:
        annotations = wanted.get("annotations", {})
        if not isinstance(wanted.get("labels", {}), dict) or not re.fullmatch(r"(\d+[a-z]+)*", wanted.get("for", "")):
            return BAD_REQUEST
        for key, option in (("noDataState", "NoData"), ("execErrState", "Error")):
            if wanted.get(key) == "KeepLast" and not self.keeps_later_keys:
                return message(500, f"unknown {option} state option KeepLast")
        if not wanted["data"]:
            return message(400, "invalid alert rule: no queries or expressions are found")
        if len(wanted["title"]) > MOST_TITLE_CHARACTERS:
            return message(400, f"invalid alert rule: name length should not be greater than {MOST_TITLE_CHARACTERS}")
        if ("__dashboardUid__" in annotations) != ("__panelId__" in annotations):
            return message(500, "both annotations __dashboardUid__ and __panelId__ must be specified")
        settings = (wanted.get("notification_settings") or {}) if self.keeps_later_keys else {}
        if settings.get("receiver") not in {None, *self._receivers()}:
            return message(400, f"invalid alert rule: receiver {settings['receiver']} does not exist")
        if not set(settings.get("mute_time_intervals", [])) <= self.mute_timings.keys():
            return message(400, f"invalid alert rule: {settings['mute_time_intervals']} do not exist")
        return None

    def _title_is_taken(self, wanted: dict[str, Any]) -> bool:
        key = (wanted["folderUID"], wanted["title"])
        others = [rule for uid, rule in self.rules.items() if uid != wanted["uid"]]
        return key in {(rule["folderUID"], rule["title"]) for rule in others}

    def _delete_rule(self, _request: Request, _caller: Caller, uid: str) -> Answer:
        rule = self.rules.get(uid, {})
        if rule.get("provenance") == "file":
            return message(500, "cannot delete with provided provenance 'api', needs 'file'")
        self.rules.pop(uid, None)
        if rule and not self._group(rule["folderUID"], rule["ruleGroup"]):
            del self.intervals[rule["folderUID"], rule["ruleGroup"]]
        return Answer(204)

    def _group(self, folder: str, group: str) -> list[dict[str, Any]]:
        return [rule for rule in self.rules.values() if (rule["folderUID"], rule["ruleGroup"]) == (folder, group)]

    def _get_group(self, _request: Request, _caller: Caller, folder: str, group: str) -> Answer:
        rules = [_without_provenance(rule) for rule in self._group(folder, group)]
        if not rules:
            return message(404, "rulegroup not found")
        interval = self.intervals[folder, group]
        return Answer(200, {"title": group, "folderUid": folder, "interval": interval, "rules": rules})

    def _update_group(self, request: Request, _caller: Caller, folder: str, group: str) -> Answer:
        interval = request.body["interval"]
        old = self._group(folder, group)
        if interval % SCHEDULER_SECONDS:
            text = f"interval ({interval}s) should be non-zero and divided exactly by scheduler interval: 10"
            return message(400, f"invalid alert rule: {text}")
        if any(rule.get("provenance") == "file" for rule in old):
            return message(500, "cannot update with provided provenance 'api', needs 'file'")
        if "rules" in request.body:
            return NOT_MODELLED
        if old and self.intervals[folder, group] != interval:
            # Grafana updates each rule of the group and sets its provenance (read in the source, not recorded).
            for rule in old:
                self.rules[rule["uid"]] = {**rule, "provenance": "api"}
        self.intervals[folder, group] = interval
        return Answer(200, {"title": group, "folderUid": folder, "interval": interval, "rules": None})

    def _receivers(self) -> set[str]:
        return {DEFAULT_RECEIVER, *(point["name"] for point in self.contact_points)}

    def _list_contact_points(self, request: Request, _caller: Caller) -> Answer:
        shown = sorted(self.contact_points, key=lambda point: str(point["name"]))
        name = request.query.get("name")
        return Answer(200, [point for point in shown if name is None or point["name"] == name])

    def _contact_point_error(self, wanted: dict[str, Any]) -> Answer | None:
        if wanted["type"] not in KNOWN_TYPES:
            return message(400, f"invalid object specification: unknown type '{wanted['type']}'")
        if wanted["type"] == "webhook" and not wanted["settings"].get("url"):
            text = "failed to validate receiver of type \"webhook\": required field 'url' is not specified"
            return message(400, f"invalid object specification: {text}")
        return None

    def _create_contact_point(self, request: Request, _caller: Caller) -> Answer:
        wanted = request.body
        if error := self._contact_point_error(wanted):
            return error
        same = next((point for point in self.contact_points if point["uid"] == wanted["uid"]), None)
        if same is not None:
            text = f"receiver configuration with UID '{wanted['uid']}' already exist in contact point '{same['name']}'."
            return message(500, f"{text} Please use unique identifiers for receivers across all contact points")
        made = self._contact_point(wanted, _provenance(request))
        self.contact_points.append(made)
        redacted = {"authorization_credentials": "[REDACTED]", "password": "[REDACTED]"}
        return Answer(202, made | {"settings": made["settings"] | redacted})

    def _contact_point(self, wanted: dict[str, Any], provenance: str) -> dict[str, Any]:
        secret = {name: "[REDACTED]" for name in SECRETS if name in wanted["settings"]}
        made = {name: wanted[name] for name in ("uid", "name", "type")} | {"settings": wanted["settings"] | secret}
        made["disableResolveMessage"] = wanted.get("disableResolveMessage", False)
        return made | ({"provenance": provenance} if provenance else {})

    def _update_contact_point(self, request: Request, _caller: Caller, uid: str) -> Answer:
        old = next((point for point in self.contact_points if point["uid"] == uid), None)
        if old is None:
            return message(404, f"object not found: contact point with uid '{uid}' not found")
        old |= self._contact_point({**request.body, "uid": uid}, _provenance(request))
        return message(202, "contactpoint updated")

    def _delete_contact_point(self, _request: Request, _caller: Caller, uid: str) -> Answer:
        for point in [point for point in self.contact_points if point["uid"] == uid]:
            others = [other for other in self.contact_points if other["name"] == point["name"] and other is not point]
            if not others and point["name"] in set(_values(self.policies, "receiver")):
                return message(500, f"contact point '{point['name']}' is currently used by a notification policy")
            self.contact_points.remove(point)
        return message(202, "contactpoint deleted")

    def _update_policies(self, request: Request, _caller: Caller) -> Answer:
        wanted = copy.deepcopy(request.body)
        if any(
            matcher[1] not in {"=", "!=", "=~", "!~"}
            for matcher in itertools.chain(*_values(wanted, "object_matchers"))
        ):
            return BAD_REQUEST
        for receiver in _values(wanted, "receiver"):
            if receiver not in self._receivers():
                return message(400, f"invalid object specification: receiver '{receiver}' does not exist")
        for name in itertools.chain(*_values(wanted, "mute_time_intervals")):
            if name not in self.mute_timings:
                return message(400, f"invalid object specification: mute time interval '{name}' does not exist")
        self.policies = _without_false(wanted) | {"provenance": "api"}  # also with X-Disable-Provenance
        return message(202, "policies updated")

    def _configuration(self, _request: Request, _caller: Caller) -> Answer:
        """Return the configuration as the pages read it: without secrets, and with the names of those that are set."""
        shown = [
            {
                "name": point["name"],
                "grafana_managed_receiver_configs": [
                    {name: point[name] for name in ("uid", "name", "type", "disableResolveMessage")}
                    | {
                        "settings": {k: v for k, v in point["settings"].items() if v != "[REDACTED]"},
                        "secureFields": {k: True for k, v in point["settings"].items() if v == "[REDACTED]"},
                    }
                ],
            }
            for point in self.contact_points
        ]
        settings = {"route": self.policies, "mute_time_intervals": [*self.mute_timings.values()], "receivers": shown}
        return Answer(200, copy.deepcopy({"template_files": {}, "alertmanager_config": settings | {"templates": None}}))

    def _save_configuration(self, request: Request, _caller: Caller) -> Answer:
        """Store a configuration of the pages. Secrets of contact points remain, unless the request has others."""
        wanted = request.body["alertmanager_config"]
        if _without_false(wanted["route"]) != self.policies and "provenance" in self.policies:
            return message(400, "policies were provisioned and cannot be changed through the UI")
        for receiver in wanted["receivers"]:
            for point in receiver["grafana_managed_receiver_configs"]:
                old = next((one for one in self.contact_points if one["uid"] == point["uid"]), None)
                if old is None:
                    return message(400, f"unknown receiver: {point['uid']}")
                secrets = {name: value for name, value in old["settings"].items() if value == "[REDACTED]"}
                old |= {"settings": secrets | point["settings"]}
        self.policies = _without_false(wanted["route"])
        self.mute_timings = {one["name"]: one for one in wanted["mute_time_intervals"] or ()}
        return message(202, "configuration created")

    def _create_mute_timing(self, request: Request, _caller: Caller) -> Answer:
        wanted = request.body
        times = [time for interval in wanted["time_intervals"] for time in interval.get("times", [])]
        if any(time["start_time"] >= "24:00" or time["end_time"] > "24:00" for time in times):
            return BAD_REQUEST
        if wanted["name"] in self.mute_timings:
            return message(400, "invalid object specification: a mute timing with this name already exists")
        self.mute_timings[wanted["name"]] = wanted
        return Answer(201, wanted | {"provenance": "api"})

    def _delete_mute_timing(self, _request: Request, _caller: Caller, name: str) -> Answer:
        if name in set(itertools.chain(*_values(self.policies, "mute_time_intervals"))):
            return message(500, f"mute time '{name}' is currently used by a notification policy")
        self.mute_timings.pop(name, None)
        return Answer(204)


def _provenance(request: Request) -> str:
    return "" if "X-Disable-Provenance" in request.headers else "api"


def _without_provenance(rule: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in rule.items() if name != "provenance"}


def _values(route: dict[str, Any], key: str) -> Iterator[Any]:
    """Yield the value of a key in a tree of routes."""
    if route.get(key):
        yield route[key]
    for child in route.get("routes") or []:
        yield from _values(child, key)


def _without_false(route: dict[str, Any]) -> dict[str, Any]:
    """Return a route as the server stores it: without `continue: false` and without empty lists."""
    kept = {name: value for name, value in route.items() if value not in (False, [])}
    return kept | ({"routes": [_without_false(child) for child in route["routes"]]} if route.get("routes") else {})
