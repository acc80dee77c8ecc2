"""A real Prometheus with the shipped configuration discovers the ranks and answers each panel, variable and alert."""

import json
import re
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml
from tests.dashboards.conftest import FILES, substituted
from tests.end_to_end.lives import until

from rankscope_contract.metrics.catalogue import TOKENS
from rankscope_dashboards.alerts.groups import alert_groups
from rankscope_dashboards.boards.elements.pages import all_panels
from rankscope_dashboards.boards.elements.selectors import RANKS, RATE_WINDOW, SERVICE_RANKS, rate
from rankscope_dashboards.deploy.prometheus import DEFAULT_SERVICE

TRAINING = Path(__file__).with_name("troubled_training.py")
RUN = "watched"
STALLED_AFTER_SECONDS = 3.0
AFTER_ALL_TROUBLE = 60
WHAT_A_STEP_WAITS_FOR = {
    21: {("AnomalyNan", "1"), ("AnomalyNanEvents", "1")},
    31: {("AnomalyTurbulence", "0"), ("AnomalyTurbulence", "1")},
    40: {("RunStalled", None), ("ScoreAboveLimit", "1")},
}
VARIABLES = {"$__rate_interval": "10s", "$__interval": "10s", "$__range": "10m", "$smooth": "1m", "$run": RUN}
VARIABLES |= dict.fromkeys(("$rank", "$host", "$tensor", "$lines", "$rows"), ".+") | {"$kind": "grad_reduced"}
BOARDS = [json.loads(text) for name, text in FILES.items() if name.endswith(".json")]
ALERTS = {" ".join((alert.name, *alert.labels.values())): alert for group in alert_groups() for alert in group.alerts}


class Asked:
    """Responses of a Prometheus server."""

    def __init__(self, url):
        self.url = url
        self.started = time.time()

    def get(self, path, **arguments):
        query = urllib.parse.urlencode(arguments, doseq=True)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as answer:
            document = json.load(answer)
        # Prometheus also requests label values from the store, for which remote read has no request.
        assert set(document.get("warnings", ())) <= {"not implemented"}
        return document["data"]

    def now(self, expression):
        return self.get("query", query=expression)["result"]

    def since_start(self, expression, step=1):
        return self.get("query_range", query=expression, start=self.started, end=time.time(), step=step)["result"]

    def labels_since_start(self, expression):
        return [series["metric"] for series in self.since_start(expression)]


@pytest.fixture
def prometheus(require_server, tmp_path, service, another_port):
    """Yield a Prometheus that discovers the targets of `service` only."""
    program = require_server("prometheus")
    folder = tmp_path / "prometheus"
    folder.mkdir()
    made = FILES["prometheus/prometheus.yml"].replace(DEFAULT_SERVICE, f"127.0.0.1:{service.port}")
    config = yaml.safe_load(made)
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["http_sd_configs"][0]["refresh_interval"] = "1s"
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (folder / "rankscope.rules.yml").write_text(FILES["prometheus/rankscope.rules.yml"], encoding="utf-8")
    listen = f"127.0.0.1:{another_port}"
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={listen}"], stdout=log, stderr=log)
    yield Asked(f"http://{listen}")
    process.terminate()
    process.wait(20)


def panel_targets():
    for board in BOARDS:
        for panel in all_panels(board):
            for target in panel.get("targets", ()):
                yield f"{panel['title']} {target['refId']}", target


UNANSWERED = {  # Queries without a result in this run, with the reason. Tests with promtool evaluate them.
    "Closed incidents A": "an incident is closed five minutes after its last firing",
    "Collectives A": "DDP calls its collectives inside torch",
    "Failed ranks A": "no rank fails before the end of this test",
    "Pauses B": "the training has no checkpoint and no evaluation",
    "Targets B": "the service scrapes no other exporters",
    "Scrapes of other exporters C": "the service scrapes no other exporters",
    "Samples by remote write B": "no Prometheus writes to the service",
    "Samples by remote write C": "no Prometheus writes to the service",
}

OF_ACCELERATORS = ("rankscope_gpu_", "rankscope_device_memory_")
"""Metrics with simulated readings, because the ranks of this test have no GPU."""

SIMULATED = {name for name, target in panel_targets() if any(prefix in target["expr"] for prefix in OF_ACCELERATORS)}
"""Queries with simulated results. The documentation states their number."""


def unanswered_panels(prometheus, seconds=30.0):
    """Return the panels without data for the queries of Grafana, at one time or over a range, after `seconds`."""
    asked = {name: target for name, target in panel_targets() if name not in UNANSWERED}
    deadline = time.monotonic() + seconds
    while asked and time.monotonic() < deadline:
        for name, target in list(asked.items()):
            ask = prometheus.now if target["instant"] else prometheus.since_start
            if ask(substituted(target["expr"], VARIABLES)):
                del asked[name]
    return list(asked)


def values_of_variables(prometheus):
    """Return the entries of each variable, from the label values address and from the series address."""
    listed = {}
    for variable in (item for board in BOARDS for item in board["templating"]["list"] if item["type"] == "query"):
        text = substituted(variable["query"], VARIABLES)
        if ordered := re.fullmatch(r"query_result\((.+)\)", text):
            found = [[*series["metric"].values()] for series in prometheus.now(ordered[1])]
            listed[variable["name"]] = [value for (value,) in found]
            continue
        selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", text).groups()
        window = {"match[]": selector, "start": prometheus.started, "end": time.time()}
        by_label = prometheus.get(f"label/{label}/values", **window)
        by_series = {series[label] for series in prometheus.get("series", **window)}
        assert set(by_label) == by_series
        listed[variable["name"]] = by_label
    return listed


