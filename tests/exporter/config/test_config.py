"""The configuration, its JSON and its environment: defaults, and errors that name the key and the fault."""

import argparse
import dataclasses
import enum
import itertools
import json
import math
import re
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.programs import run_program

from rankscope_contract.rules.anomaly import AnomalyTurbulence
from rankscope_exporter import ConfigError, Monitor, MonitorConfig
from rankscope_exporter.config.hyperparameters import MAX_CHARACTERS, MAX_ITEMS, MAX_TEXT, storable
from rankscope_exporter.config.loader import without_comments
from rankscope_exporter.config.monitor_config import OTHER_VARIABLES, VARIABLES, public_settings
from rankscope_exporter.publish.serving_config import PREFIX, ServeConfig
from rankscope_exporter.training.sampling_config import sampling_config_from
from rankscope_msprobe.trainer_mon import TrainerMon

TURBULENCE = {"rule_name": "AnomalyTurbulence"}
LINEAR = {"quantities": ["gradients", "linear"]}
EVERY_SECONDS = "every_seconds must be a number of seconds"
STACKS_SIGNALS = "'SIGUSR1', 'SIGUSR2' or 'SIGQUIT'"
UNKNOWN_OP = ["is not a statistic; the statistics are norm, ", "Did you mean 'zeros'?"]
WRONG_SHARES = (0, 1, 1.0, -0.1, "1", "one percent", True, math.nan, "0 %", "100 %", [0.01])
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
        *(({"every": 0}, ["every", "at least 1", "0"]), ({"every": True}, ["every"])),
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
        *(({"tensors": [1]}, ["tensors must be a list of names"]), ({"run": 5}, ["run must be a name"])),
        ({"rules": [5]}, ["rules must be a list of rules, or of tables"]),
        ({"rules": [{"rule_name": "AnomalyNan"}] * 2}, ["'AnomalyNan' is used twice"]),
        ({"serve": 5}, ["serve must be a table"]),
        ({"serve": {"ring_records": "512"}}, ["ring_records must be a whole number"]),
        ({"serve": {"listen": 5}}, ["listen must be text"]),
        *(({"collectives_share": share}, ["collectives_share"]) for share in (-0.1, 1.5, "much", True)),
        *(({"hang_after_seconds": limit}, ["hang_after_seconds"]) for limit in (-1, math.nan, math.inf, "300", True)),
        *(({"hardware": {"every_seconds": value}}, [EVERY_SECONDS]) for value in (-1, "5", True, math.inf)),
        *(
            ({"stacks_signal": name}, [STACKS_SIGNALS])
            for name in ("SIGTERM", "SIGKILL", "SIGINT", "usr2", "SIGSEGV", "")
        ),
        *(({"stop_signals": [name]}, ["SIGTERM, SIGHUP, ", "not"]) for name in ("SIGKILL", "SIGSEGV", "term", "")),
        *(({"max_overhead": share}, ['such as 0.01 or "1 %"']) for share in WRONG_SHARES),
        ({"throughput": {"method": "magic"}}, ["throughput.method must be one of"]),
        ({"throughput": {"flops_per_token": 0}}, ["throughput.flops_per_token must be a number above 0"]),
        ({"throughput": {"peak_tflops": math.inf}}, ["throughput.peak_tflops"]),
        ({"throughput": {"peak_tflops": True}}, ["throughput.peak_tflops"]),
        ({"throughput": {"model_parallel": 0}}, ["throughput.model_parallel must be a number of ranks"]),
        ({"throughput": {"peak": 3}}, ["peak"]),
        ({"serve": {"node_page": True}}, ["serve.node_page was removed: Prometheus scrapes each rank"]),
        ({"throughput": {"method": "formula"}}, ["was removed: call rankscope.count_flops()"]),
        ({"capture": {"quantites": []}}, ["Did you mean capture.quantities"]),
        ({"capture": {"quantities": ["activation"]}}, ["Did you mean 'activations'"]),
        ({"capture": {"rules": ["AnomalyNaN"]}}, ["Did you mean 'AnomalyNan'"]),
        ({"capture": {"rules": "AnomalyNan"}}, ["write ['AnomalyNan']"]),
        ({"capture": {"steps": 0}}, ["capture.steps must be a whole number of at least 1"]),
        ({"capture": {"cooldown_steps": -1}}, ["capture.cooldown_steps must be a whole number of at least 0"]),
        ({"capture": {"options": {"activations": {"target": []}}}}, ["Did you mean options.activations.targets"]),
        ({"capture": {"options": {"router": {}}}}, ["add 'router' to capture.quantities"]),
        ({"capture": {"flight_record": "yes"}}, ["capture.flight_record must be true or false"]),
        ({"capture": True}, ["capture must be a table of settings"]),
        ({"sinks": {"csv": {"steps_per_file": 0}}}, ["steps_per_file must be a number from 1 to 1,000,000"]),
        ({"sinks": {"csv": {"digits": 21}}}, ["digits must be a number from 1 to 20"]),
        ({"sinks": {"csv": {"digits": True}}}, ["digits must be a number from 1 to 20"]),
        ({"sinks": {"csv": {"append_to": ["Dec03_21-34-40"]}}}, ["append_to must be two folder times"]),
        ({"sinks": {"csv": {"append_to": ["Dec03_21-34-40", "later"]}}}, ["append_to: 'later' is not a folder time"]),
        ({"sinks": {"csv": {"ops": ["norms"]}}}, ["'norms' is unknown; valid names are ", "Did you mean 'norm'"]),
        ({"sinks": {"csv": {"ops": "norm"}}}, ["ops must be a list"]),
        ({"sinks": {"csv": {"folder": 3}}}, ["folder must be a path"]),
        ({"sinks": {"csv": {"squash_name": 1}}}, ["squash_name must be true or false"]),
        ({"sinks": {"csv": {"step_per_file": 3}}}, ["Did you mean sinks.csv.steps_per_file"]),
        ({"sinks": {"anomalies": {"folder": 3}}}, ["sinks.anomalies: folder must be a path, not 3"]),
        ({"sinks": {"apu": {}}}, ["'apu' is unknown; valid names are ", "Did you mean 'api'"]),
        ({"sinks": {"api": {"step": 3}}}, ["unknown setting sinks.api.step; ", "Did you mean sinks.api.steps"]),
        ({"sinks": {"api": {"steps": 0}}}, ["sinks.api: steps must be a number from 1"]),
        ({"sinks": {"api": True}}, ["sinks.api must be a table"]),
        ({"sinks": ["api"]}, ["sinks must be a table"]),
        ({"ops": ["norm", "zeroes"]}, UNKNOWN_OP),
        ({"options": {"gradients": {"ops": ["max", "zero"]}}}, UNKNOWN_OP),
        ({"ops": "norm"}, ["ops must be a list of names, ", "write ['norm']"]),
        ({"options": {"gradients": {"ops": "norm"}}}, ["ops must be a list of statistics"]),
        ({**LINEAR, "options": {"linear": {"ops": ["norm"]}}}, ["options.linear.ops has no effect"]),
        ({"options": {"gradient": {}}}, ["Did you mean 'gradients'"]),
        ({"quantities": ["gradients"], "options": {"linear": {}}}, ["add 'linear' to quantities"]),
        ({"options": {"gradients": {"evry": 2}}}, ["Did you mean options.gradients.every"]),
        ({"options": {"gradients": {"every": 0}}}, ["every must be a whole number of at least 1"]),
        ({"options": {"gradients": {"targets": "x"}}}, ["targets must be a list of names"]),
        ({"options": {"gradients": []}}, ["options.gradients must be a table"]),
        ({"tensors": ["re:("]}, ["tensors: target 're:(' is not a valid regular expression"]),
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
        *(("[" * 100_000, "recursion"), ('{"every": ' + "9" * 5000 + "}", "4300 digits"), ("", "Expecting value")),
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
        *(({"options": 5}, "options must be a table"), ({"options": {5: {}}}, "5 is unknown")),
        ({"options": {"gradients": {"ops": 5}}}, "ops must be a list of statistics, not 5"),
        ({"options": {"gradients": {"targets": 5}}}, "targets must be a list of names, not 5"),
        ({"options": {"gradients": {"targets": None}}}, "targets must be a list of names, not None"),
        ({"options": {"gradients": {"ranks": 5}}}, "ranks must be a list of rank numbers, not 5"),
        *(({"sinks": {5: {}}}, "5 is unknown; valid names are"), ({5: 1}, "unknown setting 5")),
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
    for maker in (Monitor, TrainerMon):
        with pytest.raises(ConfigError, match=r"null byte|its path is invalid"):
            maker("monitor\0.json")


