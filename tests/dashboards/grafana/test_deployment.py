"""Deployment to a Grafana server, or to that at RANKSCOPE_GRAFANA_URL, its content, commands, errors and removal."""

import copy
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.dashboards.grafana.conftest import PROMETHEUS, Grafana, complete
from tests.dashboards.grafana.contract_server import ALERTS_FOLDER, ContractServer, recorded_server
from tests.ingest.notify.test_deliveries import Web
from tests.programs import run_command

from rankscope_dashboards.grafana.contact_points import contact_uid
from rankscope_dashboards.grafana.content import Content, Folder, read_content
from rankscope_dashboards.grafana.server import GrafanaError, Server, UnauthorizedError, UnreachableError
from rankscope_dashboards.provisioning.tree import PACKAGED_TREE

NEVER = {"refId": "A", "type": "math", "expression": "0"}
RULES_FOLDER = "rankscope-alerts"


class StoppingServer(Server):
    """A server that does not answer after a number of requests."""

    def _ask(self, method: str, path: str, **options: Any) -> Any:
        self.remaining -= 1
        if self.remaining < 0:
            raise UnreachableError(f"{method} {path} failed")
        return super()._ask(method, path, **options)


def users_rule(folder: str, title: str = "A rule of a user") -> dict[str, Any]:
    query = {"refId": "A", "datasourceUid": "__expr__", "relativeTimeRange": {"from": 0, "to": 0}, "model": NEVER}
    states = {"condition": "A", "for": "0s", "noDataState": "OK", "execErrState": "OK"}
    named = {"uid": "a-users-rule", "title": title, "orgID": 1, "folderUID": folder, "ruleGroup": "users"}
    return named | states | {"data": [query]}


def edit_board(grafana: Grafana) -> None:
    grafana.save_board(grafana.board()["dashboard"] | {"description": "edited"})


def edit_rule(grafana: Grafana) -> None:
    uid = grafana.content.groups[0].rules[0]["uid"]
    grafana.save_rule(grafana.rules()[uid] | {"for": "7m"})


def edit_source(grafana: Grafana) -> None:
    path = "/datasources/uid/rankscope-live"
    grafana.user.put(path, grafana.user.get(path) | {"url": "http://127.0.0.1:7"})


EDITS = {"board": edit_board, "rule": edit_rule, "data source": edit_source}


def changed_release(content: Content) -> Content:
    """Return a later release: other board, other rule, other interval, and one rule less."""
    board = content.boards[0] | {"description": "of a later release"}
    first, second = content.groups
    rules = ({**first.rules[0], "for": "3m"},)
    return replace(content, boards=(board,), groups=(replace(first, rules=rules, interval_seconds=10), second))


def test_complete_deployment_creates_editable_objects(grafana: Grafana):
    content = complete()

    grafana.deploy(content)

    uids = {rule["uid"] for group in content.groups for rule in group.rules}
    rules = [grafana.user.get(f"/v1/provisioning/alert-rules/{uid}") for uid in uids]
    path = f"/v1/provisioning/folder/{RULES_FOLDER}/rule-groups"
    intervals = [grafana.user.get(f"{path}/{group.name}")["interval"] for group in content.groups]
    boards = [grafana.user.get(f"/dashboards/uid/{board['uid']}") for board in content.boards]
    assert {""} == {rule.get("provenance", "") for rule in rules}
    assert [group.interval_seconds for group in content.groups] == intervals
    assert {content.boards_folder.uid} == {board["meta"]["folderUid"] for board in boards}


def test_second_deployment_writes_nothing(local: Grafana, contract: ContractServer):
    local.deploy()
    contract.requests.clear()

    assert (0, []) == (local.deploy(), contract.writes)


