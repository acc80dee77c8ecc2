"""Rollups contain the statistics of all their rows, for any parts, order, kills and late rows."""

import contextlib
import datetime as dt
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.storage.rows import Killed, ask, dying, files, put

from rankscope_contract.model.kinds import COUNT_OPS, VALUE_OPS
from rankscope_storage.api.store import Store, Writer
from rankscope_storage.base.datasets import ROLLUPS
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.schema import table_schema
from rankscope_storage.connection import Connection, connect
from rankscope_storage.log.delta import Log
from rankscope_storage.maintenance import retention
from rankscope_storage.maintenance.check import check
from rankscope_storage.maintenance.retention import Retention, RetentionReport, retain
from rankscope_storage.prometheus.query import Matcher, MatchType, SeriesQuery
from rankscope_storage.prometheus.read import read

# An independent reference for rollups, computed row by row.

Row = Mapping[str, Any]

IDENTITY_COLUMNS = ("run", "attempt", "rank", "micro_step", "vpp_stage")
SERIES_OF = {
    "tensor_stats": (*IDENTITY_COLUMNS, "kind", "tensor", "index", "placement", "shard_group", "call_seq"),
    "scalars": (*IDENTITY_COLUMNS, "name", "unit", "labels"),
}


def rollups(dataset: str, rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the rollups of all `rows`, one per series and bucket; means are exact fractions, or None."""
    buckets: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        series = tuple(row.get(name) for name in SERIES_OF[dataset])
        buckets[*series, *_bucket(row)].append(row)
    return [_rolled(dataset, key, members) for key, members in buckets.items()]


def _bucket(row: Row) -> tuple[int | None, int | None]:
    if row.get("step") is not None:
        return row["step"] // 100 * 100, None
    return None, None if row["ts"] is None else int(row["ts"].timestamp()) // 600


def _rolled(dataset: str, key: tuple[Any, ...], rows: list[Row]) -> dict[str, Any]:
    steps = [row["step"] for row in rows if row.get("step") is not None]
    moments: list[dt.datetime] = [row["ts"] for row in rows if row["ts"] is not None]
    odd = [row for row in rows if _is_odd(dataset, row)]
    odd_steps = [row["step"] for row in odd if row.get("step") is not None]
    return {
        **dict(zip(SERIES_OF[dataset], key, strict=False)),
        "step": key[-2],
        "first_step": min(steps, default=None),
        "last_step": max(steps, default=None),
        "first_ts": min(moments, default=None),
        "ts": max(moments, default=None),
        "rows": len(rows),
        "nonfinite_rows": len(odd),
        "first_nonfinite_step": min(odd_steps, default=None),
        **_numbers(VALUE_OPS if dataset == "tensor_stats" else ("value",), rows),
        **_totals(COUNT_OPS if dataset == "tensor_stats" else (), rows),
    }


def _numbers(names: Iterable[str], rows: list[Row]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name in names:
        known = [row[name] for row in rows if row.get(name) is not None]
        finite = [Fraction(value) for value in known if math.isfinite(value)]
        told |= {
            f"{name}_min": float(min(finite)) if finite else None,
            f"{name}_max": float(max(finite)) if finite else None,
            f"{name}_avg": float(sum(finite) / len(finite)) if finite else None,
            f"{name}_count": len(finite),
            f"{name}_nans": sum(math.isnan(value) for value in known),
            f"{name}_infs": sum(math.isinf(value) for value in known),
        }
    return told


def _totals(names: Iterable[str], rows: list[Row]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name in names:
        known = [row[name] for row in rows if row.get(name) is not None]
        told |= {name: sum(known) if known else None, f"{name}_rows": len(known)}
    return told


def _is_odd(dataset: str, row: Row) -> bool:
    names = VALUE_OPS if dataset == "tensor_stats" else ("value",)
    elements = dataset == "tensor_stats" and any((row.get(name) or 0) > 0 for name in ("nans", "infs"))
    return elements or any(row.get(name) is not None and not math.isfinite(row[name]) for name in names)


# Tests.

ROLLED_UP = 'SELECT step, "rows" FROM tensor_rollups ORDER BY step'
START = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
POLICY = Retention(raw_days=10, scalars_days=10)  # With this policy, the slack is a day


def day(number: float) -> dt.datetime:
    return START + dt.timedelta(days=number)


def append(writer: Writer, dataset: str, rows: Sequence[Row]) -> None:
    put(writer, dataset, rows, run="r")


def let_age(root, until: float, *, sync=sync_to_disk, works: int | None = None) -> RetentionReport:
    """Apply POLICY at a time at which rows before day `until` are too old."""
    return retain(root, POLICY, sync, now=day(until + 10), works=works)


def found(connection: Connection, dataset: str) -> list[dict[str, Any]]:
    return connection.query(f"FROM {ROLLUPS[dataset]}").to_pylist()


def comparable(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rollups, sorted, without columns of nulls; means have 13 digits."""
    unknown = ("incarnation", "seq", "ordinal", "ts_origin")
    alike = [{name: told_alike(value) for name, value in row.items() if name not in unknown} for row in rows]
    return sorted(repr(sorted(told.items(), key=lambda item: item[0])) for told in alike)


def told_alike(value: Any) -> Any:
    if isinstance(value, dt.datetime):
        return value.astimezone(dt.UTC).isoformat()
    return f"{value + 0.0:.12e}" if isinstance(value, float) else value  # without the sign of zero


FLOATS = st.one_of(st.none(), st.just(math.nan), st.just(math.inf), st.just(0.0), st.floats(-9, 9, width=32))
COUNTS = st.one_of(st.none(), st.integers(0, 3))
TENSOR_ROWS = st.fixed_dictionaries(
    {
        "run": st.sampled_from(["r", "s"]),
        "attempt": st.sampled_from([0, 0, 1]),
        "rank": st.sampled_from([0, 1]),
        "step": st.one_of(st.none(), st.integers(-150, 350)),
        "micro_step": st.sampled_from([None, 3]),
        "kind": st.just("k"),
        "tensor": st.sampled_from(["a", "b"]),
        "call_seq": st.sampled_from([None, 1]),
        **dict.fromkeys(("norm", "min", "max", "mean"), FLOATS),
        **dict.fromkeys(("nans", "infs", "zeros"), COUNTS),
        "numel": st.just(9),
    }
)
SCALAR_ROWS = st.fixed_dictionaries(
    {
        "rank": st.sampled_from([None, 1]),
        "step": st.one_of(st.none(), st.integers(0, 350)),
        "name": st.sampled_from(["loss", "lr"]),
        "labels": st.sampled_from([None, '{"a":"b"}']),
        "value": st.one_of(FLOATS, st.sampled_from([1.7e308, -1.7e308, 5e-324])),
    }
)
ROWS = st.one_of(
    st.tuples(st.just("tensor_stats"), st.lists(TENSOR_ROWS, min_size=1, max_size=25)),
    st.tuples(st.just("scalars"), st.lists(SCALAR_ROWS, min_size=1, max_size=25)),
)


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ROWS, st.data())
def test_rollups_in_any_parts_with_any_kills_equal_those_of_all_rows(tmp_path_factory, monkeypatch, given_rows, data):
    dataset, rows = given_rows
    rows = [{"run": "r", **row, "ts": day(data.draw(st.floats(0, 9)))} for row in rows]  # in any order: some are late
    monkeypatch.setattr(retention, "WORK_ROWS", 5)
    store = Store.open(tmp_path_factory.mktemp("store"), create=True)
    with store.claim(owner="me") as writer, connect(store.root) as connection:
        while_there = list(rows)
        while while_there:
            size = data.draw(st.integers(6, 15))
            append(writer, dataset, while_there[:size])
            del while_there[:size]
            with contextlib.suppress(Killed):
                let_age(store.root, data.draw(st.floats(0, 12)), sync=dying(data.draw(st.integers(1, 12))), works=2)
            timeline = {"tensor_stats": "tensor_timeline", "scalars": "scalar_timeline"}[dataset]

            assert [(len(rows) - len(while_there),)] == ask(connection, f'SELECT sum("rows")::BIGINT FROM {timeline}')
        let_age(store.root, 30)

        assert comparable(rollups(dataset, rows)) == comparable(found(connection, dataset))
        assert 0 == len(connection.query(f"FROM {dataset}"))
        assert check(store.root).is_intact


