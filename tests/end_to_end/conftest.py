"""Fixtures with real processes: the service, ranks under torchrun, and the store, which is read by DuckDB."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.end_to_end.lives import RANKS, Host, until
from tests.programs import Started, start_module, start_script


@dataclass
class Service:
    """A `rankscope serve` process. It keeps its port across restarts."""

    folder: Path
    port: int
    urls: tuple[str, ...] = ()
    flush_after_seconds: float = 1.0
    spools: tuple[Path, ...] = ()
    poll_seconds: float = 0.3
    token: str | None = None
    stalled_after_seconds: float = 300.0
    ingest: str = ""  # Further lines of this section of the configuration
    program: Path | None = None  # A script that replaces the `rankscope` command
    place: Path | None = None  # Path of the store, if it is not in `folder`
    process: subprocess.Popen[bytes] | Started | None = field(default=None, init=False)

    @property
    def store(self):
        return self.place or self.folder / "history"

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        config = self.folder / "service.toml"
        token = f'token = "{self.token}"' if self.token else ""
        config.write_text(f"""
[service]
listen = "127.0.0.1:{self.port}"
{token}
[store]
path = "{self.store}"
[ingest]
poll_seconds = {self.poll_seconds}
flush_after_seconds = {self.flush_after_seconds}
{self.ingest}
[runs]
heartbeat_seconds = 1.0
refused_after_seconds = 3.0
failed_after_seconds = 8.0
stalled_after_seconds = {self.stalled_after_seconds}
[notify]
mode = "{"embedded" if self.urls else "off"}"
urls = {json.dumps(self.urls)}
[spool]
folders = {json.dumps([str(folder) for folder in self.spools])}
scan_seconds = 0.3
""")
        arguments, log = ("serve", config, "--quiet"), self.folder / "service.log"
        if self.program is None:
            self.process = start_module("rankscope.__main__", *arguments, log=log)
        else:
            with log.open("ab") as output:
                command = [sys.executable, self.program, *arguments]
                self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        self.wait_for(lambda: self.get("/healthz"))

    def wait_for(self, condition, seconds=150.0):
        def of_living_service():
            assert self.process.poll() is None, self.log()
            return condition()

        return until(of_living_service, seconds, self.log)

    def get(self, path):
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers), timeout=30) as answer:
            return answer.read().decode()

    def runs(self):
        document = json.loads(self.get("/api/v1/runs"))
        return document["runs"] if isinstance(document, dict) else document

    def kill(self):
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self):
        """Send SIGTERM, wait for the drain, and return the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def log(self):
        return (self.folder / "service.log").read_text(errors="replace")


def write_locked_config(folder, certificates, port, more=""):
    """Write the configuration of a service on ::1 with mutual TLS and a token, and the files that it names."""
    (folder / "token").write_text("open-sesame\n")
    asks = {"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": str(certificates.ca)}
    certificates.web_config(folder / "web.json", **asks, min_version="TLS13")
    (folder / "service.toml").write_text(f"""
[service]
listen = "[::1]:{port}"
token_file = "token"
web_config = "web.json"
ca_file = "{certificates.ca}"
cert_file = "{certificates.cert("client")}"
key_file = "{certificates.key("client")}"
[store]
path = "history"
{more}""")


@pytest.fixture
def service(tmp_path, free_port):
    """Yield a service that is not started. At the end of the test its process is stopped."""
    made = Service(tmp_path, free_port)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.process.wait(10)


@pytest.fixture
def start_job(service, tmp_path):
    """Return a function that starts a script as a job with the URL of the service. Its output goes to training.log."""
    # With the options `torchrun`, the script runs under torchrun.
    started = []

    def start(script, *arguments, torchrun=(), log="training.log", **environment):
        settings = {"RANKSCOPE_INGEST_URL": service.url, "OMP_NUM_THREADS": "1"} | environment
        if not torchrun:
            started.append(start_script(script, *arguments, log=tmp_path / log, **settings))
            return started[-1]
        command = [sys.executable, "-m", "torch.distributed.run", *torchrun, str(script), *map(str, arguments)]
        with (tmp_path / log).open("ab") as output:
            options = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
            started.append(subprocess.Popen(command, env={**os.environ, **settings}, **options))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


@pytest.fixture
def start_ranks(start_job, another_port):
    """Return a function that starts all ranks of a script. With `log`, the output of a rank goes to `log`-RANK.log."""

    def start(script, *arguments, run, count=2, log="", **environment):
        group = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(another_port)}
        settings = group | {"RANKSCOPE_RUN": run} | environment
        return [
            start_job(
                script, *arguments, log=f"{log}-{rank}.log" if log else "training.log",
                RANK=str(rank), LOCAL_RANK=str(rank), **settings,
            )
            for rank in range(count)
        ]  # fmt: skip

    return start


@pytest.fixture(scope="session")
def parent():
    """Return a function that forks ranks, so that torch is imported only once."""
    process = subprocess.Popen([sys.executable, str(RANKS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield process
    process.kill()
    process.wait(10)


@pytest.fixture
def host(tmp_path, parent):
    made = Host(tmp_path, parent)
    yield made
    made.end()
