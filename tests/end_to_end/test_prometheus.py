"""A real Prometheus with the configuration we ship: it finds the ranks, answers every panel, and its alerts fire."""

from __future__ import annotations

import json
import subprocess
import urllib.parse
import urllib.request

import pytest
import yaml

from rankscope_dashboards.generate import files
from rankscope_dashboards.prometheus_config import DEFAULT_SERVICE

VARIABLES = {"$__rate_interval": "10s", "$__interval": "10s", "$run": "watched", "$rank": ".+"}


@pytest.fixture
def prometheus(require_server, tmp_path, service):
    """Give the address of a Prometheus that was told of `service`, and nothing else."""
    program = require_server("prometheus")
    folder = tmp_path / "prometheus"
    folder.mkdir()
    made = files()
    config = yaml.safe_load(made["prometheus/prometheus.yml"].replace(DEFAULT_SERVICE, f"127.0.0.1:{service.port}"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["http_sd_configs"][0]["refresh_interval"] = "1s"
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (folder / "rankscope.rules.yml").write_text(made["prometheus/rankscope.rules.yml"], encoding="utf-8")
    listen = f"127.0.0.1:{service.port + 1 if service.port < 65535 else service.port - 1}"
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={listen}"], stdout=log, stderr=log)
    yield f"http://{listen}"
    process.terminate()
    process.wait(20)


def asked(prometheus: str, expression: str) -> list[dict[str, object]]:
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{prometheus}/api/v1/query?{query}", timeout=5) as answer:
        result: list[dict[str, object]] = json.load(answer)["data"]["result"]
    return result


def panel_queries() -> dict[str, str]:
    queries = {}
    for name, text in files().items():
        for panel in json.loads(text)["panels"] if name.startswith("dashboards/") else ():
            for target in panel["targets"]:
                expression = target["expr"]
                for variable, value in VARIABLES.items():
                    expression = expression.replace(variable, value)
                queries[f"{panel['title']} {target['refId']}"] = expression
    return queries


@pytest.mark.timeout(300)
def test_shipped_configuration_finds_ranks_fills_panels_and_fires_alerts(service, train, prometheus):
    service.start()
    train(service, "watched", steps=3000, pause=0.05)
    unanswered = panel_queries()

    def every_panel_has_data() -> bool:
        for name, expression in list(unanswered.items()):
            if asked(prometheus, expression):
                del unanswered[name]
        return not unanswered

    def alerting() -> set[tuple[str, str]]:
        found = asked(prometheus, 'ALERTS{alertstate="firing", run="watched"}')
        return {(series["metric"]["alertname"], series["metric"]["rank"]) for series in found}

    assert service.wait_for(lambda: len(asked(prometheus, 'up{job="rankscope"} == 1')) == 2)
    instances = {series["metric"]["instance"] for series in asked(prometheus, 'up{job="rankscope"}')}
    assert {"watched/0", "watched/1"} == instances
    # The NaN lasted one step of a twentieth of a second, before Prometheus had found the ranks: the counter tells.
    assert service.wait_for(lambda: ("AnomalyNanEvents", "1") in alerting())
    assert service.wait_for(every_panel_has_data, 90), unanswered
