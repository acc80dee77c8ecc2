"""`rankscope doctor`: reports of a healthy, a broken and an empty installation."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rankscope.access.service import Response, UnreachableError
from rankscope.doctor.checks import run_checks
from rankscope.doctor.report import CheckResult, Endpoints, Environment, State, find_endpoints, is_healthy, report_lines
from rankscope.up.machine import StateDir, listeners
from rankscope_ingest.base.config_file import load_config
from rankscope_storage.api.store import Store

GOLDEN = Path(__file__).parents[1] / "golden" / "cli"
NOW = 1_772_366_400.5  # 2026-03-01 12:00:00.5 UTC
DATE = {"date": "Sun, 01 Mar 2026 12:00:00 GMT"}
LATE = {"date": "Sun, 01 Mar 2026 11:59:00 GMT"}
SERVICE, PROMETHEUS, ALERTMANAGER = "http://127.0.0.1:9470", "http://127.0.0.1:9090", "http://127.0.0.1:9093"


@dataclass
class FakeEnvironment:
    """An Environment with values chosen by the test."""

    pages: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    executables: dict[str, str] = field(default_factory=dict)
    ports: dict[int, str] = field(default_factory=dict)
    free: int = 100 << 30
    writable: bool = True
    token: str | None = None
    date: dict[str, str] = field(default_factory=lambda: DATE)

    def python(self):
        return self.versions.get("python", "3.11.7")

    def installed_version(self, package):
        return self.versions.get(package)

    def required_versions(self):
        return {"torch": "2.13", "duckdb": "2", "deltalake": "1.6.6", "pyarrow": "17"}

    def executable(self, executable):
        return self.executables.get(executable.title)

    def get(self, url, token=None):
        if url not in self.pages:
            raise UnreachableError(f"{url}: Connection refused")
        page = self.pages[url]
        if self.token is not None and token != self.token and url.endswith("/api/v1/targets"):
            return Response(401, b"{}", self.date)
        body = page if isinstance(page, str) else json.dumps(page)
        return Response(200, body.encode(), self.date)

    def free_bytes(self, path):
        return self.free

    def check_writable(self, folder):
        if not self.writable:
            raise PermissionError(13, "Permission denied")

    def listener(self, port):
        return self.ports.get(port)

    def now(self):
        return NOW


def target(rank, **changes):
    known = {"run": "my-run", "rank": rank, "url": f"http://127.0.0.1:500{rank}", "health": "up", "last_error": None}
    return known | {"records_lost": 0} | changes


def readers(*names):
    return {"status": "ok", "readers": [{"page": page, "by": by, "seconds_ago": 0.4} for page, by in names]}


VERSIONS = {"pyarrow": "26.0.1", "prometheus-client": "0.26.0", "torch": "2.13.0+cpu"}
VERSIONS |= {"deltalake": "1.6.6", "duckdb": "2.0.0", "aiohttp": "3.14.5"}
PROGRAMS = {"Prometheus": "2.42.0 (/usr/bin/prometheus)", "Alertmanager": "0.25.0 (/usr/bin/prometheus-alertmanager)"}


def scraped(job, health="up", error=""):
    return {"labels": {"job": job}, "health": health, "lastError": error}


def healthy_environment():
    read = readers(("/records", "Rankscope/0.1.0"), ("/metrics", "Prometheus/2.42.0"))
    config = "receivers:\n- name: nobody\n- name: chat\n  webhook_configs:\n  - url: http://chat.example\n"
    targets = [scraped("rankscope"), scraped("rankscope"), scraped("rankscope-service"), scraped("node")]
    pages = {
        f"{PROMETHEUS}/api/v1/status/config": {"data": {"yaml": "scrape_configs: []"}},
        f"{SERVICE}/healthz": {"status": "ok"},
        f"{SERVICE}/api/v1/targets": [target(0), target(1), target(2, health="gone", last_error="over")],
        "http://127.0.0.1:5000/healthz": read,
        "http://127.0.0.1:5001/healthz": read,
        f"{PROMETHEUS}/api/v1/targets?state=active": {"data": {"activeTargets": targets}},
        f"{PROMETHEUS}/api/v1/rules": {
            "data": {"groups": [{"name": "rankscope-anomaly", "rules": [{"health": "ok"}]}]}
        },
        f"{PROMETHEUS}/api/v1/alertmanagers": {"data": {"activeAlertmanagers": [{"url": ALERTMANAGER}]}},
        f"{ALERTMANAGER}/api/v2/status": {"config": {"original": config}},
        f"{ALERTMANAGER}/metrics": 'alertmanager_notifications_failed_total{integration="webhook"} 0\n',
    }
    ports = {9470: "python3 (process 12)", 9090: "prometheus (process 13)", 9093: "a process of another user"}
    return FakeEnvironment(pages=pages, versions=VERSIONS, executables=PROGRAMS, ports=ports)


def broken_environment():
    environment = healthy_environment()
    environment.date = LATE
    environment.versions = {name: version for name, version in VERSIONS.items() if name != "duckdb"} | {
        "torch": "2.4.1"
    }
    environment.executables = {"Prometheus": PROGRAMS["Prometheus"]}
    environment.free, environment.writable = 100 << 20, False
    rule = {"name": "AnomalyNan", "health": "err", "lastError": "many-to-many"}
    environment.pages |= {
        f"{SERVICE}/healthz": {"status": "degraded", "reason": "the disk is full"},
        f"{SERVICE}/api/v1/targets": [
            target(0, records_lost=7),
            target(1, health="failing", last_error="nobody listens\x1b[2J", url="http://127.0.0.1:5009"),
        ],
        "http://127.0.0.1:5000/healthz": readers(("/records", "Rankscope/0.1.0")),
        f"{PROMETHEUS}/api/v1/targets?state=active": {
            "data": {"activeTargets": [scraped("rankscope"), scraped("rankscope", "down", "401 Unauthorized")]}
        },
        f"{PROMETHEUS}/api/v1/rules": {"data": {"groups": [{"name": "rankscope-anomaly", "rules": [rule]}]}},
        f"{PROMETHEUS}/api/v1/alertmanagers": {"data": {"activeAlertmanagers": []}},
        f"{ALERTMANAGER}/api/v2/status": {"config": {"original": "receivers:\n- name: nobody\n"}},
        f"{ALERTMANAGER}/metrics": 'alertmanager_notifications_failed_total{integration="webhook"} 3\n',
    }
    return environment


def where(store, **changes):
    addresses = {"service": SERVICE, "prometheus": PROMETHEUS, "alertmanager": ALERTMANAGER}
    return Endpoints(**{**addresses, "store": str(store), **changes})


def report(environment, store, **changes):
    text = "\n".join(report_lines(list(run_checks(environment, where(store, **changes))))) + "\n"
    return text.replace(str(store), "STORE")


@pytest.mark.parametrize("name", ["healthy", "broken", "nothing"])
def test_report_matches_the_golden_file(name, sample_store, tmp_path):
    environment = {"healthy": healthy_environment, "broken": broken_environment, "nothing": FakeEnvironment}[name]()
    store = tmp_path / "none-yet" if name == "nothing" else sample_store
    expected = GOLDEN / f"doctor_{name}.txt"
    text = report(environment, store)

    assert expected.read_text(encoding="utf-8") == text


SENDER = {"name": "10.0.0.7 (p/3)", "reason": "malformed: x", "requests": 1250}
UNDELIVERED = "2 messages wait since 40 s: 403 Forbidden (json://chat.example)"
OF_SENDER, SHARED = "requests of the remote write sender 10.0.0.7 (p/3): malformed: x", "two trainings are named 'r'"
TARGETS = f"{SERVICE}/api/v1/targets"
STATUS, HEALTH = f"{SERVICE}/api/v1/status", f"{SERVICE}/healthz"
SCRAPED = f"{PROMETHEUS}/api/v1/targets?state=active"


@pytest.mark.parametrize(
    ("page", "response", "line"),
    [
        (STATUS, {"refused_senders": [SENDER]}, f"FAIL  refuses all {OF_SENDER}\n        -> the"),
        (
            STATUS,
            {"refused_senders": [SENDER | {"accepted_requests": 50}] * 12},
            f"FAIL  refuses 1,250 of 1,300 {OF_SENDER}\n",
        ),
        (STATUS, {"refused_senders": [SENDER] * 12}, "FAIL  refuses requests of 2 other remote write senders\n"),
        (
            STATUS,
            {"notifications": UNDELIVERED},
            f"WARN  notifications: {UNDELIVERED}\n        -> check the address in",
        ),
        (STATUS, {"shared_names": [SHARED]}, f"WARN  {SHARED}\n        -> export another RANKSCOPE_RUN"),
        (TARGETS, [], f"no rank is registered\n        -> in the training job: export RANKSCOPE_INGEST_URL={SERVICE}"),
        *((HEALTH, other, f"the server at {SERVICE} is not Rankscope") for other in ("<html>", [], {"hello": 1})),
        *((SCRAPED, other, "not a Prometheus response") for other in ("<html>", [], {"data": 1})),
        (SCRAPED, {"data": {"activeTargets": []}}, "scrapes no ranks (job rankscope)"),
        *((f"{PROMETHEUS}/api/v1/{page}", None, "no response") for page in ("status/config", "rules", "alertmanagers")),
    ],
)
def test_answer_of_a_server_has_its_line(sample_store, page, response, line):
    environment = healthy_environment()
    environment.pages[page] = response
    if response is None:
        del environment.pages[page]
    text = report(environment, sample_store)

    assert line in text
    assert text.count("10.0.0.7") <= 10


@pytest.mark.parametrize("status", [{"notifications": None}, {}, "<html>"])
def test_delivered_notifications_add_no_line(sample_store, status):
    environment = healthy_environment()
    environment.pages[STATUS] = status

    assert "notifications:" not in report(environment, sample_store)


def test_missing_wrong_and_correct_tokens(sample_store):
    environment = healthy_environment()
    environment.token = "right"

    assert "FAIL  requires a token\n        -> export RANKSCOPE_TOKEN=" in report(environment, sample_store)
    assert "FAIL  rejects the token" in report(environment, sample_store, token="wrong")
    assert "OK    accepts the token" in report(environment, sample_store, token="right")
    assert "wrong" not in report(environment, sample_store, token="wrong")


def test_each_shard_has_its_service_or_a_command_that_starts_it(tmp_path):
    store = Store.open(tmp_path, create=True)
    for number in range(2):
        with store.claim(f"{number}/3", owner=f"process {number}", is_service=True) as writer:
            writer.join(f"http://h:{number}")
            writer.renew()
    text = re.sub(r"commit \d+ s", "commit 3 s", report(healthy_environment(), tmp_path))
    newest = max((tmp_path / "_delta_log").glob("*.json"))
    newest.write_text(re.sub(r'"timestamp":\d+', '"timestamp":1', newest.read_text()))

    assert "the shard 0/3 has the service http://h:0, process 0, last commit 3 s ago, maintains the store\n" in text
    assert "the shard 1/3 has the service http://h:1, process 1, last commit 3 s ago\n" in text
    assert "WARN  the shard 2/3 has no service\n        -> start it: rankscope serve --shard 2/3" in text
    assert "WARN  the service of the shard 1/3 is dead: http://h:1" in report(healthy_environment(), tmp_path)


def test_missing_store_in_a_bucket_is_created_by_the_service(bucket):
    found = report(healthy_environment(), f"s3://{bucket}/history")

    assert "WARN  STORE does not exist yet\n        -> rankscope serve creates it" in found
    assert "FAIL  STORE cannot be opened: cannot access" in report(healthy_environment(), "s3://no-bucket/history")


def test_store_that_cannot_be_read_is_one_error(tmp_path):
    older = shutil.copytree(Path(__file__).parents[1] / "storage" / "data" / "store_1", tmp_path / "history")
    for store, reason in ((older, "was written by an earlier release"), ("gs://history", "has the unknown scheme gs")):
        found = report(healthy_environment(), store)

        assert f"\nStore\n  FAIL  STORE cannot be opened: STORE {reason}" in found


def test_store_below_an_unreadable_folder_is_reported(tmp_path, monkeypatch):
    def denied(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", denied)

    assert "FAIL  STORE cannot be opened: Permission denied\n" in report(healthy_environment(), tmp_path)
    assert Environment().free_bytes(tmp_path / "history") > 0


def test_only_failed_checks_are_unhealthy():
    ok, warning, failure = (CheckResult("a", state, "x") for state in State)

    assert is_healthy([ok, warning])
    assert not is_healthy([ok, failure])


def test_required_versions_come_from_the_package_metadata():
    required_versions = Environment().required_versions()

    assert "2.4" == required_versions["torch"]
    assert "1.6.6" == required_versions["deltalake"]


def test_listening_process_is_found_by_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert f"(process {os.getpid()})" in listeners()[server.getsockname()[1]]


def test_address_precedence_is_option_then_up_then_default(tmp_path):
    """The token of `rankscope up` is sent only to its service."""
    settings = load_config(None, {"store.path": str(tmp_path / "history")})
    folder = StateDir.next_to(tmp_path / "history")
    folder.create()
    folder.save_notes({"urls": {"service": "http://127.0.0.1:1", "prometheus": "http://127.0.0.1:2"}})
    folder.write({"token": "open-sesame"})
    chosen = find_endpoints(settings, None, given={"service": "http://other:3"}, is_explicit=False)

    assert ["http://other:3", "http://127.0.0.1:2"] == [chosen.service, chosen.prometheus]
    assert (ALERTMANAGER, [("prometheus", 2), ("alertmanager", 9093)]) == (chosen.alertmanager, chosen.ports)
    assert "open-sesame" == find_endpoints(settings, None, given={}, is_explicit=False).token
    assert chosen.token is None
    assert find_endpoints(settings, None, given={}, is_explicit=True).token is None


def test_remote_service_uses_the_tls_settings_of_ranks(tmp_path, monkeypatch):
    settings = load_config(None, {"store.path": str(tmp_path / "history")})
    for name in ("CA", "CERT", "KEY"):
        monkeypatch.setenv(f"RANKSCOPE_{name}_FILE", f"/etc/{name}")
    client_tls = find_endpoints(settings, None, given={"service": "https://other:3"}, is_explicit=False).client_tls

    assert ("/etc/CA", "/etc/CERT", "/etc/KEY") == (client_tls.ca_file, client_tls.cert_file, client_tls.key_file)


def test_prometheus_with_discovery_but_no_rank_is_healthy(sample_store):
    environment = healthy_environment()
    config = "scrape_configs:\n- job_name: r\n  http_sd_configs:\n  - url: http://127.0.0.1:9470/sd\n"
    environment.pages |= {SCRAPED: {"data": {"activeTargets": []}}}
    environment.pages[f"{PROMETHEUS}/api/v1/status/config"] = {"data": {"yaml": config}}

    assert "OK    discovers ranks from the service; no rank is registered yet" in report(environment, sample_store)


def test_invalid_configuration_is_reported_and_other_checks_run(tmp_path, free_port):
    (tmp_path / "service.toml").write_text('[store]\npath = "h"\n[servise]\n')
    address = f"http://127.0.0.1:{free_port}"
    unused = ["--prometheus", address, "--alertmanager", address]
    command = [sys.executable, "-m", "rankscope", "doctor", "--config", "service.toml", "--url", address, "--json"]
    done = subprocess.run([*command, *unused], cwd=tmp_path, capture_output=True, text=True, check=False)
    outcome = json.loads(done.stdout)
    failed = [result["area"] for result in outcome["results"] if result["state"] == "FAIL"]

    assert 1 == done.returncode
    assert outcome["healthy"] is False
    assert ["Configuration", "Service"] == failed
    assert {"area", "state", "text", "remedy"} == outcome["results"][0].keys()
    assert "did you mean service" in outcome["results"][0]["text"]
    assert "" == done.stderr


def test_wrong_address_is_a_failed_check(in_process, free_port):
    wrong = f"http://127.0.0.1:{free_port}0000"
    done = in_process("doctor", "--url", wrong, "--prometheus", "http://[x", "--alertmanager", wrong)

    assert (1, "") == (done.returncode, done.stderr)
    assert "Port out of range" in done.stdout
