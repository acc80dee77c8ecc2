"""The store: a query among 1,000 small runs, connecting, 4,000 points of a curve."""

from __future__ import annotations

import datetime as dt
import functools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
from _rows import Row, print_rows

from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import connect

SMALL_RUNS = 1_000

_CURVES = {
    "each rank's curve, downsample to 4,000": """
        with c as (select rank, step, value from scalars where run = 'run' and name = 'loss')
        from downsample(c, step, value, 4000, series := rank)""",
    "the ranks' mean, downsample to 4,000": """
        with c as (select step, avg(value) as value from scalars where run = 'run' and name = 'loss' group by step)
        from downsample(c, step, value, 4000)""",
    "loss_curve, downsample to 4,000": """
        with c as (select step, loss from loss_curve where run = 'run')
        from downsample(c, step, loss, 4000)""",
}


def run() -> list[Row]:
    folder = Path(tempfile.mkdtemp())
    try:
        return [
            *_connecting(folder / "small"),
            *_curve(folder / "curve"),
            *_small_runs(folder / "runs"),
        ]
    finally:
        shutil.rmtree(folder)


def _connecting(folder: Path) -> Iterable[Row]:
    """Connect and ask one thing, as a command does; a view or macro is made when it is named."""
    with Store.open(folder, create=True).claim("0/1", owner="bench") as writer:
        writer.append(_loss("run", 0, 0, steps=20))
    yield Row(
        "DuckDB's connection alone", _cpu_milliseconds(lambda: duckdb.connect().close()), "ms CPU", "median of 15"
    )
    for name, question in {
        "connect, count a dataset": "select count(*) from scalars",
        "connect, loss_curve": "select * from loss_curve",
        "connect, every view and macro": "show tables",
    }.items():
        ask = functools.partial(_ask_once, folder, question)
        yield Row(name, _cpu_milliseconds(ask), "ms CPU", "median of 15")


def _curve(folder: Path) -> Iterable[Row]:
    """The loss of 8 ranks over 200,000 steps in at most 4,000 points each, and in as many steps of the ranks' mean."""
    with Store.open(folder, create=True).claim("0/1", owner="bench") as writer:
        writer.append(Batch(tables={"scalars": _long_loss(ranks=8, steps=200_000)}, watermarks={}))
    with connect(folder) as connection:
        for name, question in _CURVES.items():
            ask = functools.partial(connection.query, question)
            yield Row(name, _milliseconds(ask), "ms", f"8 ranks x 200,000 steps; {_cpu_milliseconds(ask):.0f} ms CPU")


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


def _cpu_milliseconds(work: Callable[[], object]) -> float:
    """CPU time of all threads: what a busy machine does not change."""
    work()
    seconds = []
    for _ in range(15):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return 1000 * statistics.median(seconds)


def _long_loss(*, ranks: int, steps: int) -> pa.Table:
    step = np.tile(np.arange(steps), ranks)
    loss = 10 / (1 + step / 1000) + np.random.default_rng(0).normal(0, 0.1, len(step))
    columns = {
        "run": pa.DictionaryArray.from_arrays(np.zeros(len(step), np.int32), ["run"]),
        "name": pa.DictionaryArray.from_arrays(np.zeros(len(step), np.int32), ["loss"]),
        "attempt": np.zeros(len(step), np.int32),
        "rank": np.repeat(np.arange(ranks, dtype=np.int32), steps),
        "step": step,
        "ordinal": step,
        "ts": pa.array(step * 1_000_000, pa.timestamp("us", tz="UTC")),
        "value": loss,
    }
    return pa.table(columns)


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
