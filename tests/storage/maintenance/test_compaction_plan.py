"""Which files are merged: few rewrites of each row, few files for each question."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pyarrow as pa

from rankscope_storage.log.snapshot import Snapshot
from rankscope_storage.maintenance import compaction_plan, rollup_writer
from rankscope_storage.maintenance.compaction_plan import plan

NOW = dt.datetime(2026, 11, 20, 12, tzinfo=dt.UTC)


def listed(*described: dict) -> Snapshot:
    """A version with these files, each of 1,000 rows of the dataset scalars unless it says otherwise."""
    usual = {
        "dataset": "scalars", "rows": 1000, "size_bytes": 1, "attempt_min": 0, "attempt_max": 0, "step_min": 0,
        "step_max": 9, "ts_min": NOW, "ts_max": NOW, "part": "r",
    }  # fmt: skip
    rows = [{**usual, "path": f"{number:02d}", **row} for number, row in enumerate(described)]
    return Snapshot(Path("/store"), 1, pa.Table.from_pylist(rows))


def planned(*described: dict) -> list[list[str]]:
    return [[file.path for file in merge.files] for merge in plan(listed(*described), NOW)]


AGO = {"ts_max": NOW - compaction_plan.SILENCE - dt.timedelta(seconds=1)}


def test_what_is_still_written_waits_for_company_and_what_is_silent_is_merged_to_its_end():
    assert [] == planned({}, {})
    assert [] == planned(AGO, {})
    assert [["00", "01"]] == planned(AGO, AGO)
    assert [] == planned(AGO)
    assert [] == planned(AGO, {**AGO, "rows": compaction_plan.SMALL_ROWS})


def test_small_files_that_make_two_full_ones_are_merged_though_they_are_few():
    half = {"rows": compaction_plan.SMALL_ROWS - 1}

    assert [] == planned(half, half, half)
    assert [["00", "01", "02", "03"]] == planned(half, half, half, half, {"rows": 5})


def test_a_row_of_rollups_counts_as_four():
    """It is as much wider, and a merge holds its rows in memory: pieces as retention writes them are left alone."""
    rolled = {**AGO, "dataset": "tensor_rollups"}
    piece, half = {**rolled, "rows": rollup_writer.PIECE_ROWS}, {**rolled, "rows": compaction_plan.SMALL_ROWS // 4 - 1}

    assert [] == planned(piece, piece, piece)
    assert [["00", "01", "02", "03"], ["04", "05"]] == planned(*[half] * 6)


def test_shared_parts_of_past_days_become_one_and_that_of_today_waits():
    days = [{"part": f"_shared-2026-11-{day}", **AGO} for day in (20, 18, 17, 19, 16, 20)]

    assert [["04", "02", "01", "03"]] == planned(*days)
    assert ["_shared-2026-11-16"] == [merge.part for merge in plan(listed(*days), NOW)]
    assert [] == planned(*days[1:4])


def test_thirty_days_of_flushes_leave_few_files():
    """Every day 25 flushes of small runs and a compaction: nothing is lost, and what is left is large."""
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
    assert len(sizes) <= 1 + compaction_plan.PAST_FILES + 60 * 25 * 3000 // compaction_plan.SMALL_ROWS


def slowly(first: int, steps: int, rows: int, **more: object) -> dict:
    """A file whose rows came over two days, and ended two days ago."""
    when = {"ts_min": NOW - dt.timedelta(days=4), "ts_max": NOW - dt.timedelta(days=2)}
    return {"step_min": first, "step_max": first + steps - 1, "rows": rows, **when, **more}


def test_files_that_took_long_to_fill_are_merged_once_more():
    """The last one of them stays as it is: it has the last step."""
    days = [slowly(first, 50, 1_100_000) for first in range(0, 250, 50)]
    first, second = plan(listed(*days), NOW)

    assert [["00", "01"], ["02", "03"]] == [[file.path for file in merge.files] for merge in (first, second)]
    assert {compaction_plan.MERGE_ROWS} == {first.rows, second.rows}
    assert [] == planned(*({**day, "ts_min": day["ts_max"]} for day in days))  # as fast as that, it would cost too much


def test_what_was_merged_once_more_is_left_alone():
    assert [] == planned(*(slowly(first, 100, 2_200_000) for first in range(0, 500, 100)), slowly(500, 10, 1000))


def test_a_run_that_ended_is_merged_to_its_end_where_steps_are_short():
    """800 rows a step: no question about the last step is slower for it. 20,000 are another thing."""
    scalars = [slowly(0, 1000, 800_000), slowly(1000, 1000, 800_000), slowly(2000, 125, 100_000)]
    tensors = [slowly(0, 40, 800_000), slowly(40, 40, 800_000), slowly(80, 40, 800_000)]
    live = {"step_min": 5000, "step_max": 5000}

    assert [["00", "01", "02"]] == planned(*scalars)
    assert [["00", "01"]] == planned(*tensors)
    assert [["00", "01"]] == planned(*scalars, live)  # what is small waits for company


def test_only_neighbours_are_merged_once_more():
    days = [slowly(0, 50, 800_000), slowly(50, 100, 2_200_000), slowly(150, 50, 800_000), slowly(200, 50, 800_000)]

    assert [] == planned(*days)
    assert [["02", "03"]] == planned(*days, slowly(250, 50, 800_000))


def test_parts_that_runs_share_are_not_merged_once_more():
    assert [] == planned(*(slowly(0, 2000, 800_000, part="_shared-2026-11-18") for _ in range(2)))


def test_thirty_days_of_one_run_leave_few_files_and_write_each_row_three_times():
    """Each day 28 flushes of one step, of 20,000 rows, and a compaction."""
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
            assert ends["rows"] == (ends["step_max"] - ends["step_min"] + 1) * 20_000  # neighbours, and all of them
            assert ends["rows"] <= merge.rows
            files.append({"path": f"{day:02d}-merged-{number}", **ends})
            written += ends["rows"]

    total = 30 * 28 * 20_000
    assert total == sum(file["rows"] for file in files)
    assert len(files) <= 9
    assert written <= 3 * total