def test_dry_run_prints_a_diff_and_writes_nothing(grafana: Grafana):
    grafana.deploy()
    edit_board(grafana)
    before = grafana.board()

    grafana.deploy(changed_release(grafana.content), dry_run=True)

    rule = [line.strip() for line in grafana.lines if '"for"' in line]
    assert ['- "for": "0s",', '+ "for": "3m",'] == [" ".join(line.split()) for line in rule]
    assert before == grafana.board()


@pytest.mark.parametrize("kind", EDITS)
def test_changed_object_is_reported_and_kept_without_force(grafana: Grafana, kind: str):
    grafana.deploy()
    EDITS[kind](grafana)

    assert (0, True) == (grafana.deploy(), f"keep      {kind}" in grafana.text)
    assert (1, 0) == (grafana.deploy(force=True), grafana.deploy())
    EDITS[kind](grafana)
    assert any(line.startswith(f"keep      {kind}") for line in grafana.undeploy())
    assert [] == grafana.undeploy(force=True)


def test_moved_board_is_reported(grafana: Grafana):
    grafana.deploy()
    grafana.save_board(grafana.board()["dashboard"], folder="")
    grafana.deploy()

    assert "--force moves it back" in grafana.text


def test_boards_that_the_server_migrates_are_not_changed_boards(local: Grafana, contract: ContractServer):
    contract.content.migrates_boards = True
    local.deploy()

    unchanged = local.deploy(), local.text
    edit_board(local)
    local.deploy()

    assert (0, False) == (unchanged[0], "keep  " in unchanged[1])
    assert "keep      board" in local.text


def test_release_that_returns_later_keys_has_no_changed_rules(local: Grafana, contract: ContractServer):
    local.deploy()
    contract.alerting.keeps_later_keys, contract.version = True, "11.0.0"
    local.deploy()

    assert (0, False) == (local.deploy(), "keep  " in local.text)
    assert {"KeepLast"} == {rule["execErrState"] for rule in local.rules().values()}


def test_later_release_updates_unchanged_objects_and_deletes_dropped_ones(grafana: Grafana):
    grafana.deploy()
    release = changed_release(grafana.content)

    grafana.deploy(release)

    dropped = grafana.content.groups[0].rules[1]["uid"]
    rule = grafana.user.get(f"/v1/provisioning/alert-rules/{release.groups[0].rules[0]['uid']}")
    assert ("3m", "") == (rule["for"], rule.get("provenance", ""))
    assert "of a later release" == grafana.board()["dashboard"]["description"]
    assert dropped not in grafana.rules()
    assert 0 == grafana.deploy(release)
    grafana.deploy(replace(release, boards=()))
    assert grafana.user.find(f"/dashboards/uid/{release.boards[0]['uid']}") is None


def test_later_release_keeps_a_changed_rule_that_it_drops(grafana: Grafana):
    grafana.deploy()
    dropped = grafana.content.groups[0].rules[1]["uid"]
    grafana.save_rule(grafana.rules()[dropped] | {"for": "9m"})

    grafana.deploy(changed_release(grafana.content))

    assert dropped in grafana.rules()
    assert "no longer shipped, but it was changed" in grafana.text


def test_every_interrupted_deployment_is_completed(grafana: Grafana):
    expected = _state_after(grafana, grafana.deploy)

    for requests in range(9, 54, 7):
        grafana.undeploy(force=True)
        stopping = StoppingServer(grafana.url, grafana.credentials)
        stopping.remaining = requests
        with pytest.raises(UnreachableError):
            grafana.deploy(server=stopping)
        assert expected == _state_after(grafana, grafana.deploy), requests


def _state_after(grafana: Grafana, call: Callable[[], int]) -> Any:
    call()
    assert 0 == grafana.deploy()
    rules = grafana.rules().values()
    board = grafana.board()
    return (
        sorted((rule["uid"], rule["title"], rule["for"], rule.get("provenance", "")) for rule in rules),
        board["dashboard"]["panels"],
        grafana.user.get("/datasources/uid/rankscope-live")["url"],
    )


