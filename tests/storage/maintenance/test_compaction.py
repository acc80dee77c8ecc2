"""Compaction changes no row, whatever other processes do."""

from __future__ import annotations

import datetime as dt
import threading
from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_storage.api.store import Batch
from rankscope_storage.base.errors import ShardLostError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.connection import connect
from rankscope_storage.files.sorting import shared_part
from rankscope_storage.log.delta import MUTEX, Change, Log
from rankscope_storage.maintenance import compaction
from rankscope_storage.maintenance.compaction import (
    SILENCE,
    Merge,
    compact,
    open_and_closed,
    plan,
    split_by_part,
    split_by_step,
)


@pytest.fixture
def eager(monkeypatch):
    """Make compaction merge three or more small files."""
    monkeypatch.setattr(compaction, "SMALL_FILES", 2)


def files(root) -> pa.Table:
    return Log.open(root, sync_to_disk).snapshot().files


def test_few_files_are_not_merged(store, writer, batch):
    for seq in range(compaction.TINY_FILES):
        writer.append(batch([seq]))
    report = writer.compact()

    assert (0, 0) == (report.files_removed, report.files_added)


def test_many_tiny_files_become_one_with_equal_rows(store, writer, batch, connection):
    for seq in range(compaction.TINY_FILES + 1):
        writer.append(batch([seq]))
    before = connection.query("FROM scalars ORDER BY seq")
    report = writer.compact()

    assert (11, 1, 11) == (report.files_removed, report.files_added, report.rows)
    assert 1 == files(store.root).num_rows
    assert before.equals(connection.query("FROM scalars ORDER BY seq"))


def test_all_types_and_special_values_survive_a_merge(store, writer, connection, eager):
    odd = [float("nan"), float("inf"), None, 0.0, -0.0]
    for seq, value in enumerate(odd):
        row = {"run": ["学/=.."], "incarnation": ["i"], "seq": [seq], "kind": ["k"], "tensor": ["t"]}
        writer.append(
            Batch(
                tables={
                    "tensor_stats": pa.table({**row, "norm": pa.array([value], pa.float32())}),
                    "histograms": pa.table({**row, "scheme": ["log2"], "counts": [None if seq == 2 else [seq, 1]]}),
                    "tensors": pa.table({**row, "shape": [[2, 3]], "aliases": [None if seq else ["a", "学"]]}),
                },
                watermarks={"i": seq},
            )
        )
    names = ("tensor_stats", "histograms", "tensors_history")
    before = [connection.query(f"FROM {name} ORDER BY seq") for name in names]
    report = writer.compact()
    after = [connection.query(f"FROM {name} ORDER BY seq") for name in names]

    assert (15, 3) == (report.files_removed, report.files_added)
    assert [repr(table.to_pylist()) for table in before] == [repr(table.to_pylist()) for table in after]


def test_appends_and_watermark_continue_after_a_merge(writer, batch, connection, eager):
    for seq in range(5):
        writer.append(batch([seq]))
    writer.compact()
    writer.append(batch(range(8)))

    assert 7 == writer.watermark("i0")
    assert [(8, 8)] == connection.sql("SELECT count(*), count(DISTINCT seq) FROM scalars").fetchall()


def test_large_files_are_not_merged(store, writer, batch, monkeypatch):
    monkeypatch.setattr(compaction, "SMALL_FILES", 2)
    monkeypatch.setattr(compaction, "SMALL_ROWS", 5)
    for first in range(0, 20, 5):
        writer.append(batch(range(first, first + 5)))

    assert [] == plan(Log.open(store.root, sync_to_disk).snapshot())


def test_merged_files_have_the_target_size(store, writer, batch, eager, monkeypatch):
    monkeypatch.setattr(compaction, "MERGE_ROWS", 10)
    for first in range(0, 24, 4):
        writer.append(batch(range(first, first + 4)))
    planned = plan(Log.open(store.root, sync_to_disk).snapshot())

    assert [8, 8, 8] == [sum(file.rows for file in merge.files) for merge in planned]


