"""Cost of a sample from exporter to store: record channel and text pages, compared with Prometheus and VictoriaMetrics.

    python benchmarks/run.py peers
    RANKSCOPE_PEERS="targets=8 seconds=20" python benchmarks/run.py peers
    RANKSCOPE_PEERS="targets=100 scrape_seconds=15 step_seconds=2 seconds=300" python benchmarks/run.py peers
    RANKSCOPE_PEERS="rounds=3 without=VictoriaMetrics" python benchmarks/run.py peers

The programs read the same exporters one after the other. The exporters are real and publish 8 numbers of each tensor;
the numbers are noise without repetition. Only the CPU time of the program counts, from /proc, and never that of the
exporters, which serve pages to one program and records to the other. The page is scraped every few seconds, as usual.
The record channel transfers every step and is measured at two step rates, because the steps of a poll share its cost.
`steady` begins when all series are known and two rounds are stored. With several rounds, figures and ratios are medians
over the rounds.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from _noise import six_statistics
from _peers_exporters import Ranks
from _peers_programs import Moment, Program, Result, exporters, fetched, folder_bytes, free_port, metric, scrape_config
from _rows import Row, cpu_seconds, print_rows

from rankscope_storage.base.fsync import sync_to_disk

FLUSH_SECONDS = 10.0
TENSORS = 1880
SAMPLES_PER_ROW = 8
"""norm, min, max, mean, nans, infs, zeros, numel: as many series on the page, as many numbers in a row."""
OUR_CHANNEL = "our record channel"
OUR_FAST_CHANNEL = "our record channel, steps four times as fast"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of the comparison."""

    targets: int = 20
    tensors: int = TENSORS
    step_seconds: float = 1.0
    scrape_seconds: float = 2.0
    seconds: float = 35.0
    rounds: int = 1
    without: str = ""

    @property
    def series(self) -> int:
        return self.targets * self.tensors * SAMPLES_PER_ROW

    def ranks(self, ingest_url: str | None = None) -> Ranks:
        return Ranks(targets=self.targets, tensors=self.tensors, step_seconds=self.step_seconds, ingest_url=ingest_url)


def run() -> list[Row]:
    size = _size()
    measured: dict[str, list[Result]] = {name: [] for name in _MEASURES if _is_there(name) and name != size.without}
    for _ in range(size.rounds):
        for name, results in measured.items():
            folder = Path(tempfile.mkdtemp(prefix="rankscope-peers-"))
            try:
                results.append(_MEASURES[name](size, folder))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    return [*_rows(size, measured), *_limits()]


def _is_there(name: str) -> bool:
    programs = {"Prometheus": "prometheus", "VictoriaMetrics": "victoria-metrics"}
    return name not in programs or shutil.which(programs[name]) is not None


def _size() -> Size:
    given = dict(item.split("=", 1) for item in os.environ.get("RANKSCOPE_PEERS", "").split())
    kinds: dict[str, Callable[[str], Any]] = {"targets": int, "tensors": int, "rounds": int, "without": str}
    return Size(**{name: kinds.get(name, float)(value) for name, value in given.items()})


def _rows(size: Size, measured: dict[str, list[Result]]) -> Iterable[Row]:
    for name, results in measured.items():
        steady = [result.steady for result in results]
        millions, whole = (sum(one.samples for one in results) / 1e6, statistics.median(one.whole for one in results))
        note = f"{_span(steady)}{millions:.1f} M samples; {whole:.3g} with start and first sight of the series"
        yield Row(f"{name}: CPU", statistics.median(steady), "s per million samples", note)
        peak = max(result.peak_mb for result in results)
        yield Row(f"{name}: peak memory", peak, "MB", f"{size.series:,} series at {size.targets} targets")
        for what in results[0].stored:
            stored = statistics.median(result.stored[what] for result in results)
            yield Row(f"{name}: {what}", stored, "bytes per sample")
    for peer in ("Prometheus", "VictoriaMetrics"):
        for ours, wanted in ((OUR_CHANNEL, 30), (OUR_FAST_CHANNEL, 30), ("our text path", 5)):
            if peer in measured and ours in measured:
                pairs = zip(measured[peer], measured[ours], strict=True)
                ratios = [theirs.steady / own.steady for theirs, own in pairs]
                goal = f"promised {wanted}" if peer == "Prometheus" else ""
                yield Row(f"{ours} against {peer}", statistics.median(ratios), "x less CPU", f"{_span(ratios)}{goal}")


