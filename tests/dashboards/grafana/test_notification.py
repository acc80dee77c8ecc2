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
BY_RUN = {"group_by": ["grafana_folder", "alertname", "run"], "group_wait": "5s", "group_interval": "1m"}
POLICIES = "/v1/provisioning/policies"


@pytest.fixture
def points(tmp_path: Path):
    file = tmp_path / "points.yaml"
    file.write_text(FILE, encoding="utf-8")
    return read_contact_points(file, ENVIRONMENT)


@pytest.fixture
def dropping(grafana: Grafana) -> Grafana:
    """Return a server of a release that drops the receiver of rules, as 9.4 does."""
    if grafana.user.check().startswith("9."):
        return grafana
    pytest.skip("make test-grafana, with a release that drops the receiver of rules")


def test_deployment_without_receiver_states_it(grafana: Grafana):
    grafana.deploy()

    assert "No contact point is notified" in grafana.text


def test_receiver_is_set_on_rules_where_the_release_keeps_it(local: Grafana, contract: ContractServer, points):
    contract.alerting.keeps_later_keys = True

    local.deploy(contact_points=points, receiver="on-call")

    settings = [rule["notification_settings"] for rule in local.rules().values()]
    assert [{"receiver": "on-call", **BY_RUN}] * len(settings) == settings
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


def test_release_without_receivers_of_rules_needs_a_route(dropping: Grafana, points):
    before = dropping.user.get(POLICIES)

    dropping.deploy(contact_points=points, receiver="on-call")

    assert "use --add-route" in dropping.text
    assert before == dropping.user.get(POLICIES)


def test_added_route_is_first_and_undeploy_removes_only_it(dropping: Grafana, points):
    before = dropping.user.get(POLICIES) | {"routes": OTHERS}
    dropping.user.put(POLICIES, before, headers={"X-Disable-Provenance": "true"})
    dropping.deploy(contact_points=points, receiver="on-call", add_route=True)
    added, *others = dropping.user.get(POLICIES)["routes"]
    (copy,) = dropping.folder.glob("grafana-policies-*.json")
    again = dropping.deploy(contact_points=points, receiver="on-call", add_route=True)

    remaining = dropping.undeploy()

    matchers = [["grafana_folder", "=", "Training alerts"]]
    assert {"receiver": "on-call", "object_matchers": matchers, **BY_RUN} == added
    assert (OTHERS, before) == (others, json.loads(copy.read_text(encoding="utf-8")))
    assert (0, [], before) == (again, remaining, dropping.user.get(POLICIES))


def test_route_that_a_user_has_changed_remains(dropping: Grafana, points):
    dropping.deploy(contact_points=points, receiver="on-call", add_route=True)
    tree = dropping.user.get(POLICIES)
    tree["routes"][0]["group_wait"] = "1m"
    dropping.user.put(POLICIES, tree)

    remaining = dropping.undeploy()

    assert tree["routes"] == dropping.user.get(POLICIES)["routes"]
    assert "currently used by a notification policy" in remaining[0]


def test_unknown_receiver_is_rejected_before_any_write(local: Grafana, contract: ContractServer):
    with pytest.raises(GrafanaError, match="'absent' does not exist"):
        local.deploy(receiver="absent")

    assert [] == contract.writes


def test_changed_contact_point_is_kept_without_force(grafana: Grafana, points):
    grafana.deploy(contact_points=points)
    path = f"/v1/provisioning/contact-points/{points[0]['uid']}"
    grafana.user.put(path, points[0] | {"settings": {"url": "http://127.0.0.1:8/other"}})

    kept = grafana.deploy(contact_points=points)
    text = grafana.text
    replaced = grafana.deploy(contact_points=points, force=True)

    assert (0, 1) == (kept, replaced)
    assert "these keys are different: settings.url" in text


def test_contact_point_of_a_user_with_the_same_name_remains(local: Grafana, contract: ContractServer, points):
    users = points[0] | {"uid": "users"}
    local.user.post("/v1/provisioning/contact-points", users)

    local.deploy(contact_points=points, force=True)

    assert ["", "users"] == sorted(point["uid"] for point in contract.alerting.contact_points)
    assert "choose a different name" in local.text


def test_secrets_are_never_printed(grafana: Grafana, points):
    grafana.deploy(contact_points=points, dry_run=True)
    text = grafana.text
    grafana.deploy(contact_points=points)

    assert "a-secret" not in text + grafana.text


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
