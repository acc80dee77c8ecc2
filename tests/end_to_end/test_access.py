"""Access control of all programs: IPv6, mutual TLS, a token on every connection, a port range."""

import json
import os
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml
from tests.end_to_end.conftest import write_locked_config
from tests.end_to_end.lives import until

from rankscope_contract.wire.tls import client_context
from rankscope_dashboards.deploy.prometheus import PrometheusSettings, Tls, prometheus_config
from rankscope_storage.connection import connect

INGEST = """[ingest]
poll_seconds = 0.3
flush_after_seconds = 1.0
[runs]
heartbeat_seconds = 1.0
refused_after_seconds = 3.0
failed_after_seconds = 8.0
[notify]
mode = "off"
"""
RANKS = Path(__file__).with_name("node_ranks.py")


class Node:
    """A service, its ranks and a Prometheus on ::1, with certificates of one CA and one token."""

    def __init__(self, folder, certificates, port):
        self.folder, self.port = folder, port
        files = certificates.ca, certificates.cert("client"), certificates.key("client")
        self.ca, self.cert, self.key = map(str, files)
        self.processes = []
        write_locked_config(folder, certificates, port, INGEST)
        self.context = client_context(*files)
        self.context.check_hostname = True

    def start(self, name, command, **environment):
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdout=subprocess.PIPE if name == "ranks" else log,
                stderr=log,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def start_service(self):
        config = self.folder / "service.toml"
        self.start("service", [sys.executable, "-m", "rankscope", "serve", config, "--quiet"])
        self.wait_for(lambda: self.get(f"https://[::1]:{self.port}/healthz"))

    def start_ranks(self, **jobs):
        """Start the given number of ranks of each job; return their process ids, the lowest rank first."""
        process = self.start(
            "ranks",
            [sys.executable, RANKS, *(f"{run}:{count}" for run, count in jobs.items())],
            RANKSCOPE_INGEST_URL=f"https://[::1]:{self.port}",
            RANKSCOPE_LISTEN=f"[::1]:{self.port + 10}-{self.port + 60}",
            RANKSCOPE_TOKEN_FILE=str(self.folder / "token"),
            RANKSCOPE_WEB_CONFIG=str(self.folder / "web.json"),
            RANKSCOPE_CA_FILE=self.ca,
            RANKSCOPE_CERT_FILE=self.cert,
            RANKSCOPE_KEY_FILE=self.key,
        )
        return [int(process.stdout.readline()) for _ in range(sum(jobs.values()))]

    def start_prometheus(self, program):
        tls = Tls(ca_file=self.ca, cert_file=self.cert, key_file=self.key)
        places = {
            "service": f"[::1]:{self.port}",
            "token_file": str(self.folder / "token"),
            "tls": tls,
            "ranks_tls": tls,
        }
        settings = PrometheusSettings(**places, rule_files=(), scrape_seconds=1.0, discovery_seconds=1.0)
        config = self.folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(prometheus_config(settings)))
        listen = f"127.0.0.1:{self.port + 1}"
        files = [f"--config.file={config}", f"--storage.tsdb.path={self.folder / 'data'}"]
        self.start("prometheus", [program, *files, f"--web.listen-address={listen}"])

    def get(self, url, token="open-sesame"):
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=30, context=self.context) as answer:
            return answer.read().decode()

    def asked(self, expression):
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port + 1}/api/v1/query?{query}", timeout=30) as answer:
            found = json.load(answer)["data"]["result"]
        return {(one["metric"]["instance"], one["metric"].get("rank")): float(one["value"][1]) for one in found}

    def targets(self):
        return json.loads(self.get(f"https://[::1]:{self.port}/api/v1/targets"))

    def wait_for(self, condition):
        return until(condition, 60, self.logs)

    def logs(self):
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(self.folder.glob("*.log")))

    def stop(self):
        for process in reversed(self.processes):
            for number in (signal.SIGTERM, signal.SIGKILL):
                if process.poll() is None:
                    os.killpg(process.pid, number)
                    try:
                        process.wait(20)
                    except subprocess.TimeoutExpired:
                        continue
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def node(tmp_path, certificates, free_port):
    """Yield a node without running programs, with the ports from `free_port` on."""
    made = Node(tmp_path, certificates, free_port)
    yield made
    made.stop()


@pytest.mark.timeout(240)
@pytest.mark.thorough
def test_ipv6_mutual_tls_and_token_of_ranks_of_which_one_is_killed(node, require_server, certificates):
    program = require_server("prometheus")
    node.start_service()
    first, *_ = node.start_ranks(locked=2, beside=1)
    node.start_prometheus(program)

    # Each step of each rank is stored. Prometheus has the steps of each rank from its own target.
    node.wait_for(lambda: [target for target in node.targets() if target["committed"] > 5][2:])
    everybody = {("locked/0", "0"), ("locked/1", "1"), ("beside/0", "0")}
    assert node.wait_for(lambda: node.asked("rankscope_step > 5").keys() == everybody)
    assert {(instance, None): 1.0 for instance, _ in everybody} == node.asked('up{job="rankscope"}')
    urls = {target["url"] for target in node.targets()}
    assert 3 == len(urls)
    assert all(url.startswith("https://[::1]:") for url in urls)

    # Requests without a certificate or without the token are rejected.
    url = node.targets()[0]["url"]
    bare = ssl.create_default_context(cafile=str(certificates.ca))
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{url}/metrics", timeout=30, context=bare).read()
    with pytest.raises(urllib.error.HTTPError, match="401"):
        node.get(f"{url}/metrics", token="guessed")

    # A rank is killed: the series of the other ranks continue.
    os.kill(first, signal.SIGKILL)
    assert node.wait_for(lambda: node.asked('rankscope_step{run="locked"}').keys() == {("locked/1", "1")})
    step = node.asked("rankscope_step")["locked/1", "1"]
    assert node.wait_for(lambda: node.asked("rankscope_step").get(("locked/1", "1"), 0) > step + 5)

    node.stop()
    with connect(node.folder / "history") as connection:
        question = "SELECT step FROM scalars WHERE name = 'loss' AND run = 'locked' AND rank = 1 ORDER BY seq"
        steps = connection.query(question).to_pylist()
    assert list(range(1, len(steps) + 1)) == [row["step"] for row in steps]
