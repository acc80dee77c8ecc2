"""Fixtures with real processes: the service, ranks under torchrun, and the store, which is read by DuckDB."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.lives import RANKS, Host
from tests.programs import Started, start_module, start_script

TRAINING = Path(__file__).with_name("tiny_training.py")

StartJob = Callable[..., Any]

CONFIG = """
[service]
listen = "127.0.0.1:{port}"
{token}
[store]
path = "{store}"
[ingest]
poll_seconds = {poll}
flush_after_seconds = {flush}
{ingest}
[runs]
heartbeat_seconds = 1.0
refused_after_seconds = 3.0
failed_after_seconds = 8.0
stalled_after_seconds = {stalled}
[notify]
mode = "{mode}"
urls = [{urls}]
[spool]
folders = [{spools}]
scan_seconds = 0.3
"""


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
    ingest: str = ""
    """Further lines of this section of the configuration."""
    program: Path | None = None
    """A script that replaces the `rankscope` command."""
    place: Path | None = None
    """Path of the store, if it is not in `folder`."""
    process: subprocess.Popen[bytes] | Started | None = field(default=None, init=False)

    @property
    def store(self) -> Path:
        return self.place or self.folder / "history"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        config = self.folder / "service.toml"
        urls = ", ".join(json.dumps(url) for url in self.urls)
        mode = "embedded" if urls else "off"
        spools = ", ".join(json.dumps(str(folder)) for folder in self.spools)
        text = CONFIG.format(
            port=self.port,
            store=self.store,
            urls=urls,
            mode=mode,
            flush=self.flush_after_seconds,
            ingest=self.ingest,
            spools=spools,
            poll=self.poll_seconds,
            token=f'token = "{self.token}"' if self.token else "",
            stalled=self.stalled_after_seconds,
        )
        config.write_text(text)
        arguments, log = ("serve", config, "--quiet"), self.folder / "service.log"
        if self.program is None:
            self.process = start_module("rankscope.__main__", *arguments, log=log)
        else:
            with log.open("ab") as output:
                command = [sys.executable, self.program, *arguments]
                self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        self.wait_for(lambda: self.get("/healthz"))

    def wait_for(self, condition: Callable[[], Any], seconds: float = 150.0) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None, self.log()
            try:
                value = condition()
            except OSError:
                value = None
            if value:
                return value
            time.sleep(0.05)
        return pytest.fail(f"not within {seconds} s; log of the service:\n{self.log()}")

    def get(self, path: str) -> str:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers), timeout=5) as answer:
            text: str = answer.read().decode()
        return text

    def runs(self) -> list[dict[str, Any]]:
        document = json.loads(self.get("/api/v1/runs"))
        runs: list[dict[str, Any]] = document["runs"] if isinstance(document, dict) else document
        return runs

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        """Send SIGTERM, wait for the drain, and return the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def log(self) -> str:
        return (self.folder / "service.log").read_text(errors="replace")


@pytest.fixture
def service(tmp_path: Path, free_port: int) -> Iterator[Service]:
    """Yield a service that is not started. At the end of the test its process is stopped."""
    made = Service(tmp_path, free_port)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.process.wait(10)


@pytest.fixture
def start_job(service: Service, tmp_path: Path) -> Iterator[StartJob]:
    """Return a function that starts a script as a job with the URL of the service. Its output goes to training.log.

    With the options `torchrun`, the script runs under torchrun.
    """
    started: list[subprocess.Popen[bytes] | Started] = []
    path = tmp_path / "training.log"

    def start(script: Path, *arguments: object, torchrun: Sequence[str] = (), **environment: str) -> Any:
        settings = {"RANKSCOPE_INGEST_URL": service.url, "OMP_NUM_THREADS": "1"} | environment
        if not torchrun:
            started.append(start_script(script, *arguments, log=path, **settings))
            return started[-1]
        command = [sys.executable, "-m", "torch.distributed.run", *torchrun, str(script), *map(str, arguments)]
        with path.open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **settings}, start_new_session=True
            )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


@pytest.fixture
def train(start_job: StartJob, tmp_path: Path, another_port: int) -> Callable[..., list[Started]]:
    """Return a function that starts both ranks of the training."""

    def start(service: Service, run: str, *, steps: int, pause: float = 0.0) -> list[Started]:
        group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(another_port)}
        settings = {"RANKSCOPE_INGEST_URL": service.url, "RANKSCOPE_RUN": run} | group
        return [start_job(TRAINING, tmp_path, steps, pause, RANK=rank, LOCAL_RANK=rank, **settings) for rank in "01"]

    return start


@pytest.fixture
def reference(tmp_path: Path) -> Callable[[], dict[tuple[int, int, str, str], dict[str, Any]]]:
    """Return a function that reads the references of the ranks, by (rank, step, kind, tensor)."""

    def read() -> dict[tuple[int, int, str, str], dict[str, Any]]:
        rows = {}
        for rank in range(2):
            for line in (tmp_path / f"reference-{rank}.jsonl").read_text().splitlines():
                row = json.loads(line)
                rows[rank, row["step"], row["kind"], row["tensor"]] = row
        return rows

    return read


@pytest.fixture(scope="session")
def parent() -> Iterator[subprocess.Popen[bytes]]:
    """Return a function that forks ranks, so that torch is imported only once."""
    process = subprocess.Popen([sys.executable, str(RANKS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield process
    process.kill()
    process.wait(10)


@pytest.fixture
def host(tmp_path: Path, parent: subprocess.Popen[bytes]) -> Iterator[Host]:
    made = Host(tmp_path, parent)
    yield made
    made.end()