def test_merged_files_have_disjoint_step_ranges(store, writer, scalars, eager, monkeypatch):
    """The flushes of slow ranks overlap; the step ranges of the merged files do not."""
    monkeypatch.setattr(compaction, "TARGET_ROWS", 10)
    for flush in range(6):
        fast, slow = (
            scalars(range(max(0, flush * 4 - lag), flush * 4 + 4 - lag), rank=lag, incarnation=f"i{lag}")
            for lag in (0, 2)
        )
        writer.append(
            Batch(
                tables={"scalars": pa.concat_tables([fast, slow])},
                watermarks={"i0": flush * 4 + 3, "i2": flush * 4 + 1},
            )
        )
    writer.compact()
    ranges = sorted(
        zip(files(store.root)["step_min"].to_pylist(), files(store.root)["step_max"].to_pylist(), strict=True)
    )

    assert [(0, 4), (5, 9), (10, 14), (15, 19), (20, 23)] == ranges


def test_attempts_are_never_merged_with_each_other(store, writer, scalars, eager):
    for seq in range(6):
        table = scalars([seq]).set_column(1, "attempt", pa.array([seq % 2], pa.int32()))
        writer.append(Batch(tables={"scalars": table}, watermarks={"i0": seq}))
    writer.compact()

    assert [(0, 0), (1, 1)] == sorted(
        zip(files(store.root)["attempt_min"].to_pylist(), files(store.root)["attempt_max"].to_pylist(), strict=True)
    )


def test_parts_and_datasets_are_never_merged_with_each_other(store, writer, batch, scalars, eager):
    for seq in range(3):
        event = pa.table({"run": ["r"], "incarnation": ["i0"], "seq": [seq], "type": ["note"]})
        writer.append(Batch(tables={"scalars": scalars([seq]), "events": event}, watermarks={"i0": seq}))
    writer.compact()

    assert {"scalars": 1, "events": 1} == Counter(files(store.root)["dataset"].to_pylist())


STEPS = st.lists(
    st.tuples(st.sampled_from([None, 0, 1]), st.one_of(st.none(), st.integers(0, 6))), min_size=1, max_size=60
)


@given(STEPS, st.integers(1, 20))
def test_split_by_step_divides_no_step_and_loses_no_row(steps, target):
    table = pa.table(
        {
            "run": pa.array(["r"] * len(steps), pa.string()),
            "attempt": pa.array([attempt for attempt, _ in steps], pa.int32()),
            "step": pa.array([step for _, step in steps], pa.int64()),
        }
    )
    pieces = [[(row["attempt"], row["step"]) for row in piece.to_pylist()] for piece in split_by_step(table, target)]
    largest_step = max(Counter(steps).values())

    assert Counter(steps) == Counter(row for piece in pieces for row in piece)
    assert sum(len(set(piece)) for piece in pieces) == len(set(steps))
    assert all(len(piece) <= max(target, largest_step) for piece in pieces)


def test_refused_one_of_two_compactions_changes_nothing(store, writer, batch, connection, eager, monkeypatch):
    for seq in range(4):
        writer.append(batch([seq]))
    genuine = compaction._rewrite

    def overtaken(*arguments):
        monkeypatch.setattr(compaction, "_rewrite", genuine)
        compact(store.root, sync_to_disk)
        return genuine(*arguments)

    monkeypatch.setattr(compaction, "_rewrite", overtaken)
    report = writer.compact()

    assert (0, 1) == (report.files_added, report.refused)
    assert [(4, 4)] == connection.sql("SELECT count(*), count(DISTINCT seq) FROM scalars").fetchall()
    assert 5 == len(
        list(store.root.rglob("dataset=*/part=*/*.parquet"))
    )  # four replaced, one new, none of the refused compaction


def test_file_replaced_after_the_plan_is_not_merged_again(store, writer, batch, connection, eager, monkeypatch):
    """A plan may have several merges, and another compaction may make the second one first."""
    for seq in range(4):
        writer.append(batch([seq]))
    stale = plan(Log.open(store.root, sync_to_disk).snapshot())
    compact(store.root, sync_to_disk)
    monkeypatch.setattr(compaction, "plan", lambda snapshot, now: stale)
    report = writer.compact()

    assert (0, 1) == (report.files_added, report.refused)
    assert [(4, 4)] == connection.sql("SELECT count(*), count(DISTINCT seq) FROM scalars").fetchall()


def test_compaction_killed_before_its_commit_changes_no_row(store, writer, batch, connection, eager, monkeypatch):
    for seq in range(4):
        writer.append(batch([seq]))

    def die(log: Log, change: Change) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Log, "commit", die)
        with pytest.raises(KeyboardInterrupt):
            writer.compact()

    assert [(4,)] == connection.sql("SELECT count(*) FROM scalars").fetchall()
    assert 1 == writer.compact().files_added
    assert [(4,)] == connection.sql("SELECT count(*) FROM scalars").fetchall()