def rates_unlike_scraped(prometheus, rates):
    """Return the ranks whose speed differs from the scraped values, where there are enough samples."""
    scraped = f"rate({TOKENS.name}{SERVICE_RANKS}{RATE_WINDOW})"
    found = prometheus.since_start(substituted(f"({rates} - on (run, rank) {scraped}) != 0", VARIABLES))
    return {series["metric"]["rank"] for series in found}


def unwell(promtool, page):
    checked = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, check=False)
    return (checked.stdout + checked.stderr).decode()


def of_the_run(prometheus, *names):
    """Return the alerts whose expressions had no result for the run yet."""
    found = {name: prometheus.labels_since_start(ALERTS[name].expression) for name in names}
    return {name for name in names if not any(labels.get("run") == RUN for labels in found[name])}


def fired(prometheus):
    found = prometheus.labels_since_start('ALERTS{alertstate="firing"}')
    return {(labels["alertname"], labels.get("rank")) for labels in found}


def step_of(service, processes):
    assert [None, None] == [process.poll() for process in processes], rank_logs(service)
    return service.runs()[0]["step"]


def rank_logs(service):
    return "\n".join(path.read_text(errors="replace")[-2000:] for path in service.folder.glob("rank*.log"))


def kill_with_something_published(service, processes):
    """Kill the ranks when a heartbeat has reported records that the service has not polled."""
    named = {target["pid"]: target for target in json.loads(service.get("/api/v1/targets"))}
    assert {process.pid for process in processes} == named.keys()

    def waiting():
        return [one["head"] - one["cursor"] for one in json.loads(service.get("/api/v1/targets"))]

    # Heartbeats are twice as frequent as polls: after the first one with new records, the next poll is 1 s away.
    service.wait_for(lambda: 0 in waiting())
    service.wait_for(lambda: all(count > 0 for count in waiting()))
    for process in processes:
        process.send_signal(signal.SIGKILL)


def test_documentation_states_exceptions_and_simulated_queries():
    page = (Path(__file__).parents[2] / "docs" / "dashboards.md").read_text(encoding="utf-8")

    assert len(UNANSWERED) <= 8
    assert f"{len(SIMULATED)} queries of GPU panels have simulated results" in page
    assert all(name.rpartition(" ")[0] in page for name in UNANSWERED)


@pytest.mark.timeout(300)
@pytest.mark.thorough
def test_every_panel_variable_and_alert_has_a_result(service, start_ranks, prometheus, require_server):
    service.poll_seconds, service.stalled_after_seconds = 2.0, STALLED_AFTER_SECONDS
    service.start()
    processes = start_ranks(TRAINING, service.folder, run=RUN, log="rank")

    service.wait_for(lambda: service.runs() and step_of(service, processes) is None, 90)
    service.wait_for(lambda: len(prometheus.now('up{job="rankscope"} == 1')) == 2, 30)
    instances = {series["metric"]["instance"] for series in prometheus.now('up{job="rankscope"}')}
    (service.folder / "go").touch()
    for step, alerts in WHAT_A_STEP_WAITS_FOR.items():
        service.wait_for(lambda step=step: (step_of(service, processes) or 0) >= step - 1)
        service.wait_for(lambda alerts=alerts: alerts <= fired(prometheus))
        (service.folder / f"seen-{step}").touch()
    service.wait_for(lambda: (step_of(service, processes) or 0) >= AFTER_ALL_TROUBLE)

    assert {f"{RUN}/0", f"{RUN}/1"} == instances
    assert [] == unanswered_panels(prometheus)
    listed = values_of_variables(prometheus)
    assert ([RUN], ["0", "1"], ["bias", "weight"]) == (listed["run"], listed["rank"], listed["tensor"])
    assert {"grad_reduced", "act_out", "momentum"} <= set(listed["kind"])

    assert set() == rates_unlike_scraped(prometheus, rate(TOKENS)), (
        "the queries of the boards, although every step is stored as well"
    )
    merged = f"rate({TOKENS.name}{RANKS}{RATE_WINDOW})"
    assert {"0", "1"} == rates_unlike_scraped(prometheus, merged), "merged series: the store was queried"

    promtool = require_server("promtool", "prometheus")
    addresses = [address for one in json.loads(service.get("/sd")) for address in one["targets"]]
    for url in (service.url, *(f"http://{address}" for address in addresses)):
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            assert "" == unwell(promtool, answer.read()), url

    while_it_lived = ("AnomalyNan", "AnomalyNanEvents", "AnomalyTurbulence", "AnomalyTurbulenceEvents", "RunStalled")
    assert set() == of_the_run(prometheus, *while_it_lived)
    for rule in ("AnomalyNan", "AnomalyTurbulence"):
        assert prometheus.since_start(f'rankscope_rule_firing{{rule="{rule}", kind!=""}} == 1'), "the rank agrees"

    kill_with_something_published(service, processes)
    death = {("RankGone", "0"), ("RankGone", "1"), ("IngestLosing", None)}
    service.wait_for(lambda: death <= (now := fired(prometheus)) and "RunFailed" in {name for name, _ in now})
    service.kill()
    until(lambda: prometheus.now(ALERTS["ServiceDown"].expression), 30)

    firing = fired(prometheus)
    elsewhere = {"AnomalyWithoutService", "RuleDisagreement", "ServiceDown"}
    of_runs = {name for name, alert in ALERTS.items() if alert.name not in elsewhere}
    assert set().union(death, *WHAT_A_STEP_WAITS_FOR.values()) <= firing
    assert "RuleDisagreement" not in {name for name, _ in firing}, "ranks and Prometheus agree"
    assert set() == of_the_run(prometheus, *of_runs)
