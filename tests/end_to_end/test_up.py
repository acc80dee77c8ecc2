"""`rankscope up` with the real programs: started, kept running, ended in order, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.end_to_end import past


class Up:
    """One `rankscope up` over a folder."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.log = folder / "up.log"
        store = [] if "service.toml" in arguments else ["--store", "history"]
        command = [sys.executable, "-m", "rankscope", "up", *store, "--scrape", "1", *arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, condition: Callable[[], Any], seconds: float = 60.0) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                value = condition()
            except (OSError, psutil.NoSuchProcess):
                value = None
            if value:
                return value
            time.sleep(0.05)
        return pytest.fail(f"not within {seconds} s; it said:\n{self.said()}")

    def ready(self) -> dict[str, str]:
        """Wait until everything runs; return the address of each program."""
        self.wait_for(lambda: "Ctrl-C ends all of it" in self.said())
        return dict(re.findall(r"^(\w+) +(https?://\S+) +ready", self.said(), re.MULTILINE))

    def children(self) -> dict[str, psutil.Process]:
        """Return the programs by name."""
        names = {"prometheus": "prometheus", "prometheus-alertmanager": "alertmanager"}
        found = psutil.Process(self.process.pid).children(recursive=True)
        return {names.get(Path(child.cmdline()[0]).name, "service"): child for child in found}


@pytest.fixture
def start_up(require_server, tmp_path) -> Iterator[Callable[..., Up]]:
    require_server("prometheus")
    require_server("prometheus-alertmanager")
    started: list[Up] = []

    def start(*arguments: str) -> Up:
        started.append(Up(tmp_path, *arguments))
        return started[-1]

    yield start
    for up in started:
        if up.process.poll() is None:
            up.process.kill()
            up.process.wait(10)