def steps(first: int, end: int, *, per_day: int = 100, **columns) -> list[Row]:
    """Return rows of one tensor, a row per step, `per_day` steps per day."""
    common = {"attempt": 0, "kind": "k", "tensor": "t", "norm": 1.0, **columns}
    return [{"step": step, "ts": day(step / per_day), **common} for step in range(first, end)]


def test_file_across_the_limit_is_divided_between_two_buckets(store, writer, connection):
    append(writer, "tensor_stats", steps(0, 1000, per_day=250))  # four days
    report = let_age(store.root, 2.9)  # in the middle of steps 700 to 799

    assert (1, 700, 7) == (report.files, report.rows, report.added_rows)
    assert [(700, 999, 300)] == ask(connection, "SELECT min(step), max(step), count(*) FROM tensor_stats")
    assert [(step, 100) for step in range(0, 700, 100)] == ask(connection, ROLLED_UP)
    assert check(store.root, deep=True).is_intact


def test_file_is_not_divided_within_the_slack_or_without_an_old_bucket(store, writer, connection):
    append(writer, "tensor_stats", steps(0, 300, per_day=100))
    version = Log.open(store.root, sync_to_disk).version
    let_age(store.root, 0.9)

    assert version == Log.open(store.root, sync_to_disk).version
    append(writer, "tensor_stats", steps(0, 90, per_day=1, tensor="slow"))  # its only bucket lasts 90 days
    version = Log.open(store.root, sync_to_disk).version
    let_age(store.root, 80)

    assert version + 1 == Log.open(store.root, sync_to_disk).version
    assert [("slow", 90)] == ask(connection, "SELECT tensor, count(*) FROM tensor_stats GROUP BY tensor")


