"""`rankscope up` with the real programs: start, restart, orderly stop, and no process left behind."""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request

import psutil
import pytest
from tests.end_to_end import past
from tests.end_to_end.conftest import write_locked_config
from tests.end_to_end.lives import until
from tests.programs import run_command

MARKS = {
    "prometheus": "/usr/bin/prometheus",
    "alertmanager": "/usr/bin/prometheus-alertmanager",
    "service": "serve",
    "supervisor": "supervisor.supervisord",
}
"""A word of the command line of each process."""


class Up:
    """One `rankscope up` process in a folder."""

    def __init__(self, folder, *arguments):
        self.log = folder / "up.log"
        store = [] if "service.toml" in arguments else ["--store", "history"]
        command = [sys.executable, "-m", "rankscope", "up", *store, "--scrape", "1", *arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)

    def output(self):
        return self.log.read_text(errors="replace")

    def wait_for(self, condition):
        return until(condition, 60, self.output)

    def ready(self):
        """Wait until all programs are ready; return their addresses by name."""
        self.wait_for(lambda: "Press Ctrl-C to stop all programs" in self.output())
        return dict(re.findall(r"^(\w+) +(https?://\S+) +ready", self.output(), re.MULTILINE))

    def children(self):
        found = psutil.Process(self.process.pid).children(recursive=True)
        return {next(name for name, mark in MARKS.items() if mark in child.cmdline()): child for child in found}


@pytest.fixture
def start_up(require_server, tmp_path):
    require_server("prometheus")
    require_server("prometheus-alertmanager")
    started = []

    def start(*arguments):
        started.append(Up(tmp_path, *arguments))
        return started[-1]

    yield start
    for up in started:
        if up.process.poll() is None:
            up.process.kill()
            up.process.wait(10)


