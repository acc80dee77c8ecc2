"""Compaction changes no row, whatever other processes do, and blocks none; it makes few files with few rewrites."""

import datetime as dt
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from tests.storage.rows import ask, files, put

from rankscope_storage.api.store import Batch
from rankscope_storage.base.errors import ShardLostError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.files.sorting import shared_part
from rankscope_storage.log.delta import MUTEX, Log
from rankscope_storage.log.snapshot import Snapshot
from rankscope_storage.maintenance import compaction, retention
from rankscope_storage.maintenance.check import check
from rankscope_storage.maintenance.compaction import SILENCE, compact, plan
from rankscope_storage.maintenance.retention import Retention, retain
from rankscope_storage.maintenance.vacuum import maintain

NOW = dt.datetime(2026, 11, 20, 12, tzinfo=dt.UTC)
STORED = "SELECT count(*), count(DISTINCT seq) FROM scalars"


@pytest.fixture
def eager(monkeypatch):
    monkeypatch.setattr(compaction, "SMALL_FILES", 2)


@pytest.fixture
def four(writer, batch, eager):
    for seq in range(4):
        writer.append(batch([seq]))


def column(root, *names: str) -> list[tuple]:
    """Return these values of each file, sorted."""
    return sorted(zip(*(files(root)[name].to_pylist() for name in names), strict=True))


def test_only_many_tiny_files_become_one_with_equal_rows_and_progress(store, writer, batch, connection):
    for seq in range(compaction.TINY_FILES):
        writer.append(batch([seq]))
    assert (0, 0) == (writer.compact().files_removed, writer.compact().files_added)
    writer.append(batch([compaction.TINY_FILES]))
    before, told = connection.query("FROM scalars ORDER BY seq"), []
    report = compact(store.root, sync_to_disk, lambda done, total: told.append((done, total)))

    assert (11, 1, 11) == (report.files_removed, report.files_added, report.rows)
    assert ([(1, 1)], 1) == (told, files(store.root).num_rows)
    assert before.equals(connection.query("FROM scalars ORDER BY seq"))


def test_all_types_and_special_values_survive_a_merge(writer, connection, eager):
    odd = [float("nan"), float("inf"), None, 0.0, -0.0]
    for seq, value in enumerate(odd):
        row = {"run": ["学/=.."], "incarnation": ["i"], "seq": [seq], "kind": ["k"], "tensor": ["t"]}
        tables = {
            "tensor_stats": pa.table({**row, "norm": pa.array([value], pa.float32())}),
            "histograms": pa.table({**row, "scheme": ["log2"], "counts": [None if seq == 2 else [seq, 1]]}),
            "tensors": pa.table({**row, "shape": [[2, 3]], "aliases": [None if seq else ["a", "学"]]}),
        }
        writer.append(Batch(tables=tables, watermarks={"i": seq}))
    names = ("tensor_stats", "histograms", "tensors_history")
    before = [connection.query(f"FROM {name} ORDER BY seq") for name in names]
    report = writer.compact()
    after = [connection.query(f"FROM {name} ORDER BY seq") for name in names]

    assert (15, 3) == (report.files_removed, report.files_added)
    assert [repr(table.to_pylist()) for table in before] == [repr(table.to_pylist()) for table in after]


def test_appends_and_watermark_continue_after_a_merge(store, writer, batch, connection, four):
    writer.compact()
    log = Log.open(store.root, sync_to_disk)
    assert (1, 5) == (log.transaction(MUTEX), log.transaction("ingest:0/1"))  # the mutex moved, and not the shard
    writer.append(batch(range(8)))

    assert 7 == writer.watermark("i0")
    assert [(8, 8)] == ask(connection, STORED)


def test_merged_files_have_disjoint_step_ranges(store, writer, scalars, eager, monkeypatch):
    """The flushes of slow ranks overlap; the step ranges of the merged files do not."""
    monkeypatch.setattr(compaction, "TARGET_ROWS", 11)
    for end in range(4, 28, 4):
        both = [scalars(range(max(0, end - 4 - lag), end - lag), rank=lag, incarnation=f"i{lag}") for lag in (0, 2)]
        writer.append(Batch(tables={"scalars": pa.concat_tables(both)}, watermarks={"i0": end - 1, "i2": end - 3}))
    writer.compact()

    assert [(0, 4), (5, 9), (10, 14), (15, 19), (20, 23)] == column(store.root, "step_min", "step_max")


def test_attempts_parts_and_datasets_are_never_merged_with_each_other(store, writer, scalars, eager):
    for seq in range(6):
        table = scalars([seq]).set_column(1, "attempt", pa.array([seq % 2], pa.int32()))
        event = pa.table({"run": ["r"], "incarnation": ["i0"], "seq": [seq], "type": ["note"], "attempt": [seq % 2]})
        writer.append(Batch(tables={"scalars": table, "events": event}, watermarks={"i0": seq}))
    writer.compact()

    expected = [(name, attempt, attempt) for name in ("events", "scalars") for attempt in (0, 1)]
    assert expected == column(store.root, "dataset", "attempt_min", "attempt_max")


