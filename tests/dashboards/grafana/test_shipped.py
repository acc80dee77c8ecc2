"""The content of a deployment, read from the committed provisioning files, and the command line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.dashboards.grafana.conftest import PROMETHEUS, complete
from tests.dashboards.grafana.contract_server import ContractServer
from tests.programs import run_command

from rankscope_dashboards.grafana.shipped import shipped
from rankscope_dashboards.provisioning.tree import SHIPPED

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
    shutil.copytree(SHIPPED, tree)
    file = tree / "alerting" / "rules.yaml"
    file.write_text(file.read_text().replace("severity: critical", "severity: costs $$5", 1))

    assert "costs $5" == shipped(tree).groups[0].rules[0]["labels"]["severity"]


def test_panels_link_to_the_pages_address():
    content = shipped(pages_url="http://127.0.0.1:9470/")

    (overview,) = (one for one in content.boards if one["uid"] == "rankscope-run-overview")
    (pages,) = (variable for variable in overview["templating"]["list"] if variable["name"] == "pages")
    assert "http://127.0.0.1:9470" == pages["query"]
    assert all(panel["links"] for panel in overview["panels"] if panel["type"] != "row")


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
