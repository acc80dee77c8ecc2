"""`rankscope serve`: printed address, clean stop, and error messages."""

import logging
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.end_to_end.lives import until
from tests.programs import start_module

from rankscope.commands.serve import _run, load_settings
from rankscope.output.progress import LineHandler, fetch_runs
from rankscope.shell.errors import TAKEN_OVER, USAGE, CommandError
from rankscope_storage.base.errors import ShardLostError

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"


@pytest.fixture
def refused(rankscope):
    """Return a function that runs `rankscope serve ARGUMENTS` until it exits with an error."""

    def run(*arguments):
        done = rankscope("serve", *arguments, env={"RANKSCOPE_STORE": ""})
        assert "Traceback" not in done.stderr
        return done

    return run


@contextmanager
def serving(log, *arguments):
    process = start_module("rankscope.__main__", "serve", *arguments, log=log)
    try:
        found = until(
            lambda: re.search(r"^listening on (http://\S+)$", log.read_text(), re.MULTILINE), 30, log.read_text
        )
        yield process, found[1]
    finally:
        process.kill()
        process.wait(30)


def test_log_lines_contain_the_known_context():
    said = []
    record = logging.makeLogRecord(
        {"levelname": "INFO", "msg": "state of the run changed to %s", "args": ("running",), "run": "r"}
    )
    record.reason = None
    LineHandler(said.append).emit(record)

    assert ["info: state of the run changed to running, run r"] == said


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_service_prints_its_address_and_stops_cleanly(tmp_path, ending):
    log = tmp_path / "log"
    with serving(log, "--store", tmp_path / "history", "--listen", "127.0.0.1:0") as (process, url):
        runs = fetch_runs(url)
        process.send_signal(ending)

        assert 0 == process.wait(30)
    assert [] == runs
    assert log.read_text().endswith("stopped; 0 rows stored, 0 rows not stored\n")


def test_service_prints_the_followed_logs_their_states_and_their_rows(tmp_path):
    log, followed, config = tmp_path / "log", tmp_path / "train.jsonl", tmp_path / "service.toml"
    followed.write_text("".join(f'{{"step": {n}, "loss": 3.0, "total_steps": 29}}\n' for n in range(30)))
    config.write_text(f'[[watch]]\nlog = "{followed}"\nrun = "old"\npoll_seconds = 0.1\nsettle_seconds = 0\n')
    with serving(log, config, "--store", tmp_path / "history", "--listen", "127.0.0.1:0") as (process, _):
        until(
            lambda: "info: old  finished  the last planned step, 29, was reached" in log.read_text(), 30, log.read_text
        )
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    stored = re.search(r"stopped; (\d+) rows stored, 0 rows not stored\n$", log.read_text())

    assert f"info: following {followed} as the run old, every 0.1 s" in log.read_text()
    assert int(stored[1]) >= 30


@pytest.mark.parametrize("output", ["a closed pipe", "a full disk"])
def test_service_under_nohup_outlives_its_terminal(tmp_path, output):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "rankscope", "serve", "--store", tmp_path / "history", "--listen", address]
    with Path("/dev/full").open("w") as full, subprocess.Popen(
        ["nohup", *command], stdout=full if output == "a full disk" else subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:  # fmt: skip
        if process.stdout is not None:
            process.stdout.readline()
            process.stdout.close()
        until(lambda: fetch_runs(f"http://{address}") is not None, 60)
        process.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        assert [] == fetch_runs(f"http://{address}")
        process.terminate()

        assert 0 == process.wait(30)


def test_second_service_on_one_store_names_the_lock_holder(tmp_path, refused):
    store = tmp_path / "history"
    with serving(tmp_path / "log", "--store", store, "--listen", "127.0.0.1:0") as (process, _):
        done = refused("--store", store, "--listen", "127.0.0.1:0")

    assert 1 == done.returncode
    assert f"process {process.pid}" in done.stderr
    assert 1 == done.stderr.count("\n")


def test_service_whose_shard_was_taken_over_exits_with_code_3(tmp_path, monkeypatch):
    """Systemd does not restart it at this code. Otherwise two machines would take the store from each other forever."""

    async def lost(*_, **__):
        raise ShardLostError("shard 0/1 of history was taken over by process 7 on b: this service must stop")

    monkeypatch.setattr("rankscope_ingest.service.main.run", lost)
    settings = load_settings(None, tmp_path / "history", "127.0.0.1:0", None)
    with pytest.raises(CommandError, match="taken over by process 7 on b") as raised:
        _run(settings, SimpleNamespace(print_line=print), show=False)

    assert TAKEN_OVER == raised.value.code
    for unit in UNITS.glob("*.service"):
        assert f"RestartPreventExitStatus={USAGE} {TAKEN_OVER}\n" in unit.read_text()


def test_port_in_use_and_store_that_is_a_file_are_named(tmp_path, refused):
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        port_in_use = refused("--store", tmp_path / "history", "--listen", f"127.0.0.1:{port}")
    is_file = refused("--store", tmp_path / "file", "--listen", "127.0.0.1:0")

    assert (1, 1) == (port_in_use.returncode, is_file.returncode)
    assert f"127.0.0.1:{port}" in port_in_use.stderr
    assert 1 == port_in_use.stderr.count("\n")
    assert f"{tmp_path / 'file'} is a file" in is_file.stderr


def test_options_override_the_file(tmp_path):
    (tmp_path / "service.toml").write_text('[store]\npath = "from-file"\n[service]\nlisten = "127.0.0.1:1"\n')
    with serving(tmp_path / "log", tmp_path / "service.toml", "--listen", "127.0.0.1:0", "--shard", "1/2"):
        pass

    assert "from-file, shard 1/2\n" in (tmp_path / "log").read_text()
    assert (tmp_path / "from-file" / "_delta_log").is_dir()


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('[store]\npath = "h"\n[servise]\n', "did you mean service"),
        ('[store]\npath = "h"\n[ingest]\npoll_second = 2\n', "did you mean poll_seconds"),
        ('[store]\npath = "h"\n[ingest]\npoll_seconds = -1\n', "ingest.poll_seconds"),
        ('[store]\npath = "h"\n[service]\nlisten = "0.0.0.0:9470"\n', "set token"),
        ('[store]\npath = "h"\n[notify]\nurls = ["nonsense"]\n', "notify.urls[0]"),
        ("", "store: is missing"),
        ("not toml", "not valid TOML"),
    ],
)
def test_configuration_errors_name_the_remedy(tmp_path, refused, toml, message):
    (tmp_path / "service.toml").write_text(toml, encoding="utf-8")
    done = refused(tmp_path / "service.toml")

    assert 2 == done.returncode
    assert message in done.stderr
    assert "service.toml" in done.stderr or "notify" in done.stderr


def test_unsupported_notify_url_fails_before_files_are_created(tmp_path, refused):
    done = refused("--store", tmp_path / "history", "--listen", "127.0.0.1:0", "--notify", "bad://secret@nowhere")

    assert 2 == done.returncode
    assert "notify.urls[0] (bad://…)" in done.stderr
    assert "secret" not in done.stderr
    assert [] == list(tmp_path.iterdir())
