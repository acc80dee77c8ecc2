"""Retention: CPU per million rows rolled up, bytes before and after, and the cost of an append during retention.

Sixty simulated days of statistics, of which the older half is rolled up. 4 million rows by default; more with
`RANKSCOPE_RETENTION_ROWS=40000000 python benchmarks/run.py retention`. Afterwards the same for files
of a large fleet, with each series once per file, in one pass and in slices.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import os
import resource
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
from _rows import Row, print_rows

from rankscope_storage.api.store import Batch, Store, Writer
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.schema import conform, dataset_schema
from rankscope_storage.connection import connect
from rankscope_storage.files.encoding import write_file
from rankscope_storage.maintenance import retention
from rankscope_storage.maintenance.retention import File, Retention, RetentionReport, retain

ROWS = int(os.environ.get("RANKSCOPE_RETENTION_ROWS", "4000000"))
RANKS, TENSORS = 4, 250
ROWS_PER_STEP = RANKS * TENSORS
FLUSH_ROWS = 400_000
DAYS, KEPT_DAYS = 60.0, 30.0
START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
APPENDS = 60
FLEET_RANKS, FLEET_TENSORS, FLEET_FILES = 400, 2_500, 6
ONE_TENSOR = "SELECT step, rank, norm FROM {} WHERE run = 'run' AND tensor = 'layers.17.mlp.weight'"


def run() -> list[Row]:
    folder = Path(tempfile.mkdtemp())
    try:
        with Store.open(folder / "store", create=True).claim("0/1", owner="bench") as writer:
            return [*_measure(folder / "store", writer), *_fleet(folder / "fleet")]
    finally:
        shutil.rmtree(folder)


def _measure(root: Path, writer: Writer) -> list[Row]:
    _fill(writer)
    writer.compact()
    raw, size = _stored(root)
    alone = _appends(writer, lambda: False)
    asked = _asking(root, "tensor_stats")
    report, cpu, memory, beside = _retain_beside(root, writer)
    rolled = report.rows
    points = f"{report.added_rows:,} rollup rows of {rolled:,} rows in {report.files} files"
    return [
        Row("rolling up", 1e6 * cpu / rolled, "CPU s per million rows", f"one file is cut; {points}"),
        Row("raw rows", size / raw, "bytes per row", f"{raw:,} rows, noise of 2 to 30 %"),
        Row("rollup rows", report.added_bytes / report.added_rows, "bytes per row", "of 100 steps each"),
        Row("rolled-up rows", report.size_bytes / report.added_bytes, "x smaller", "bytes of files in the log"),
        Row("memory", memory, "MiB", "largest increase of resident memory, sampled at each append"),
        *_latencies("append alone", alone),
        *_latencies("append while retention runs", beside),
        Row("one tensor's norm, all raw", asked, "ms CPU", f"{raw:,} rows, median of 5"),
        Row("the same over both tiers", _asking(root, "tensor_timeline"), "ms CPU", "half of the steps rolled up"),
    ]


def _retain_beside(root: Path, writer: Writer) -> tuple[RetentionReport, float, float, list[float]]:
    """Roll up in another thread while this one appends; return also the CPU seconds of that thread and MiB it took."""
    found: list[tuple[RetentionReport, float]] = []

    def work() -> None:
        began = time.thread_time()
        now = START + dt.timedelta(days=DAYS)
        report = retain(root, Retention(raw_days=KEPT_DAYS), sync_to_disk, now=now)
        found.append((report, time.thread_time() - began))

    before = _resident()
    highest = [before]
    thread = threading.Thread(target=work)
    thread.start()

    def goes_on() -> bool:
        highest[0] = max(highest[0], _resident())
        return thread.is_alive()

    beside = _appends(writer, goes_on)
    thread.join()
    [(report, cpu)] = found
    return report, cpu, highest[0] - before, beside


def _resident() -> float:
    """Return the MiB of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def _appends(writer: Writer, is_going_on: Callable[[], bool]) -> list[float]:
    """Commit one row after the other, and return how many milliseconds each took."""
    taken: list[float] = []
    while is_going_on() or len(taken) < APPENDS:
        row = {"run": "other", "step": len(taken), "ts": dt.datetime.now(dt.UTC), "name": "loss", "value": 1.0}
        table = pa.Table.from_pylist([row], schema=dataset_schema("scalars"))
        began = time.perf_counter()
        writer.append(Batch(tables={"scalars": table}, watermarks={}))
        taken.append(1000 * (time.perf_counter() - began))
    return taken


