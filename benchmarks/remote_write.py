"""Prometheus' remote write into the store: requests read and stored, and a real Prometheus that pushes.

python benchmarks/run.py remote_write          # RANKSCOPE_BENCH_SECONDS=300 for a longer push than 40 s
"""

from __future__ import annotations

import contextlib
import http.server
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _rows import Row, cpu_seconds

from rankscope_ingest.base.protobuf import MESSAGES, WRITE_2_MESSAGES, label_bytes, packed, unpacked
from rankscope_ingest.remote_write.decoder import WriteReader
from rankscope_ingest.remote_write.handler import samples_table
from rankscope_storage.api.store import Batch, Store

SERIES = 10_000
NOW = 1_770_000_000_000
MAX_BYTES = 1 << 26
PAGES, SERIES_OF_A_PAGE, SCRAPE_SECONDS = 10, 2_000, 5
SECONDS = int(os.environ.get("RANKSCOPE_BENCH_SECONDS", "40"))


def run() -> list[Row]:
    rows = []
    for size, of_each in ((500, 1), (5_000, 1), (1_000, 10)):
        rows += _reading(size, of_each)
    rows += [_reading_2(5_000), *_storing()]
    return rows + (_pushed() if shutil.which("prometheus") else [])


def _reading(size: int, of_each: int = 1) -> list[Row]:
    """Return the CPU time per million samples of decoding, and the same with a loop over all labels for comparison."""
    bodies = [
        [_request(place, size, NOW + 15_000 * of_each * number, of_each) for place in range(0, SERIES, size)]
        for number in range(8)
    ]
    reader, rounds, samples = WriteReader(), iter(bodies), SERIES * of_each
    for body in next(rounds):
        reader.read(unpacked(body, MAX_BYTES))
    ours = cpu_seconds(lambda: [reader.read(unpacked(body, MAX_BYTES)) for body in next(rounds)]) / samples * 1e6
    message = message_class("WriteRequest")
    walked = cpu_seconds(lambda: [_walk(message, body) for body in bodies[1]], rounds=3) / samples * 1e6
    name = f"{size:,} series of {of_each} in a request"
    return [
        Row(f"{name}, labels looked up", ours, "CPU s/M samples", f"{walked / ours:.1f}x less; snappy included"),
        Row(f"{name}, labels walked", walked, "CPU s/M samples", "protobuf's parser, then Python"),
    ]


def _walk(message: Any, body: bytes) -> list[tuple[dict[str, str], int, float]]:
    found = []
    for series in message.FromString(unpacked(body, MAX_BYTES)).timeseries:
        labels = {label.name: label.value for label in series.labels}
        found += [(labels, sample.timestamp, sample.value) for sample in series.samples]
    return found


