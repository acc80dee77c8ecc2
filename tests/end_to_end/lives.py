"""Rank processes that publish records without a training, and queries for these records in the store."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope_storage.connection import connect

RANKS = Path(__file__).with_name("spool_ranks.py")


@dataclass
class Life:
    """One rank process, which writes the seqs that it has published to a file."""

    pid: int
    out: Path

    @property
    def published(self) -> int:
        return len(self.out.read_bytes().splitlines()) if self.out.exists() else 0

    @property
    def left(self) -> int:
        """Return the number of records that the rank reported as not stored when it exited."""
        return int(self.out.with_suffix(".left").read_bytes())

    @property
    def is_alive(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    def release(self) -> None:
        self.out.with_suffix(".released").touch()

    def kill(self) -> None:
        if self.is_alive:
            os.kill(self.pid, signal.SIGKILL)
        until(lambda: not self.is_alive)


class Host:
    """A machine with rank processes. `spool` is their common folder."""

    def __init__(self, folder: Path, parent: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self.spool = folder / "spool"
        self.lives: list[Life] = []
        self.parent = parent

    def start(self, service: Any, rank: int, life: str, *, spool: bool = True, **order: Any) -> Life:
        """Start a rank; `order` has its `steps` and its `end`, and further fields of an order of spool_ranks.py."""
        out = self.folder / f"{life}-{rank}.out"
        environment = {"RANKSCOPE_INGEST_URL": service.url, "RANKSCOPE_SPOOL_DIR": str(self.spool) if spool else "off"}
        order = {"pause": 0.0, "ring": 1024, "is_held": False} | order | {"rank": rank, "life": life, "out": str(out)}
        assert self.parent.stdin is not None
        assert self.parent.stdout is not None
        self.parent.stdin.write(json.dumps(order | {"environment": environment}).encode() + b"\n")
        self.parent.stdin.flush()
        self.lives.append(Life(int(self.parent.stdout.readline()), out))
        return self.lives[-1]

    def left(self) -> list[str]:
        return sorted(path.name for path in self.spool.iterdir()) if self.spool.exists() else []

    def end(self) -> None:
        for life in self.lives:
            life.kill()


def until(condition: Callable[[], Any], seconds: float = 90.0, explain: Callable[[], Any] = str) -> Any:
    """Return the value of `condition` when it is true. An OSError counts as not yet true."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            if value := condition():
                return value
        assert time.monotonic() < deadline, f"not within {seconds} s; {explain()}"
        time.sleep(0.02)


def stored(store: Path) -> dict[str, list[int]]:
    """Return the seqs in the store for each process, with duplicates."""
    with connect(store) as connection:
        rows = connection.query("SELECT incarnation, seq FROM tensor_stats ORDER BY ALL").to_pylist()
    found: dict[str, list[int]] = {}
    for row in rows:
        found.setdefault(row["incarnation"], []).append(row["seq"])
    return found


def gaps(store: Path) -> list[dict[str, Any]]:
    with connect(store) as connection:
        rows = connection.query("SELECT details FROM events WHERE type = 'gap' ORDER BY ordinal").to_pylist()
    return [json.loads(row["details"]) for row in rows]


def attempts(store: Path) -> dict[str, tuple[int, str]]:
    with connect(store) as connection:
        rows = connection.query("SELECT launch_id, attempt, state FROM attempts").to_pylist()
    return {row["launch_id"]: (row["attempt"], row["state"]) for row in rows}


def targets(service: Any) -> dict[str, dict[str, Any]]:
    return {target["incarnation"]: target for target in json.loads(service.get("/api/v1/targets"))}
