"""`rankscope serve` as an operator meets it: it says where it listens, ends cleanly, and names what is wrong."""

from __future__ import annotations

import logging
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from rankscope.base.errors import TAKEN_OVER, USAGE, CommandError
from rankscope.commands.serve import _run, _ViewHandler, load_settings
from rankscope.output.progress import fetch_runs
from rankscope_storage.errors import ShardLostError

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "rankscope", "serve", *map(str, arguments)]


def refused(*arguments: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, check=False, timeout=60)
    assert "Traceback" not in done.stderr
    return done


@contextmanager
def serving(log: Path, *arguments: object) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a service, give it with its address, and end it."""
    with log.open("wb") as output:
        process = subprocess.Popen(command(*arguments), stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 30
        while not (found := re.search(r"^listening on (http://\S+)$", log.read_text(), re.MULTILINE)):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "the service never said where it listens"
            time.sleep(0.05)
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


def test_log_lines_say_what_they_are_about_as_far_as_it_is_known():
    said = []
    record = logging.makeLogRecord({"levelname": "INFO", "msg": "run is %s", "args": ("running",), "run": "r"})
    record.reason = None
    _ViewHandler(SimpleNamespace(print_line=said.append)).emit(record)

    assert ["info: run is running, run r"] == said


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_service_says_where_it_is_and_ends_cleanly(tmp_path, ending):
    log = tmp_path / "log"
    with serving(log, "--store", tmp_path / "history", "--listen", "127.0.0.1:0") as (process, url):
        runs = fetch_runs(url)
        process.send_signal(ending)

        assert 0 == process.wait(30)
    assert [] == runs
    assert log.read_text().endswith("stopped; 0 rows were stored, 0 are left\n")


def test_second_service_on_one_store_is_told_who_holds_it(tmp_path):
    store = tmp_path / "history"
    with serving(tmp_path / "log", "--store", store, "--listen", "127.0.0.1:0") as (process, _):
        done = refused("--store", store, "--listen", "127.0.0.1:0")

    assert 1 == done.returncode
    assert f"process {process.pid}" in done.stderr
    assert 1 == done.stderr.count("\n")


def test_a_service_whose_store_was_taken_over_ends_with_a_code_at_which_it_is_not_started_again(tmp_path, monkeypatch):
    """Else two machines would take one store from each other without end."""

    async def lost(*_, **__):
        raise ShardLostError("shard 0/1 of history was taken over by process 7 on b: this service must stop")

    monkeypatch.setattr("rankscope_ingest.service.run", lost)
    settings = load_settings(None, tmp_path / "history", "127.0.0.1:0", None)
    with pytest.raises(CommandError, match="taken over by process 7 on b") as raised:
        _run(settings, SimpleNamespace(print_line=print), show=False)

    assert TAKEN_OVER == raised.value.code
    for unit in UNITS.glob("*.service"):
        assert f"RestartPreventExitStatus={USAGE} {TAKEN_OVER}\n" in unit.read_text()


def test_taken_port_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = refused("--store", tmp_path / "history", "--listen", f"127.0.0.1:{port}")

    assert 1 == done.returncode
    assert f"127.0.0.1:{port}" in done.stderr
    assert 1 == done.stderr.count("\n")


def test_options_win_over_the_file(tmp_path):
    (tmp_path / "service.toml").write_text('[store]\npath = "from-file"\n[service]\nlisten = "127.0.0.1:1"\n')
    with serving(tmp_path / "log", tmp_path / "service.toml", "--listen", "127.0.0.1:0"):
        pass

    assert (tmp_path / "from-file" / "_delta_log").is_dir()


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ('[store]\npath = "h"\n[servise]\n', "did you mean service"),
        ('[store]\npath = "h"\n[ingest]\npoll_second = 2\n', "did you mean poll_seconds"),
        ('[store]\npath = "h"\n[ingest]\npoll_seconds = -1\n', "ingest.poll_seconds"),
        ('[store]\npath = "h"\n[service]\nlisten = "0.0.0.0:9470"\n', "set token"),
        ('[store]\npath = "h"\n[notify]\nurls = ["nonsense"]\n', "notify.urls[0]"),
        ("", "store: is missing"),
        ("not toml", "not TOML"),
    ],
)
def test_wrong_configuration_is_named_with_its_remedy(tmp_path, toml, said):
    (tmp_path / "service.toml").write_text(toml, encoding="utf-8")
    done = refused(tmp_path / "service.toml")

    assert 2 == done.returncode
    assert said in done.stderr
    assert "service.toml" in done.stderr or "notify" in done.stderr


def test_address_that_no_notifier_understands_is_refused_before_anything_is_made(tmp_path):
    done = refused("--store", tmp_path / "history", "--listen", "127.0.0.1:0", "--notify", "bad://secret@nowhere")

    assert 2 == done.returncode
    assert "notify.urls[0] (bad://…)" in done.stderr
    assert "secret" not in done.stderr
    assert [] == list(tmp_path.iterdir())


def test_folder_that_cannot_hold_a_store_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    done = refused("--store", tmp_path / "file", "--listen", "127.0.0.1:0")

    assert 1 == done.returncode
    assert f"{tmp_path / 'file'} is a file" in done.stderr
