"""Files of earlier releases, vacuum and retention: exactly the due files and rows change."""

import datetime as dt
import errno
import json
import os
import shutil
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.storage.crashes.operations import append, content, silent
from tests.storage.older_encoding import split_integers, wide_differences
from tests.storage.rows import ask, data_files, entries, files, put, table

from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.datasets import BUCKET_SECONDS, DATASETS, DIMENSIONS, ROLLUPS
from rankscope_storage.base.errors import StoreError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import connect
from rankscope_storage.files.encoding import has_older_integers
from rankscope_storage.log.delta import CHECKPOINT_COMMITS, MUTEX, REMOVED_FILES_HOURS, Change, Log
from rankscope_storage.maintenance import compaction, retention
from rankscope_storage.maintenance.check import FindingKind, check
from rankscope_storage.maintenance.compaction import compact
from rankscope_storage.maintenance.repair import repair
from rankscope_storage.maintenance.retention import RAW, Retention, RetentionReport, retain
from rankscope_storage.maintenance.stats import store_stats
from rankscope_storage.maintenance.upgrade import upgrade
from rankscope_storage.maintenance.vacuum import STAGED_SECONDS
from rankscope_storage.runs import edit

SUMS = "SELECT count(*), sum(seq), sum(step), sum(numel), min(ts), max(ts) FROM tensor_stats"


@pytest.fixture
def older(tmp_path):
    """Return a store with six files of an earlier release and two of this one, of two datasets."""
    root = tmp_path / "store"
    with split_integers():
        append(root, silent, records=9, per_commit=3)
    append(root, silent, records=12, per_commit=3)
    return root


def older_files(root):
    paths = files(root)["path"].to_pylist()
    return [path for path in paths if has_older_integers(pq.read_metadata(root / path))]


def test_differences_of_any_width_are_an_older_encoding(tmp_path):
    """Fastparquet returns wrong values for them. Each file of an earlier release is rewritten once."""
    start = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)
    rows = [{"run": "r", "name": "loss", "ts": start + dt.timedelta(seconds=at)} for at in (0, 1, 200)]
    with wide_differences(), Store.open(tmp_path, create=True).claim(owner="test") as writer:
        for some in (rows, rows[:2]):
            put(writer, "scalars", some)
    report = compact(tmp_path, sync_to_disk, rewrite=True)

    assert (2, 0) == (report.rewritten, compact(tmp_path, sync_to_disk, rewrite=True).rewritten)
    assert [(5,)] == ask(tmp_path, "SELECT count(ts) FROM scalars")


def test_repair_and_compaction_without_rewrite_leave_older_files(older):
    assert () == repair(older, sync_to_disk).lost
    assert 0 == compact(older, sync_to_disk).rewritten
    assert 6 == len(older_files(older))


def test_rewrite_replaces_each_older_file_by_one_with_equal_rows(older):
    before, sums, progress = content(older), ask(older, SUMS), []
    report = compact(older, sync_to_disk, lambda done, total: progress.append((done, total)), rewrite=True)

    assert 2 * 2 * 12 == sums[0][0]
    assert (0, 0, 6, 0) == (report.files_removed, report.files_added, report.rewritten, report.refused)
    assert [(done, 6) for done in range(1, 7)] == progress
    assert ([], before, sums) == (older_files(older), content(older), ask(older, SUMS))
    assert () == tuple(one for one in check(older, deep=True).findings if one.kind is not FindingKind.UNUSED)
    assert 0 == compact(older, sync_to_disk, rewrite=True).rewritten
    with Store.open(older).claim(owner="next") as writer:
        assert 11 == writer.watermark("i0")


def test_rewrite_merges_small_files_first(older, monkeypatch):
    monkeypatch.setattr(compaction, "SMALL_FILES", 1)
    before = content(older)
    report = compact(older, sync_to_disk, rewrite=True)

    assert (8, 2, 0) == (report.files_removed, report.files_added, report.rewritten)
    assert ([], before) == (older_files(older), content(older))


