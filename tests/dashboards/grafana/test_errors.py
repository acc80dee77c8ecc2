"""Errors of a deployment: the message, the requests that were sent, and the next call."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.dashboards.grafana.conftest import PROMETHEUS, Grafana
from tests.dashboards.grafana.contract_server import ContractServer
from tests.dashboards.grafana.test_deployment import RULES_FOLDER, users_rule

from rankscope_dashboards.grafana.server import GrafanaError, Server, UnauthorizedError, UnreachableError

HEALTH_AND_ORGANISATION = ["GET /api/health", "GET /api/org"]


@pytest.mark.parametrize(
    ("credentials", "text"),
    [("glsa_wrong", "invalid API key"), ("eyJr_wrong", "invalid API key"), (("admin", "wrong"), "invalid username")],
)
def test_wrong_credentials_are_sent_once(local: Grafana, contract: ContractServer, credentials, text: str):
    local.credentials = credentials

    with pytest.raises(UnauthorizedError, match=text):
        local.deploy()

    assert (HEALTH_AND_ORGANISATION, ["/api/org"]) == (contract.requests, contract.authenticated)


def test_locked_user_is_not_tried_again(local: Grafana, contract: ContractServer):
    contract.wrong_passwords, local.credentials = 5, ("admin", "admin")

    with pytest.raises(UnauthorizedError, match="lock a user for five minutes"):
        local.deploy()

    assert HEALTH_AND_ORGANISATION == contract.requests


def test_old_release_is_rejected_before_credentials_are_sent(local: Grafana, contract: ContractServer):
    contract.version = "9.3.6"

    with pytest.raises(GrafanaError, match=r"Grafana 9\.3\.6 .* is too old: update it to 9\.4"):
        local.deploy()

    assert (HEALTH_AND_ORGANISATION[:1], []) == (contract.requests, contract.authenticated)


@pytest.mark.parametrize(
    ("role", "organisation", "urls", "text"),
    [
        ("editor", None, {"rankscope-live": PROMETHEUS}, r"Permissions needed: alert\.provisioning:read"),
        ("admin", 2, {"rankscope-live": PROMETHEUS}, "belong to organisation 1, not to 2"),
        ("admin", None, {}, "--prometheus-url"),
    ],
)
def test_error_is_named_before_any_write(local: Grafana, contract: ContractServer, role, organisation, urls, text):
    server = Server(local.url, f"glsa_{role}", organisation=organisation)

    with pytest.raises(GrafanaError, match=text):
        local.deploy(server=server, urls=urls)

    assert [] == contract.writes


@pytest.mark.parametrize("permission", ["folders:create", "datasources:create", "alert.provisioning:write"])
def test_missing_write_permission_is_named_and_a_call_completes(
    local: Grafana, contract: ContractServer, permission: str
):
    contract.denied.add(permission)
    with pytest.raises(GrafanaError, match=f"Permissions needed: {permission}"):
        local.deploy()
    contract.denied.clear()

    local.deploy()

    assert 0 == local.deploy()


def test_server_that_stops_is_reported_and_a_call_completes(local: Grafana, contract: ContractServer):
    contract.fail_after = 30
    with pytest.raises(UnreachableError, match="no connection to Grafana"):
        local.deploy()
    contract.fail_after = None

    local.deploy()

    assert 0 == local.deploy()


@pytest.mark.parametrize(
    ("status", "body"),
    [(404, "404 page not found"), (401, "{}"), (200, "<html>Sign in</html>"), (200, '{"version": "9.5.1"}')],
)
def test_other_program_at_the_address_is_named_so(local: Grafana, status: int, body: str):
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, args=(0.01,), daemon=True).start()
        local.url = f"http://127.0.0.1:{other.server_port}"

        with pytest.raises(GrafanaError, match=f"^{local.url} answers, but it is not Grafana"):
            local.deploy()

        other.shutdown()


def test_refused_connection_and_server_that_hangs_are_reported(local: Grafana):
    with pytest.raises(UnreachableError, match=r"no connection to Grafana at http://127\.0\.0\.1:9"):
        local.deploy(server=Server("http://127.0.0.1:9", "glsa_admin"))

    with socket.create_server(("127.0.0.1", 0)) as hanging:
        server = Server(f"http://127.0.0.1:{hanging.getsockname()[1]}", "glsa_admin", timeout_seconds=0.1)

        with pytest.raises(UnreachableError, match=r"timed out after 0\.1 s"):
            local.deploy(server=server)


def clash_of_folders(grafana: Grafana) -> None:
    grafana.user.post("/folders", {"uid": "other", "title": grafana.content.rules_folder.title})


def clash_of_sources(grafana: Grafana) -> None:
    source = {"name": "rankscope-live", "uid": "other", "type": "prometheus", "access": "proxy", "url": "http://a"}
    grafana.user.post("/datasources", source)


def clash_of_boards(grafana: Grafana) -> None:
    grafana.user.post("/folders", {"uid": "rankscope", "title": "Training"})
    grafana.save_board({"uid": "other", "title": grafana.content.boards[0]["title"], "panels": []})


def clash_of_rules(grafana: Grafana) -> None:
    grafana.user.post("/folders", {"uid": RULES_FOLDER, "title": "Training alerts"})
    grafana.save_rule(users_rule(RULES_FOLDER, grafana.content.groups[0].rules[0]["title"]))


CLASHES = {
    "/folders/other": clash_of_folders,
    "/datasources/uid/other": clash_of_sources,
    "/dashboards/uid/other": clash_of_boards,
    "/v1/provisioning/alert-rules/a-users-rule": clash_of_rules,
}


@pytest.mark.parametrize("path", CLASHES)
def test_name_clash_is_found_before_any_write(local: Grafana, contract: ContractServer, path: str):
    CLASHES[path](local)
    contract.requests.clear()

    for dry_run in (True, False):
        with pytest.raises(GrafanaError, match=f"{path.rpartition('/')[2]} has this name: rename it"):
            local.deploy(force=True, dry_run=dry_run)

    assert [] == contract.writes
    local.user.delete(path)
    local.deploy()
    assert 0 == local.deploy()


def test_rules_of_provisioning_files_are_named_before_any_write(local: Grafana, contract: ContractServer):
    contract.content.add_folder("random", "Training alerts")
    rules = [rule for group in local.content.groups for rule in group.rules]
    for rule in rules:
        contract.alerting.add_rule(rule | {"folderUID": "random"}, "file")

    for dry_run in (True, False):
        with pytest.raises(
            GrafanaError, match=f"^provisioning files own these {len(rules)} rules: {rules[0]['title']}"
        ):
            local.deploy(dry_run=dry_run)

    assert ([], []) == (contract.writes, local.lines)


def test_rules_of_a_user_in_our_group_keep_their_interval(local: Grafana):
    clash_of_rules(local)
    group = local.content.groups[0].name
    local.save_rule(users_rule(RULES_FOLDER) | {"ruleGroup": group})

    local.deploy()

    path = f"/v1/provisioning/folder/{RULES_FOLDER}/rule-groups/{group}"
    assert 60 == local.user.get(path)["interval"]
    assert "it has rules of others" in local.text


@pytest.mark.parametrize("url", ["grafana:3000", "ftp://grafana", "http://admin:secret@grafana"])
def test_wrong_address_is_rejected(url: str):
    with pytest.raises(GrafanaError, match="address") as error:
        Server(url, "glsa_admin")

    assert "secret" not in str(error.value)


def test_path_of_the_address_is_part_of_each_request(contract: ContractServer):
    with pytest.raises(GrafanaError, match="check the address, and its path"):
        Server(f"{contract.url}/grafana/", "glsa_admin").check()

    assert ["GET /grafana/api/health"] == contract.requests
