"""The content of a deployment, read from the committed provisioning files, and the command line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.dashboards.grafana.conftest import PROMETHEUS, complete
from tests.dashboards.grafana.contract_server import ContractServer
from tests.programs import run_command

from rankscope_dashboards.grafana.shipped import Shipped, shipped
from rankscope_dashboards.provisioning.tree import SHIPPED

RULE_KEYS = {
    *("uid", "title", "orgID", "folderUID", "ruleGroup", "condition", "for", "noDataState", "execErrState"),
    *("labels", "annotations", "data", "keep_firing_for", "missingSeriesEvalsToResolve", "isPaused"),
}


def with_file(tmp_path: Path, name: str, old: str, new: str) -> Shipped:
    """Return the content of a tree in which the text of one file is replaced."""
    tree = tmp_path / "tree"
    shutil.copytree(SHIPPED, tree)
    text = (tree / name).read_text(encoding="utf-8")
    assert old in text
    (tree / name).write_text(text.replace(old, new, 1), encoding="utf-8")
    return shipped(tree)


def test_rules_have_only_keys_of_the_api():
    keys = {key for group in complete().groups for rule in group.rules for key in rule}

    assert keys <= RULE_KEYS
    assert "keep_firing_for" in keys


def test_rules_link_to_a_panel_by_annotations():
    annotations = [rule["annotations"] for group in complete().groups for rule in group.rules]

    assert all({"__dashboardUid__", "__panelId__"} <= one.keys() for one in annotations)


def test_doubled_dollar_signs_of_a_file_are_single(tmp_path: Path):
    content = with_file(tmp_path, "alerting/rules.yaml", "severity: critical", "severity: costs $$5")

    assert "costs $5" == content.groups[0].rules[0]["labels"]["severity"]


def test_panels_link_to_the_pages_address():
    content = shipped(pages_url="http://127.0.0.1:9470/")

    (overview,) = (one for one in content.boards if one["uid"] == "rankscope-run-overview")
    (pages,) = (variable for variable in overview["templating"]["list"] if variable["name"] == "pages")
    assert "http://127.0.0.1:9470" == pages["query"]
    assert all(panel["links"] for panel in overview["panels"] if panel["type"] != "row")


def test_commands_deploy_and_remove_everything(contract: ContractServer, tmp_path: Path):
    token = tmp_path / "token"
    token.write_text("glsa_admin\n", encoding="utf-8")
    server = ["--url", contract.url, "--token-file", str(token)]

    deployed = run_command("dashboards", "deploy", *server, "--prometheus-url", PROMETHEUS)
    removed = run_command("dashboards", "undeploy", *server)

    assert (0, 0) == (deployed.returncode, removed.returncode)
    assert {} == contract.alerting.rules | contract.content.boards | contract.content.folders


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--add-route"], "add --receiver NAME"),
        (["--token-file", "absent"], "cannot read the token file absent"),
    ],
)
def test_wrong_options_end_with_one_line(tmp_path: Path, arguments: list[str], text: str):
    token = tmp_path / "token"
    token.write_text("glsa_admin\n", encoding="utf-8")

    result = run_command("dashboards", "deploy", "--url", "http://127.0.0.1:9", "--token-file", str(token), *arguments)

    assert 0 != result.returncode
    assert text in result.stderr
    assert 1 == len(result.stderr.strip().splitlines())