def asked(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.load(answer)


def examined(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rankscope", "doctor", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)


LOCKED = """
[service]
listen = "[::1]:{port}"
token_file = "secret"
web_config = "web.json"
ca_file = "{ca}"
cert_file = "{cert}"
key_file = "{key}"
[store]
path = "history"
"""


def test_behind_locks_all_find_each_other(start_up, tmp_path, certificates, free_port):
    """IPv6, certificates on both sides and a token: Prometheus sees the service, the doctor is let in.

    And our boards show what the store has of two months ago, which this Prometheus never scraped: each query of theirs
    on what ranks store, the lists of runs and ranks as well.
    """
    then = int(time.time()) // 60 * 60 - 60 * 86_400
    past.put(tmp_path / "history", then)
    (tmp_path / "secret").write_text("open-sesame\n")
    certificates.web_config(
        tmp_path / "web.json",
        client_auth_type="RequireAndVerifyClientCert",
        client_ca_file=str(certificates.ca),
    )
    files = {"ca": certificates.ca, "cert": certificates.cert("client"), "key": certificates.key("client")}
    (tmp_path / "service.toml").write_text(LOCKED.format(port=free_port, **files))
    up = start_up("service.toml")
    urls = up.ready()
    line = "scrapes the service: 1 of 1 up"
    doctor = up.wait_for(lambda: seen if line in (seen := examined(tmp_path, "-c", "service.toml")).stdout else None)
    panels = past.panels_of_the_past()
    found = {title: past.shown(urls["prometheus"], query, then) for title, query in panels.items()}

    assert f"https://[::1]:{free_port}" == urls["service"]
    assert [] == [title for title, lines in found.items() if not lines]
    assert 40 < len(found)
    board = "Rankscope · Run overview: "
    highest, lowest, rise = [[32, 40, 48]], [[16, 20, 24]], [3 / past.SECONDS_PER_STEP] * 3
    assert [highest, lowest] == [found[f"{board}Loss {place}"] for place in "AB"]
    assert [highest, [[14, 18, 22]]] == [found[f"{board}Gradient norm {place}"] for place in "AB"]
    assert [highest, lowest] == [found[f"{board}Step time {place}"] for place in "AB"]
    assert [pytest.approx(rise)] == found[f"{board}Tokens per second A"]
    assert {"run": {past.RUN}, "rank": {"0", "1"}} == past.listed(urls["prometheus"], then)
    assert (
        'Prometheus shows     the whole store too, where the job is named: rankscope_loss{job="rankscope"}' in up.said()
    )
    assert 0 == doctor.returncode, doctor.stdout
    assert "takes the token" in doctor.stdout
    assert f"export RANKSCOPE_INGEST_URL=https://[::1]:{free_port}" in up.said()
    assert "export RANKSCOPE_TOKEN_FILE=" in up.said()
    assert "open-sesame" not in up.said() + doctor.stdout


def test_all_run_configured_for_each_other_and_what_dies_is_started_again(start_up, tmp_path):
    up = start_up("--ports", "free", "--notify", "http://127.0.0.1:9/hook")
    urls = up.ready()

    def healthy() -> bool:
        targets = asked(f"{urls['prometheus']}/api/v1/targets")["data"]["activeTargets"]
        return [("rankscope-service", "up")] == [(target["labels"]["job"], target["health"]) for target in targets]

    assert {"service", "prometheus", "alertmanager"} == urls.keys()
    assert f"export RANKSCOPE_INGEST_URL={urls['service']}" in up.said()
    assert up.wait_for(healthy)
    managers = asked(f"{urls['prometheus']}/api/v1/alertmanagers")["data"]["activeAlertmanagers"]
    assert [urls["alertmanager"] + "/api/v2/alerts"] == [manager["url"] for manager in managers]
    assert "http://127.0.0.1:9/hook" in asked(f"{urls['alertmanager']}/api/v2/status")["config"]["original"]
    rules = asked(f"{urls['prometheus']}/api/v1/rules")["data"]["groups"]
    assert "rankscope-anomaly" in {group["name"] for group in rules}

    doctor = examined(tmp_path)
    assert 0 == doctor.returncode, doctor.stdout
    for line in ("scrapes the service: 1 of 1 up", "tells address-1", f"sends alerts to {urls['alertmanager']}"):
        assert line in doctor.stdout

    before = up.children()
    for name in ("prometheus", "service"):
        before[name].kill()
    up.wait_for(
        lambda: (
            {"prometheus ended with -9", "service ended with -9"}
            <= set(re.findall(r"^\w+ ended with -9", up.said(), re.MULTILINE))
        )
    )
    assert up.wait_for(lambda: asked(f"{urls['prometheus']}/api/v1/targets") and asked(f"{urls['service']}/healthz"))
    after = up.children()

    assert before["alertmanager"].pid == after["alertmanager"].pid
    assert before["service"].pid != after["service"].pid
    up.process.send_signal(signal.SIGTERM)
    assert 0 == up.process.wait(60), up.said()
    assert [] == psutil.wait_procs(after.values(), timeout=5)[1]
    assert "stopped; 0 rows were stored" in (tmp_path / "rankscope-live" / "logs" / "service.log").read_text()

    again = start_up("--ports", "free")
    assert urls == again.ready(), "trainings that run look for the service where it was"
    again.process.send_signal(signal.SIGINT)
    assert 0 == again.process.wait(60), again.said()


def test_killed_outright_it_leaves_nothing_behind(start_up):
    up = start_up("--ports", "free")
    up.ready()
    children = up.children()
    up.process.kill()

    assert 3 == len(children)
    assert [] == psutil.wait_procs(children.values(), timeout=30)[1]


def test_a_second_interrupt_ends_all_at_once(start_up):
    up = start_up("--ports", "free")
    up.ready()
    children = up.children()
    children["service"].suspend()  # it will not end because it is asked to
    up.process.send_signal(signal.SIGINT)
    up.wait_for(lambda: "once more Ctrl-C" in up.said())
    up.process.send_signal(signal.SIGINT)

    assert 130 == up.process.wait(20), up.said()  # the service alone may take 30 s otherwise
    assert [] == psutil.wait_procs(children.values(), timeout=5)[1]


def test_what_cannot_start_is_told_with_the_end_of_its_log(start_up, tmp_path):
    (tmp_path / "history").write_text("a file where a folder should be")
    up = start_up("--ports", "free")

    assert 1 == up.process.wait(60)
    assert "service ended with 1 instead of starting" in up.said()
    assert "is a file" in up.said()
    assert "Traceback" not in up.said()


def test_without_prometheus_on_path_one_line_says_how_to_get_it(tmp_path):
    command = [sys.executable, "-m", "rankscope", "up"]
    environment = os.environ | {"PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert 1 == done.returncode
    assert 1 == done.stderr.count("\n")
    assert "apt install prometheus" in done.stderr
    assert "--without-prometheus" in done.stderr
    assert [] == list(tmp_path.iterdir())
