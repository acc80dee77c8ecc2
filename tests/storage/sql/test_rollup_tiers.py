"""Curves, downsampling, timelines and remote read continue with rollups where raw rows end."""

from __future__ import annotations

import datetime as dt
import math
from pathlib import Path

import pytest
from tests.storage.rows import ask, put

from rankscope_storage.api.store import Store
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.connection import connect
from rankscope_storage.maintenance.retention import Retention, retain
from rankscope_storage.prometheus.query import Matcher, MatchType, SeriesQuery
from rankscope_storage.prometheus.read import read

START = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
STEPS, RAW_FROM = 400, 300
PER_DAY = 100


def at(step: int) -> dt.datetime:
    return START + dt.timedelta(days=step / PER_DAY)


IDENTITY = {"run": "r", "attempt": 0, "rank": 0}


def loss(step: int) -> float:
    return math.nan if step in {120, 250} else 1000.0 - step


@pytest.fixture(scope="module")
def aged(tmp_path_factory) -> Path:
    """Return a store with four days of 100 steps each, of which the first three are rolled up."""
    store = Store.open(tmp_path_factory.mktemp("aged") / "store", create=True)
    with store.claim(owner="me") as writer:
        steps = [{"step": step, "ts": at(step)} for step in range(STEPS)]
        losses = [row | {"name": "loss", "value": loss(row["step"])} for row in steps]
        tokens = [row | {"name": "tokens_total", "value": 10.0 * (row["step"] + 1)} for row in steps]
        put(writer, "scalars", losses + tokens, **IDENTITY)
        own = [{"norm": float(n), "max": 9.0 if n == 57 else 1.0, "nans": 2 if n == 33 else 0} for n in range(STEPS)]
        common = {"kind": "k", "tensor": "t", "placement": "full", "min": -1.0, "infs": 0, "numel": 8, "zeros": 4}
        statistics = [row | numbers for row, numbers in zip(steps, own, strict=True)]
        put(writer, "tensor_stats", statistics, **IDENTITY, **common)
    policy = Retention(raw_days=10, scalars_days=10)
    retain(store.root, policy, sync_to_disk, now=at(RAW_FROM) + dt.timedelta(days=10))
    return store.root


def test_loss_curve_has_a_point_per_100_rolled_steps_then_per_step(aged):
    curve = ask(aged, "SELECT first_step, step, loss, parts FROM loss_curve ORDER BY step")
    one, other = (sum(loss(n) for n in range(at, at + 100) if n not in {120, 250}) / 99 for at in (100, 200))

    assert [(0, 99, 950.5, 1), (100, 199, one, 1), (200, 299, other, 1)] == curve[:3]
    assert [(step, step, loss(step), 1) for step in range(RAW_FROM, STEPS)] == curve[3:]


def test_attempt_that_begins_within_rollups_supersedes_whole_buckets(store, writer, connection):
    named = {"run": "r", "rank": 0, "name": "loss"}
    put(writer, "scalars", [{"step": n, "ts": at(n)} for n in range(250)], **named, attempt=0, value=1.0)
    retain(store.root, Retention(scalars_days=10), sync_to_disk, now=at(250) + dt.timedelta(days=20))
    put(writer, "scalars", [{"step": n, "ts": at(250)} for n in range(150, 160)], **named, attempt=1, value=2.0)
    curve = ask(connection, "SELECT attempt, step, cumulative_step, loss FROM loss_curve ORDER BY step")

    assert [(0, 99, 99, 1.0), *((1, step, step + 100, 2.0) for step in range(150, 160))] == curve
    assert [(13,)] == ask(connection, "SELECT count(*) FROM scalar_history")


def test_tensor_timeline_has_both_tiers_and_all_non_finite_counts(aged):
    query = """SELECT tier, count(*), sum("rows"), sum(nans * "rows"), max("max"), max(zeros), sum(nonfinite_rows)
        FROM tensor_timeline GROUP BY tier ORDER BY tier"""
    values = ask(aged, "SELECT step, norm, tier FROM tensor_timeline ORDER BY step LIMIT 4")

    assert [("raw", 100, 100, 0.0, 1.0, 4.0, 0), ("rollup", 3, 300, 2.0, 9.0, 4.0, 1)] == ask(aged, query)
    assert [(99, 49.5, "rollup"), (199, 149.5, "rollup"), (299, 249.5, "rollup"), (300, 300.0, "raw")] == values


def test_scalar_timeline_keeps_the_last_value_of_counters(aged):
    query = "SELECT step, value, nonfinite_rows FROM scalar_timeline WHERE name = '{}' ORDER BY step LIMIT 4"
    tokens, losses = (ask(aged, query.format(name)) for name in ("tokens_total", "loss"))

    assert [(99, 1000.0, 0), (199, 2000.0, 0), (299, 3000.0, 0), (300, 3010.0, 0)] == tokens
    assert [0, 1, 1, 0] == [row[2] for row in losses]


def ms(step: int) -> int:
    return int(at(step).timestamp() * 1000)


def asked(aged: Path, name: str, op: str = "", last: int = STEPS) -> list[tuple[float, ...]]:
    """Return the samples until step `last` of the only series of this metric, as Prometheus gets them."""
    given = (("__name__", name), *([("op", op)] if op else []))
    query = SeriesQuery(tuple(Matcher(MatchType.EQUAL, *matcher) for matcher in given), ms(0), ms(last))
    with connect(aged) as connection:
        [[series]] = read(connection, [query], max_series=10, max_samples=10_000)
    return list(zip(series.times_ms.tolist(), series.values.tolist(), strict=True))


def test_remote_read_returns_rollups_with_the_same_labels(aged):
    tensors = "rankscope_tensor_value"
    norm = asked(aged, tensors, "norm")

    assert [(ms(99), 49.5), (ms(199), 149.5), (ms(299), 249.5), (ms(300), 300.0)] == norm[:4]
    assert STEPS - RAW_FROM + 3 == len(norm)
    assert [(ms(99), 0.02), (ms(199), 0.0)] == asked(aged, tensors, "nans", last=250)
    assert [9.0, 1.0, 1.0] == [value for _, value in asked(aged, tensors, "max", last=299)]
    assert [(ms(99), 1000.0), (ms(199), 2000.0)] == asked(aged, "rankscope_tokens_total", last=200)
    assert [(ms(99), 99.0), (ms(199), 199.0)] == asked(aged, "rankscope_step", last=200)  # without raw rows