def _span(figures: Sequence[float]) -> str:
    return f"{min(figures):.3g} to {max(figures):.3g} in {len(figures)} rounds; " if len(figures) > 1 else ""


def _prometheus(size: Size, folder: Path) -> Result:
    own = f"http://127.0.0.1:{free_port()}"
    options = ["--config.file=config.yml", "--storage.tsdb.path=data", f"--web.listen-address={own[7:]}"]
    command = ["prometheus", *options, "--web.enable-admin-api", "--log.level=warn"]
    with exporters(size.ranks()) as addresses:
        (folder / "config.yml").write_text(scrape_config(addresses, size.scrape_seconds))
        program = Program(command, folder)
        try:
            first, last = _watched(size, program, own, "prometheus_tsdb_head_samples_appended_total")
            log_bytes = folder_bytes(folder / "data" / "wal")
            name = json.loads(fetched(f"{own}/api/v1/admin/tsdb/snapshot", b""))["data"]["name"]
            stored = metric(f"{own}/metrics", "prometheus_tsdb_head_samples_appended_total")
            block = folder / "data" / "snapshots" / name
            written = program.cpu_seconds - last.cpu_seconds
            sizes = {
                "chunks of a block": folder_bytes(block, "*/chunks/*") / stored,
                "its index": folder_bytes(block, "*/index") / stored,
                "write-ahead log": log_bytes / last.samples,
            }
            result = _result(first, last, program, sizes)
            blocks = written / (stored / 1e6)
            return Result(
                steady=result.steady,
                whole=result.whole + blocks,
                samples=result.samples,
                peak_mb=result.peak_mb,
                stored=sizes,
            )
        finally:
            program.stop()


def _victoria(size: Size, folder: Path) -> Result:
    own = f"http://127.0.0.1:{free_port()}"
    options = ["-promscrape.config=config.yml", "-storageDataPath=data", f"-httpListenAddr={own[7:]}"]
    with exporters(size.ranks()) as addresses:
        (folder / "config.yml").write_text(scrape_config(addresses, size.scrape_seconds))
        program = Program(["victoria-metrics", *options, "-retentionPeriod=100y"], folder)
        try:
            first, last = _watched(size, program, own, 'vm_rows_inserted_total{type="promscrape"}')
            result = _result(first, last, program, {})
            stored = metric(f"{own}/metrics", 'vm_rows_inserted_total{type="promscrape"}')
        finally:
            program.stop()
    parts = {"data": "data/data", "index": "data/indexdb"}
    result.stored.update({what: folder_bytes(folder / path) / stored for what, path in parts.items()})
    return result


def _watched(size: Size, program: Program, own: str, counter: str) -> tuple[Moment, Moment]:
    """Return the state of a program after two rounds of scrapes, and its state `size.seconds` later."""
    program.await_answer(f"{own}/metrics")
    deadline = time.monotonic() + 120
    while metric(f"{own}/metrics", counter) < 2 * size.series:
        if time.monotonic() > deadline:
            raise RuntimeError(f"two rounds of scrapes take more than two minutes: {program.said}")
        time.sleep(1)
    first = Moment(program.cpu_seconds, metric(f"{own}/metrics", counter))
    time.sleep(size.seconds)
    return first, Moment(program.cpu_seconds, metric(f"{own}/metrics", counter))


def _text(size: Size, folder: Path) -> Result:
    """The service scrapes the pages into `samples`."""
    with exporters(size.ranks()) as addresses:
        (folder / "targets.json").write_text(json.dumps([{"targets": addresses}]))
        listed = {"file": str(folder / "targets.json"), "every_seconds": size.scrape_seconds}
        service = _Service(folder, {"[exporter_lists]": listed})
        try:
            return service.result(size, "samples", 1)
        finally:
            service.program.stop()


def _channel(size: Size, folder: Path) -> Result:
    """The service takes every step of ranks that register with it."""
    service = _Service(folder, {})
    try:
        with exporters(size.ranks(service.own)):
            return service.result(size, "tensor_stats", SAMPLES_PER_ROW)
    finally:
        service.program.stop()


_MEASURES: Mapping[str, Callable[[Size, Path], Result]] = {
    "Prometheus": _prometheus,
    "our text path": _text,
    OUR_CHANNEL: _channel,
    OUR_FAST_CHANNEL: lambda size, folder: _channel(replace(size, step_seconds=size.step_seconds / 4), folder),
    "VictoriaMetrics": _victoria,
}


