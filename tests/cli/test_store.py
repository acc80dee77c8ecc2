"""`rankscope store`: check, stats, compact, retain and repair of intact and damaged stores."""

from __future__ import annotations

import datetime as dt
import json
import shutil

import pyarrow as pa
import pytest
from tests.storage.crashes.operations import append, silent
from tests.storage.older_encoding import split_integers

from rankscope.commands import main
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import connect
from rankscope_storage.log.delta import Change, Log
from rankscope_storage.maintenance import compaction

LONG_AGO = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
FLUSHES = 12


@pytest.fixture
def in_flushes(tmp_path):
    """Return a store with FLUSHES files of one run, each with one loss row."""
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


def test_check_and_stats_of_an_intact_store(rankscope):
    checked, counted = rankscope("store", "check", "--deep"), rankscope("store", "stats", "--format", "json")
    figures = {row["dataset"]: row["rows"] for row in json.loads(counted.stdout)}

    assert (0, "") == (checked.returncode, checked.stderr)
    assert checked.stdout.endswith("; no damage\n")
    assert 240 == figures["scalars"]


def test_check_of_a_damaged_store_exits_with_1_repair_lists_losses(rankscope, sample_store, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(sample_store, broken)
    next(broken.glob("dataset=events/*/*.parquet")).unlink()
    checked = rankscope("store", "check", "--store", str(broken))
    repaired = rankscope("store", "repair", "--force", "--store", str(broken))

    assert (1, "") == (checked.returncode, checked.stderr)
    assert "damage: missing file: dataset=events" in checked.stdout
    assert repaired.stdout.startswith("removed from the log, data lost: dataset=events")


def test_repair_drops_a_missing_folder_only_with_force(rankscope, in_flushes):
    (in_flushes / "dataset=scalars").rename(in_flushes.parent / "away")
    refused = rankscope("store", "repair", "--store", str(in_flushes))
    forced = rankscope("store", "repair", "--force", "--store", str(in_flushes))

    assert 1 == refused.returncode
    assert f"no file of scalars is left in {in_flushes / 'dataset=scalars'}. A disk or a mount may" in refused.stderr
    assert (0, FLUSHES) == (forced.returncode, forced.stdout.count("removed from the log, data lost: dataset=scalars"))
    assert 0 == rows_of(in_flushes, "scalars")


def test_retain_rejects_days_beyond_the_range_of_dates(rankscope):
    done = rankscope("store", "retain", "--days", "inf", "--dry-run")

    text = "rankscope: a number of days is too large: the resulting date is out of range\n"
    assert (2, text) == (done.returncode, done.stderr)


def test_retain_dry_run_prints_the_plan_and_days_are_required(rankscope):
    done, without_days = rankscope("store", "retain", "--days", "36500", "--dry-run"), rankscope("store", "retain")

    assert (0, "") == (done.returncode, done.stderr)
    assert done.stdout.endswith("would delete: 0 files, 0 rows, 0 bytes\n")
    assert 2 == without_days.returncode
    assert "give --days, --scalars-days, --samples-days or --rollup-days" in without_days.stderr


def test_compact_prints_the_number_of_files_and_rows(rankscope, in_flushes):
    done = rankscope("store", "compact", "--store", str(in_flushes))
    again = rankscope("store", "compact", "--store", str(in_flushes))

    assert (0, "") == (done.returncode, done.stderr)
    assert done.stdout.startswith(f"{FLUSHES} files were merged into 1, {FLUSHES} rows, ")
    assert again.stdout.startswith("0 files were merged into 0, 0 rows, ")
    assert FLUSHES == rows_of(in_flushes, "scalars")


def test_compact_rewrites_the_files_that_check_counts(rankscope, tmp_path):
    with split_integers():
        append(tmp_path / "old", silent, records=4, per_commit=2)
    store = ("--store", str(tmp_path / "old"))
    before, done, after = (
        rankscope("store", *words.split(), *store) for words in ("check", "compact --rewrite", "check")
    )

    assert [0, 0, 0] == [each.returncode for each in (before, done, after)]
    assert "note: older encoding: dataset=scalars/" in before.stdout
    assert ": 4 files, " in before.stdout
    assert "4 other files were rewritten with the current encoding" == done.stdout.splitlines()[-1]
    assert "older encoding" not in after.stdout


@pytest.mark.parametrize("rounds", [1, 2])
def test_rewrite_reports_the_files_that_other_processes_prevented(tmp_path, monkeypatch, capsys, rounds):
    """Another process commits a rewrite while the command writes each of its first two files."""
    root, genuine, calls = tmp_path / "old", compaction._rewrite, iter(range(2))
    with split_integers():
        append(root, silent, records=4, per_commit=2)

    def rewrite_beside_another(*arguments):
        if next(calls, None) is not None:
            Log.open(root, sync_to_disk).replace_files(Change)
        return genuine(*arguments)

    monkeypatch.setattr(compaction, "_rewrite", rewrite_beside_another)
    monkeypatch.setattr(compaction, "REWRITE_ROUNDS", rounds)
    monkeypatch.setattr("sys.argv", ["rankscope", "store", "compact", "--rewrite", "--store", str(root)])
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()

    left = "2 files still have the older encoding: other processes changed the files of 2 merges: run the command again"
    expected = [(1, f"rankscope: {left}\n"), (0, "")][rounds - 1]
    assert expected == (code, said.err)
    assert f"{2 * rounds} other files were rewritten with the current encoding" == said.out.splitlines()[-1]


def test_second_concurrent_compaction_exits_with_1(in_flushes, monkeypatch, capsys):
    """Another real compaction merges the same files while this one writes."""
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
    assert said.out.startswith("0 files were merged into 0, 0 rows, ")
    assert "rankscope: another compaction of this store is running: it will compact the remaining files\n" == said.err
    assert FLUSHES == rows_of(in_flushes, "scalars")


def test_retain_replaces_old_rows_by_rollups(rankscope, in_flushes):
    """The dry run prints what the run then does; a second run changes nothing."""
    arguments = ("store", "retain", "--days", "1", "--scalars-days", "1", "--store", str(in_flushes))
    would, done, again = rankscope(*arguments, "--dry-run"), rankscope(*arguments), rankscope(*arguments)

    assert [0, 0, 0] == [each.returncode for each in (would, done, again)]
    assert would.stdout.splitlines()[-1].startswith(f"would delete: {FLUSHES} files, {FLUSHES} rows, ")
    said = done.stdout.splitlines()
    assert said[-2].startswith(f"deleted: {FLUSHES} files, {FLUSHES} rows, ")
    assert said[-1].startswith("added rollups: 1 rows, ")
    assert again.stdout.splitlines()[-1].startswith("deleted: 0 files, 0 rows, 0 bytes")
    assert (0, 1) == (rows_of(in_flushes, "scalars"), rows_of(in_flushes, "scalar_rollups"))