def message_class(name: str) -> Any:
    """Return one of Prometheus' messages as Google's own protobuf reads it."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="w.proto", package="p", syntax="proto3")
    for title, *fields in (
        ("ReadResponse", ("results", 1, ".p.QueryResult", 3)),
        ("QueryResult", ("timeseries", 1, ".p.TimeSeries", 3)),
        ("WriteRequest", ("timeseries", 1, ".p.TimeSeries", 3)),
        ("TimeSeries", ("labels", 1, ".p.Label", 3), ("samples", 2, ".p.Sample", 3)),
        ("Label", ("name", 1, 9, 1), ("value", 2, 9, 1)),
        ("Sample", ("value", 1, 1, 1), ("timestamp", 2, 3, 1)),
    ):
        message = file.message_type.add(name=title)
        for field_name, number, kind, label in fields:
            one = message.field.add(name=field_name, number=number, label=label, type=11)
            if isinstance(kind, str):
                one.type_name = kind
            else:
                one.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"p.{name}"))


def _storing() -> list[Row]:
    reader = WriteReader()
    rows = []
    with tempfile.TemporaryDirectory() as folder, Store.open(f"{folder}/store", create=True).claim(owner="b") as writer:
        for requests in (1, 20):
            bodies = [_request(0, SERIES, NOW + 15_000 * number) for number in range(requests)]
            written = [reader.read(unpacked(body, MAX_BYTES)) for body in bodies]

            def store(written=written) -> None:  # type: ignore[no-untyped-def] # bound in the loop
                writer.append(Batch(tables={"samples": samples_table(written)}, watermarks={}))

            cpu = cpu_seconds(store) / requests / SERIES * 1e6
            rows.append(
                Row(f"commit of {requests * SERIES:,} samples", cpu, "CPU s/M samples", "sorted, encoded, synced")
            )
    return rows


def _pushed() -> list[Row]:
    """Return what a Prometheus 2.42 that scrapes and pushes costs the service, and how long its requests wait."""
    with tempfile.TemporaryDirectory() as name, page() as page_port:
        folder = Path(name)
        port, own = free_port(), free_port()
        (folder / "service.toml").write_text(f'[service]\nlisten = "127.0.0.1:{port}"\n[store]\npath = "store"\n')
        (folder / "p.yml").write_text(configuration(port, page_port))
        serve = [sys.executable, "-m", "rankscope", "serve", str(folder / "service.toml")]
        scrape = ["prometheus", f"--config.file={folder}/p.yml", f"--storage.tsdb.path={folder}/data"]
        with contextlib.ExitStack() as running:
            service = running.enter_context(process(serve))
            _wait(lambda: bool(_metrics(port)))
            running.enter_context(process([*scrape, f"--web.listen-address=127.0.0.1:{own}"]))
            _wait(lambda: _metrics(port).get("rankscope_ingest_remote_write_samples_total", 0) > 0)
            began, cpu, before = time.monotonic(), _cpu(service), _metrics(port)
            time.sleep(SECONDS)
            seconds, cpu, after = time.monotonic() - began, _cpu(service) - cpu, _metrics(port)
            theirs = _metrics(own)
    samples = (
        after["rankscope_ingest_remote_write_samples_total"] - before["rankscope_ingest_remote_write_samples_total"]
    )
    commits = after["rankscope_ingest_commits_total"] - before["rankscope_ingest_commits_total"]
    sent = "prometheus_remote_storage_sent_batch_duration_seconds"
    wait = theirs[f"{sent}_sum"] / theirs[f"{sent}_count"]
    failed = theirs["prometheus_remote_storage_samples_failed_total"]
    retried = theirs["prometheus_remote_storage_samples_retried_total"]
    shards = theirs["prometheus_remote_storage_shards"]
    return [
        Row(
            "a Prometheus that pushes",
            samples / seconds,
            "samples/s",
            f"{PAGES * SERIES_OF_A_PAGE / SCRAPE_SECONDS:g} scraped",
        ),
        Row(
            "its service",
            cpu / samples * 1e6,
            "CPU s/M samples",
            f"{commits / seconds:.2f} commits/s, everything included",
        ),
        Row("a request waits", wait, "s", f"mean; {shards:g} shards, {retried:g} retried, {failed:g} failed"),
    ]


def _request(first: int, count: int, at: int, of_each: int = 1) -> bytes:
    series = []
    for number in range(first, first + count):
        times = range(at, at + 15_000 * of_each, 15_000)
        samples = [MESSAGES["Sample"](timestamp=ms, value=_value(number, ms)) for ms in times]
        head = MESSAGES["SeriesHead"](labels=_labels(number)).SerializeToString()
        one = MESSAGES["TimeSeries"].FromString(head)
        one.samples.extend(samples)
        series.append(one)
    return packed(MESSAGES["WriteRequest"](timeseries=series).SerializeToString())


def _reading_2(size: int) -> Row:
    """Return the CPU time per million samples of decoding requests of version 2.0, whose series are known."""
    bodies = [_request_2(place, size, NOW + 15_000 * number) for number in range(8) for place in range(0, SERIES, size)]
    reader, bodies_left = WriteReader(), iter(bodies)
    for _ in range(0, SERIES, size):
        reader.read_2(unpacked(next(bodies_left), MAX_BYTES), MAX_BYTES)
    cost = cpu_seconds(lambda: reader.read_2(unpacked(next(bodies_left), MAX_BYTES), MAX_BYTES)) / size * 1e6
    return Row(f"{size:,} series of 1 in a request of version 2.0", cost, "CPU s/M samples", "known by their symbols")


def _request_2(first: int, count: int, at: int) -> bytes:
    request, places = WRITE_2_MESSAGES["Request"](), {"": 0}
    metadata = WRITE_2_MESSAGES["Metadata"](type=1).SerializeToString()
    for number in range(first, first + count):
        one = request.timeseries.add(metadata=metadata)
        for data in _labels(number):
            label = MESSAGES["Label"].FromString(data)
            one.labels_refs.extend(places.setdefault(text, len(places)) for text in (label.name, label.value))
        one.samples.add(timestamp=at, value=_value(number, at))
    request.symbols.extend(places)
    return packed(request.SerializeToString())


def _value(number: int, at: int) -> float:
    return (number % 50) * 1.5 + at % 1_000_003 if number % 10 else 0.0


def _labels(number: int) -> list[bytes]:
    labels = {
        "__name__": f"node_cpu_seconds_{number % 40}_total",
        "cpu": str(number // 40),
        "dc": "eu-west-1a",
        "env": "production",
        "instance": f"host-{number % 7}:9100",
        "job": "node",
        "mode": "idle",
    }
    return [label_bytes(name, value) for name, value in labels.items()]


def configuration(port: int, page: int) -> str:
    """Return the file of a Prometheus that scrapes the page as several exporters, and pushes."""
    jobs = [
        f'- job_name: "node-{number}"\n  static_configs: [{{targets: ["127.0.0.1:{page}"]}}]\n'
        for number in range(PAGES)
    ]
    queue = "{max_samples_per_send: 5000, capacity: 20000, min_shards: 4}"
    return (
        f"global: {{scrape_interval: {SCRAPE_SECONDS}s}}\nscrape_configs:\n{''.join(jobs)}remote_write:\n"
        f"- url: http://127.0.0.1:{port}/api/v1/write\n  queue_config: {queue}\n"
    )


@contextlib.contextmanager
def page() -> Iterator[int]:
    """Serve a page whose numbers change; it is made once, so that it costs others little."""
    lines = [f'node_{number % 40}_total{{cpu="{number // 40}",mode="idle"}} 1' for number in range(SERIES_OF_A_PAGE)]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = f"{time.time():.3f}\n".join(lines).encode() + b"\n"
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the client has closed the connection
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def process(arguments: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program while inside."""
    running = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield running
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(60)


def _metrics(port: int) -> dict[str, float]:
    """Return the sum of each family."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            if not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                name = series.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
    return found


def _cpu(process: subprocess.Popen[bytes]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wait(condition, seconds: float = 60.0) -> None:  # type: ignore[no-untyped-def] # any callable
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("nothing was pushed")
        time.sleep(0.5)


def free_port() -> int:
    """Return a free TCP port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
