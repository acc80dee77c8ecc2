"""`rankscope store`: what is told of a whole store and of a damaged one, and what it does to either."""

from __future__ import annotations

import datetime as dt
import json
import shutil

import pyarrow as pa
import pytest

from rankscope.commands import main
from rankscope_storage.care import compaction
from rankscope_storage.connection import connect
from rankscope_storage.schema import dataset_schema
from rankscope_storage.store import Batch, Store

LONG_AGO = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
FLUSHES = 12


@pytest.fixture
def in_flushes(tmp_path):
    """Return the folder of a store with one loss in each of some files of the same run."""
    root = tmp_path / "history"
    with Store.open(root, create=True).claim(owner="test") as writer:
        for step in range(FLUSHES):
            row = {"run": "r", "attempt": 0, "rank": 0, "incarnation": "i", "seq": step, "step": step}
            row |= {"ts": LONG_AGO + dt.timedelta(seconds=step), "ts_origin": "rank", "name": "loss", "value": 1.0}
            table = pa.Table.from_pylist([row], schema=dataset_schema("scalars"))
            writer.append(Batch(tables={"scalars": table}, watermarks={"i": step}))
    return root


def rows_of(root, dataset):
    with connect(root) as connection:
        return connection.query(f"SELECT count(*) AS n FROM {dataset}").to_pylist()[0]["n"]


def test_store_check_and_stats_of_a_whole_store(rankscope):
    checked, counted = rankscope("store", "check", "--deep"), rankscope("store", "stats", "--format", "json")
    figures = {row["dataset"]: row["rows"] for row in json.loads(counted.stdout)}

    assert (0, "") == (checked.returncode, checked.stderr)
    assert checked.stdout.endswith("; whole\n")
    assert 240 == figures["scalars"]


def test_store_check_of_a_damaged_store_ends_with_1_and_repair_says_what_is_lost(rankscope, sample_store, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(sample_store, broken)
    next(broken.glob("dataset=events/*/*.parquet")).unlink()
    checked = rankscope("store", "check", "--store", str(broken))
    repaired = rankscope("store", "repair", "--force", "--store", str(broken))

    assert (1, "") == (checked.returncode, checked.stderr)
    assert "damage: missing file: dataset=events" in checked.stdout
    assert repaired.stdout.startswith("taken out of the log, lost: dataset=events")


def test_store_repair_gives_up_a_folder_that_is_away_only_when_it_is_forced_to(rankscope, in_flushes):
    (in_flushes / "dataset=scalars").rename(in_flushes.parent / "away")
    refused = rankscope("store", "repair", "--store", str(in_flushes))
    forced = rankscope("store", "repair", "--force", "--store", str(in_flushes))

    assert 1 == refused.returncode
    assert f"no file of scalars is left in {in_flushes / 'dataset=scalars'}. A disk or a mount may" in refused.stderr
    assert (0, FLUSHES) == (forced.returncode, forced.stdout.count("taken out of the log, lost: dataset=scalars"))
    assert 0 == rows_of(in_flushes, "scalars")


def test_store_retain_takes_no_time_before_all_time(rankscope):
    done = rankscope("store", "retain", "--days", "inf", "--dry-run")

    text = "rankscope: one of the days is before all time: nothing is that old\n"
    assert (2, text) == (done.returncode, done.stderr)


def test_store_retain_says_what_would_go_and_asks_for_days(rankscope):
    done, unsaid = rankscope("store", "retain", "--days", "36500", "--dry-run"), rankscope("store", "retain")

    assert (0, "") == (done.returncode, done.stderr)
    assert done.stdout.endswith("would go: 0 files, 0 rows, 0 bytes\n")
    assert 2 == unsaid.returncode
    assert "Give --days, --scalars-days, --samples-days or --rollup-days" in unsaid.stderr


def test_store_compact_says_what_became_of_how_many_files(rankscope, in_flushes):
    done = rankscope("store", "compact", "--store", str(in_flushes))
    again = rankscope("store", "compact", "--store", str(in_flushes))

    assert (0, "") == (done.returncode, done.stderr)
    assert done.stdout.startswith(f"{FLUSHES} files became 1, {FLUSHES} rows, ")
    assert again.stdout.startswith("0 files became 0, 0 rows, ")
    assert FLUSHES == rows_of(in_flushes, "scalars")


def test_of_two_compactions_the_second_says_that_another_is_at_work_and_ends_with_1(in_flushes, monkeypatch, capsys):
    """Another one, as real as the first, merges the same files while this one writes."""
    rewrite = compaction._rewrite

    def rewrite_beside_another(root, merge, sync, now):
        monkeypatch.setattr(compaction, "_rewrite", rewrite)
        assert FLUSHES == compaction.compact(root, sync).files_removed
        return rewrite(root, merge, sync, now)

    monkeypatch.setattr(compaction, "_rewrite", rewrite_beside_another)
    monkeypatch.setattr("sys.argv", ["rankscope", "store", "compact", "--store", str(in_flushes)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()

    assert 1 == ended.value.code
    assert said.out.startswith("0 files became 0, 0 rows, ")
    assert "rankscope: another compaction is at work: the rest is left to it\n" == said.err
    assert FLUSHES == rows_of(in_flushes, "scalars")


def test_store_retain_puts_rollups_where_rows_are_too_old(rankscope, in_flushes):
    """What it would do, it does; and then there is nothing left to do."""
    arguments = ("store", "retain", "--days", "1", "--scalars-days", "1", "--store", str(in_flushes))
    would, done, again = rankscope(*arguments, "--dry-run"), rankscope(*arguments), rankscope(*arguments)

    assert [0, 0, 0] == [each.returncode for each in (would, done, again)]
    assert would.stdout.splitlines()[-1].startswith(f"would go: {FLUSHES} files, {FLUSHES} rows, ")
    said = done.stdout.splitlines()
    assert said[-2].startswith(f"gone: {FLUSHES} files, {FLUSHES} rows, ")
    assert said[-1].startswith("came for it: 1 rows, ")
    assert again.stdout.splitlines()[-1].startswith("gone: 0 files, 0 rows, 0 bytes")
    assert (0, 1) == (rows_of(in_flushes, "scalars"), rows_of(in_flushes, "scalar_rollups"))