def test_unreadable_file_does_not_block_retention_of_others(store, writer, connection):
    append(writer, "tensor_stats", steps(0, 100, attempt=0))
    append(writer, "tensor_stats", steps(0, 90, per_day=1, attempt=1))  # its only bucket has not ended
    append(writer, "tensor_stats", steps(0, 90, per_day=1, attempt=2))
    append(writer, "tensor_stats", steps(0, 100, attempt=3))
    append(writer, "scalars", [{"step": 1, "ts": day(0), "name": "loss", "value": 1.0}])
    [broken] = [file["path"] for file in files(store.root).to_pylist() if file["attempt_max"] == 0]
    (store.root / broken).write_bytes(b"no Parquet" * 99)
    reports = []
    while not reports or reports[-1].left:
        reports.append(let_age(store.root, 50, works=1))

    assert (2, 101) == (len(reports), sum(report.rows for report in reports))
    assert ["cannot roll up files" in text for report in reports for text in report.failed] in ([True], [True, True])


def test_bucket_that_continues_in_a_newer_file_waits_at_most_a_day(store, writer, connection):
    for first in range(0, 200, 20):
        append(writer, "tensor_stats", steps(first, first + 20))
    let_age(store.root, 1.4)

    assert [(0, 100)] == ask(connection, ROLLED_UP)
    let_age(store.root, 2.1)
    assert [(0, 100), (100, 100)] == ask(connection, ROLLED_UP)
    append(writer, "tensor_stats", steps(200, 220))
    append(writer, "tensor_stats", steps(220, 240, per_day=10))  # training is slower now
    let_age(store.root, 3.5)
    assert [(240,)] == ask(connection, "SELECT sum(rows) FROM tensor_timeline")
    assert [(20,)] == ask(connection, "SELECT count(*) FROM tensor_stats")


