"""Examples of contact points and routes: closed key lists, and names that refer to each other."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from functools import cache

import pytest
import yaml
from tests.dashboards.grafana.conftest import complete
from tests.dashboards.grafana.contract_server import ContractServer

from rankscope_contract.model.events import Severity
from rankscope_dashboards.alerts.groups import alert_groups
from rankscope_dashboards.deploy.alertmanager import DETAIL
from rankscope_dashboards.grafana.routes import route as deployed_route
from rankscope_dashboards.grafana.rules import Rules
from rankscope_dashboards.grafana.server import Server
from rankscope_dashboards.provisioning.alert_rules import FOLDER
from rankscope_dashboards.provisioning.notifications import MESSAGE, notification_examples
from rankscope_dashboards.provisioning.tree import packaged_boards, tree_files

FILES = tree_files(packaged_boards())
EXAMPLES = notification_examples()
POINTS = EXAMPLES["contact-points.yaml"]["contactPoints"]
(POLICY,) = EXAMPLES["policies.yaml"]["policies"]
MUTES = EXAMPLES["mute-timings.yaml"]["muteTimes"]
TEMPLATES = EXAMPLES["templates.yaml"]["templates"]

# Keys of the provisioning file format. Grafana ignores other keys without a message.
DOCUMENT_KEYS = {"contactPoints", "policies", "muteTimes", "templates"}
POINT_KEYS = {"orgId", "name", "receivers"}
RECEIVER_KEYS = {"uid", "type", "disableResolveMessage", "settings"}
SETTINGS = {"webhook": {"url", "httpMethod", "maxAlerts"}, "email": {"addresses", "singleEmail", "subject", "message"}}
ROUTE_KEYS = {
    *("receiver", "group_by", "object_matchers", "mute_time_intervals", "continue", "routes"),
    *("group_wait", "group_interval", "repeat_interval"),
}
INTERVAL_KEYS = {"times", "weekdays", "days_of_month", "months", "years", "location"}


def routes(route):
    return [route, *(inner for one in route.get("routes", ()) for inner in routes(one))]


def test_examples_contain_only_keys_that_grafana_reads():
    assert {"examples"} == {name.partition("/")[0] for name in FILES if "/alerting/" in name}, (
        "Grafana reads no example"
    )
    assert "replaces the tree of your server" in FILES["examples/alerting/policies.yaml"]
    assert not [name for name in FILES if name.startswith("examples/") and "$" in FILES[name]]
    for name, document in EXAMPLES.items():
        assert document == yaml.safe_load(FILES[f"examples/alerting/{name}"])
        assert document.keys() - DOCUMENT_KEYS == {"apiVersion"}
    for point in POINTS:
        assert POINT_KEYS == point.keys()
        for receiver in point["receivers"]:
            assert RECEIVER_KEYS == receiver.keys()
            assert SETTINGS[receiver["type"]] == receiver["settings"].keys()
            assert re.fullmatch(r"[a-z0-9-]{1,40}", receiver["uid"])
    assert all(route.keys() <= ROUTE_KEYS for top in POLICY["routes"] for route in routes(top))
    assert POLICY.keys() <= ROUTE_KEYS | {"orgId"}
    for mute in MUTES:
        assert {"orgId", "name", "time_intervals"} == mute.keys()
        assert all(interval.keys() <= INTERVAL_KEYS for interval in mute["time_intervals"])
    assert all({"orgId", "name", "template"} == template.keys() for template in TEMPLATES)


def test_routes_refer_to_contact_points_and_mute_timings_that_exist():
    inner = [route for top in POLICY["routes"] for route in routes(top)]
    receivers = {route["receiver"] for route in inner}

    assert {point["name"] for point in POINTS} == receivers
    assert "grafana-default-email" == POLICY["receiver"], "other alerts go where a new server sends them"
    assert {mute["name"] for mute in MUTES} == {name for one in inner for name in one.get("mute_time_intervals", ())}


def test_route_of_rankscope_sends_one_message_for_each_incident():
    (route,) = POLICY["routes"]
    details, critical, rest = route["routes"]

    assert [["grafana_folder", "=", FOLDER]] == route["object_matchers"]
    assert (["alertname", "run", "rule", "step"], "5s") == (route["group_by"], route["group_wait"])
    assert [[DETAIL[0], "=", DETAIL[1]]] == details["object_matchers"]
    assert ["rankscope-always"] == details["mute_time_intervals"]
    (always,) = (mute for mute in MUTES if mute["name"] == "rankscope-always")
    assert [{"times": [{"start_time": "00:00", "end_time": "24:00"}]}] == always["time_intervals"]
    assert critical["object_matchers"] == [["severity", "=", Severity.CRITICAL]]
    assert critical["continue"]
    assert {"receiver": "rankscope-chat"} == rest


ALERTMANAGER = yaml.safe_load(FILES["alertmanager/alertmanager.yml"])
ALWAYS_MUTED = {"rankscope-always", "rankscope-details"}
OPERATORS = {"=": re.escape, "=~": str, "!=": lambda text: f"(?!{re.escape(text)}$).*"}


def matches(route, labels):
    texts = [re.fullmatch(r'(\w+)(=~|!=|=)"(.*)"', text).groups() for text in route.get("matchers", ())]
    every = [*texts, *route.get("object_matchers", ())]
    return all(re.fullmatch(OPERATORS[operator](text), labels.get(name, "")) for name, operator, text in every)


def messages(route, labels, group_by=()):
    """Return the receiver and the group of each message about an alert, by the routing of Alertmanager."""
    group_by = route.get("group_by", group_by)
    found = []
    for child in route.get("routes", ()):
        if matches(child, labels):
            found += messages({"receiver": route["receiver"]} | child, labels, group_by)
            if not child.get("continue"):
                return found
    is_muted = ALWAYS_MUTED & {*route.get("mute_time_intervals", ())} or route["receiver"] == "none"
    own = (route["receiver"], *(labels.get(name, "") for name in group_by))
    return found or [None if is_muted else own]


@cache
def settings_of_rules():
    """Return the receiver of each rule on a release of Grafana that keeps it, by the title of the rule."""
    content = complete()
    with ContractServer() as contract:
        server = Server(contract.url, "glsa_admin")
        rules = Rules(server, content.groups, content.rules_folder, receiver="chat", force=False)
        return {change.title: change.payload["notification_settings"] for change in rules.plan()}


TREES = {
    "Alertmanager": lambda labels: messages(ALERTMANAGER["route"], labels),
    "files": lambda labels: messages(POLICY, labels),
    "route of deploy": lambda labels: messages({"receiver": "x", "routes": [deployed_route("chat", FOLDER)]}, labels),
    "rules of deploy": lambda labels: messages(settings_of_rules()[labels["alertname"]], labels),
}


@pytest.mark.parametrize("tree", TREES)
def test_nan_of_one_step_is_one_message_for_each_contact_point(tree):
    """The step of a NaN makes 20 alerts fire: one about its incident, and details. A NaN of a later step is another."""
    series = {"run": "r", "rank": "0", "kind": "grad_local", "grafana_folder": FOLDER}
    every = [alert for group in alert_groups() for alert in group.alerts]
    alerts = {alert.name: {"alertname": alert.name, **alert.all_labels()} for alert in every}
    details = [alerts["AnomalyNan"] | series | {"tensor": f"t{number}", "op": "nans"} for number in range(18)]
    fired = [*details, alerts["AnomalyNanEvents"] | series]
    incident = alerts["AnomalyIncident"] | series | {"rule": "AnomalyNan", "severity": "critical", "tensor": "t0"}

    def sent(steps):
        firing = [labels for step in steps for labels in (*fired, incident | {"step": step})]
        keys = {key for labels in firing for key in TREES[tree](labels)} - {None}
        return Counter(receiver.removeprefix("rankscope-") for receiver, *_ in keys)

    receivers = {"chat"} if "deploy" in tree else {"chat", "on-call"}
    assert dict.fromkeys(receivers, 1) == sent(["150"])
    assert dict.fromkeys(receivers, 2) == sent(["150", "151"])


@pytest.mark.parametrize("run", ["r", None])
def test_templates_render_title_and_texts(require_server, tmp_path, run):
    """Grafana and Alertmanager use the same template language."""
    board = {"board": "https://grafana/d/b?var-run=r"} if run else {}
    data = {
        "status": "firing",
        "groupLabels": {"rule": "RunFailed", "run": run} if run else {},
        "commonLabels": {"alertname": "ServiceDown"},
        "alerts": [{"annotations": {"summary": "S", "description": "D"} | board, "status": "firing"}],
    }
    (tmp_path / "data.json").write_text(json.dumps(data))
    (tmp_path / "rankscope.tmpl").write_text(TEMPLATES[0]["template"])
    command = [require_server("amtool", "prometheus-alertmanager"), "template", "render"]
    command += [f"--template.data={tmp_path / 'data.json'}", f"--template.glob={tmp_path}/*.tmpl"]
    command += ['--template.text={{ template "rankscope.title" . }}|{{ template "rankscope.message" . }}']
    title = '[FIRING] RunFailed in run "r"' if run else "[FIRING] ServiceDown"

    text = "\n".join(("S", "D", *board.values()))
    assert f"{title}|{text}" == subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert "summary" in MESSAGE