def test_compaction_moves_the_mutex_and_not_the_shard(store, writer, batch, eager):
    for seq in range(4):
        writer.append(batch([seq]))
    writer.compact()
    log = Log.open(store.root, sync_to_disk)

    assert (1, 5) == (log.transaction(MUTEX), log.transaction("ingest:0/1"))


@pytest.mark.thorough
def test_readers_see_whole_appends_during_appends_and_compactions(store, writer, batch, eager):
    """One appender, two concurrent compactions, one reader: each result is a whole number of appends."""
    appends, failures, done = 60, [], threading.Event()

    def guarded(work):
        def run():
            try:
                work()
            except Exception as error:
                failures.append(error)

        return threading.Thread(target=run)

    def append():
        try:
            for number in range(appends):
                writer.append(batch(range(number * 3, number * 3 + 3)))
        finally:
            done.set()

    def merge():
        while not done.is_set():
            compact(store.root, sync_to_disk)

    answers = []

    def read():
        with connect(store.root) as connection:
            while not done.is_set():
                answers.extend(connection.sql("SELECT count(*), count(DISTINCT seq), max(seq) FROM scalars").fetchall())

    threads = [guarded(work) for work in (append, merge, merge, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    with connect(store.root) as connection:
        final = connection.sql("SELECT count(*), count(DISTINCT seq) FROM scalars").fetchall()

    assert [] == failures
    assert [(appends * 3, appends * 3)] == final
    assert all(
        count == distinct == (highest + 1 if count else 0) and count % 3 == 0
        for count, distinct, highest in answers
        if count
    )
    assert sorted(answers, key=lambda answer: answer[0]) == answers
    assert len({count for count, _, _ in answers}) > 5


def test_writer_without_its_shard_can_compact_but_not_append(store, writer, batch, eager):
    """Compaction changes no row and needs only the mutex, not the shard."""
    for seq in range(4):
        writer.append(batch([seq]))
    for lock in (store.root / "_shards").iterdir():
        lock.unlink()
    with store.claim(owner="successor"):
        assert 1 == writer.compact().files_added
        with pytest.raises(ShardLostError):
            writer.append(batch([9]))


NOW = dt.datetime(2026, 11, 20, 12, tzinfo=dt.UTC)


def test_run_that_has_grown_moves_to_a_separate_part(store, writer, batch, connection, eager, monkeypatch):
    monkeypatch.setattr(compaction, "OWN_PART_ROWS", 15)
    for flush in range(4):
        writer.append(batch(range(flush * 5, flush * 5 + 5), run="grown", incarnation="g"))
        writer.append(batch([flush], run="small", incarnation="s"))
    before = connection.query("FROM scalars ORDER BY run, seq")
    writer.compact()

    assert {"grown": 20, shared_part(dt.datetime.now(dt.UTC).date()): 4} == dict(
        zip(files(store.root)["part"].to_pylist(), files(store.root)["rows"].to_pylist(), strict=True)
    )
    assert before.equals(connection.query("FROM scalars ORDER BY run, seq"))


def test_run_with_a_separate_part_moves_only_enough_rows_for_a_file(batch):
    merge = Merge(dataset="scalars", part="_shared-x", files=(), own_parts=frozenset({"a", "b"}))
    table = pa.table({"run": ["a"] * 3 + ["b"] * 2 + ["c"] * 3})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "MOVED_ROWS", 3)
        found = [(part, rows.column("run").to_pylist()) for part, rows in split_by_part(table, merge)]

    assert [("a", ["a"] * 3), ("_shared-x", ["b"] * 2 + ["c"] * 3)] == found


def test_steps_after_the_slowest_live_rank_remain_separate():
    """Rank 1 is at step 3. Rank 2 has been silent since step 1, and delays no merge."""
    rows = [(0, step, NOW) for step in (None, 1, 2, 3, 4, 5)] + [(1, step, NOW) for step in (1, 3)]
    rows += [(2, 1, NOW - SILENCE - dt.timedelta(seconds=1))]
    table = pa.Table.from_pylist([dict(zip(("rank", "step", "ts"), row, strict=True)) for row in rows])
    steps = [piece.column("step").to_pylist() for piece in open_and_closed(table, NOW)]

    assert [[None, 1, 2, 3, 1, 3, 1], [4, 5]] == steps
    assert [table] == list(open_and_closed(table, NOW + dt.timedelta(days=1)))