def test_writer_without_its_shard_can_compact_but_not_append(store, writer, batch, four):
    """Compaction changes no row and needs only the mutex, not the shard."""
    for lock in (store.root / "_shards").iterdir():
        lock.unlink()
    with store.claim(owner="successor"):
        assert 1 == writer.compact().files_added
        with pytest.raises(ShardLostError):
            writer.append(batch([9]))


def test_file_replaced_after_the_plan_is_not_merged_again(store, writer, connection, four, monkeypatch):
    """A plan may have several merges, and another compaction may make the second one first."""
    stale = plan(Log.open(store.root, sync_to_disk).snapshot())
    compact(store.root, sync_to_disk)
    monkeypatch.setattr(compaction, "plan", lambda snapshot, now: stale)
    report = writer.compact()

    assert (0, 1) == (report.files_added, report.refused)
    assert [(4, 4)] == ask(connection, STORED)


def test_run_that_has_grown_moves_to_a_separate_part(store, writer, batch, connection, eager, monkeypatch):
    monkeypatch.setattr(compaction, "OWN_PART_ROWS", 15)
    for flush in range(4):
        writer.append(batch(range(flush * 5, flush * 5 + 5), run="grown", incarnation="g"))
        writer.append(batch([flush], run="small", incarnation="s"))
    before = connection.query("FROM scalars ORDER BY run, seq")
    writer.compact()

    assert [(shared_part(dt.datetime.now(dt.UTC).date()), 4), ("grown", 20)] == column(store.root, "part", "rows")
    assert before.equals(connection.query("FROM scalars ORDER BY run, seq"))


# --- the selection of files to merge


def listed(*described: dict) -> Snapshot:
    """Return a version with these files, by default with 1,000 rows of the dataset scalars each."""
    usual = {
        "dataset": "scalars", "rows": 1000, "size_bytes": 1, "attempt_min": 0, "attempt_max": 0, "step_min": 0,
        "step_max": 9, "ts_min": NOW, "ts_max": NOW, "part": "r",
    }  # fmt: skip
    rows = [{**usual, "path": f"{number:02d}", **row} for number, row in enumerate(described)]
    return Snapshot(Path("/store"), 1, pa.Table.from_pylist(rows))


def slowly(first: int, steps: int, rows: int, **more: object) -> dict:
    """Return a file with rows that arrived over two days and ended two days ago."""
    when = {"ts_min": NOW - dt.timedelta(days=4), "ts_max": NOW - dt.timedelta(days=2)}
    return {"step_min": first, "step_max": first + steps - 1, "rows": rows, **when, **more}