class _Service:
    """`rankscope serve` with a store below `folder`, measured from one commit to another."""

    def __init__(self, folder: Path, sections: dict[str, dict[str, object]]) -> None:
        self.own = f"http://127.0.0.1:{free_port()}"
        self._store = folder / "store"
        written: dict[str, dict[str, object]] = {
            "service": {"listen": self.own[7:]},
            "store": {"path": str(self._store)},
            "ingest": {"flush_after_seconds": FLUSH_SECONDS},
            "notify": {"mode": "off"},
            **sections,
        }
        text = "\n".join(
            "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())])
            for name, values in written.items()
        )
        (folder / "service.toml").write_text(text)
        self.program = Program([sys.executable, "-m", "rankscope", "serve", "service.toml", "--quiet"], folder)
        self.program.await_answer(f"{self.own}/metrics")
        self._seen: dict[str, int] = {}

    def result(self, size: Size, dataset: str, samples_a_row: int) -> Result:
        """Watch the commits: steady is from the first that holds two rounds of all series."""
        moments: list[Moment] = []
        deadline = time.monotonic() + 180 + size.seconds
        began = math.inf
        while time.monotonic() < began + size.seconds or len(moments) < 2:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the service commits too little: {moments}, {self.program.said}")
            samples = self._committed_rows(dataset) * samples_a_row
            if samples >= 2 * size.series and samples > (moments[-1].samples if moments else 0):
                moments.append(Moment(self.program.cpu_seconds, samples))
                began = min(began, time.monotonic())
            time.sleep(0.05)
        size_bytes = folder_bytes(self._store, f"dataset={dataset}/**/*.parquet")
        stored = {"stored": size_bytes / (self._committed_rows(dataset) * samples_a_row)}
        return _result(moments[0], moments[-1], self.program, stored)

    def _committed_rows(self, dataset: str) -> int:
        """Return the rows that commits added, from the log's own statistics."""
        for entry in (self._store / "_delta_log").glob("*.json"):
            if entry.name not in self._seen:
                self._seen[entry.name] = sum(_added_rows(line, dataset) for line in entry.read_text().splitlines())
        return sum(self._seen.values())


def _added_rows(line: str, dataset: str) -> int:
    added = json.loads(line).get("add")
    if not added or not added["dataChange"] or added["partitionValues"]["dataset"] != dataset:
        return 0
    return int(json.loads(added["stats"])["numRecords"])


def _result(first: Moment, last: Moment, program: Program, stored: dict[str, float]) -> Result:
    steady = (last.cpu_seconds - first.cpu_seconds) / ((last.samples - first.samples) / 1e6)
    whole = last.cpu_seconds / (last.samples / 1e6)
    return Result(
        steady=steady, whole=whole, samples=last.samples - first.samples, peak_mb=program.peak_mb, stored=stored
    )


def _limits() -> Iterable[Row]:
    """Return the physical limits of the machine for the same float32 values, measured in the same run."""
    walk = six_statistics(TENSORS)
    records = [next(walk) for _ in range(200)]
    numbers = [record.statistics.values.slice(0, 4 * TENSORS).to_numpy() for record in records]
    values = np.ascontiguousarray(np.stack(numbers, axis=-1))  # a series after the other, as they are stored
    million = values.size / 1e6
    split = pa.py_buffer(np.ascontiguousarray(values.view(np.uint8).reshape(-1, 4).T).tobytes())
    codec = pa.Codec("zstd", compression_level=1)
    packed = codec.compress(split)
    space = np.empty_like(values)
    unit = "CPU s per million samples"
    yield Row("limit: memcpy", cpu_seconds(lambda: np.copyto(space, values), 15) / million, unit, "4 bytes each")
    yield Row(
        "limit: zstd 1 of split bytes",
        cpu_seconds(lambda: codec.compress(split), 9) / million,
        unit,
        f"{packed.size / values.size:.2f} bytes per value that is noise; nothing is counted, sorted or named",
    )
    seconds, cpu = _durable_write(packed.to_pybytes())
    note = f"{seconds / million * 1e3:.2g} ms by the clock"
    yield Row("limit: write and fsync of these bytes", cpu / million, unit, note)


def _durable_write(content: bytes) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"

        def write() -> None:
            path.write_bytes(content)
            sync_to_disk(path)

        return statistics.median(_clocked(write) for _ in range(9)), cpu_seconds(write, 9)


def _clocked(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run())
