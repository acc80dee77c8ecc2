"""A real node_exporter: the service scrapes it, and the store contains the values of its page."""

import json
import subprocess
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rankscope_storage.connection import connect

SCRAPES = 'rankscope_ingest_exporter_scrapes_total{outcome="ok"}'
CONSTANT = ("node_boot_time_seconds", "node_memory_MemTotal_bytes", "node_uname_info", "node_os_info", "node_dmi_info")
"""Series that do not change while a machine runs."""


@pytest.fixture
def node_exporter(require_server, another_port, tmp_path):
    command = [require_server("prometheus-node-exporter"), f"--web.listen-address=127.0.0.1:{another_port}"]
    with (tmp_path / "node-exporter.log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        yield f"http://127.0.0.1:{another_port}/metrics"
        process.terminate()


def page(url):
    """Return the page as parsed by prometheus_client: value by name and labels. An empty label counts as absent."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        (sample.name, tuple(sorted(label for label in sample.labels.items() if label[1]))): sample.value
        for family in families
        for sample in family.samples
    }


def scrapes(service):
    lines = service.get("/metrics").splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(SCRAPES))


def test_store_has_each_series_of_a_node_exporter_with_its_values(service, node_exporter):
    service.ingest = f'[[exporters]]\nurl = "{node_exporter}"\nname = "node-a"\nevery_seconds = 0.5'
    service.start()
    before = service.wait_for(lambda: page(node_exporter))
    enough = scrapes(service) + 3
    service.wait_for(lambda: scrapes(service) >= enough)
    after = page(node_exporter)
    assert service.stop() == 0

    with connect(service.store) as connection:
        rows = connection.query("SELECT target, metric, labels, value FROM samples ORDER BY ts").to_pylist()
    assert {"node-a"} == {row["target"] for row in rows}
    stored = {}
    for row in rows:
        labels = json.loads(row["labels"] or "{}")
        stored.setdefault((row["metric"], tuple(sorted(labels.items()))), []).append(row["value"])
    assert {1.0} == set(stored[("up", ())])
    always = before.keys() & after.keys()
    assert len(always) > 200  # 500 on a machine with two processors
    assert always <= stored.keys()
    for series in always:
        name = series[0]
        values = [value for value in stored[series] if value is not None]
        if name in CONSTANT:
            assert {before[series]} == set(values), series
        elif name.startswith("node_cpu_seconds"):
            assert values == sorted(values), series
            assert values[0] <= after[series], series
            assert values[-1] >= before[series], series
