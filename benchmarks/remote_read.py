"""Prometheus' remote read over a store: from the body of a question to the body of its answer, snappy included."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from _rows import Row, cpu_seconds

from rankscope_ingest.base.protobuf import packed
from rankscope_ingest.remote_read.handler import frames, read_response
from rankscope_storage.api.store import Store
from rankscope_storage.connection import Connection, connect
from rankscope_storage.prometheus.query import Matcher, MatchType, SeriesQuery
from rankscope_storage.prometheus.read import read
from rankscope_storage.prometheus.series import Series
from rankscope_storage.writer.writer import Batch

RUNS, RANKS, TENSORS, STEPS, FLUSH_STEPS, ROUNDS = 4, 4, 50, 2_000, 250, 7
LONG_RANKS, LONG_TENSORS, LONG_STEPS, LONG_FLUSH_STEPS = 2, 30, 50_000, 500
START = 1_770_000_000_000_000
STEP_US = 33_000
LOOKBACK_MS = 300_000


def run() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        _fill(store)
        with connect(store) as connection:
            one = {"run": "run-1", "tensor": "layers.7.weight", "op": "norm", "rank": "2"}
            return [
                *_row(connection, "one series", one),
                *_row(connection, "a tensor, all ranks and statistics", {"run": "run-1", "tensor": "layers.7.weight"}),
                *_row(connection, "one statistic of a run", {"run": "run-1", "op": "norm"}),
                *_long_run(connection),
            ]


def _long_run(connection: Connection) -> list[Row]:
    """Return what the queries of a board read of one run of 50,000 steps, 30 of them per second."""
    end = (START + LONG_STEPS * STEP_US) // 1000
    start = end - LOOKBACK_MS
    tensors = _matchers({"__name__": "rankscope_tensor_value", "run": "long"})
    norms = (*tensors, *_matchers({"op": "norm"}))
    steps = _matchers({"__name__": "rankscope_step", "run": "long"})
    asked = {
        "50,000 steps: list of tensor series": SeriesQuery(tensors, 0, end, series_alone=True),
        "… list of series of the step": SeriesQuery(steps, 0, end, series_alone=True),
        "… step over the whole run": SeriesQuery(steps, 0, end),
        "… last norms within five minutes": SeriesQuery(norms, start, end, last_alone=True),
    }
    return [_timed(connection, name, question) for name, question in asked.items()]


def _timed(connection: Connection, name: str, question: SeriesQuery) -> Row:
    found = read(connection, [question], max_series=100_000, max_samples=10_000_000)[0]
    cpu = cpu_seconds(lambda: read(connection, [question], max_series=100_000, max_samples=10_000_000))
    return Row(name, cpu, "CPU s", f"{len(found):,} series, {sum(len(one.values) for one in found):,} samples")


def _matchers(labels: dict[str, str]) -> tuple[Matcher, ...]:
    return tuple(Matcher(MatchType.EQUAL, label, value) for label, value in labels.items())


def _row(connection: Connection, name: str, labels: dict[str, str]) -> list[Row]:
    question = SeriesQuery(_matchers({"__name__": "rankscope_tensor_value", **labels}), 0, 1 << 42)
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        answers = read(connection, [question], max_series=100_000, max_samples=10_000_000)
        body = packed(read_response(answers))
        times.append(time.perf_counter() - began)
    samples = sum(len(series.values) for series in answers[0])
    note = f"{len(answers[0]):,} series, {samples:,} samples, {len(body) / samples:.1f} bytes each; warm"
    return [Row(name, statistics.median(times) * 1e3, "ms", note), *_written(answers, body)]


def _written(answers: list[list[Series]], plain: bytes) -> list[Row]:
    """Return what writing the answer costs, as plain samples and as chunks."""
    samples = sum(len(series.values) for series in answers[0])
    streamed = b"".join(frames(answers))
    as_samples = cpu_seconds(lambda: packed(read_response(answers))) / samples * 1e6
    as_chunks = cpu_seconds(lambda: b"".join(frames(answers))) / samples * 1e6
    unit = "CPU s/M samples"
    return [
        Row("… written as samples, packed", as_samples, unit, f"{len(plain) / samples:.1f} bytes each"),
        Row("… written as XOR chunks", as_chunks, unit, f"{len(streamed) / samples:.1f} bytes each"),
    ]


def _fill(store: Path) -> None:
    random = np.random.default_rng(0)
    with Store.open(store, create=True).claim(owner="benchmark") as writer:
        for number in range(RUNS):
            for first in range(0, STEPS, FLUSH_STEPS):
                rows = _rows(f"run-{number}", (range(first, first + FLUSH_STEPS), RANKS, TENSORS), 1_000_000, random)
                writer.append(Batch(tables={"tensor_stats": rows}, watermarks={}))
        for first in range(0, LONG_STEPS, LONG_FLUSH_STEPS):
            shape = (range(first, first + LONG_FLUSH_STEPS), LONG_RANKS, LONG_TENSORS)
            writer.append(Batch(tables={"tensor_stats": _rows("long", shape, STEP_US, random)}, watermarks={}))


def _rows(run: str, shape: tuple[range, int, int], step_us: int, random: np.random.Generator) -> pa.Table:
    """Return a row for each step, rank and tensor of `shape`."""
    steps, ranks, tensors = shape
    step, rank, tensor = (
        grid.ravel() for grid in np.meshgrid(np.arange(steps.start, steps.stop), np.arange(ranks), np.arange(tensors))
    )
    count = len(step)
    names = pa.array([f"layers.{place}.weight" for place in range(tensors)])
    columns = {
        "run": pa.array([run] * count),
        "attempt": pa.array(np.zeros(count, np.int32)),
        "rank": pa.array(rank.astype(np.int32)),
        "step": pa.array(step),
        "ts": pa.array(START + step * step_us).cast(pa.timestamp("us", "UTC")),
        "kind": pa.array(["grad_reduced"] * count),
        "tensor": pa.DictionaryArray.from_arrays(pa.array(tensor.astype(np.int32)), names),
    }
    for op in ("norm", "min", "max", "mean"):
        columns[op] = pa.array(random.normal(size=count).astype(np.float32))
    return pa.table(columns)
