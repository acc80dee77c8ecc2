"""A large log that is followed over a real sshd and grows by a line per second: time to the store, and CPU time.

python benchmarks/watch_ssh.py [MEGABYTES [SECONDS]]; 300 of each by default
"""

from __future__ import annotations

import contextlib
import datetime as dt
import getpass
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from _rows import Row, print_rows

from rankscope_storage.connection import connect

MEGABYTES = 300
SECONDS = 300
POLL_SECONDS = 10.0
MAX_WAIT_SECONDS = 900.0
"""Time within which the first import, and the last lines, must be in the store."""

_SSHD = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
Subsystem sftp internal-sftp
"""


def run(megabytes: int = MEGABYTES, seconds: int = SECONDS) -> list[Row]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        log, store = folder / "train.log", folder / "store"
        written = int(1e6 * megabytes / len(_line(10**6, 0.0)))
        begin = time.time() - written
        with log.open("w") as file:
            file.writelines(_line(step, begin + step) for step in range(1, written + 1))
        with _sshd(folder) as port, _watch(folder, f"ssh://127.0.0.1:{port}{log}", store) as process:
            began = time.monotonic()
            _wait_for(store, written, [])
            first, first_cpu = time.monotonic() - began, _cpu(process)
            time.sleep(2 * POLL_SECONDS)
            before, began = _cpu(process), time.monotonic()
            times, seen = _grow(log, store, written, seconds)
            share = (_cpu(process) - before) / (time.monotonic() - began)
            _wait_for(store, written + seconds, seen)
            memory = process.memory_info().rss
        with connect(store) as connection:
            (row,) = connection.query(
                "SELECT count(*) AS n, count(DISTINCT step) AS steps FROM scalars WHERE name = 'loss'"
            ).to_pylist()
        steps = written + seconds
        waits = [_first_seen(seen, step) - at for step, at in times.items()]
    return [
        Row("first import: elapsed", first, "s", f"{written:,} lines, {first_cpu:.1f} s CPU with the start"),
        Row("a line is in the store after, median", statistics.median(waits), "s", f"{seconds} lines, one per second"),
        Row("a line is in the store after, most", max(waits), "s", f"poll interval {POLL_SECONDS:g} s"),
        Row("CPU of the watcher", 100 * share, "% of a core", "while the log grows"),
        Row("memory of the watcher", memory / 2**20, "MiB", ""),
        Row("lines that are missing in the store", steps - row["steps"], "lines", f"of {steps:,}"),
        Row("lines that are twice in the store", row["n"] - row["steps"], "lines", ""),
    ]


def _line(step: int, at: float) -> str:
    moment = dt.datetime.fromtimestamp(at, dt.UTC).strftime("%Y-%m-%d %H:%M:%S")
    loss = 2 + (step * 7919 % 1000) / 1000
    return f"{moment} step {step} | loss {loss:.4f} | lr 1.0e-4 | grad norm {loss / 3:.3f} | time 1.000s\n"


def _grow(log: Path, store: Path, written: int, seconds: int) -> tuple[dict[int, float], list[tuple[float, int]]]:
    """Append a line per second; return the time of each, and the last stored step at times between them."""
    times, seen, began = {}, [], time.monotonic()
    for number in range(1, seconds + 1):
        with log.open("a") as file:
            file.write(_line(written + number, time.time()))
        times[written + number] = time.monotonic()
        seen.append((time.monotonic(), _last_step(store)))
        time.sleep(max(0.0, began + number - time.monotonic()))
    return times, seen


def _wait_for(store: Path, step: int, seen: list[tuple[float, int]]) -> None:
    deadline = time.monotonic() + MAX_WAIT_SECONDS
    while (last := _last_step(store)) < step:
        seen.append((time.monotonic(), last))
        if time.monotonic() > deadline:
            raise SystemExit(f"step {step} is not in the store after {MAX_WAIT_SECONDS:g} s; the last one is {last}")
        time.sleep(1.0)
    seen.append((time.monotonic(), last))


def _first_seen(seen: list[tuple[float, int]], step: int) -> float:
    return next(at for at, last in seen if last >= step)


def _last_step(store: Path) -> int:
    if not store.exists():
        return -1
    with connect(store) as connection:
        (row,) = connection.query("SELECT max(step) AS step FROM scalars").to_pylist()
    return -1 if row["step"] is None else int(row["step"])


def _cpu(process: psutil.Process) -> float:
    user, system, *_ = process.cpu_times()
    return float(user + system)


@contextlib.contextmanager
def _sshd(folder: Path) -> Iterator[int]:
    """Run sshd with new keys, and configure the home folder of the watcher for it."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        raise SystemExit("sshd is missing: install openssh-server")
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    home = folder / "home" / ".ssh"
    home.mkdir(parents=True, mode=0o700)
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    kind, key, *_ = (folder / "host_key.pub").read_text().split()
    (home / "known_hosts").write_text(f"[127.0.0.1]:{port} {kind} {key}\n")
    (home / "config").write_text(
        f"Host *\n  User {getpass.getuser()}\n  IdentityFile {folder}/user_key\n  IdentitiesOnly yes\n"
    )
    (folder / "sshd_config").write_text(_SSHD.format(port=port, folder=folder))
    server = subprocess.Popen([program, "-D", "-f", str(folder / "sshd_config")], start_new_session=True)
    try:
        yield port
    finally:
        for child in psutil.Process(server.pid).children(recursive=True):
            child.kill()
        server.kill()
        server.wait()


@contextlib.contextmanager
def _watch(folder: Path, address: str, store: Path) -> Iterator[psutil.Process]:
    """Run `rankscope watch` for the log at `address`."""
    environment = {name: value for name, value in os.environ.items() if name != "SSH_AUTH_SOCK"}
    environment["HOME"] = str(folder / "home")
    command = [sys.executable, "-m", "rankscope", "watch", address, "--run", "followed", "--store", str(store)]
    with (folder / "output").open("wb") as output:
        watcher = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield psutil.Process(watcher.pid)
        finally:
            watcher.terminate()
            watcher.wait()


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run(*map(int, sys.argv[1:3])))
