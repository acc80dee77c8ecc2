"""Questions to a long history: one training and a tenth of it, ten times as many, 30 days of it among 1,000 runs.

Each query runs on an open connection, on a new snapshot, and on a new connection, in a process that has run queries
before. The physical limit next to it is DuckDB alone on exactly the files with the answer.

The default size is a quarter. The targets hold for 100 million samples, and only such stores are compared with them:

    RANKSCOPE_HISTORY_STEPS=834 RANKSCOPE_HISTORY_LOSS_STEPS=200000 python benchmarks/run.py history
"""

from __future__ import annotations

import functools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import duckdb
from _history_store import RUN, Builder, long_training, thirty_days
from _rows import Row, print_rows

from rankscope_storage.connection import Connection, connect

STEPS = int(os.environ.get("RANKSCOPE_HISTORY_STEPS", "210"))
LOSS_STEPS = int(os.environ.get("RANKSCOPE_HISTORY_LOSS_STEPS", "50000"))
HAS_FULL_SIZE = STEPS >= 834 and LOSS_STEPS >= 200_000
OTHER_RUNS = 1_000
ROUNDS = 15


@dataclass(frozen=True)
class Question:
    """A query, its target in milliseconds if there is one, and the equivalent query for DuckDB alone."""

    name: str
    sql: str
    target: float | None
    dataset: str = "tensor_stats"
    floor: str | None = None
    steps: tuple[int, int] | None = None
    rounds: int = ROUNDS


# Text of our own goes into these statements, nothing from elsewhere.
# ruff: noqa: S608
_LAST = STEPS - 1
_SERIES = "run = 'main' AND kind = 'grad_reduced' AND tensor = 'model.layers.12.block.7.weight'"
_LOSS = "run = 'main' AND name = 'loss'"
QUESTIONS = [
    Question(
        "one tensor over all steps, 8 ranks",
        f"SELECT rank, step, norm FROM tensor_stats WHERE {_SERIES} ORDER BY rank, step",
        20,
        floor=f"SELECT rank, step, norm FROM files WHERE {_SERIES} ORDER BY rank, step",
    ),
    Question(
        "latest step of all tensors, all columns",
        "FROM tensor_latest WHERE run = 'main'",
        70,
        floor=f"FROM files WHERE run = 'main' AND step = {_LAST}",
        steps=(_LAST, _LAST),
    ),
    Question(
        "any NaN",
        "SELECT count(*) FROM tensor_stats WHERE nans > 0",
        15,
        floor="SELECT count(*) FROM files WHERE nans > 0",
    ),
    Question(
        "rows that are not finite, all columns",
        "FROM nonfinite",
        None,
        floor="FROM files WHERE nans > 0 UNION ALL FROM files WHERE infs > 0 AND (nans IS NULL OR nans <= 0)",
    ),
    Question(
        "loss in 4,000 points, scalar_curve",
        "FROM scalar_curve('main')",
        70,
        "scalars",
        f"SELECT step // {-(-LOSS_STEPS // 4000)} AS bucket, avg(value), min(value), max(value) "
        f"FROM files WHERE {_LOSS} GROUP BY bucket",
    ),
    Question(
        "loss of each rank in 4,000 points, downsample",
        f"WITH c AS (SELECT rank, step, value FROM scalars WHERE {_LOSS}) "
        "FROM downsample(c, step, value, 4000, series := rank)",
        70,
        "scalars",
    ),
    Question(
        "loss_curve in 4,000 points, downsample",
        "WITH c AS (SELECT step, loss FROM loss_curve WHERE run = 'main') FROM downsample(c, step, loss, 4000)",
        70,
        "scalars",
    ),
    Question("top 20 deviations from the baseline", "FROM top_deviations('main')", 1000, rounds=3),
    Question("top 20 deviations from 50 steps before", "FROM bucket_deviations('main')", 1000, rounds=3),
]


