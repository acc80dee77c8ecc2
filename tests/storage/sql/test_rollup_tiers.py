"""Curves, downsampling, timelines and remote read continue with rollups where raw rows end."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rankscope_storage.api.store import Batch, Store, Writer
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import connect
from rankscope_storage.maintenance.retention import Retention, retain
from rankscope_storage.prometheus.query import Matcher, MatchType, SeriesQuery
from rankscope_storage.prometheus.read import read

START = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
STEPS, RAW_FROM = 400, 300
PER_DAY = 100


def at(step: int) -> dt.datetime:
    return START + dt.timedelta(days=step / PER_DAY)


def append(writer: Writer, dataset: str, rows: Sequence[dict[str, Any]]) -> None:
    identity = {"run": "r", "attempt": 0, "rank": 0}
    table = pa.Table.from_pylist([identity | row for row in rows], schema=dataset_schema(dataset))
    writer.append(Batch(tables={dataset: table}, watermarks={}))


def loss(step: int) -> float:
    return math.nan if step in {120, 250} else 1000.0 - step


@pytest.fixture(scope="module")
def aged(tmp_path_factory) -> Path:
    """Return a store with four days of 100 steps each, of which the first three are rolled up."""
    store = Store.open(tmp_path_factory.mktemp("aged") / "store", create=True)
    with store.claim(owner="me") as writer:
        scalars = [{"step": step, "ts": at(step), "name": "loss", "value": loss(step)} for step in range(STEPS)]
        tokens = [
            {"step": step, "ts": at(step), "name": "tokens_total", "value": 10.0 * (step + 1)} for step in range(STEPS)
        ]
        append(writer, "scalars", scalars + tokens)
        statistics = {"kind": "k", "tensor": "t", "placement": "full", "min": -1.0, "infs": 0, "numel": 8}
        rows = [
            {
                **statistics,
                "step": step,
                "ts": at(step),
                "norm": float(step),
                "max": 9.0 if step == 57 else 1.0,
                "nans": 2 if step == 33 else 0,
                "zeros": 4,
            }
            for step in range(STEPS)
        ]
        append(writer, "tensor_stats", rows)
    policy = Retention(raw_days=10, scalars_days=10)
    retain(store.root, policy, sync_to_disk, now=at(RAW_FROM) + dt.timedelta(days=10))
    return store.root


def test_loss_curve_has_a_point_per_100_rolled_steps_then_per_step(aged):
    with connect(aged) as connection:
        curve = connection.sql("SELECT first_step, step, loss, parts FROM loss_curve ORDER BY step").fetchall()
    of_finite = [
        sum(loss(step) for step in steps if step not in {120, 250}) / 99 for steps in (range(100, 200), range(200, 300))
    ]

    assert [(0, 99, 950.5, 1), (100, 199, of_finite[0], 1), (200, 299, of_finite[1], 1)] == curve[:3]
    assert [(step, step, loss(step), 1) for step in range(RAW_FROM, STEPS)] == curve[3:]


def test_attempt_that_begins_within_rollups_supersedes_whole_buckets(store, writer, connection):
    append(writer, "scalars", [{"step": step, "ts": at(step), "name": "loss", "value": 1.0} for step in range(250)])
    policy = Retention(scalars_days=10)
    retain(store.root, policy, sync_to_disk, now=at(250) + dt.timedelta(days=20))
    again = [{"step": step, "ts": at(250), "attempt": 1, "name": "loss", "value": 2.0} for step in range(150, 160)]
    append(writer, "scalars", again)
    curve = connection.sql("SELECT attempt, step, cumulative_step, loss FROM loss_curve ORDER BY step").fetchall()

    assert [(0, 99, 99, 1.0), *((1, step, step + 100, 2.0) for step in range(150, 160))] == curve
    assert 13 == connection.sql("FROM scalar_history").count("*").fetchall()[0][0]


def test_downsample_includes_rollups(aged):
    with connect(aged) as connection:
        thinned = connection.sql(
            "WITH c AS (SELECT step, loss FROM loss_curve) FROM downsample(c, step, loss, 20)"
        ).fetchall()

    assert (99.0, 950.5) == thinned[0][1:]
    assert (399.0, 601.0) == thinned[-1][1:]


def test_tensor_timeline_has_both_tiers_and_all_non_finite_counts(aged):
    query = """SELECT tier, count(*), sum("rows"), sum(nans * "rows"), max("max"), max(zeros), sum(nonfinite_rows)
        FROM tensor_timeline GROUP BY tier ORDER BY tier"""
    with connect(aged) as connection:
        assert [("raw", 100, 100, 0.0, 1.0, 4.0, 0), ("rollup", 3, 300, 2.0, 9.0, 4.0, 1)] == connection.sql(
            query
        ).fetchall()
        values = connection.sql("SELECT step, norm, tier FROM tensor_timeline ORDER BY step LIMIT 4").fetchall()

    assert [(99, 49.5, "rollup"), (199, 149.5, "rollup"), (299, 249.5, "rollup"), (300, 300.0, "raw")] == values


def test_scalar_timeline_keeps_the_last_value_of_counters(aged):
    with connect(aged) as connection:
        query = "SELECT step, value, nonfinite_rows FROM scalar_timeline WHERE name = {} ORDER BY step LIMIT 4"
        tokens = connection.sql(query.format("'tokens_total'")).fetchall()
        losses = connection.sql(query.format("'loss'")).fetchall()

    assert [(99, 1000.0, 0), (199, 2000.0, 0), (299, 3000.0, 0), (300, 3010.0, 0)] == tokens
    assert [0, 1, 1, 0] == [row[2] for row in losses]


def asked(aged: Path, *matchers: tuple[str, str], first: int = 0, last: int = STEPS) -> list[tuple[float, ...]]:
    given = tuple(Matcher(MatchType.EQUAL, *matcher) for matcher in matchers)
    start, end = (int(at(step).timestamp() * 1000) for step in (first, last))
    with connect(aged) as connection:
        [found] = read(connection, [SeriesQuery(given, start, end)], max_series=10, max_samples=10_000)
    [series] = found
    return list(zip(series.times_ms.tolist(), series.values.tolist(), strict=True))


def ms(step: int) -> int:
    return int(at(step).timestamp() * 1000)


def test_remote_read_returns_rollups_with_the_same_labels(aged):
    norm = asked(aged, ("__name__", "rankscope_tensor_value"), ("op", "norm"))

    assert [(ms(99), 49.5), (ms(199), 149.5), (ms(299), 249.5), (ms(300), 300.0)] == norm[:4]
    assert STEPS - RAW_FROM + 3 == len(norm)
    assert [(ms(99), 0.02), (ms(199), 0.0)] == asked(
        aged, ("__name__", "rankscope_tensor_value"), ("op", "nans"), last=250
    )
    assert [9.0, 1.0, 1.0] == [
        value for _, value in asked(aged, ("__name__", "rankscope_tensor_value"), ("op", "max"), last=299)
    ]
    assert [(ms(99), 1000.0), (ms(199), 2000.0)] == asked(aged, ("__name__", "rankscope_tokens_total"), last=200)


def test_rank_without_raw_rows_has_its_step_metric(aged):
    assert [(ms(99), 99.0), (ms(199), 199.0)] == asked(aged, ("__name__", "rankscope_step"), last=200)
