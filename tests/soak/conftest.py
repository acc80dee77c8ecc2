"""Fixtures for `make soak`; `RANKSCOPE_SOAK_SECONDS` is the duration of each fault: 60, or 600 for the guarantee."""

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.end_to_end.conftest import host, parent, service  # noqa: F401  # fixtures

SECONDS = float(os.environ.get("RANKSCOPE_SOAK_SECONDS") or 60)

collect_ignore_glob = [] if os.environ.get("RANKSCOPE_SOAK") else ["test_*"]


class Memory:
    """The resident memory of a service over time in MiB, across restarts of its process."""

    def __init__(self, service: Any) -> None:  # noqa: F811
        self._service = service
        self._over = threading.Event()
        self.seen: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            process = self._service.process
            if process is not None and process.poll() is None:
                try:
                    rss = psutil.Process(process.pid).memory_info().rss / 2**20
                    self.seen.append((time.monotonic(), rss))
                except psutil.NoSuchProcess:
                    continue

    def most(self, since: float, until: float) -> float:
        return max((rss for at, rss in self.seen if since <= at <= until), default=0.0)

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture
def memory(service: Any) -> Iterator[Memory]:  # noqa: F811
    watch = Memory(service)
    yield watch
    watch.stop()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of 64 MiB in memory. Only root can mount it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = f"a small disk cannot be mounted, which takes root: {done.stderr.strip()}"
        if os.environ.get("RANKSCOPE_REQUIRE_SERVERS"):
            pytest.fail(reason)
        pytest.skip(reason)
    yield folder
    for _ in range(50):
        if subprocess.run(["umount", folder], capture_output=True, check=False).returncode == 0:
            return
        time.sleep(0.2)
    subprocess.run(["umount", "-l", folder], check=True)
