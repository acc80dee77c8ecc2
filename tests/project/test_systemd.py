"""The systemd units are valid, their command runs the service, and the service notifies systemd when it is ready."""

import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from rankscope.commands.serve import notify_systemd
from rankscope_ingest.base.config_file import load_config

DEPLOY = Path(__file__).parents[2] / "deploy" / "systemd"
PROGRAM = "/opt/rankscope/bin/rankscope"
UNITS = ("rankscope.service", "rankscope@.service")


def setting(unit: str, key: str) -> str:
    found = re.search(rf"^{key}=(.*)$", (DEPLOY / unit).read_text(), re.MULTILINE)
    assert found, f"{unit} has no {key}"
    return found[1]


def with_token(text: str) -> str:
    """Return a unit with the lines for a token uncommented."""
    return re.sub(r"^# (LoadCredential=|Environment=)", r"\1", text, flags=re.MULTILINE)


@pytest.mark.parametrize("prepared", [str, with_token])
@pytest.mark.parametrize("unit", UNITS)
def test_unit_is_valid(unit, prepared, tmp_path, require_server):
    """Checked by `systemd-analyze verify`, with an existing program in ExecStart."""
    analyze = require_server("systemd-analyze", "systemd")
    path = tmp_path / unit.replace("@.", "@0-2.")
    path.write_text(prepared((DEPLOY / unit).read_text()).replace(PROGRAM, "/bin/true"))
    done = subprocess.run([analyze, "verify", path], capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stderr
    assert "" == done.stderr


@pytest.mark.parametrize("unit", UNITS)
def test_unit_is_sandboxed(unit):
    assert "strict" == setting(unit, "ProtectSystem")
    assert "yes" == setting(unit, "NoNewPrivileges") == setting(unit, "DynamicUser")
    assert "rankscope" == setting(unit, "StateDirectory") == setting(unit, "User")  # shards share one user and store
    assert "on-failure" == setting(unit, "Restart")


@pytest.mark.parametrize("unit", UNITS)
def test_token_file_can_be_readable_by_root_only(unit):
    """Systemd creates the user of the service at the start (DynamicUser) and passes a copy of the token file."""
    text = with_token((DEPLOY / unit).read_text())

    assert "\nLoadCredential=token:/etc/rankscope/token\n" in text
    assert "\nEnvironment=RANKSCOPE_TOKEN_FILE=%d/token\n" in text


def test_units_differ_only_in_their_shard_and_options():
    one, many = ((DEPLOY / unit).read_text().partition("[Service]")[2] for unit in UNITS)

    shard = "EnvironmentFile=-/etc/rankscope/shard-%i.env\nExecStart="
    options = "--shard %I --quiet $RANKSCOPE_SERVE_OPTIONS"
    assert one.replace("ExecStart=", shard).replace("--quiet", options) == many


def test_shipped_configuration_is_valid_with_all_commented_settings(tmp_path):
    path = DEPLOY / "rankscope.toml"
    text = path.read_text().replace("# For", "#: For")
    whole = re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE)
    whole = whole.replace('listen = "127.0.0.1:9470"\n', "", 1)
    (tmp_path / "whole.toml").write_text(whole)

    assert "/var/lib/rankscope/history" == load_config(path).store.path
    assert "0.0.0.0:9470" == tomllib.loads(whole)["service"]["listen"]
    assert "secret" == load_config(tmp_path / "whole.toml", environment={"RANKSCOPE_TOKEN": "secret"}).token


@pytest.mark.thorough
def test_unit_command_notifies_systemd_of_ready_and_watchdog(tmp_path, free_port):
    """READY is sent once the service listens; WATCHDOG repeatedly while it runs."""
    text = (DEPLOY / "rankscope.toml").read_text()
    text = text.replace("/var/lib/rankscope", str(tmp_path)).replace("127.0.0.1:9470", f"127.0.0.1:{free_port}")
    (tmp_path / "rankscope.toml").write_text(text)
    program, *arguments = shlex.split(setting("rankscope.service", "ExecStart"))
    arguments = [argument.replace("/etc/rankscope", str(tmp_path)) for argument in arguments]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        command = [sys.executable, "-m", "rankscope", *arguments]
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        service = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        try:
            received = [systemd.recv(1000).decode() for _ in range(3)]
            with socket.create_connection(("127.0.0.1", free_port), timeout=5):
                listens = True
        finally:
            service.send_signal(signal.SIGTERM)
            output, _ = service.communicate(timeout=60)

    assert PROGRAM == program
    assert ["READY=1", "WATCHDOG=1", "WATCHDOG=1"] == received
    assert listens
    assert 0 == service.returncode, output


def test_failed_systemd_notification_is_only_logged(tmp_path, caplog):
    notify_systemd("READY=1", {})  # without systemd, nothing is sent
    notify_systemd("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "gone")})

    assert ["cannot send READY to systemd: No such file or directory"] == [
        record.getMessage().replace("[Errno 2] ", "") for record in caplog.records
    ]


def test_abstract_notify_sockets_are_supported():
    name = f"rankscope-test-{time.time_ns()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("\0" + name)
        notify_systemd("READY=1", {"NOTIFY_SOCKET": "@" + name})

        assert b"READY=1" == systemd.recv(100)