INFINITE = ("zero_below", "exit_wait_seconds", "switch_poll_seconds", "hang_after_seconds")


@pytest.mark.parametrize("number", [10**400, math.inf])
def test_infinite_or_too_large_number_is_rejected(number: float) -> None:
    rule = {"rule_name": "AnomalyNan", "args": {"threshold": number}}
    settings = [{"wg_distribution": True, "eps": number}, {"alert": {"rules": [rule]}}]
    for wrong in (*({name: number} for name in INFINITE), *settings):
        with pytest.raises(ConfigError):
            MonitorConfig.from_mapping(wrong)


def test_environment_variables_override_the_file() -> None:
    hang = {"RANKSCOPE_STACKS_SIGNAL": "SIGUSR1", "RANKSCOPE_HANG_AFTER_SECONDS": "7.5"}
    config = MonitorConfig(every=3).with_environment({"RANKSCOPE_DISABLED": "1", "RANKSCOPE_TOKEN": "secret", **hang})

    assert (False, "secret", 3) == (config.enabled, config.serve.token, config.every)
    assert ("SIGUSR1", 7.5) == (config.stacks_signal, config.hang_after_seconds)
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


TRAINING = """
import torch
from rankscope_exporter import Monitor
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Monitor({"statistics": "torch"}).attach(model, optimizer) as monitor:
    for step in range(3):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    address = monitor.address
print("trained 3 steps")
"""

