"""The tree of configuration files is written with real addresses, and never overwrites what a user has changed."""

from __future__ import annotations

import json

import pytest
import yaml

from rankscope_dashboards.generate import PROVISIONING, generated_files
from rankscope_dashboards.provisioning import tree
from rankscope_dashboards.provisioning.tree import MANIFEST, TreeError, TreeSettings, tree_files, write_tree

BOARDS = tree.packaged_boards()
FILES = tree_files(BOARDS)


def written(folder):
    found = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}
    return {name: text for name, text in found.items() if name != MANIFEST}


def test_tree_has_the_files_that_are_committed():
    committed = {path.relative_to(PROVISIONING).as_posix() for path in PROVISIONING.rglob("*") if path.is_file()}

    assert committed - {"dashboards/.lint"} == FILES.keys()
    assert {name: text.partition("\n")[2] for name, text in FILES.items()} == {
        name: text.partition("\n")[2] for name, text in generated_files().items()
    }


def test_addresses_and_paths_are_filled_in():
    settings = TreeSettings(
        prometheus_url="http://prometheus.example:9090",
        history_url="http://history.example:9090",
        runbooks_url="https://wiki.example/rankscope",
        boards_path="/srv/grafana/boards",
    )
    files, same = tree_files(BOARDS, settings), tree_files(BOARDS, TreeSettings(prometheus_url="http://p.example"))
    sources, own = (yaml.safe_load(one["datasources/rankscope.yaml"])["datasources"] for one in (files, same))
    (provider,) = yaml.safe_load(files["dashboards/rankscope.yaml"])["providers"]

    assert ["http://prometheus.example:9090", "http://history.example:9090"] == [source["url"] for source in sources]
    assert ["http://p.example"] * 2 == [source["url"] for source in own], "history without an address of its own"
    assert "/srv/grafana/boards" == provider["options"]["path"]
    for name in ("alerting/rules.yaml", "prometheus/rankscope.rules.yml"):
        assert "runbook_url: https://wiki.example/rankscope#servicedown" in files[name]
        assert "runbook_url" not in FILES[name]


def test_address_of_the_pages_is_the_value_of_a_variable_of_the_boards():
    def address(**settings):
        text = tree_files(BOARDS, TreeSettings(**settings))["dashboards/rankscope/run_overview.json"]
        (variable,) = (one for one in json.loads(text)["templating"]["list"] if one["name"] == "pages")
        return variable["query"], variable.get("current", {}).get("value", "")

    assert ("", "") == address()
    assert ("https://pages.example", "https://pages.example") == address(pages_url="https://pages.example")


def test_address_that_grafana_would_not_use_is_rejected():
    for name, url, message in (
        ("prometheus_url", "", "prometheus-url is ''"),
        ("history_url", "history.example:9090", "history-url is 'history.example:9090': write an address such as"),
        ("pages_url", "ftp://pages", "pages-url is"),
        ("runbooks_url", "docs/runbooks.md", "runbooks-url is"),
        ("prometheus_url", "http://user:$PASSWORD@host", "write it as %24"),
    ):
        with pytest.raises(ValueError, match=message):
            TreeSettings(**{name: url})


def test_folder_of_the_user_is_refused_without_force(tmp_path):
    (tmp_path / "mine.yaml").write_text("mine")
    with pytest.raises(TreeError, match="is not empty: name another folder, or add --force"):
        write_tree(tmp_path, {"one.yaml": "1"})

    assert {"mine.yaml": "mine"} == written(tmp_path)
    write_tree(tmp_path, {"one.yaml": "1"}, force=True)
    assert {"mine.yaml": "mine", "one.yaml": "1"} == written(tmp_path)


def test_file_that_the_user_changed_is_refused_without_force(tmp_path):
    write_tree(tmp_path / "tree", {"one.yaml": "1", "two.yaml": "1"})
    (tmp_path / "tree" / "one.yaml").write_text("mine")
    with pytest.raises(TreeError, match=r"were changed: one\.yaml; add --force"):
        write_tree(tmp_path / "tree", {"one.yaml": "2", "two.yaml": "2"})

    assert {"one.yaml": "mine", "two.yaml": "1"} == written(tmp_path / "tree")
    write_tree(tmp_path / "tree", {"one.yaml": "2", "two.yaml": "2"}, force=True)
    assert {"one.yaml": "2", "two.yaml": "2"} == written(tmp_path / "tree")


def test_second_call_updates_the_files_but_none_of_the_user(tmp_path):
    folder = tmp_path / "tree"
    write_tree(folder, {"a/one.yaml": "1", "dropped.yaml": "1", "old.json": "{}"})
    for name in ("new.yaml", "dropped.yaml"):
        (folder / name).write_text("mine")

    with pytest.raises(TreeError, match=r"were changed: new\.yaml"):
        write_tree(folder, {"a/one.yaml": "2", "new.yaml": "2"})
    write_tree(folder, {"a/one.yaml": "2", "b/new.yaml": "3"})
    assert {"a/one.yaml": "2", "b/new.yaml": "3", "dropped.yaml": "mine", "new.yaml": "mine"} == written(folder)


def test_call_after_an_interrupted_one_completes_the_files(tmp_path):
    folder = tmp_path / "tree"
    write_tree(folder, {"one.yaml": "1", "two.yaml": "1"})
    (folder / "two.yaml").unlink()
    (folder / "two.yaml").mkdir()  # writing fails at this file
    with pytest.raises(IsADirectoryError):
        write_tree(folder, {"one.yaml": "2", "two.yaml": "2", "three.yaml": "2"})
    (folder / "two.yaml").rmdir()
    (folder / "two.yaml").write_text("1")
    write_tree(folder, {"one.yaml": "3", "two.yaml": "3", "three.yaml": "3"})

    assert {"one.yaml": "3", "two.yaml": "3", "three.yaml": "3"} == written(folder)


@pytest.mark.parametrize("manifest", ["", "[]", "{", '{"../outside.yaml": "x"}'])
def test_damaged_manifest_counts_as_a_folder_of_the_user(tmp_path, manifest):
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / MANIFEST).write_text(manifest)
    (tmp_path / "outside.yaml").write_text("mine")

    with pytest.raises(TreeError, match="is not empty"):
        write_tree(folder, {"one.yaml": "1"})
    write_tree(folder, {"one.yaml": "1"}, force=True)
    assert "mine" == (tmp_path / "outside.yaml").read_text()


def test_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")

    with pytest.raises(TreeError, match="is not a folder"):
        write_tree(tmp_path / "file", {"one.yaml": "1"})
