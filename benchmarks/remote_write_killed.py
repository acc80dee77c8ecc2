"""A service that is killed -9 again and again while a real Prometheus pushes: lost and doubled samples.

    python benchmarks/run.py remote_write_killed   # RANKSCOPE_BENCH_SECONDS=600 for longer than 45 s

At the end Prometheus' own answer to a remote read is compared with the store's, sample by sample and bit by bit.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import remote_write as pushing
from _rows import Row

from rankscope_ingest.base.protobuf import MESSAGES, packed, unpacked
from rankscope_storage.connection import connect

SECONDS = int(os.environ.get("RANKSCOPE_BENCH_SECONDS", "45"))
PAUSES = (6.0, 11.0)
CATCH_UP_SECONDS = 90
REGEX = 2


def run() -> list[Row]:
    if not shutil.which("prometheus"):
        return []
    with tempfile.TemporaryDirectory() as name, pushing.page() as page_port:
        folder, port, own = Path(name), pushing.free_port(), pushing.free_port()
        config = f'[service]\nlisten = "127.0.0.1:{port}"\n[store]\npath = "store"\n'
        config += "[remote_write]\nhold_seconds = 0.5\n[remote_read]\nmax_series = 50_000\n"
        (folder / "service.toml").write_text(config)
        (folder / "p.yml").write_text(pushing.configuration(port, page_port))
        scrape = ["prometheus", f"--config.file={folder}/p.yml", f"--storage.tsdb.path={folder}/data"]
        with contextlib.ExitStack() as running:
            service = _Service([sys.executable, "-m", "rankscope", "serve", str(folder / "service.toml")])
            running.callback(service.end)
            running.enter_context(pushing.process([*scrape, f"--web.listen-address=127.0.0.1:{own}"]))
            kills = _kill_now_and_then(service)
            end = int(time.time() * 1000) - 3 * 1000 * pushing.SCRAPE_SECONDS
            theirs = _asked(own, end)
            ours = _caught_up(port, end, theirs)
        with connect(folder / "store") as connection:
            ((stored, distinct),) = connection.sql(
                "SELECT count(*), count(DISTINCT (target, metric, labels, ts)) FROM samples"
            ).fetchall()
    note = f"{kills} kills; answers {'equal' if ours == theirs else 'DIFFERENT'} bit for bit"
    return [
        Row("samples that Prometheus has", _count(theirs), "samples", ""),
        Row("of them in the store", _count(ours), "samples", note),
        Row("rows of one series and time twice", stored - distinct, "rows", f"of {stored:,}"),
    ]


class _Service:
    """The service, started again whenever it was killed."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        self._process = self._started()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process = self._started()

    def end(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _kill_now_and_then(service: _Service) -> int:
    draw = random.Random(5)  # noqa: S311 - no secret
    until, kills = time.monotonic() + SECONDS, 0
    while time.monotonic() < until:
        time.sleep(draw.uniform(*PAUSES))
        service.kill()
        kills += 1
    return kills


def _caught_up(port: int, end: int, theirs: dict[bytes, list[bytes]]) -> dict[bytes, list[bytes]]:
    ours: dict[bytes, list[bytes]] = {}
    until = time.monotonic() + CATCH_UP_SECONDS
    while ours != theirs and time.monotonic() < until:
        time.sleep(1.0)
        with contextlib.suppress(OSError):
            ours = _asked(port, end)
    return ours


def _asked(port: int, end: int) -> dict[bytes, list[bytes]]:
    """Return the samples of each series as they came, by the labels as they came."""
    request = MESSAGES["ReadRequest"]()
    query = request.queries.add(start_timestamp_ms=end - 86_400_000, end_timestamp_ms=end)
    query.matchers.add(type=REGEX, name="__name__", value="node_.*|up")
    body = packed(request.SerializeToString())
    headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "snappy"}
    address = f"http://127.0.0.1:{port}/api/v1/read"
    with urllib.request.urlopen(urllib.request.Request(address, body, headers)) as answer:
        message = pushing.message_class("ReadResponse").FromString(unpacked(answer.read(), 1 << 30))
    return {
        b"".join(label.SerializeToString() for label in series.labels): [
            sample.SerializeToString() for sample in series.samples
        ]
        for series in message.results[0].timeseries
    }


def _count(answer: dict[bytes, list[bytes]]) -> int:
    return sum(len(samples) for samples in answer.values())