WRONG = {
    "RANKSCOPE_DISABLED": "perhaps",
    "RANKSCOPE_RUN": "x" * 1001,
    "RANKSCOPE_HANG_AFTER_SECONDS": "soon",
    "RANKSCOPE_STACKS_SIGNAL": "SIGKILL",
    "RANKSCOPE_STOP_SIGNALS": "SIGNOTHING",
    "RANKSCOPE_INSECURE": "maybe",
    "RANKSCOPE_SPOOL_SYNC": "always",
    "RANKSCOPE_TOKEN": "two words",
    "RANKSCOPE_TOKEN_FILE": "/absent/token",
    "RANKSCOPE_WEB_CONFIG": "/absent/web.yml",
    "RANKSCOPE_LISTEN": "0.0.0.0:9400",
    "RANKSCOPE_ADVERTISE": "0.0.0.0",
    "RANKSCOPE_CA_FILE": "/absent/ca.pem",
    "RANKSCOPE_CERT_FILE": "/absent/cert.pem",
    "RANKSCOPE_KEY_FILE": "/absent/key.pem",
    "RANKSCOPE_INGEST_URL": "localhost:9470",
}
ANY_TEXT = {"RANKSCOPE_SWITCH_FILE", "RANKSCOPE_DISCOVERY_DIR", "RANKSCOPE_SPOOL_DIR"}
"""Variables with a path, which is used later."""


def test_wrong_value_of_each_variable_is_one_line_and_training_continues(tmp_path: Path) -> None:
    done = run_program(TRAINING, folder=tmp_path, **WRONG)
    lines = done.stderr.splitlines()
    counts = {name: sum(line.startswith(f"{name} is not used: ") for line in lines) for name in WRONG}

    assert WRONG.keys() | ANY_TEXT == set(VARIABLES)
    assert "trained 3 steps\n" == done.stdout, done.stderr
    assert dict.fromkeys(WRONG, 1) == counts
    assert "Traceback" not in done.stderr
    assert "two words" not in done.stderr
    assert any(line.startswith("rankscope: run ") for line in lines)


