"""Scrape targets of the configuration file, and of lists in the formats of Prometheus."""

import json
import re

import pytest

from rankscope_ingest.base.config import ExporterListSection, ExporterSection
from rankscope_ingest.base.config_file import load_config
from rankscope_ingest.base.errors import ConfigError
from rankscope_ingest.scrape.discovery import configured, listed

LIST = ExporterListSection(file="x.json", labels={"dc": "east", "job": "none"}, every_seconds=5)


def test_target_of_a_configured_exporter_is_its_name_or_address():
    url = "http://10.0.0.1:9100/metrics"
    sections = [{}, {"name": "node-1"}, {"labels": {"instance": "node-2", "dc": "east", "empty": ""}}]
    found = list(configured([ExporterSection(url=url, **section) for section in sections]))

    assert ["10.0.0.1:9100", "node-1", "node-2"] == [exporter.name for exporter in found]
    assert (("dc", "east"),) == found[2].labels


def test_list_in_the_format_of_prometheus_is_parsed():
    """Labels of the list take precedence over those of the section; labels for relabelling are dropped."""
    labels = {"job": "dcgm", "__scheme__": "https", "__metrics_path__": "/gpu", "__param_all": "a b", "__meta_x": "y"}
    groups = [{"targets": ["a:9400", "[::1]:9400"], "labels": labels}, {"targets": ["b"]}]
    found = listed(json.dumps(groups), LIST)

    assert [
        ("a:9400", "https://a:9400/gpu?all=a+b", (("dc", "east"), ("job", "dcgm"))),
        ("[::1]:9400", "https://[::1]:9400/gpu?all=a+b", (("dc", "east"), ("job", "dcgm"))),
        ("b", "http://b/metrics", (("dc", "east"), ("job", "none"))),
    ] == [(exporter.name, exporter.url, exporter.labels) for exporter in found]
    assert {(5.0, 10.0)} == {(exporter.every_seconds, exporter.timeout_seconds) for exporter in found}


def test_yaml_list_keeps_label_values_as_text():
    """Label values that look like numbers or booleans remain text, as in Prometheus."""
    text = "- targets: ['a:9400', b]\n  labels:\n    rack: 07\n    on: yes\n"
    found = listed(text, LIST, is_yaml=True)

    labels = (("dc", "east"), ("job", "none"), ("on", "yes"), ("rack", "07"))
    assert [("a:9400", labels), ("b", labels)] == [(exporter.name, exporter.labels) for exporter in found]


@pytest.mark.parametrize("text", ["", "- [", "a: b", "- targets: x", "- !!python/object:os.system {}", "\t- a"])
def test_invalid_yaml_list_is_rejected_with_the_reason(text):
    with pytest.raises(ConfigError, match=r'not valid YAML|not a list|has no "targets"'):
        listed(text, LIST, is_yaml=True)


NO_LISTS = [
    *("", "{}", "[1]", '[{"targets": "a"}]', '[{"targets": [1]}]', '[{"targets": ["a/b"]}]', '[{"targets": ["u@h"]}]'),
    *('[{"targets": ["a:b"]}]', '[{"targets": [""]}]', '[{"targets": [], "labels": {"a b": "x"}}]'),
    *('[{"targets": [], "labels": {"a": 1}}]', '[{"targets": ["a"], "labels": {"__scheme__": "file"}}]', "[" * 100_000),
]


@pytest.mark.parametrize("text", NO_LISTS, ids=lambda text: text[:30])
def test_invalid_json_list_is_rejected_with_the_reason(text):
    with pytest.raises(ConfigError, match=r"not valid|not a list|an entry|invalid labels|not host:port"):
        listed(text, LIST)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"exporters": [{"url": "localhost:9100"}]}, "such as http://127.0.0.1:9100/metrics"),
        ({"exporters": [{"url": "http://a:port/"}]}, "such as http://127.0.0.1:9100/metrics"),
        ({"exporters": [{"url": "http://a", "labels": {"a-b": "x"}}]}, "labels"),
        ({"exporter_lists": [{}]}, "set either file"),
        ({"exporter_lists": [{"file": "a", "url": "http://b"}]}, "set either file"),
        ({"exporter_lists": [{"fil": "a"}]}, "did you mean file"),
    ],
)
def test_error_names_the_wrong_setting(changes, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)):
        load_config(None, {"store.path": "x"} | changes)


def test_paths_of_list_files_are_relative_to_the_configuration(tmp_path):
    (tmp_path / "service.toml").write_text('[store]\npath = "s"\n[[exporter_lists]]\nfile = "targets/*.json"\n')
    config = load_config(tmp_path / "service.toml")

    assert str(tmp_path / "targets/*.json") == config.exporter_lists[0].file
