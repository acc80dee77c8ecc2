"""Receivers of our rules: on the rules, by one added route, and contact points from a file."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.dashboards.grafana.conftest import Grafana, complete, save_policies
from tests.dashboards.grafana.contract_server import ContractServer

from rankscope_dashboards.grafana.contact_points import CONTACT_POINTS, read_contact_points
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
GROUPS = ["grafana_folder", "alertname", "run", "rule", "step"]
BY_INCIDENT = {"group_by": GROUPS, "group_wait": "5s", "group_interval": "1m"}
MUTED = {"mute_time_intervals": ["rankscope-details"]}
POLICIES = "/v1/provisioning/policies"


def read(folder: Path, text: str = FILE, environment=ENVIRONMENT):
    """Return the contact points of a file with this text."""
    file = folder / "points.yaml"
    file.write_text(text, encoding="utf-8")
    return read_contact_points(file, environment)


@pytest.fixture
def points(tmp_path: Path):
    return read(tmp_path)


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
    group = complete().groups[0]
    local.content = replace(local.content, groups=(replace(group, rules=group.rules[-3:]),))

    local.deploy(contact_points=points, receiver="on-call")

    details = [rule["labels"].get("notification") == "none" for rule in local.rules().values()]
    settings = [rule["notification_settings"] for rule in local.rules().values()]
    assert {True, False} == set(details)
    assert [{"receiver": "on-call", **BY_INCIDENT, **(MUTED if muted else {})} for muted in details] == settings
    assert (0, 0) == (local.deploy(contact_points=points, receiver="on-call"), local.deploy())
    assert "sent to: on-call" in local.text


@pytest.mark.parametrize("change", [{"notification_settings": {"receiver": "email receiver"}}, {"isPaused": True}])
def test_rule_that_a_user_has_paused_or_sent_elsewhere_remains(
    local: Grafana, contract: ContractServer, points, change
):
    contract.alerting.keeps_later_keys = True
    local.deploy(contact_points=points, receiver="on-call")
    (uid, rule), *_ = local.rules().items()
    local.save_rule(rule | change)

    local.deploy(contact_points=points, receiver="on-call")

    assert change.items() <= local.rules()[uid].items()
    assert f"({uid}): it was changed" in local.text


def test_release_without_receivers_of_rules_needs_a_route(dropping: Grafana, points):
    before = dropping.user.get(POLICIES)

    dropping.deploy(contact_points=points, receiver="on-call")

    assert "use --add-route" in dropping.text
    assert before == dropping.user.get(POLICIES)


def test_added_route_is_first_and_undeploy_removes_only_it(dropping: Grafana, points):
    before = dropping.user.get(POLICIES) | {"routes": OTHERS}
    save_policies(dropping.user, before)
    dropping.deploy(contact_points=points, receiver="on-call", add_route=True)
    added, *others = dropping.user.get(POLICIES)["routes"]
    (copy,) = dropping.folder.glob("grafana-policies-*.json")
    again = dropping.deploy(contact_points=points, receiver="on-call", add_route=True)

    remaining = dropping.undeploy()

    matchers = [["grafana_folder", "=", "Training alerts"]]
    details = {"receiver": "on-call", "object_matchers": [["notification", "=", "none"]], **MUTED}
    assert {"receiver": "on-call", "object_matchers": matchers, **BY_INCIDENT, "routes": [details]} == added
    assert (OTHERS, before) == (others, json.loads(copy.read_text(encoding="utf-8")))
    assert (0, [], before) == (again, remaining, dropping.user.get(POLICIES))


def test_route_that_a_user_has_changed_remains(dropping: Grafana, points):
    dropping.deploy(contact_points=points, receiver="on-call", add_route=True)
    tree = dropping.user.get(POLICIES)
    tree["routes"][0]["group_wait"] = "1m"
    save_policies(dropping.user, tree)

    remaining = dropping.undeploy()

    assert tree == dropping.user.get(POLICIES)
    assert "currently used by a notification policy" in remaining[0]


def test_pages_can_edit_policies_and_secrets_remain(dropping: Grafana, points):
    """The pages cannot save a tree with a provenance. Their own request would lose secrets that it does not keep."""
    users = points[0] | {"uid": "users-point", "name": "users", "settings": {**points[0]["settings"], "username": "u"}}
    dropping.user.post(CONTACT_POINTS, users)
    tree = dropping.user.get(POLICIES)

    added = {"contact_points": points, "receiver": "on-call", "add_route": True}
    for command in (lambda: dropping.deploy(**added), dropping.undeploy):
        command()
        found = dropping.user.get(POLICIES)
        save_policies(dropping.user, found | {"group_wait": "45s"})
        save_policies(dropping.user, found)
        assert "provenance" not in found
        (stored,) = (one for one in dropping.user.get(CONTACT_POINTS) if one["uid"] == "users-point")
        assert "[REDACTED]" == stored["settings"].get("password")

    assert tree == dropping.user.get(POLICIES)
    dropping.user.delete(f"{CONTACT_POINTS}/users-point")


@pytest.mark.parametrize(("provenance", "text"), [("api", "belong to the API"), ("file", "to a provisioning file")])
def test_policies_of_another_owner_remain_and_it_is_named(
    local: Grafana, contract: ContractServer, points, provenance: str, text: str
):
    contract.alerting.policies |= {"provenance": provenance, "routes": OTHERS}
    before = dict(contract.alerting.policies)

    local.deploy(contact_points=points, receiver="on-call", add_route=True, dry_run=True)
    planned = local.text
    with pytest.raises(GrafanaError, match=text):
        local.deploy(contact_points=points, receiver="on-call", add_route=True)

    assert text in planned
    assert before == contract.alerting.policies
    assert {} == contract.alerting.rules
    with pytest.raises(GrafanaError, match=r"Nothing was changed\. Leave out --add-route"):
        local.deploy(contact_points=points, receiver="on-call", add_route=True)
    local.deploy(contact_points=points, receiver="on-call")
    assert contract.alerting.rules


def test_route_of_an_earlier_release_is_replaced_and_removed(local: Grafana, contract: ContractServer, points):
    """An earlier release added a route that did not mute details, and made the pages unable to edit the tree."""
    earlier = {"receiver": "on-call", "object_matchers": [["grafana_folder", "=", "Training alerts"]], **BY_INCIDENT}
    earlier["group_by"] = GROUPS[:3]
    local.deploy(contact_points=points)
    tree = {**contract.alerting.policies, "routes": [earlier, *OTHERS]}
    contract.alerting.policies = tree
    local.deploy(contact_points=points, receiver="on-call", add_route=True)
    replaced = contract.alerting.policies["routes"]
    contract.alerting.policies = tree | {"provenance": "api"}

    remaining = local.undeploy()

    assert (2, [{"object_matchers": [["notification", "=", "none"]], "receiver": "on-call", **MUTED}]) == (
        len(replaced),
        replaced[0]["routes"],
    )
    assert ([], OTHERS) == (remaining, contract.alerting.policies["routes"])


def test_release_that_refuses_the_request_of_the_pages_is_not_locked(local: Grafana, contract: ContractServer, points):
    contract.denied.add("alert.notifications:write")
    before = dict(contract.alerting.policies)

    with pytest.raises(GrafanaError, match=r"refuses the request.*unchanged: add or remove the route by hand"):
        local.deploy(contact_points=points, receiver="on-call", add_route=True)

    assert before == contract.alerting.policies


def test_unknown_receiver_is_rejected_before_any_write(local: Grafana, contract: ContractServer):
    with pytest.raises(GrafanaError, match="'absent' does not exist"):
        local.deploy(receiver="absent")

    assert [] == contract.writes


def test_changed_contact_point_is_kept_and_no_secret_is_printed(grafana: Grafana, points):
    grafana.deploy(contact_points=points, dry_run=True)
    text = grafana.text
    grafana.deploy(contact_points=points)
    text += grafana.text
    path = f"{CONTACT_POINTS}/{points[0]['uid']}"
    grafana.user.put(path, points[0] | {"settings": {"url": "http://127.0.0.1:8/other"}})

    assert 0 == grafana.deploy(contact_points=points)
    assert "these keys are different: settings.url" in grafana.text
    assert 1 == grafana.deploy(contact_points=points, force=True)
    assert "a-secret" not in text + grafana.text


def test_contact_point_of_a_user_with_the_same_name_remains(local: Grafana, contract: ContractServer, points):
    users = points[0] | {"uid": "users"}
    local.user.post(CONTACT_POINTS, users)

    local.deploy(contact_points=points, force=True)

    assert ["", "users"] == sorted(point["uid"] for point in contract.alerting.contact_points)
    assert "choose a different name" in local.text


def test_file_without_contact_points_or_with_an_unset_variable_is_rejected(tmp_path: Path):
    with pytest.raises(GrafanaError, match="HOOK_PASSWORD, which is not set"):
        read(tmp_path, environment={"HOOK_URL": "http://a"})
    with pytest.raises(GrafanaError, match="no file of contact points"):
        read(tmp_path, "receivers: []\n")
