"""What is large and old goes, file by file; everything else stays."""

from __future__ import annotations

import datetime as dt

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope_contract.records import DATASETS, DIMENSIONS
from rankscope_storage.care import retention
from rankscope_storage.care.checking import check
from rankscope_storage.care.retention import EXPIRING, retain
from rankscope_storage.connection import connect
from rankscope_storage.durable import sync_to_disk
from rankscope_storage.log import Change, Log
from rankscope_storage.schema import dataset_schema
from rankscope_storage.store import Batch, Store

START = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)


def day(number: float) -> dt.datetime:
    return START + dt.timedelta(days=number)


def rows(dataset: str, days: list[float | None]) -> Batch:
    """A row per day; the rest is whatever its type allows."""
    schema = dataset_schema(dataset)
    texts = {field.name: "x" for field in schema if not field.nullable}
    table = [{**texts, "run": "r", "ts": None if number is None else day(number)} for number in days]
    return Batch(tables={dataset: pa.Table.from_pylist(table, schema=schema)}, watermarks={})


def count(root, dataset: str) -> int:
    with connect(root) as connection:
        return connection.sql(f"SELECT count(*) FROM {dataset}").fetchall()[0][0]


def test_only_large_datasets_expire(store, writer):
    for dataset in DATASETS:
        writer.append(rows(dataset, [0.0]))
    report = retain(store.root, day(1), sync_to_disk)

    assert (len(EXPIRING), len(EXPIRING)) == (report.files, report.rows)
    stay = {dataset for dataset in (*DATASETS,) if dataset not in EXPIRING}
    assert {*DIMENSIONS, "scalars", "events"} <= stay
    left = Log.open(store.root, sync_to_disk).snapshot().files
    assert sorted(stay) == sorted(left["dataset"].to_pylist())
    assert check(store.root).is_whole


DAYS = st.lists(st.lists(st.one_of(st.none(), st.floats(0, 10)), min_size=1, max_size=3), min_size=1, max_size=5)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(DAYS, st.floats(0, 10))
def test_a_file_goes_when_its_youngest_row_is_too_old_and_no_younger_row_ever(tmp_path_factory, files, limit):
    store = Store.open(tmp_path_factory.mktemp("store"), create=True)
    with store.claim(owner="me") as writer:
        for days in files:
            writer.append(rows("features", days))
        retain(store.root, day(limit), sync_to_disk)
    slack = 1e-3 / 43_200  # two milliseconds: the log cuts times
    known = [[number for number in days if number is not None] for days in files]
    must = sum(len(days) for days, told in zip(files, known, strict=True) if told and max(told) < limit - slack)
    may = sum(len(days) for days, told in zip(files, known, strict=True) if told and max(told) < limit)

    assert sum(map(len, files)) - may <= count(store.root, "features") <= sum(map(len, files)) - must


def test_a_dry_run_says_what_would_go_and_changes_nothing(store, writer):
    writer.append(rows("features", [0.0, 0.5]))
    version = Log.open(store.root, sync_to_disk).version
    planned = retain(store.root, day(1), sync_to_disk, dry_run=True)

    assert version == Log.open(store.root, sync_to_disk).version
    (group,) = planned.groups.to_pylist()
    assert ("features", "_shared", 1, 2, planned.size_bytes) == (
        group["dataset"],
        group["part"][:7],
        group["files"],
        group["rows"],
        group["bytes"],
    )
    assert planned == retain(store.root, day(1), sync_to_disk)
    assert 0 == retain(store.root, day(1), sync_to_disk).files


@pytest.mark.parametrize("times", [1, 9])
def test_a_compaction_that_comes_between_is_let_by(store, writer, monkeypatch, times):
    """Each attempt finds the mutex moved; after a few it gives up, and nothing has changed."""
    writer.append(rows("features", [0.0]))
    left = [times]
    chosen = retention.expired

    def disturbed(snapshot, before):
        if left[0]:
            left[0] -= 1
            log = Log.open(store.root, sync_to_disk)
            log.commit(
                Change(transactions={retention.MUTEX: (log.transaction(retention.MUTEX) or 0) + 1}, rewrites=True)
            )
        return chosen(snapshot, before)

    monkeypatch.setattr(retention, "expired", disturbed)
    if times == 1:
        retain(store.root, day(1), sync_to_disk)
    else:
        with pytest.raises(retention.ConflictError):
            retain(store.root, day(1), sync_to_disk)

    assert (0 if times == 1 else 1) == count(store.root, "features")


def test_a_service_goes_on_and_nothing_that_went_comes_back(store, writer, batch):
    features = rows("features", [0.0]).tables["features"]
    named = features.set_column(features.schema.get_field_index("incarnation"), "incarnation", pa.array(["i0"]))
    first = named.set_column(named.schema.get_field_index("seq"), "seq", pa.array([0], pa.int64()))
    again = Batch(tables={"features": first}, watermarks={"i0": 0})
    writer.append(again)
    retain(store.root, day(1), sync_to_disk)
    writer.append(again)
    writer.append(batch(range(1, 4)))

    assert (0, 3) == (count(store.root, "features"), count(store.root, "scalars"))