def run() -> Iterator[Row]:
    folder = Path(tempfile.mkdtemp(prefix="rankscope-history-"))
    try:
        tenth = long_training(folder / "tenth", STEPS // 10, LOSS_STEPS // 10)
        yield from _questions("a tenth of the training", tenth.root, every=False, floors=False)
        for name, build in (
            ("one training", lambda root: long_training(root, STEPS, LOSS_STEPS)),
            ("30 days, 1,000 runs", lambda root: thirty_days(root, STEPS, LOSS_STEPS, OTHER_RUNS)),
        ):
            began = time.perf_counter()
            builder = build(folder / name.partition(",")[0])
            yield Row(f"{name}: building", time.perf_counter() - began, "s", _size(builder))
            yield from _questions(name, builder.root)
            if name == "one training":
                builder.multiply(10)
                yield Row("ten times the history", len(builder.files()), "files", "links, committed as other runs")
                yield from _questions("ten times the history", builder.root, every=False)
            shutil.rmtree(builder.root)
    finally:
        shutil.rmtree(folder)


def _size(builder: Builder) -> str:
    files = builder.files()
    statistics_files = [file for file in files if file["dataset"] == "tensor_stats"]
    rows = sum(file["rows"] for file in statistics_files)
    return f"{rows:,} wide rows in {len(statistics_files)} files, {len(files) - len(statistics_files)} files beside"


def _questions(store: str, root: Path, *, every: bool = True, floors: bool = True) -> Iterator[Row]:
    with connect(root) as connection:
        for question in QUESTIONS if every else QUESTIONS[:5]:
            began = time.perf_counter()
            rows = connection.query(question.sql).num_rows
            first = 1000 * (time.perf_counter() - began)
            ways: dict[str, Callable[[], object]] = {
                "open connection": functools.partial(connection.query, question.sql),
                "snapshot and question": functools.partial(_through_snapshot, connection, question.sql),
                "connect and question": functools.partial(_through_connect, root, question.sql),
            }
            for way, ask in ways.items():
                note = f"{rows:,} rows, the first time {first:.0f} ms"
                yield _asked(f"{store}: {question.name}; {way}", ask, question, note, judges=every and HAS_FULL_SIZE)
            if floors and question.floor is not None:
                yield _floor(store, connection, question)


def _asked(name: str, ask: Callable[[], object], question: Question, note: str, *, judges: bool) -> Row:
    median, least, cpu = _milliseconds(ask, question.rounds)
    target = question.target
    judged = f"target {target:.0f}: {_verdict(median, least, target)}; " if judges and target is not None else ""
    return Row(name, median, "ms", f"{judged}least {least:.1f}, CPU {cpu:.1f}; {note}")


def _verdict(median: float, least: float, target: float) -> str:
    if median <= target:
        return "met"
    return "met by the best" if least <= target else "not met"


def _floor(store: str, connection: Connection, question: Question) -> Row:
    files = connection.files(question.dataset, run=RUN, steps=question.steps)
    with duckdb.connect() as plain:
        plain.execute("SET parquet_metadata_cache = true")
        plain.execute(f"CREATE VIEW files AS FROM read_parquet({files!r}, hive_partitioning = false)")
        median, least, cpu = _milliseconds(lambda: plain.sql(question.floor).to_arrow_table(), question.rounds)
    note = f"least {least:.1f}, CPU {cpu:.1f}; {len(files)} files"
    return Row(f"{store}: {question.name}; DuckDB alone", median, "ms", note)


def _through_snapshot(connection: Connection, sql: str) -> None:
    with connection.snapshot() as pinned:
        pinned.query(sql)


def _through_connect(root: Path, sql: str) -> None:
    with connect(root) as connection:
        connection.query(sql)


def _milliseconds(work: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Return the median and the least of the clock, and the least CPU of all threads; `work` was done before."""
    clock, cpu = [], []
    for _ in range(rounds):
        began, burnt = time.perf_counter(), time.process_time()
        work()
        clock.append(1000 * (time.perf_counter() - began))
        cpu.append(1000 * (time.process_time() - burnt))
    return statistics.median(clock), min(clock), min(cpu)


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run())