def test_undeploy_removes_only_deployed_objects(grafana: Grafana):
    grafana.user.post("/folders", {"uid": "rankscope-test-team", "title": "Rankscope test team"})
    grafana.save_rule(users_rule("rankscope-test-team"))
    grafana.deploy()

    remaining = grafana.undeploy()

    ours = [rule["uid"] for group in grafana.content.groups for rule in group.rules]
    assert [] == remaining
    assert not grafana.rules().keys() & set(ours)
    assert [None] * 3 == [
        grafana.user.find(path)
        for path in ("/folders/rankscope", f"/folders/{RULES_FOLDER}", "/datasources/uid/rankscope-live")
    ]
    assert "a-users-rule" in grafana.rules()
    grafana.user.delete("/v1/provisioning/alert-rules/a-users-rule")
    grafana.user.delete("/folders/rankscope-test-team")


def test_undeploy_keeps_a_folder_that_holds_anything_else(grafana: Grafana):
    grafana.deploy()
    grafana.save_rule(users_rule(RULES_FOLDER))
    grafana.save_board({"uid": "a-users-board", "title": "A board of a user", "panels": []})

    remaining = grafana.undeploy()

    assert ["a-users-board", "A rule of a user"] == [
        line.rsplit(" ", 1)[-1] if "board" in line else line[-16:] for line in remaining
    ]
    assert {"a-users-rule"} == grafana.rules().keys() & {"a-users-rule"}
    grafana.user.delete("/v1/provisioning/alert-rules/a-users-rule")
    grafana.user.delete("/dashboards/uid/a-users-board")


def test_undeploy_keeps_a_data_source_that_a_remaining_board_queries(grafana: Grafana):
    grafana.deploy()
    target = {"datasource": {"type": "prometheus", "uid": "rankscope-live"}, "expr": "up"}
    panel = {"type": "timeseries", "title": "Up", "datasource": target["datasource"], "targets": [target]}
    grafana.save_board({"uid": "a-users-board", "title": "A board of a user", "panels": [panel]}, folder="")

    remaining = grafana.undeploy()

    assert ["keep      data source rankscope-live: still used by board a-users-board"] == remaining
    assert grafana.user.find("/datasources/uid/rankscope-history") is None
    grafana.user.delete("/dashboards/uid/a-users-board")


def test_dry_run_of_undeploy_lists_all_that_it_deletes(grafana: Grafana):
    point = {"uid": contact_uid("hook", 0), "name": "hook", "type": "webhook", "disableResolveMessage": False}
    point["settings"] = {"url": "http://127.0.0.1:9"}
    grafana.deploy(contact_points=[point], receiver="hook", add_route=True)
    grafana.undeploy(dry_run=True)
    listed = [line.partition(":")[0] for line in grafana.lines]

    grafana.undeploy()

    kinds = {"route", "rule", "contact", "mute", "board", "data", "folder"}
    if not grafana.user.check().startswith("9."):
        kinds.remove("route")
    assert (kinds, {"delete"}) == ({line.split()[1] for line in listed}, {line.split()[0] for line in listed})
    assert listed == [line.partition(":")[0] for line in grafana.lines]


def test_objects_of_provisioning_files_remain(tmp_path: Path):
    with recorded_server() as server:
        content = complete()
        boards = tuple(board for board in content.boards if board["uid"] == "rankscope-run-overview")
        folder, urls = Folder(uid=ALERTS_FOLDER, title="Training alerts"), {"rankscope-live": "http://other:9090"}
        before = copy.deepcopy(server.content.boards["rankscope-run-overview"].document)
        local = Grafana(url=server.url, credentials="glsa_admin", folder=tmp_path, content=content)

        local.deploy(replace(content, groups=(), boards=boards, rules_folder=folder), force=True, urls=urls)

        assert before == server.content.boards["rankscope-run-overview"].document

    assert 2 == local.text.count("a provisioning file owns it")