def test_late_rows_of_a_bucket_are_combined_with_its_rollup(store, writer, connection):
    append(writer, "tensor_stats", steps(0, 60, norm=1.0, nans=0))
    let_age(store.root, 5)
    append(writer, "tensor_stats", steps(60, 100, norm=11.0, nans=2))
    let_age(store.root, 6)
    (row,) = connection.query("FROM tensor_rollups").to_pylist()

    assert 2 == len(connection.files("tensor_rollups"))
    assert (100, 0, 99, 1.0, 11.0, 5.0) == tuple(
        row[name] for name in ("rows", "first_step", "last_step", "norm_min", "norm_max", "norm_avg")
    )
    assert (80, 40, 60) == tuple(row[name] for name in ("nans", "nonfinite_rows", "first_nonfinite_step"))


def test_extreme_numbers_do_not_block_retention(store, writer, connection):
    lowest, highest = -(1 << 63), (1 << 63) - 1
    rows = [{"step": step, "ts": day(0), "kind": "k", "tensor": "t", "zeros": highest} for step in (lowest, highest)]
    append(writer, "tensor_stats", rows + rows)
    append(writer, "scalars", [{"step": 1, "ts": day(0), "name": "n", "value": 1.7e308}] * 3)
    let_age(store.root, 5)

    assert [highest, highest] == [row["zeros"] for row in found(connection, "tensor_stats")]
    assert [pytest.approx(1.7e308, rel=1e-15)] == [row["value_avg"] for row in found(connection, "scalars")]


def test_table_of_an_older_release_gets_the_columns_of_rollups(folder, monkeypatch):
    today = table_schema()
    before = pa.schema([field for field in today if not field.name.startswith(("norm_", "value_"))])
    with monkeypatch.context() as patched:
        patched.setattr("rankscope_storage.log.delta.table_schema", lambda: before)
        with Store.open(folder, create=True).claim(owner="me") as writer:
            append(writer, "tensor_stats", steps(0, 100))
    let_age(folder, 5)

    assert [] == Log.open(folder, sync_to_disk).add_missing_columns()
    with connect(folder) as connection:
        assert 100 == found(connection, "tensor_stats")[0]["norm_count"]


def test_rollups_of_shared_days_are_stored_by_month(store, writer):
    append(writer, "tensor_stats", steps(0, 10))
    let_age(store.root, 5)

    assert [f"_shared-{dt.datetime.now(dt.UTC):%Y-%m}"] == files(store.root)["part"].to_pylist()


# --- curves, downsampling, timelines and remote read continue with rollups where raw rows end


STEPS, RAW_FROM = 400, 300
PER_DAY = 100


def at(step: int) -> dt.datetime:
    return START + dt.timedelta(days=step / PER_DAY)


IDENTITY = {"run": "r", "attempt": 0, "rank": 0}


def loss_at(step: int) -> float:
    return math.nan if step in {120, 250} else 1000.0 - step


@pytest.fixture(scope="module")
def aged(tmp_path_factory) -> Path:
    """Return a store with four days of 100 steps each, of which the first three are rolled up."""
    store = Store.open(tmp_path_factory.mktemp("aged") / "store", create=True)
    with store.claim(owner="me") as writer:
        steps = [{"step": step, "ts": at(step)} for step in range(STEPS)]
        losses = [row | {"name": "loss", "value": loss_at(row["step"])} for row in steps]
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
    one, other = (sum(loss_at(n) for n in range(at, at + 100) if n not in {120, 250}) / 99 for at in (100, 200))

    assert [(0, 99, 950.5, 1), (100, 199, one, 1), (200, 299, other, 1)] == curve[:3]
    assert [(step, step, loss_at(step), 1) for step in range(RAW_FROM, STEPS)] == curve[3:]


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
