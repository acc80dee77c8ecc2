"""Programs as `peers` compares them: started, watched from /proc, asked for their own figures, stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from _peers_exporters import Ranks

_TICKS = os.sysconf("SC_CLK_TCK")
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Moment:
    """CPU time, memory and storage of a program at one moment."""

    cpu_seconds: float
    samples: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`steady` leaves out the start, in which series are made known; `whole` has it."""

    steady: float  # CPU seconds per million samples, as all of these
    whole: float
    samples: float
    peak_mb: float
    stored: dict[str, float]  # bytes per sample, by type of file


class Program:
    """One process, its folder and its log."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self.folder = folder
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, cwd=folder)

    @property
    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    @property
    def peak_mb(self) -> float:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024

    def await_answer(self, url: str) -> None:
        """Return when `url` answers. Raise with the output of the program if the program exits first."""
        deadline = time.monotonic() + 60
        while True:
            try:
                fetched(url)
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"no answer from {url}: {self.said}") from None
                time.sleep(0.1)
            else:
                return

    @property
    def said(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-2000:]

    def stop(self) -> None:
        """End it in good order."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()


@contextlib.contextmanager
def exporters(ranks: Ranks) -> Iterator[list[str]]:
    """Give the addresses of running exporters."""
    command = [sys.executable, str(HERE / "_peers_exporters.py"), json.dumps(asdict(ranks))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def scrape_config(addresses: Sequence[str], seconds: float) -> str:
    """Return the configuration of both Prometheus and VictoriaMetrics."""
    config = {
        "global": {"scrape_interval": f"{seconds * 1000:.0f}ms", "scrape_timeout": f"{seconds * 1000:.0f}ms"},
        "scrape_configs": [{"job_name": "ranks", "static_configs": [{"targets": list(addresses)}]}],
    }
    return json.dumps(config)  # which is YAML too


def metric(url: str, name: str) -> float:
    """Return the sum over a metric on a page of a program's own; `name` may begin its labels."""
    lines = (line for line in fetched(url).decode().splitlines() if line.startswith(name))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def fetched(url: str, data: bytes | None = None) -> bytes:
    """Return what answers at `url`; with `data` it is posted."""
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=300) as answer:
        return bytes(answer.read())


def free_port() -> int:
    """Return a free TCP port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def folder_bytes(folder: Path, pattern: str = "**/*") -> int:
    """Return the bytes of all files below `folder`."""
    return sum(path.stat().st_size for path in folder.glob(pattern) if path.is_file())
