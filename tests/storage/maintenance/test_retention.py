"""Retention: raw rows become rollups, and rollups are removed, at their ages; all other rows are kept."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.storage.rows import ask, data_files, files, table

from rankscope_contract.model.schema import BUCKET_SECONDS, DATASETS, DIMENSIONS, ROLLUPS
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.log.delta import MUTEX, Change, Log
from rankscope_storage.maintenance import retention, retention_plan
from rankscope_storage.maintenance.check import check
from rankscope_storage.maintenance.retention import RAW, Retention, RetentionReport, retain

START = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
KEPT_DAYS = 100
"""With this age, the slack is one day."""
HOUR = BUCKET_SECONDS / 86_400


def day(number: float) -> dt.datetime:
    return START + dt.timedelta(days=number)


def rows(dataset: str, days: list[float | None], **own) -> Batch:
    """Return a row per day; other columns have any values of their type."""
    texts = {field.name: "x" for field in dataset_schema(dataset) if not field.nullable}
    told = [{"ts": None if number is None else day(number)} for number in days]
    return Batch(tables={dataset: table(dataset, told, **texts | {"run": "r"} | own)}, watermarks={})


def count(root, dataset: str, counted: str = "count(*)") -> int:
    return ask(root, f"SELECT {counted}::BIGINT FROM {dataset}")[0][0]


def raw_before(root, number: float, **options) -> RetentionReport:
    """Remove raw rows before day `number`."""
    return retain(root, Retention(raw_days=KEPT_DAYS), sync_to_disk, now=day(number + KEPT_DAYS), **options)


def stored(root) -> list[str]:
    return sorted(files(root)["dataset"].to_pylist())


@pytest.mark.usual(2)
@pytest.mark.parametrize("name", ["raw_days", "samples_days", "scalars_days", "rollup_days", ""])
def test_each_number_of_days_applies_only_to_its_datasets(store, writer, name):
    policy = Retention(**({name: 1} if name else {}))
    every = {"raw_days": RAW, "samples_days": {"samples"}, "scalars_days": {"scalars"}, "rollup_days": ROLLUPS.values()}
    going = {*every.get(name, ())}
    for dataset in DATASETS:
        writer.append(rows(dataset, [0.0]))
    report = retain(store.root, policy, sync_to_disk, now=day(3))

    assert (len(going), bool(going)) == (report.files, policy.is_on)
    kept = [dataset for dataset in DATASETS if dataset not in going]
    assert {*DIMENSIONS, "events", "modules"} <= set(kept)
    assert sorted([*kept, *(ROLLUPS[dataset] for dataset in going & ROLLUPS.keys())]) == stored(store.root)
    assert check(store.root).is_intact


DAYS = st.lists(st.lists(st.one_of(st.none(), st.floats(0, 10)), min_size=1, max_size=3), min_size=1, max_size=5)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(DAYS, st.floats(0, 10))
def test_retention_removes_exactly_the_rows_that_are_too_old(tmp_path_factory, files, limit):
    """It removes a whole file or the old rows in it, at most a day and an hour late."""
    store = Store.open(tmp_path_factory.mktemp("store"), create=True)
    with store.claim(owner="me") as writer:
        for days in files:
            writer.append(rows("features", days))
        raw_before(store.root, limit)
    slack = 1e-3 / 43_200  # two milliseconds, because the log truncates times
    must = may = 0
    for days in files:
        known = [number for number in days if number is not None]
        is_old = bool(known) and max(known) < limit - slack
        is_late = bool(known) and min(known) < limit - 1 - slack
        may += len(days) if known and max(known) < limit else sum(number < limit for number in known)
        must += len(days) if is_old else is_late * sum(number < limit - HOUR - slack for number in known)

    assert sum(map(len, files)) - may <= count(store.root, "features") <= sum(map(len, files)) - must


@pytest.mark.parametrize("dataset", ["features", "tensor_rollups"])
def test_old_rows_are_removed_from_files_with_newer_rows(store, writer, dataset):
    """Runs with few rows share a file for months, which must not keep its first days as long."""
    writer.append(rows(dataset, [0.0, 0.5, 1.9, 5.0, None]))
    policy = Retention(raw_days=KEPT_DAYS, rollup_days=KEPT_DAYS)
    report = retain(store.root, policy, sync_to_disk, now=day(2 + KEPT_DAYS))

    assert (3, 0, 2) == (report.rows, report.added_rows, count(store.root, dataset))
    assert [dataset] == stored(store.root)
    assert 0 == retain(store.root, policy, sync_to_disk, now=day(2 + KEPT_DAYS)).files


def test_dry_run_reports_and_changes_nothing(store, writer):
    writer.append(rows("features", [0.0, 0.5]))
    writer.append(rows("tensor_stats", [0.0, 0.5]))
    version = Log.open(store.root, sync_to_disk).version
    planned = raw_before(store.root, 1, dry_run=True)

    assert version == Log.open(store.root, sync_to_disk).version
    told = [(row["dataset"], row["becomes"], row["files"], row["rows"]) for row in planned.groups.to_pylist()]
    assert [("features", "nothing", 1, 2), ("tensor_stats", "rollups", 1, 2)] == sorted(told)
    done = raw_before(store.root, 1)
    assert (planned.groups, planned.size_bytes) == (done.groups, done.size_bytes)
    assert 0 == raw_before(store.root, 1).files


@pytest.mark.parametrize("dataset", ["features", "tensor_stats"])
@pytest.mark.parametrize("times", [1, 9])
def test_retention_retries_after_a_concurrent_compaction(store, writer, monkeypatch, dataset, times):
    """Each try finds that the mutex has moved; after five tries retention fails, and nothing has changed."""
    writer.append(rows(dataset, [0.0]))
    left = [times]
    transaction = retention.Log.transaction

    def disturbed(log, name):
        number = transaction(log, name)
        if left[0] and name == MUTEX:
            left[0] -= 1
            other = Log.open(store.root, sync_to_disk)
            other.commit(Change(transactions={name: (transaction(other, name) or 0) + 1}, rewrites=True))
        return number

    monkeypatch.setattr(retention.Log, "transaction", disturbed)
    if times == 1:
        raw_before(store.root, 1)
    else:
        with pytest.raises(retention.ConflictError):
            raw_before(store.root, 1)

    becomes = {"features": [], "tensor_stats": ["tensor_rollups"]}[dataset]
    assert (becomes if times == 1 else [dataset]) == stored(store.root)
    written = {path.parts[-3].removeprefix("dataset=") for path in data_files(store.root)}
    assert {dataset, *(becomes if times == 1 else [])} == written  # refused tries leave no file


def test_files_merged_meanwhile_are_left_for_the_next_retention(store, writer, monkeypatch):
    for number in range(4):
        writer.append(rows("tensor_stats", [number / 10]))
    planned = retention.plan

    def then_merged(*arguments):
        works = planned(*arguments)
        if left:
            left.pop()
            writer.compact()
        return works

    left = ["once"]
    monkeypatch.setattr("rankscope_storage.maintenance.compaction.SMALL_FILES", 1)
    monkeypatch.setattr(retention, "plan", then_merged)

    assert (0, 1) == (raw_before(store.root, 1).files, len(stored(store.root)))
    assert (1, 4) == (raw_before(store.root, 1).files, count(store.root, "tensor_rollups", 'sum("rows")'))


def test_service_continues_and_removed_rows_do_not_return(store, writer, batch):
    again = Batch(tables=rows("features", [0.0], incarnation="i0", seq=0).tables, watermarks={"i0": 0})
    writer.append(again)
    raw_before(store.root, 1)
    writer.append(again)
    writer.append(batch(range(1, 4)))

    assert (0, 3) == (count(store.root, "features"), count(store.root, "scalars"))


@pytest.mark.thorough
def test_retention_makes_at_most_the_requested_commits(store, writer, monkeypatch):
    monkeypatch.setattr(retention_plan, "WORK_ROWS", 2)
    for number in range(5):
        writer.append(rows("tensor_stats", [number / 10]))

    assert [2, 1, 0] == [raw_before(store.root, 1, works=1).left for _ in range(3)]
    assert (0, 5) == (count(store.root, "tensor_stats"), count(store.root, "tensor_rollups", 'sum("rows")'))


def test_rollup_days_below_raw_days_are_refused():
    with pytest.raises(ValueError, match=r"rollup_days \(10\) is less than the 30 days for which raw rows are kept"):
        Retention(raw_days=30, rollup_days=10)