def fetch(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


@pytest.mark.thorough
def test_programs_reach_each_other_with_tls_and_token(start_up, tmp_path, certificates, free_port):
    """IPv6, mutual TLS and a token: Prometheus scrapes the service, and `rankscope doctor` can access it."""
    # The boards also show data of the store from two months ago, which this Prometheus never scraped. This is checked
    # for every board query on stored data of ranks, and for the lists of runs and ranks.
    then = int(time.time()) // 60 * 60 - 60 * 86_400
    past.put(tmp_path / "history", then)
    write_locked_config(tmp_path, certificates, free_port)
    up = start_up("service.toml")
    urls = up.ready()
    line = "scrapes the service: 1 of 1 up"
    doctor = up.wait_for(
        lambda: seen if line in (seen := run_command("doctor", "-c", "service.toml", folder=tmp_path)).stdout else None
    )
    panels = past.panels_of_the_past()
    found = {title: past.shown(urls["prometheus"], query, then) for title, query in panels.items()}

    assert f"https://[::1]:{free_port}" == urls["service"]
    assert [] == [title for title, lines in found.items() if not lines]
    assert 50 < len(found)
    board = "Rankscope · Run overview: "
    highest, lowest, rise = [[32, 40, 48]], [[16, 20, 24]], [3 / past.SECONDS_PER_STEP] * 3
    assert [highest, lowest] == [found[f"{board}Loss {place}"] for place in "AB"]
    assert [highest, [[14, 18, 22]]] == [found[f"{board}Gradient norm {place}"] for place in "AB"]
    assert [highest, lowest] == [found[f"{board}Step time {place}"] for place in "AB"]
    assert [[1, 1, 1]] == found[f"{board}State A"], "running"
    assert [[pytest.approx(step / past.STEPS) for step in (16, 20, 24)]] == found[f"{board}Progress A"]
    assert [pytest.approx(rise)] == found[f"{board}Tokens per second A"]
    kinds = {"kind": set(past.KINDS), "tensor": {"weight"}}
    assert {"run": {past.RUN}, "rank": {"0", "1"}} | kinds == past.listed(urls["prometheus"], then)
    assert (
        'Prometheus serves      the whole store, selected by the job label: rankscope_loss{job="rankscope"}'
        in up.output()
    )
    assert 0 == doctor.returncode, doctor.stdout
    assert "accepts the token" in doctor.stdout
    assert f"export RANKSCOPE_INGEST_URL=https://[::1]:{free_port}" in up.output()
    assert "export RANKSCOPE_TOKEN_FILE=" in up.output()
    assert "open-sesame" not in up.output() + doctor.stdout


@pytest.mark.thorough
def test_programs_are_configured_for_each_other_and_restarted(start_up, tmp_path):
    up = start_up("--ports", "free", "--notify", "http://127.0.0.1:9/hook")
    urls = up.ready()

    def healthy():
        targets = fetch(f"{urls['prometheus']}/api/v1/targets")["data"]["activeTargets"]
        return [("rankscope-service", "up")] == [(target["labels"]["job"], target["health"]) for target in targets]

    assert {"service", "prometheus", "alertmanager"} == urls.keys()
    assert f"export RANKSCOPE_INGEST_URL={urls['service']}" in up.output()
    assert up.wait_for(healthy)
    managers = fetch(f"{urls['prometheus']}/api/v1/alertmanagers")["data"]["activeAlertmanagers"]
    assert [urls["alertmanager"] + "/api/v2/alerts"] == [manager["url"] for manager in managers]
    assert "http://127.0.0.1:9/hook" in fetch(f"{urls['alertmanager']}/api/v2/status")["config"]["original"]
    rules = fetch(f"{urls['prometheus']}/api/v1/rules")["data"]["groups"]
    assert "rankscope-anomaly" in {group["name"] for group in rules}

    doctor = run_command("doctor", folder=tmp_path)
    assert 0 == doctor.returncode, doctor.stdout
    for line in ("scrapes the service: 1 of 1 up", "notifies address-1", f"sends alerts to {urls['alertmanager']}"):
        assert line in doctor.stdout

    before = up.children()
    for name in ("prometheus", "service"):
        before[name].kill()
    up.wait_for(
        lambda: (
            {"prometheus", "service"}
            <= set(re.findall(r"^(\w+) exited \(terminated by SIGKILL", up.output(), re.MULTILINE))
        )
    )
    assert up.wait_for(lambda: fetch(f"{urls['prometheus']}/api/v1/targets") and fetch(f"{urls['service']}/healthz"))
    after = up.children()

    assert before["alertmanager"].pid == after["alertmanager"].pid
    assert before["service"].pid != after["service"].pid
    up.process.send_signal(signal.SIGTERM)
    assert 0 == up.process.wait(60), up.output()
    assert [] == psutil.wait_procs(after.values(), timeout=5)[1]
    assert "stopped; 0 rows stored" in (tmp_path / "rankscope-live" / "logs" / "service.log").read_text()

    again = start_up("--ports", "free")
    assert urls == again.ready(), "running trainings use the previous address of the service"
    again.process.send_signal(signal.SIGINT)
    assert 0 == again.process.wait(60), again.output()


@pytest.mark.thorough
def test_sigkill_leaves_no_process_behind(start_up):
    up = start_up("--ports", "free")
    up.ready()
    children = up.children()
    up.process.kill()

    assert 4 == len(children)
    assert [] == psutil.wait_procs(children.values(), timeout=30)[1]


@pytest.mark.thorough
def test_second_interrupt_kills_all_programs(start_up):
    up = start_up("--ports", "free")
    up.ready()
    children = up.children()
    children["service"].suspend()  # a suspended process does not handle SIGTERM
    up.process.send_signal(signal.SIGINT)
    up.wait_for(lambda: "press Ctrl-C again" in up.output())
    up.process.send_signal(signal.SIGINT)

    assert 130 == up.process.wait(20), up.output()  # otherwise the service could take 30 s
    assert [] == psutil.wait_procs(children.values(), timeout=5)[1]


def test_failed_start_prints_the_end_of_the_log(start_up, tmp_path):
    (tmp_path / "history").write_text("a file where a folder should be")
    up = start_up("--ports", "free")

    assert 1 == up.process.wait(60)
    assert "service exited during the start (exit status 1;" in up.output()
    assert "is a file" in up.output()
    assert "Traceback" not in up.output()
    # The programs were stopped during the start, so `rankscope doctor` must not search for them at their free ports.
    report = run_command("doctor", "--store", "history", folder=tmp_path).stdout
    assert set(re.findall(r"127\.0\.0\.1:(\d+)", report)) <= {"9470", "9090", "9093"}
