"""The service under a simulated fleet: the real `rankscope serve`, configured for it and watched from /proc."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The service at one moment; `loop_seconds` is the CPU time of its event loop alone.

    `stolen_seconds` is the CPU time that the host gave to other virtual machines instead of this one.
    """

    at: float
    stolen_seconds: float
    cpu_seconds: float
    loop_seconds: float
    resident_mb: float
    commits: int
    rows_pending: int
    page: Mapping[str, float]


class Service:
    """A service process and its store below `folder`, or the service of `shard` of a store that is at `bucket`."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Mapping[str, object]],
        *,
        bucket: str | None = None,
        shard: str = "0/1",
    ) -> None:
        self.store = folder / "store"
        self.url = f"http://127.0.0.1:{_free_port()}"
        section = {"path": bucket or str(self.store), "shard": shard}
        written = {**settings, "store": section, "service": {"listen": self.url[7:]}}
        config = folder / f"service-{shard.replace('/', '-')}.toml"
        config.write_text("\n".join(_section(name, values) for name, values in written.items()))
        command = [sys.executable, *_profiled(), "-m", "rankscope", "serve", str(config), "--quiet"]
        self._log = config.with_suffix(".log").open("w")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        self._await_health()

    def sample(self) -> Sample:
        """Return CPU time, memory and lag of the service now."""
        pid = self._process.pid
        try:
            page = self._page()
        except OSError:  # it is too busy to answer, which the CPU shows
            page = {}
        return Sample(
            at=time.monotonic(),
            stolen_seconds=_stolen_seconds(),
            cpu_seconds=_cpu_seconds(Path(f"/proc/{pid}/stat")),
            loop_seconds=_cpu_seconds(Path(f"/proc/{pid}/task/{pid}/stat")),
            resident_mb=_resident_mb(pid),
            commits=int(page.get("rankscope_ingest_commits_total", 0)),
            rows_pending=int(page.get("rankscope_ingest_rows_pending", 0)),
            page=page,
        )

    def files(self) -> tuple[int, int]:
        """Return how many data files lie in the store, and their bytes; replaced ones count until they are removed."""
        sizes = [path.stat().st_size for path in self.store.glob("dataset=*/*/*.parquet")]
        return len(sizes), sum(sizes)

    def stop(self) -> str:
        """Stop the service with SIGTERM, wait for its drain, and return the last lines of its log."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        return Path(self._log.name).read_text()[-2000:]

    def _page(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=20) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def _await_health(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                self._page()
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"no service: {Path(self._log.name).read_text()}") from None
                time.sleep(0.1)
            else:
                return


def _profiled() -> list[str]:
    """Return the arguments that profile the CPU time of the event loop into the file $RANKSCOPE_FLEET_PROFILE."""
    path = os.environ.get("RANKSCOPE_FLEET_PROFILE")
    return [str(Path(__file__).with_name("_fleet_profile.py")), path] if path else []


def _section(name: str, values: Mapping[str, object]) -> str:
    lines = [f"{key} = {_toml(value)}" for key, value in values.items()]
    return "\n".join([f"[{name}]", *lines, ""])


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _cpu_seconds(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _stolen_seconds() -> float:
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()  # cpu, user, nice, system, idle, iowait, irq, …
    return int(fields[8]) / _TICKS


def _resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0