def test_rewrite_counts_files_that_another_compaction_replaced(older, monkeypatch):
    """Another process merges all files while the command writes the first one. No row is lost or doubled."""

    def overtaken(*arguments):
        monkeypatch.setattr(compaction, "_rewrite", genuine)
        monkeypatch.setattr(compaction, "SMALL_FILES", 1)
        compact(older, sync_to_disk)
        return genuine(*arguments)

    genuine, before = compaction._rewrite, content(older)
    monkeypatch.setattr(compaction, "_rewrite", overtaken)
    report = compact(older, sync_to_disk, rewrite=True)

    assert (0, 6, 0) == (report.rewritten, report.refused, report.left)
    assert ([], before) == (older_files(older), content(older))


def test_damaged_file_does_not_prevent_the_rewriting_of_others(older):
    damaged = max(older_files(older))
    content_ = bytearray((older / damaged).read_bytes())
    content_[4:200] = b"x" * 196
    (older / damaged).write_bytes(content_)
    progress = []
    report = compact(older, sync_to_disk, lambda done, total: progress.append((done, total)), rewrite=True)

    assert (5, 0, 1) == (report.rewritten, report.refused, report.left)
    assert [damaged] == older_files(older)
    assert [(done, 6) for done in range(1, 7)] == progress
    (error,) = report.failed
    assert error.startswith(f"cannot merge {older / damaged}: ")


def test_file_whose_rows_the_log_does_not_count_is_rewritten(older):
    """Some tools add files without statistics."""
    for path in entries(older):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line.get("add", {}).pop("stats", None)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = content(older)
    report = compact(older, sync_to_disk, rewrite=True)

    assert (6, 0) == (report.rewritten, report.left)
    assert ([], before) == (older_files(older), content(older))
    assert check(older, deep=True).is_intact
    assert 2 * 9 + 2 * 2 * 9 == store_stats(Log.open(older, sync_to_disk), by="dataset").rows  # the rewritten ones


# --- files of a release without tags, which lack columns that datasets have today


@pytest.fixture
def without_tags(tmp_path):
    root = Path(shutil.copytree(Path(__file__).parents[1] / "data" / "store_without_labels", tmp_path / "old"))
    upgrade(root, sync_to_disk)
    return root


def test_files_that_lack_columns_are_merged_into_files_with_all_columns(without_tags, monkeypatch):
    monkeypatch.setattr(compaction, "SMALL_FILES", 1)
    asked = "SELECT run, state, last_step, tags FROM runs"
    before = ask(without_tags, asked)
    day = dt.datetime(2026, 11, 22, 12, tzinfo=dt.UTC)  # the day of its files, because few files of past days remain
    report = compact(without_tags, sync_to_disk, now=day)

    assert (2, 1) == (report.files_removed, report.files_added)
    assert before == ask(without_tags, asked)
    assert check(without_tags, deep=True).is_intact


def test_run_in_files_that_lack_columns_is_renamed_and_removed(without_tags):
    asked = "SELECT step, name, value FROM scalars WHERE run = '{}' ORDER BY ALL"
    scalars = ask(without_tags, asked.format("before"))
    edit.rename(without_tags, "before", "after", sync_to_disk)

    assert [("after", "completed", 2, None)] == ask(without_tags, "SELECT run, state, last_step, tags FROM runs")
    assert scalars == ask(without_tags, asked.format("after")) != []
    assert check(without_tags, deep=True).is_intact
    edit.remove(without_tags, "after", sync_to_disk)
    assert [] == ask(without_tags, "FROM runs")


# Vacuum deletes exactly the files that no process needs.


def age(path, hours: float) -> None:
    moment = time.time() - hours * 3600
    os.utime(path, (moment, moment))


COUNT = "SELECT count(*) FROM scalars"


