"""Settings with wrong values, as a training script meets them: one line for each, and the training continues."""

from __future__ import annotations

import itertools
import re
import socket
from pathlib import Path

import pytest
from tests.programs import run_program

from rankscope_exporter.config.monitor_config import OTHER_VARIABLES, VARIABLES, MonitorConfig

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
    "RANKSCOPE_NODE_PAGE": "2",
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


def test_variables_that_the_repository_reads_are_known(caplog: pytest.LogCaptureFixture) -> None:
    """A training that starts with the variables of other programs of Rankscope prints nothing about them."""
    root = Path(__file__).parents[3]
    files = [root / "Makefile", *root.glob("*.toml")]
    folders = [
        "exporter",
        "ingest",
        "storage",
        "view",
        "dashboards",
        "cli",
        "deploy",
        "examples",
        "benchmarks",
        "tests",
        "docs",
    ]
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
    name = "rankscope_exporter.base.errors.ConfigError"
    expected = [line for sentence in MISTAKES.values() for line in (*begin, f"{name}: {sentence}")]

    assert expected == run_program(body).stderr.splitlines()


def test_monitor_without_attach_is_one_line() -> None:
    done = run_program("from rankscope_exporter import Monitor\nwith Monitor():\n    print('trained')\n")

    assert "trained\n" == done.stdout
    text = "rankscope: nothing was measured, because monitor.attach(model, optimizer) was not called"
    assert [text] == done.stderr.splitlines()