RULE_KEYS = {
    *("uid", "title", "orgID", "folderUID", "ruleGroup", "condition", "for", "noDataState", "execErrState"),
    *("labels", "annotations", "data", "keep_firing_for", "missingSeriesEvalsToResolve", "isPaused"),
}


def token_file(folder: Path) -> Path:
    (folder / "token").write_text("glsa_admin\n", encoding="utf-8")
    return folder / "token"


def test_rules_have_only_keys_of_the_api_and_link_to_a_panel():
    rules = [rule for group in complete().groups for rule in group.rules]
    keys = {key for rule in rules for key in rule}

    assert keys <= RULE_KEYS
    assert "keep_firing_for" in keys
    assert all({"__dashboardUid__", "__panelId__"} <= rule["annotations"].keys() for rule in rules)


def test_doubled_dollar_signs_of_a_file_are_single(tmp_path: Path):
    tree = tmp_path / "tree"
    shutil.copytree(PACKAGED_TREE, tree)
    file = tree / "alerting" / "rules.yaml"
    file.write_text(file.read_text().replace("severity: critical", "severity: costs $$5", 1))

    assert "costs $5" == read_content(tree).groups[0].rules[0]["labels"]["severity"]


def test_commands_deploy_and_remove_everything(contract: ContractServer, tmp_path: Path):
    server = ["--url", contract.url, "--token-file", str(token_file(tmp_path))]

    deployed = run_command("dashboards", "deploy", *server, "--prometheus-url", PROMETHEUS)
    removed = run_command("dashboards", "undeploy", *server)

    assert (0, 0) == (deployed.returncode, removed.returncode)
    assert {} == contract.alerting.rules | contract.content.boards | contract.content.folders


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--add-route"], "add --receiver NAME"), (["--token-file", "absent"], "cannot read the token file absent")],
)
def test_wrong_options_end_with_one_line(tmp_path: Path, arguments: list[str], text: str):
    server = ["--url", "http://127.0.0.1:9", "--token-file", str(token_file(tmp_path))]

    result = run_command("dashboards", "deploy", *server, *arguments)

    assert 0 != result.returncode
    assert text in result.stderr
    assert 1 == len(result.stderr.strip().splitlines())


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
    other = Web(status=status, text=body.encode())
    with other.start() as server:
        local.url = f"http://127.0.0.1:{other.port}"

        with pytest.raises(GrafanaError, match=f"^{local.url} answers, but it is not Grafana"):
            local.deploy()

        server.shutdown()


def test_refused_connection_and_server_that_hangs_are_reported(local: Grafana):
    with pytest.raises(UnreachableError, match=r"no connection to Grafana at http://127\.0\.0\.1:9"):
        local.deploy(server=Server("http://127.0.0.1:9", "glsa_admin"))

    with socket.create_server(("127.0.0.1", 0)) as hanging:
        server = Server(f"http://127.0.0.1:{hanging.getsockname()[1]}", "glsa_admin", timeout_seconds=0.1)

        with pytest.raises(UnreachableError, match=r"timed out after 0\.1 s"):
            local.deploy(server=server)


OTHER_SOURCE = {"name": "rankscope-live", "uid": "other", "type": "prometheus", "access": "proxy", "url": "http://a"}


def clash_of_boards(grafana: Grafana) -> None:
    grafana.user.post("/folders", {"uid": "rankscope", "title": "Training"})
    grafana.save_board({"uid": "other", "title": grafana.content.boards[0]["title"], "panels": []})


def clash_of_rules(grafana: Grafana) -> None:
    grafana.user.post("/folders", {"uid": RULES_FOLDER, "title": "Training alerts"})
    grafana.save_rule(users_rule(RULES_FOLDER, grafana.content.groups[0].rules[0]["title"]))


CLASHES = {
    "/folders/other": lambda to: to.user.post("/folders", {"uid": "other", "title": to.content.rules_folder.title}),
    "/datasources/uid/other": lambda grafana: grafana.user.post("/datasources", OTHER_SOURCE),
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