@pytest.mark.parametrize("run", ["a/b", "..", 'a=\'s "q"', "123", "", "%41", "_shared-2026-01-01", "x学/" * 99])
def test_vacuum_keeps_used_files_of_any_age_and_name(store, writer, batch, connection, run, monkeypatch):
    monkeypatch.setattr("rankscope_storage.files.sorting.OWN_PART_ROWS", 1)
    writer.append(batch(range(3), run=run))
    for path in store.root.rglob("*.parquet"):
        age(path, 1000)
    report = writer.maintain()

    assert 0 == report.data_files
    assert [(run, 3)] == ask(connection, "SELECT run, count(*) FROM scalars GROUP BY run")


def test_vacuum_deletes_files_of_dead_processes_above_their_age(store, writer, batch, connection):
    writer.append(batch(range(3)))
    part, staging = next(store.root.glob("dataset=*/part=*")), store.root / "_staging"
    for folder, hours in ((part, REMOVED_FILES_HOURS + 1), (staging, STAGED_SECONDS / 3600 + 1)):
        for name, old_hours in (("old.parquet", hours), ("young.parquet", 0.5)):
            (folder / name).write_bytes(b"x")
            age(folder / name, old_hours)
    report = writer.maintain()

    assert (1, 1) == (report.data_files, report.staged_files)
    assert (part / "young.parquet").exists()
    assert ["young.parquet"] == [path.name for path in staging.iterdir()]
    assert [(3,)] == ask(connection, COUNT)


def test_vacuum_keeps_recently_replaced_files_for_readers(store, writer, batch, monkeypatch):
    monkeypatch.setattr(compaction, "SMALL_FILES", 2)
    for seq in range(4):
        writer.append(batch([seq]))
    with connect(store.root) as connection, connection.snapshot() as pinned:
        writer.compact()
        for path in store.root.rglob("*.parquet"):
            age(path, 1000)
        writer.maintain()

        assert [[(4,)]] * 2 == [ask(pinned, COUNT), ask(connection, COUNT)]
    assert 5 == len(data_files(store.root))


def test_vacuum_keeps_unknown_files_in_the_folder(store, writer, batch):
    """delta-rs would delete all files that it does not know. Maintenance works in an empty store."""
    assert (0, 0) == (writer.maintain().data_files, writer.maintain().staged_files)
    writer.append(batch(range(3)))
    for name in ("notes.txt", "rankscope.sql", "strange.parquet"):
        (store.root / name).touch()
        age(store.root / name, 1000)
    writer.maintain()

    assert all((store.root / name).exists() for name in ("notes.txt", "rankscope.sql", "strange.parquet"))


def test_clean_up_deletes_old_entries_and_keeps_watermarks(store, writer, batch, connection):
    for seq in range(CHECKPOINT_COMMITS + 10):
        writer.append(batch([seq]))
    for entry in entries(store.root):
        age(entry, 1000)
    before = len(entries(store.root))
    writer.maintain()

    assert before > len(entries(store.root))
    assert CHECKPOINT_COMMITS + 9 == Log.open(store.root, sync_to_disk).transaction("w:i0")
    assert [(CHECKPOINT_COMMITS + 10,)] == ask(connection, COUNT)

    writer.append(batch([CHECKPOINT_COMMITS + 10]))

    assert [(CHECKPOINT_COMMITS + 11,)] == ask(connection, COUNT)


@pytest.mark.parametrize("method", ["unlink", "write_bytes"])
def test_full_or_read_only_disk_raises_store_error(store, writer, batch, monkeypatch, method):
    writer.append(batch(range(3)))
    (store.root / "_staging" / "old.parquet").write_bytes(b"x")
    age(store.root / "_staging" / "old.parquet", 10)

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(f"pathlib.Path.{method}", refuse)
    with pytest.raises(StoreError, match="Read-only file system"):
        writer.maintain()


# Retention: raw rows become rollups, and rollups are removed, at their ages; all other rows are kept.

START = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
KEPT_DAYS = 100  # With this age, the slack is one day
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


def test_rollup_days_below_raw_days_are_refused():
    with pytest.raises(ValueError, match=r"rollup_days \(10\) is less than the 30 days for which raw rows are kept"):
        Retention(raw_days=30, rollup_days=10)
