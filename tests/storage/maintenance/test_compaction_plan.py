"""The selection of files to merge: few rewrites per row, few files per query."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pyarrow as pa

from rankscope_storage.log.snapshot import Snapshot
from rankscope_storage.maintenance import compaction, retention
from rankscope_storage.maintenance.compaction import plan

NOW = dt.datetime(2026, 11, 20, 12, tzinfo=dt.UTC)


def listed(*described: dict) -> Snapshot:
    """Return a version with these files, by default with 1,000 rows of the dataset scalars each."""
    usual = {
        "dataset": "scalars", "rows": 1000, "size_bytes": 1, "attempt_min": 0, "attempt_max": 0, "step_min": 0,
        "step_max": 9, "ts_min": NOW, "ts_max": NOW, "part": "r",
    }  # fmt: skip
    rows = [{**usual, "path": f"{number:02d}", **row} for number, row in enumerate(described)]
    return Snapshot(Path("/store"), 1, pa.Table.from_pylist(rows))


def planned(*described: dict) -> list[list[str]]:
    return [[file.path for file in merge.files] for merge in plan(listed(*described), NOW)]


AGO = {"ts_max": NOW - compaction.SILENCE - dt.timedelta(seconds=1)}


def test_active_parts_wait_for_more_files_and_silent_ones_are_merged():
    assert [] == planned({}, {})
    assert [] == planned(AGO, {})
    assert [["00", "01"]] == planned(AGO, AGO)
    assert [] == planned(AGO)
    assert [] == planned(AGO, {**AGO, "rows": compaction.SMALL_ROWS})


def test_few_small_files_with_the_rows_of_two_full_ones_are_merged():
    half = {"rows": compaction.SMALL_ROWS - 1}

    assert [] == planned(half, half, half)
    assert [["00", "01", "02", "03"]] == planned(half, half, half, half, {"rows": 5})


def test_rollup_row_counts_as_four_rows():
    """It needs four times the memory. Files in the size that retention writes are not merged."""
    rolled = {**AGO, "dataset": "tensor_rollups"}
    piece, half = {**rolled, "rows": retention.PIECE_ROWS}, {**rolled, "rows": compaction.SMALL_ROWS // 4 - 1}

    assert [] == planned(piece, piece, piece)
    assert [["00", "01", "02", "03"], ["04", "05"]] == planned(*[half] * 6)


def test_shared_parts_of_past_days_are_merged_and_of_today_wait():
    days = [{"part": f"_shared-2026-11-{day}", **AGO} for day in (20, 18, 17, 19, 16, 20)]

    assert [["04", "02", "01", "03"]] == planned(*days)
    assert ["_shared-2026-11-16"] == [merge.part for merge in plan(listed(*days), NOW)]
    assert [] == planned(*days[1:4])


def test_thirty_days_of_flushes_leave_few_files():
    """Each day has 25 flushes of small runs and a compaction: no row is lost, and the remaining files are large."""
    sizes: list[dict] = []
    for day in range(60):
        now = NOW + dt.timedelta(days=day)
        part = f"_shared-{now.date()}"
        sizes += [{"part": part, "rows": 3000, "ts_max": now, "path": f"{day}-{flush}"} for flush in range(25)]
        for merge in plan(listed(*sizes), now):
            gone = {file.path for file in merge.files}
            rows = sum(file.rows for file in merge.files)
            sizes = [file for file in sizes if file["path"] not in gone]
            sizes.append({"part": merge.part, "rows": rows, "ts_max": now, "path": f"{day}-m{len(sizes)}"})

    assert 60 * 25 * 3000 == sum(file["rows"] for file in sizes)
    assert len(sizes) <= 1 + compaction.PAST_FILES + 60 * 25 * 3000 // compaction.SMALL_ROWS


def slowly(first: int, steps: int, rows: int, **more: object) -> dict:
    """Return a file with rows that arrived over two days and ended two days ago."""
    when = {"ts_min": NOW - dt.timedelta(days=4), "ts_max": NOW - dt.timedelta(days=2)}
    return {"step_min": first, "step_max": first + steps - 1, "rows": rows, **when, **more}


def test_files_that_filled_slowly_are_merged_once_more():
    """The last file remains, because it contains the last step."""
    days = [slowly(first, 50, 1_100_000) for first in range(0, 250, 50)]
    first, second = plan(listed(*days), NOW)

    assert [["00", "01"], ["02", "03"]] == [[file.path for file in merge.files] for merge in (first, second)]
    assert {compaction.MERGE_ROWS} == {first.rows, second.rows}
    assert [] == planned(
        *({**day, "ts_min": day["ts_max"]} for day in days)
    )  # at this rate, another merge would cost too much


def test_files_merged_once_more_are_not_merged_again():
    assert [] == planned(*(slowly(first, 100, 2_200_000) for first in range(0, 500, 100)), slowly(500, 10, 1000))


def test_ended_run_with_short_steps_is_merged_completely():
    """With 800 rows per step, queries for the last step do not become slower; with 20,000 rows they would."""
    scalars = [slowly(0, 1000, 800_000), slowly(1000, 1000, 800_000), slowly(2000, 125, 100_000)]
    tensors = [slowly(0, 40, 800_000), slowly(40, 40, 800_000), slowly(80, 40, 800_000)]
    live = {"step_min": 5000, "step_max": 5000}

    assert [["00", "01", "02"]] == planned(*scalars)
    assert [["00", "01"]] == planned(*tensors)
    assert [["00", "01"]] == planned(*scalars, live)  # small files wait for more files


def test_only_adjacent_files_are_merged_once_more():
    days = [slowly(0, 50, 800_000), slowly(50, 100, 2_200_000), slowly(150, 50, 800_000), slowly(200, 50, 800_000)]

    assert [] == planned(*days)
    assert [["02", "03"]] == planned(*days, slowly(250, 50, 800_000))


def test_shared_parts_are_not_merged_once_more():
    assert [] == planned(*(slowly(0, 2000, 800_000, part="_shared-2026-11-18") for _ in range(2)))


def test_thirty_days_of_a_run_leave_few_files_with_three_writes_per_row():
    """Each day has 28 flushes of one step with 20,000 rows, and a compaction."""
    files: list[dict] = []
    written = 0
    for day in range(30):
        now = NOW + dt.timedelta(days=day)
        files += [
            {"path": f"{day:02d}-{step:02d}", "rows": 20_000, "step_min": day * 28 + step, "step_max": day * 28 + step,
             "ts_min": now - dt.timedelta(hours=23 - step / 2), "ts_max": now - dt.timedelta(hours=23 - step / 2)}
            for step in range(28)
        ]  # fmt: skip
        for number, merge in enumerate(plan(listed(*files), now)):
            gone = [file for file in files if file["path"] in {merged.path for merged in merge.files}]
            files = [file for file in files if file not in gone]
            ends = {
                name: pick(file[name] for file in gone)
                for name, pick in (
                    ("step_min", min),
                    ("step_max", max),
                    ("ts_min", min),
                    ("ts_max", max),
                    ("rows", sum),
                )
            }
            assert ends["rows"] == (ends["step_max"] - ends["step_min"] + 1) * 20_000  # adjacent steps without a gap
            assert ends["rows"] <= merge.rows
            files.append({"path": f"{day:02d}-merged-{number}", **ends})
            written += ends["rows"]

    total = 30 * 28 * 20_000
    assert total == sum(file["rows"] for file in files)
    assert len(files) <= 9
    assert written <= 3 * total
