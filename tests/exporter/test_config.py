"""Configuration: defaults that work, errors that name the key, the fault and the nearest right word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rankscope_contract.rules.nan import AnomalyNan
from rankscope_contract.rules.turbulence import AnomalyTurbulence
from rankscope_exporter import ConfigError, Monitor, MonitorConfig

TOML = """
every = 5
tensors = ["blocks.*"]
[[rules]]
rule_name = "AnomalyTurbulence"
args = {threshold = 0.5}
[serve]
ring_records = 512
"""


def test_a_toml_file_gives_the_same_as_python(tmp_path: Path) -> None:
    path = tmp_path / "monitor.toml"
    path.write_text(TOML)
    config = MonitorConfig.from_file(path)

    assert 5 == config.every
    assert ("blocks.*",) == config.tensors
    assert (AnomalyTurbulence(threshold=0.5),) == config.rules
    assert 512 == config.serve.ring_records


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"evry": 2}, ["evry", "Did you mean every?"]),
        ({"serve": {"lisen": "127.0.0.1:0"}}, ["serve.lisen", "Did you mean serve.listen?"]),
        ({"every": 0}, ["every", "from 1 on", "0"]),
        ({"every": True}, ["every"]),
        ({"quantities": ["gradient"]}, ["'gradient'", "Did you mean 'gradients'?"]),
        ({"quantities": "gradients"}, ["quantities", "['gradients']"]),
        ({"rules": [{"rule_name": "AnomalyNaN"}]}, ["AnomalyNaN", "Did you mean 'AnomalyNan'?"]),
        (
            {"rules": [{"rule_name": "AnomalyTurbulence", "args": {"treshold": 1}}]},
            ["treshold", "it takes", "threshold"],
        ),
        ({"rules": [{"rule_name": "AnomalyTurbulence", "args": {"threshold": -1}}]}, ["threshold", "above 0"]),
        ({"zero_below": float("nan")}, ["zero_below"]),
        ({"statistics": "fast"}, ["statistics", "'auto' or 'torch'"]),
        ({"steps": "some"}, ["steps", "'auto' or 'explicit'"]),
        ({"enabled": "no"}, ["enabled is true or false"]),
        ({"exit_wait_seconds": "5"}, ["exit_wait_seconds is a number"]),
        ({"quantities": None}, ["quantities is a list"]),
        ({"tensors": [1]}, ["tensors is a list of names"]),
        ({"run": 5}, ["run is a name"]),
        ({"rules": [5]}, ["rules holds tables"]),
        ({"serve": 5}, ["serve is a table"]),
        ({"serve": {"ring_records": "512"}}, ["ring_records is a whole number"]),
        ({"serve": {"listen": 5}}, ["listen is text"]),
    ],
)
def test_a_wrong_setting_is_named_with_what_would_be_right(settings: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        MonitorConfig.from_mapping(settings)

    assert [] == [word for word in words if word not in str(error.value)]


@pytest.mark.parametrize(
    "arguments", [{"total_steps": "9"}, {"total_steps": 1.5}, {"total_steps": 0}, {"first_step": "x"}]
)
def test_numbers_of_steps_are_whole(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="number of steps"):
        Monitor(**arguments)


def test_two_rules_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="'AnomalyNan' is used twice"):
        MonitorConfig(rules=(AnomalyNan(), AnomalyNan(threshold=3.0)))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")

    with pytest.raises(ConfigError, match=r"broken\.json"):
        MonitorConfig.from_file(broken)
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        Monitor(str(tmp_path / "absent.toml"))


def test_the_environment_goes_over_the_file() -> None:
    config = MonitorConfig(every=3).with_environment({"RANKSCOPE_DISABLED": "1", "RANKSCOPE_TOKEN": "secret"})

    assert not config.enabled
    assert "secret" == config.serve.token
    assert 3 == config.every


def test_the_token_is_not_in_what_the_rank_shows() -> None:
    assert "secret" not in repr(MonitorConfig().with_environment({"RANKSCOPE_TOKEN": "secret"}))