AGO = {"ts_max": NOW - SILENCE - dt.timedelta(seconds=1)}
HALF = {"rows": compaction.SMALL_ROWS - 1}
SHARED = [{"part": f"_shared-2026-11-{day}", **AGO} for day in (20, 18, 17, 19, 16, 20)]
ROLLED = {**AGO, "dataset": "tensor_rollups"}
PIECE = {**ROLLED, "rows": retention.PIECE_ROWS}
SLOW_DAYS = [slowly(first, 50, 1_100_000) for first in range(0, 250, 50)]
ENDED = [slowly(0, 1000, 800_000), slowly(1000, 1000, 800_000), slowly(2000, 125, 100_000)]
APART = [slowly(0, 50, 800_000), slowly(50, 100, 2_200_000), slowly(150, 50, 800_000), slowly(200, 50, 800_000)]
PLANS = {
    "active parts wait for more files": ([{}, {}], []),
    "a part with one active file waits": ([AGO, {}], []),
    "silent parts are merged": ([AGO, AGO], [["00", "01"]]),
    "a single file is not merged": ([AGO], []),
    "a full file is not merged": ([AGO, {**AGO, "rows": compaction.SMALL_ROWS}], []),
    "fewer rows than two full files wait": ([HALF] * 3, []),
    "few files with the rows of two full ones": ([*[HALF] * 4, {"rows": 5}], [["00", "01", "02", "03"]]),
    "files in the size that retention writes": ([PIECE] * 3, []),
    "a rollup row counts as four rows": (
        [{**ROLLED, "rows": compaction.SMALL_ROWS // 4 - 1}] * 6, [["00", "01", "02", "03"], ["04", "05"]],
    ),
    "shared parts of past days, but not of today": (SHARED, [["04", "02", "01", "03"]]),
    "three shared parts wait": (SHARED[1:4], []),
    "slowly filled files once more, without the last step": (SLOW_DAYS, [["00", "01"], ["02", "03"]]),
    "another merge at this rate would cost too much": ([{**day, "ts_min": day["ts_max"]} for day in SLOW_DAYS], []),
    "files merged once more are not merged again": (
        [*(slowly(first, 100, 2_200_000) for first in range(0, 500, 100)), slowly(500, 10, 1000)], [],
    ),
    "ended run with short steps, completely": (ENDED, [["00", "01", "02"]]),
    "small files of a live run wait for more files": ([*ENDED, {"step_min": 5000, "step_max": 5000}], [["00", "01"]]),
    "ended run with 20,000 rows per step, without the last": (
        [slowly(first, 40, 800_000) for first in (0, 40, 80)], [["00", "01"]],
    ),
    "files that are not adjacent": (APART, []),
    "only adjacent files": ([*APART, slowly(250, 50, 800_000)], [["02", "03"]]),
    "shared parts are not merged once more": ([slowly(0, 2000, 800_000, part=SHARED[1]["part"])] * 2, []),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANS)
def test_files_to_merge(case):
    described, expected = PLANS[case]
    merges = plan(listed(*described), NOW)

    assert expected == [[file.path for file in merge.files] for merge in merges]
    if described is SHARED:
        assert ["_shared-2026-11-16"] == [merge.part for merge in merges]
    if described is SLOW_DAYS:
        assert [compaction.MERGE_ROWS] * 2 == [merge.rows for merge in merges]


def test_thirty_days_of_a_run_leave_few_files_with_three_writes_per_row():
    """Each day has 28 flushes of one step with 20,000 rows, and a compaction."""
    files: list[dict] = []
    written = 0
    for day in range(30):
        now = NOW + dt.timedelta(days=day)
        for step in range(28):
            own = dict.fromkeys(("step_min", "step_max"), day * 28 + step)
            own |= dict.fromkeys(("ts_min", "ts_max"), now - dt.timedelta(hours=23 - step / 2))
            files.append({"path": f"{day:02d}-{step:02d}", "rows": 20_000, **own})
        for number, merge in enumerate(plan(listed(*files), now)):
            gone = [file for file in files if file["path"] in {merged.path for merged in merge.files}]
            files = [file for file in files if file not in gone]
            picks = {"step_min": min, "step_max": max, "ts_min": min, "ts_max": max, "rows": sum}
            ends = {name: pick(file[name] for file in gone) for name, pick in picks.items()}
            assert ends["rows"] == (ends["step_max"] - ends["step_min"] + 1) * 20_000  # adjacent steps without a gap
            assert ends["rows"] <= merge.rows
            files.append({"path": f"{day:02d}-merged-{number}", **ends})
            written += ends["rows"]

    total = 30 * 28 * 20_000
    assert total == sum(file["rows"] for file in files)
    assert len(files) <= 9
    assert written <= 3 * total


# Maintenance blocks neither appends nor reads, at whatever fsync it is delayed.

LONG_SECONDS = 60


class Held:
    """A sync function that blocks at its `moment`-th call until it is released."""

    def __init__(self, moment: int) -> None:
        self._left = moment
        self.stopped = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, path) -> None:
        self._left -= 1
        if not self._left:
            self.stopped.set()
            assert self.go_on.wait(LONG_SECONDS)
        sync_to_disk(path)


def age(root, sync) -> None:
    """Retention that removes all rows of these tests, which have times in 1970."""
    retain(root, Retention(raw_days=1, scalars_days=1, samples_days=1), sync, now=dt.datetime.now(dt.UTC))


def append(writer, batch, seq: int) -> int:
    writer.append(batch([seq]))
    row = {"run": "r", "incarnation": "i-s", "seq": seq, "step": seq, "ts": seq * 1_000_000, "kind": "k", "tensor": "t"}
    put(writer, "tensor_stats", [row], {"i-s": seq})
    return seq + 1


COUNTED = 'SELECT (SELECT sum("rows")::BIGINT FROM tensor_timeline), (SELECT sum("rows")::BIGINT FROM scalar_timeline)'


@pytest.mark.usual(1)
@pytest.mark.parametrize("work", [age, compact, maintain])
def test_appends_and_reads_work_while_maintenance_is_blocked(store, writer, connection, batch, monkeypatch, work):
    monkeypatch.setattr(compaction, "SMALL_FILES", 1)
    rows = 0
    for moment in range(1, 60, 5):
        for _ in range(2):
            rows = append(writer, batch, rows)
        held = Held(moment)
        upkeep = threading.Thread(target=work, args=(store.root, held))
        upkeep.start()
        while upkeep.is_alive() and not held.stopped.wait(0.01):
            pass
        rows = append(writer, batch, rows)

        assert [(rows, rows)] == ask(connection, COUNTED)
        held.go_on.set()
        upkeep.join(LONG_SECONDS)
        assert not upkeep.is_alive()
        assert [(rows, rows)] == ask(connection, COUNTED)
        if not held.stopped.is_set():
            break
    assert moment > 3
    assert check(store.root, deep=True).is_intact
