"""Receivers of our rules: on the rules, by one added route, and contact points from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.dashboards.grafana.conftest import Grafana
from tests.dashboards.grafana.contract_server import ContractServer

from rankscope_dashboards.grafana.contact_points import read_contact_points
from rankscope_dashboards.grafana.server import GrafanaError

FILE = """\
apiVersion: 1
contactPoints:
- name: on-call
  receivers:
  - type: webhook
    settings:
      url: $HOOK_URL
      password: ${HOOK_PASSWORD}
"""
ENVIRONMENT = {"HOOK_URL": "http://127.0.0.1:9/hook", "HOOK_PASSWORD": "a-secret"}
OTHERS = [{"receiver": "grafana-default-email", "object_matchers": [["team", "=", "a"]]}]
POLICIES = "/v1/provisioning/policies"


@pytest.fixture
def points(tmp_path: Path):
    file = tmp_path / "points.yaml"
    file.write_text(FILE, encoding="utf-8")
    return read_contact_points(file, ENVIRONMENT)


def test_deployment_without_receiver_states_it(grafana: Grafana):
    grafana.deploy()

    assert "No contact point is notified" in grafana.text


def test_receiver_is_set_on_rules_where_the_release_keeps_it(local: Grafana, contract: ContractServer, points):
    contract.alerting.keeps_later_keys = True

    local.deploy(contact_points=points, receiver="on-call")

    settings = [rule["notification_settings"] for rule in local.rules().values()]
    assert [{"receiver": "on-call", "group_wait": "5s"}] * len(settings) == settings
    assert (0, 0) == (local.deploy(contact_points=points, receiver="on-call"), local.deploy())
    assert "sent to: on-call" in local.text


def test_receiver_that_a_user_has_chosen_remains(local: Grafana, contract: ContractServer, points):
    contract.alerting.keeps_later_keys = True
    local.deploy(contact_points=points, receiver="on-call")
    (uid, rule), *_ = local.rules().items()
    local.save_rule(rule | {"notification_settings": {"receiver": "email receiver"}})

    local.deploy(contact_points=points, receiver="on-call")

    assert "email receiver" == local.rules()[uid]["notification_settings"]["receiver"]
    assert f"({uid}): it was changed" in local.text


def test_paused_rule_is_a_changed_rule(local: Grafana, contract: ContractServer):
    contract.alerting.keeps_later_keys = True
    local.deploy()
    (uid, rule), *_ = local.rules().items()
    local.save_rule(rule | {"isPaused": True})

    local.deploy()

    assert local.rules()[uid]["isPaused"]
    assert f"({uid}): it was changed" in local.text


def test_release_without_receivers_of_rules_needs_a_route(local: Grafana, points):
    before = local.user.get(POLICIES)

    local.deploy(contact_points=points, receiver="on-call")

    assert "use --add-route" in local.text
    assert before == local.user.get(POLICIES)


def test_added_route_is_first_and_undeploy_removes_only_it(local: Grafana, points):
    before = local.user.get(POLICIES) | {"routes": OTHERS}
    local.user.put(POLICIES, before, headers={"X-Disable-Provenance": "true"})
    local.deploy(contact_points=points, receiver="on-call", add_route=True)
    added, *others = local.user.get(POLICIES)["routes"]
    (copy,) = local.folder.glob("grafana-policies-*.json")
    again = local.deploy(contact_points=points, receiver="on-call", add_route=True)

    remaining = local.undeploy()

    matchers = [["grafana_folder", "=", "Training alerts"]]
    assert {"receiver": "on-call", "object_matchers": matchers, "group_wait": "5s"} == added
    assert (OTHERS, before) == (others, json.loads(copy.read_text(encoding="utf-8")))
    assert (0, [], before) == (again, remaining, local.user.get(POLICIES))


def test_route_that_a_user_has_changed_remains(local: Grafana, points):
    local.deploy(contact_points=points, receiver="on-call", add_route=True)
    tree = local.user.get(POLICIES)
    tree["routes"][0]["group_wait"] = "1m"
    local.user.put(POLICIES, tree)

    remaining = local.undeploy()

    assert tree["routes"] == local.user.get(POLICIES)["routes"]
    assert "currently used by a notification policy" in remaining[0]


def test_unknown_receiver_is_rejected_before_any_write(local: Grafana, contract: ContractServer):
    with pytest.raises(GrafanaError, match="'absent' does not exist"):
        local.deploy(receiver="absent")

    assert [] == contract.writes


def test_changed_contact_point_is_kept_without_force(local: Grafana, points):
    local.deploy(contact_points=points)
    path = f"/v1/provisioning/contact-points/{points[0]['uid']}"
    local.user.put(path, points[0] | {"settings": {"url": "http://127.0.0.1:8/other"}})

    kept = local.deploy(contact_points=points)
    text = local.text
    replaced = local.deploy(contact_points=points, force=True)

    assert (0, 1) == (kept, replaced)
    assert "these keys are different: settings.url" in text


def test_contact_point_of_a_user_with_the_same_name_remains(local: Grafana, contract: ContractServer, points):
    users = points[0] | {"uid": "users"}
    local.user.post("/v1/provisioning/contact-points", users)

    local.deploy(contact_points=points, force=True)

    assert ["", "users"] == sorted(point["uid"] for point in contract.alerting.contact_points)
    assert "choose a different name" in local.text


def test_secrets_are_never_printed(local: Grafana, points):
    local.deploy(contact_points=points, dry_run=True)
    text = local.text
    local.deploy(contact_points=points)

    assert "a-secret" not in text + local.text


def test_unset_variable_of_a_contact_point_is_named(tmp_path: Path):
    file = tmp_path / "points.yaml"
    file.write_text(FILE, encoding="utf-8")

    with pytest.raises(GrafanaError, match="HOOK_PASSWORD, which is not set"):
        read_contact_points(file, {"HOOK_URL": "http://a"})


def test_file_without_contact_points_is_rejected(tmp_path: Path):
    file = tmp_path / "points.yaml"
    file.write_text("receivers: []\n", encoding="utf-8")

    with pytest.raises(GrafanaError, match="no file of contact points"):
        read_contact_points(file, ENVIRONMENT)
