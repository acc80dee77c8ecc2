"""The store: latency of small commits as the log grows, and of a query among 1,000 small runs."""

from __future__ import annotations

import datetime as dt
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
from _rows import Row, print_rows

from rankscope_storage.connection import connect
from rankscope_storage.schema import dataset_schema
from rankscope_storage.store import Batch, Store

COMMITS = 5_000
WINDOW = 100  # commits that a latency is taken over
SMALL_RUNS = 1_000
MAINTAIN_EVERY = 500


def run() -> list[Row]:
    folder = Path(tempfile.mkdtemp())
    try:
        return [*_commits(folder / "commits"), *_small_runs(folder / "runs")]
    finally:
        shutil.rmtree(folder)


def _commits(folder: Path) -> Iterable[Row]:
    """Commit loss rows of one run, merging and cleaning up as the service does between flushes."""
    seconds = []
    with Store.open(folder, create=True).claim("0/1", owner="bench") as writer:
        for number in range(COMMITS):
            batch = _loss("run", number, number)
            began = time.perf_counter()
            writer.append(batch)
            seconds.append(time.perf_counter() - began)
            if number % MAINTAIN_EVERY == MAINTAIN_EVERY - 1:
                writer.compact()
                writer.maintain()
    for upto in (100, 1_000, COMMITS):
        window = sorted(seconds[max(0, upto - WINDOW) : upto])
        note = f"the {len(window)} commits before, one row each, fsync included"
        yield Row(f"commit at {upto:,}, median", 1000 * statistics.median(window), "ms", note)
        yield Row(f"commit at {upto:,}, 95th percentile", 1000 * window[int(0.95 * len(window)) - 1], "ms")
    opened = _milliseconds(lambda: Store.open(folder))
    yield Row(f"open at {COMMITS:,} commits", opened, "ms", "median of 5")


def _small_runs(folder: Path) -> Iterable[Row]:
    with Store.open(folder, create=True).claim("0/1", owner="bench") as writer:
        for number in range(SMALL_RUNS):
            writer.append(_loss(f"run-{number}", 0, 0, steps=20))
            if number % 100 == 99:
                writer.compact()
    question = "select step, value from scalars where run = 'run-517' and name = 'loss' order by step"
    with connect(folder) as connection:
        assert len(connection.sql(question).fetchall()) == 20
        warm = _milliseconds(lambda: connection.sql(question).fetchall())
        overview = _milliseconds(lambda: connection.sql("select count(distinct run) from scalars").fetchall())
    cold = _milliseconds(lambda: _ask_once(folder, question))
    yield Row(f"loss curve of one of {SMALL_RUNS:,} runs", warm, "ms", "open connection, views refreshed, median of 5")
    yield Row("the same, connecting first", cold, "ms", "median of 5")
    yield Row(f"count of {SMALL_RUNS:,} runs", overview, "ms", "median of 5")


def _ask_once(folder: Path, question: str) -> None:
    with connect(folder) as connection:
        connection.sql(question).fetchall()


def _milliseconds(work: object) -> float:
    assert callable(work)
    work()
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return 1000 * statistics.median(seconds)


def _loss(run: str, first_seq: int, first_step: int, *, steps: int = 1) -> Batch:
    now = dt.datetime.now(tz=dt.UTC)
    incarnation = f"{abs(hash(run)):032x}"
    rows = [
        {
            "run": run,
            "attempt": 0,
            "rank": 0,
            "incarnation": incarnation,
            "seq": first_seq + offset,
            "ordinal": first_seq + offset,
            "step": first_step + offset,
            "ts": now,
            "ts_origin": "rank",
            "name": "loss",
            "value": 1.0 / (1 + first_step + offset),
        }
        for offset in range(steps)
    ]
    table = pa.Table.from_pylist(rows, schema=dataset_schema("scalars"))
    return Batch(tables={"scalars": table}, watermarks={incarnation: first_seq + steps - 1})


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run())
