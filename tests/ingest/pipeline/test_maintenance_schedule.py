"""The maintenance schedule: when jobs are due, and that they do not block each other."""

import asyncio
import datetime as dt
import itertools
import os
import sys
import threading
import time

import pyarrow as pa
import pytest

from rankscope_ingest.base.config_file import load_config
from rankscope_ingest.base.errors import ConfigError
from rankscope_ingest.pipeline.maintenance_schedule import (
    COMPACT_EVERY_COMMITS,
    FIRST_RETENTION_SECONDS,
    MAINTAIN_SECONDS,
    MaintenanceSchedule,
    retention_job,
)
from rankscope_storage.api.store import Batch
from rankscope_storage.api.store import Store as StoreFolder
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import connect
from rankscope_storage.maintenance.compaction import CompactionReport
from rankscope_storage.maintenance.retention import Retention, RetentionReport

EVERY = 600.0


class Store:
    """A store that records its calls."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.refused = 0

    def compact(self) -> CompactionReport:
        self.done.append("compact")
        return CompactionReport(refused=self.refused)

    def maintain(self) -> None:
        self.done.append("maintain")

    def retain(self) -> RetentionReport:
        self.done.append("retain")
        return RetentionReport()


def turns(store: Store) -> MaintenanceSchedule:
    return MaintenanceSchedule(store, 0.0, retain=store.retain, retain_seconds=EVERY)


def done(store: Store, due: MaintenanceSchedule, now: float, commits: int = 0) -> list[str]:
    store.done.clear()
    for work in due.due(now, commits):
        work()
    return store.done.copy()


def test_compaction_is_due_by_commits_and_other_jobs_by_the_clock():
    store = Store()
    due = turns(store)

    assert [] == done(store, due, 1.0, COMPACT_EVERY_COMMITS - 1)
    assert ["compact"] == done(store, due, 2.0, COMPACT_EVERY_COMMITS)
    assert [] == done(store, due, 3.0, 2 * COMPACT_EVERY_COMMITS - 1)
    assert ["retain"] == done(store, due, FIRST_RETENTION_SECONDS)
    assert [] == done(store, due, FIRST_RETENTION_SECONDS + EVERY - 1)
    assert ["compact", "maintain", "retain"] == done(store, due, MAINTAIN_SECONDS, 2 * COMPACT_EVERY_COMMITS)


def test_compaction_by_the_clock_is_reported_and_logged_if_refused(caplog):
    store, reports = Store(), []
    store.refused = 1
    due = MaintenanceSchedule(store, 0.0, on_compaction=reports.append)
    with caplog.at_level("INFO"):
        assert ["compact", "maintain"] == done(store, due, MAINTAIN_SECONDS)

    assert [CompactionReport(refused=1)] == reports
    assert ["compaction skipped: another process compacts the store"] == caplog.messages


def configured(tmp_path, text: str):
    path = tmp_path / "service.toml"
    path.write_text(f'[store]\npath = "history"\n{text}')
    return load_config(path)


def test_retention_needs_days(tmp_path):
    assert [True, False] == [
        retention_job(configured(tmp_path, text)) is None for text in ("", "[retention]\nraw_days = 30")
    ]


def test_one_of_several_services_maintains_the_store():
    """The other services do nothing, and catch up when they take over."""
    store, is_maintaining = Store(), False
    due = MaintenanceSchedule(store, 0.0, is_maintaining=lambda: is_maintaining)

    assert [] == done(store, due, MAINTAIN_SECONDS, COMPACT_EVERY_COMMITS)

    is_maintaining = True
    assert ["compact", "maintain"] == done(store, due, MAINTAIN_SECONDS, COMPACT_EVERY_COMMITS)


def test_retention_days_are_passed_to_the_store(tmp_path):
    config = configured(tmp_path, "[retention]\nraw_days = 30\nscalars_days = 365.5\nrollup_days = 730")

    assert Retention(raw_days=30, scalars_days=365.5, rollup_days=730) == config.retention.policy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raw_days = 0", "retention.raw_days: Input should be greater than 0"),
        ("raw_days = 30\nrollup_days = 7", "rollup_days (7) is less than the 30 days for which raw rows are kept"),
        ("rollups_days = 7", "did you mean rollup_days?"),
    ],
)
def test_invalid_retention_days_are_rejected(tmp_path, text, said):
    with pytest.raises(ConfigError) as error:
        configured(tmp_path, f"[retention]\n{text}")

    assert said in str(error.value)


async def test_old_rows_are_rolled_up_while_a_service_appends(tmp_path, eventually):
    config = configured(tmp_path, "[retention]\nraw_days = 30\nscalars_days = 30")
    now = dt.datetime.now(dt.UTC)
    with StoreFolder.open(config.store.path, create=True).claim(owner="service") as writer:
        for dataset, names in (("tensor_stats", {"kind": "k", "tensor": "t"}), ("scalars", {"name": "loss"})):
            times = [now - dt.timedelta(days=90 - step / 10) for step in range(900)]  # ten a day, until now
            rows = [{"run": "r", "step": step, "ts": ts, **names} for step, ts in enumerate(times)]
            table = pa.Table.from_pylist(rows, schema=dataset_schema(dataset))
            writer.append(Batch(tables={dataset: table}, watermarks={}))
        times = {"retain_seconds": 3600, "first_retention_seconds": 0.0}
        schedule = MaintenanceSchedule(writer, time.monotonic(), retain=retention_job(config), **times)
        maintenance = asyncio.create_task(schedule.run(lambda: 0, check_seconds=0.01))
        try:
            await eventually(lambda: maintenance.done() or tiers(config.store.path) == [(300, 600)] * 2)
            assert not maintenance.done()
        finally:
            maintenance.cancel()


def tiers(root: str) -> list[tuple[int, int]]:
    """Return the numbers of raw and rolled-up rows of both timelines."""
    question = "SELECT sum(rows) FILTER (tier = 'raw')::BIGINT, coalesce(sum(rows) FILTER (tier = 'rollup'), 0)::BIGINT"
    with connect(root) as connection:
        views = ("tensor_timeline", "scalar_timeline")
        return [connection.sql(f"{question} FROM {view}").fetchall()[0] for view in views]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux threads have separate nice values")
async def test_maintenance_thread_has_a_lower_priority(eventually):
    seen = []

    class Watched(Store):
        def compact(self) -> CompactionReport:
            seen.append((threading.get_ident(), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
            return super().compact()

    commits = itertools.count(COMPACT_EVERY_COMMITS, COMPACT_EVERY_COMMITS)
    schedule = MaintenanceSchedule(Watched(), time.monotonic())
    maintenance = asyncio.create_task(schedule.run(lambda: next(commits), check_seconds=0.01))
    await eventually(lambda: len(seen) >= 3)
    maintenance.cancel()
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert {min(own + 10, 19)} == {niceness for _, niceness in seen}
    assert 1 == len({thread for thread, _ in seen})