@pytest.mark.parametrize("name", sorted(ANY_TEXT))
def test_path_that_cannot_be_used_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run_program(TRAINING, folder=tmp_path, **{name: str(tmp_path / "file" / "absent")})

    assert "trained 3 steps\n" == done.stdout, done.stderr
    named = [line for line in done.stderr.splitlines() if str(tmp_path / "file") in line]
    assert 1 == sum("failed" in line or "cannot be used" in line for line in named)
    assert "Traceback" not in done.stderr


def test_misspelt_variable_is_named_with_the_nearest(caplog: pytest.LogCaptureFixture) -> None:
    for name in VARIABLES:
        caplog.clear()
        MonitorConfig().with_environment({name[:-1]: "1"})

        assert [f"the environment variable {name[:-1]} has no effect. Did you mean {name}?"] == caplog.messages


def test_removed_variable_is_named_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    name = f"{PREFIX}NODE_PAGE"
    MonitorConfig().with_environment({name: "1"})

    reason = "It was removed: Prometheus scrapes each rank, which /sd lists."
    assert [f"the environment variable {name} has no effect. {reason}"] == caplog.messages


def test_variables_that_the_repository_reads_are_known(caplog: pytest.LogCaptureFixture) -> None:
    """A training that starts with the variables of other programs of Rankscope prints nothing about them."""
    root = Path(__file__).parents[3]
    files = [root / "Makefile", *root.glob("*.toml")]
    packages = ("exporter", "ingest", "storage", "view", "dashboards", "cli")
    folders = (*packages, "deploy", "examples", "benchmarks", "tests", "docs")
    for folder, end in itertools.product(folders, ("py", "sh", "yaml", "yml", "toml", "service")):
        files += (root / folder).rglob(f"*.{end}")
    text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    found = set(re.findall(r"\bRANKSCOPE_\w*[A-Z0-9]\b", text))

    assert OTHER_VARIABLES == {name.split("_")[1] for name in found - set(VARIABLES)}
    assert OTHER_VARIABLES.isdisjoint(name.split("_")[1] for name in VARIABLES)
    MonitorConfig().with_environment(dict.fromkeys(found - set(VARIABLES), "1"))
    assert [] == caplog.messages


def test_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run_program(TRAINING, RANKSCOPE_LISTEN=f"127.0.0.1:{port}")

    assert "trained 3 steps\n" == done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"attach() failed, training continues: cannot listen on 127.0.0.1:{port}: Address already ")


MISTAKES = {
    "Monitor({'every': -1})": "every must be a whole number of steps of at least 1, not -1",
    "MonitorConfig(every=-1)": "every must be a whole number of steps of at least 1, not -1",
    "Monitor(5)": "the configuration must be a MonitorConfig, a mapping or a path, not 5",
    "Monitor('absent.toml')": "absent.toml: there is no such file, or its path is invalid",
    "Monitor(run='a')": "Monitor has no argument run; its arguments are config (with all settings, as in "
    "Monitor({'run': 'a'})), total_steps, first_step and on_anomaly",
    "Monitor(total_steps=0)": "total_steps must be a whole number of steps of at least 1, not 0",
    "Monitor(on_anomaly=5)": "on_anomaly must be a function of one argument, not 5",
}


def test_mistake_of_the_script_ends_at_its_line_with_one_sentence(tmp_path: Path) -> None:
    body = f"""
import sys
from rankscope_exporter import Monitor, MonitorConfig
for mistake in {list(MISTAKES)}:
    try:
        eval(mistake)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
"""
    begin = ["Traceback (most recent call last):", *(f'  File "<string>", line {at}, in <module>' for at in (6, 1))]
    name = "rankscope_exporter.process.errors.ConfigError"
    expected = [line for sentence in MISTAKES.values() for line in (*begin, f"{name}: {sentence}")]

    assert expected == run_program(body).stderr.splitlines()


def test_monitor_without_attach_is_one_line() -> None:
    done = run_program("from rankscope_exporter import Monitor\nwith Monitor():\n    print('trained')\n")

    assert "trained\n" == done.stdout
    text = "rankscope: nothing was measured, because monitor.attach(model, optimizer) was not called"
    assert [text] == done.stderr.splitlines()


DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab/*"\\\n{}', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet="k/*", max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(document=DOCUMENTS, comment=st.text(alphabet="ab/\"'\\{", max_size=8))
def test_comments_between_lines_do_not_change_the_document(document: Any, comment: str) -> None:
    lines = json.dumps(document, indent=1).splitlines()
    text = "\n".join(f"/* {comment.replace('*/', '')} */ {line} // {comment}" for line in lines)

    assert document == json.loads(without_comments(text))


def test_line_and_column_in_errors_are_those_of_the_file():
    text = '{"a": 1, // one\n /* two\n lines */ "b" 2}'
    with pytest.raises(json.JSONDecodeError) as fault:
        json.loads(without_comments(text))

    assert len(text) == len(without_comments(text))
    assert (3, text.splitlines()[2].index("2}") + 1) == (fault.value.lineno, fault.value.colno)


def test_unterminated_comment_is_left_for_the_parser():
    assert "{} /* no end" == without_comments("{} /* no end")


class Schedule(enum.Enum):
    COSINE = "cosine"


@dataclasses.dataclass
class Section:
    warmup: int
    path: Path


class Hostile:
    def __str__(self) -> str:
        raise RuntimeError("no text")


class HostileTable(dict):
    def items(self):
        raise RuntimeError("a missing value")


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        *((0.1, 0.1), (None, None), (True, True), (Schedule.COSINE, "cosine"), (np.float32(0.5), 0.5)),
        *((float("nan"), "nan"), (float("-inf"), "-inf"), (1 << 70, str(1 << 70)), (Path("data"), "data")),
        *((torch.bfloat16, "torch.bfloat16"), ((1, "two"), [1, "two"]), ({"b", "a"}, ["a", "b"]), ({1: 2}, {"1": 2})),
        *((Section(3, Path("x")), {"warmup": 3, "path": "x"}), (argparse.Namespace(lr=0.1), {"lr": 0.1})),
        *((torch.nn.Linear(2, 2), "Linear"), (torch.ones(2, 3), "Tensor of shape (2, 3)")),
        *((torch.optim.AdamW, "torch.optim.adamw.AdamW"), (Hostile(), "Hostile")),
        (object(), "<object object>"),  # addresses differ between the processes and attempts of a run
        (HostileTable(lr=1), "{'lr': 1}"),
        ("bad \udcff", "bad \\udcff"),
    ],
)
def test_values_without_a_json_form_become_text(given, stored):
    assert {"value": stored} == storable({"value": given})


@pytest.mark.parametrize("name", ["api_key", "hub_token", "db_password"])
def test_secrets_are_masked_by_name_and_by_form(name):
    class Client:
        def __str__(self) -> str:
            return "https://me:hunter2@host"

    found = storable({"model": {name: "hunter2"}, "text": "hf_abcdefghijklmnopqrst", "client": Client()})

    assert {"model": {name: "***"}, "text": "***", "client": "https://***@host"} == found


@pytest.mark.thorough
def test_size_is_limited_and_the_result_is_stable():
    endless = []
    endless.extend([endless] * 50)
    table = {f"key {number}": "y" * 900 for number in range(200)}
    given = {"lr": 0.1, "labels": list(range(MAX_ITEMS + 50)), "prompt": "x" * (MAX_TEXT + 50)}
    given |= {"endless": endless, "table": table}
    found = storable(given)

    assert 0.1 == found["lr"]
    assert [*range(MAX_ITEMS - 1), "… 51 more"] == found["labels"]
    assert found["prompt"].endswith("x… (1,050 characters)")
    assert MAX_TEXT == len(found["prompt"])
    assert found["table"].endswith("characters omitted")
    assert len(json.dumps(found, ensure_ascii=False)) <= MAX_CHARACTERS
    assert found == storable(found)


def test_hyperparameters_are_part_of_the_settings_of_the_run():
    given = argparse.Namespace(lr=0.1, password="hunter2", net=torch.nn.ReLU())
    shown = public_settings(Monitor({"hyperparameters": vars(given)}).config)["hyperparameters"]

    assert {"lr": 0.1, "password": "***", "net": "ReLU"} == shown
    with pytest.raises(ConfigError, match=r"hyperparameters must be a table, such as vars\(args\), not \[1\]"):
        MonitorConfig(hyperparameters=[1])