def _latencies(name: str, taken: list[float]) -> list[Row]:
    ordered = sorted(taken)
    note = f"{len(taken)} commits of one row, one after the other"
    return [
        Row(f"{name}, median", statistics.median(taken), "ms", note),
        Row(f"{name}, 95th percentile", ordered[int(0.95 * len(ordered))], "ms"),
    ]


def _fleet(root: Path) -> list[Row]:
    """Roll up files in which each of a million series has one row, as few and as many of them at a time."""
    root.mkdir()
    files: list[File] = []
    for step in range(FLEET_FILES):
        rows = conform(_statistics(step, 1, ranks=FLEET_RANKS, tensors=FLEET_TENSORS), "tensor_stats")
        written = write_file(root, "tensor_stats", "run", rows, sync_to_disk)
        files.append({"path": written.path, "dataset": "tensor_stats", "part": "run", "rows": written.rows})
    total = sum(file["rows"] for file in files)
    figures = []
    for name, most in (("in slices", retention.SLICE_ROWS), ("at once", total)):
        retention.SLICE_ROWS = most  # type: ignore[misc]
        began = time.process_time()
        retention.roll_up(root, files, sync_to_disk)
        figures.append(Row(f"a fleet's, {name}", 1e6 * (time.process_time() - began) / total, "CPU s per million rows"))
    note = f"{FLEET_RANKS * FLEET_TENSORS:,} series, once in each of {FLEET_FILES} files"
    return [dataclasses.replace(row, note=note) for row in figures]


def _fill(writer: Writer) -> None:
    steps_at_once = FLUSH_ROWS // ROWS_PER_STEP
    for first in range(0, ROWS // ROWS_PER_STEP, steps_at_once):
        writer.append(Batch(tables={"tensor_stats": _statistics(first, steps_at_once)}, watermarks={}))


def _statistics(first: int, steps: int, *, ranks: int = RANKS, tensors: int = TENSORS) -> pa.Table:
    """Return `steps` steps of all tensors of all ranks, with the spread of real statistics from step to step."""
    random = np.random.default_rng(first)
    tensor = np.tile(np.arange(tensors, dtype=np.int32), steps * ranks)
    step = np.repeat(np.arange(first, first + steps), ranks * tensors)
    spread = (0.02 + 0.28 * tensor / tensors).astype(np.float32)
    seconds = step * (DAYS * 86_400 * ROWS_PER_STEP / ROWS)
    moments = pa.array((seconds * 1e6).astype(np.int64) + int(START.timestamp() * 1e6), pa.timestamp("us", tz="UTC"))

    def noise() -> np.ndarray:
        return (1 + spread * random.standard_normal(len(step), np.float32)) * (1 + tensor % 7)

    def text(values: list[str]) -> pa.DictionaryArray:
        codes = np.zeros(len(step), np.int32) if len(values) == 1 else tensor
        return pa.DictionaryArray.from_arrays(codes, values)

    return pa.table(
        {
            "run": text(["run"]),
            "attempt": np.zeros(len(step), np.int32),
            "rank": np.tile(np.repeat(np.arange(ranks, dtype=np.int32), tensors), steps),
            "ordinal": step,
            "step": step,
            "ts": moments,
            "kind": text(["grad_reduced"]),
            "tensor": text([f"layers.{number}.mlp.weight" for number in range(tensors)]),
            "placement": text(["full"]),
            **{op: noise() for op in ("norm", "min", "max", "mean")},
            **{op: np.zeros(len(step), np.int64) for op in ("nans", "infs")},
            "zeros": np.where(tensor % 4 == 0, random.integers(0, 100, len(step)), 0),
            "numel": np.full(len(step), 1 << 20),
        }
    )


def _stored(root: Path) -> tuple[int, int]:
    with connect(root) as connection:
        files = connection.files_table("tensor_stats")
    return sum(files["rows"].to_pylist()), sum(files["size_bytes"].to_pylist())


def _asking(root: Path, view: str) -> float:
    taken = []
    with connect(root) as connection:
        for _ in range(6):
            began = time.process_time()
            connection.query(ONE_TENSOR.format(view))
            taken.append(1000 * (time.process_time() - began))
    return statistics.median(taken[1:])


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run())
