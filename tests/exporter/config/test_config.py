"""Tests of the configuration: working defaults, and errors that name the key, the fault and the nearest valid word."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from rankscope_contract.rules.turbulence import AnomalyTurbulence
from rankscope_exporter import ConfigError, Monitor, MonitorConfig
from rankscope_exporter.compat.msprobe import TrainerMon
from rankscope_exporter.sampling.sampling_config import sampling_config_from
from rankscope_exporter.serving.config import ServeConfig

TURBULENCE = {"rule_name": "AnomalyTurbulence"}
TOML = """
every = 5
tensors = ["blocks.*"]
[[rules]]
rule_name = "AnomalyTurbulence"
args = {threshold = 0.5}
[serve]
ring_records = 512
"""


def test_toml_file_gives_the_same_configuration_as_python(tmp_path: Path) -> None:
    path = tmp_path / "monitor.toml"
    path.write_text(TOML)
    wanted = {"every": 5, "tensors": ("blocks.*",), "rules": (AnomalyTurbulence(threshold=0.5),)}

    assert MonitorConfig(**wanted, serve=ServeConfig(ring_records=512)) == MonitorConfig.from_file(path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"evry": 2}, ["evry", "Did you mean every?"]),
        ({"serve": {"lisen": "127.0.0.1:0"}}, ["serve.lisen", "Did you mean serve.listen?"]),
        ({"every": 0}, ["every", "at least 1", "0"]),
        ({"every": True}, ["every"]),
        ({"quantities": ["gradient"]}, ["'gradient'", "Did you mean 'gradients'?"]),
        ({"quantities": "gradients"}, ["quantities", "['gradients']"]),
        ({"rules": [{"rule_name": "AnomalyNaN"}]}, ["AnomalyNaN", "Did you mean 'AnomalyNan'?"]),
        ({"rules": [{**TURBULENCE, "args": {"treshold": 1}}]}, ["treshold", "arguments of this rule", "threshold"]),
        ({"rules": [{**TURBULENCE, "args": {"threshold": -1}}]}, ["threshold", "above 0"]),
        ({"zero_below": float("nan")}, ["zero_below"]),
        ({"statistics": "fast"}, ["statistics", "'auto' or 'torch'"]),
        ({"steps": "some"}, ["steps", "'auto' or 'explicit'"]),
        ({"enabled": "no"}, ["enabled must be true or false"]),
        ({"exit_wait_seconds": "5"}, ["exit_wait_seconds must be a number"]),
        ({"quantities": None}, ["quantities must be a list"]),
        ({"tensors": [1]}, ["tensors must be a list of names"]),
        ({"run": 5}, ["run must be a name"]),
        ({"rules": [5]}, ["rules must be a list of rules, or of tables"]),
        ({"rules": [{"rule_name": "AnomalyNan"}] * 2}, ["'AnomalyNan' is used twice"]),
        ({"serve": 5}, ["serve must be a table"]),
        ({"serve": {"ring_records": "512"}}, ["ring_records must be a whole number"]),
        ({"serve": {"listen": 5}}, ["listen must be text"]),
    ],
)
def test_invalid_setting_is_rejected_with_the_allowed_values(settings: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        MonitorConfig.from_mapping(settings)

    assert [] == [word for word in words if word not in str(error.value)]


@pytest.mark.parametrize("wrong", [{"total_steps": "9"}, {"total_steps": 1.5}, {"first_step": "x"}])
def test_invalid_number_of_steps_is_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="number of steps"):
        Monitor(**wrong)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"every": 2,}', "remove the comma before this position"),
        ('{"quantities": ["gradients", // all\n ]}', "remove the comma before this position"),
        ("[" * 100_000, "recursion"),
        ('{"every": ' + "9" * 5000 + "}", "4300 digits"),
        ("", "Expecting value"),
        ('{"every": 2, "run": "a", "every": 3}', "'every' occurs twice in one table, as 2 and as 3: remove one"),
        ('{"options": {"gradients": {"every": 2, "every": 4}}}', "'every' occurs twice in one table, as 2 and as 4"),
    ],
)
def test_fault_in_a_json_file_is_one_warning(tmp_path: Path, text: str, words: str, caplog) -> None:
    path = tmp_path / "monitor.json"
    path.write_text(text)

    assert MonitorConfig() == MonitorConfig.from_file(path)
    (line,) = caplog.messages
    assert words in line
    assert line.startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"options": 5}, "options must be a table"),
        ({"options": {5: {}}}, "5 is unknown"),
        ({"options": {"gradients": {"ops": 5}}}, "ops must be a list of statistics, not 5"),
        ({"options": {"gradients": {"targets": 5}}}, "targets must be a list of names, not 5"),
        ({"options": {"gradients": {"targets": None}}}, "targets must be a list of names, not None"),
        ({"options": {"gradients": {"ranks": 5}}}, "ranks must be a list of rank numbers, not 5"),
        ({"sinks": {5: {}}}, "5 is unknown; valid names are"),
        ({5: 1}, "unknown setting 5"),
    ],
)
def test_setting_of_a_wrong_type_raises_config_error(settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MonitorConfig.from_mapping({"quantities": ["gradients"], **settings})
    with pytest.raises(ConfigError):
        sampling_config_from({"quantities": ["gradients"], **settings}, MonitorConfig(), on=True)


@pytest.mark.parametrize(("name", "text"), [("monitor.json", '{"every": 2}\r\n'), ("monitor.toml", "every = 2\r\n")])
def test_byte_order_mark_and_crlf_in_a_file_are_accepted(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())

    assert 2 == MonitorConfig.from_file(path).every


def test_path_with_a_null_byte_raises_config_error() -> None:
    for given in (Monitor, TrainerMon):
        with pytest.raises(ConfigError, match=r"null byte|its path is invalid"):
            given("monitor\0.json")


INFINITE = ("zero_below", "exit_wait_seconds", "switch_poll_seconds", "hang_after_seconds")


@pytest.mark.parametrize("number", [10**400, math.inf])
def test_infinite_or_too_large_number_is_rejected(number: float) -> None:
    rule = {"rule_name": "AnomalyNan", "args": {"threshold": number}}
    settings = [{"wg_distribution": True, "eps": number}, {"alert": {"rules": [rule]}}]
    for wrong in (*({name: number} for name in INFINITE), *settings):
        with pytest.raises(ConfigError):
            MonitorConfig.from_mapping(wrong)


def test_environment_variables_override_the_file() -> None:
    config = MonitorConfig(every=3).with_environment({"RANKSCOPE_DISABLED": "1", "RANKSCOPE_TOKEN": "secret"})

    assert (False, "secret", 3) == (config.enabled, config.serve.token, config.every)
    assert "secret" not in repr(config)


def test_too_long_run_name_is_refused_if_it_is_used():
    long = {"TORCHELASTIC_RUN_ID": "x" * 1001}

    assert "named" == MonitorConfig(run="named").with_environment(long).run
    assert not MonitorConfig().with_environment({**long, "RANKSCOPE_DISABLED": "1"}).enabled
    with pytest.raises(ConfigError, match=r"^run: the name of the run has 1,001 characters"):
        MonitorConfig(run="x" * 1001)


def test_wrong_settings_of_a_file_have_their_defaults(tmp_path: Path, caplog) -> None:
    """A setting may need one that comes later: `listen` the token, `options` the quantity."""
    path = tmp_path / "monitor.toml"
    path.write_text(
        """
        every = -3
        evry = 4
        [options.gradients]
        every = 2
        targets = 5
        [serve]
        listen = "0.0.0.0:9400"
        ring_records = 1
        token = "open"
        [throughput]
        method = "guess"
        """
    )
    config = MonitorConfig.from_file(path)

    assert (1, {"gradients": {"every": 2}}, "0.0.0.0:9400") == (config.every, config.options, config.serve.listen)
    expected = [
        "every must be a whole number of steps of at least 1, not -3",
        "unknown setting evry; valid settings are ",
        "options.gradients: targets must be a list of names, not 5",
        "ring_records must be a whole number of at least 256, not 1",
        "throughput.method must be ",
    ]
    lines = [line.partition(f"{path}: ")[2] for line in caplog.messages]
    assert all(line.startswith(text) for line, text in zip(lines, expected, strict=True)), lines
