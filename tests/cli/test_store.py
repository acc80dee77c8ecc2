"""`rankscope store`: check, stats, compact, retain and repair of intact and damaged stores."""

import datetime as dt
import json
import shutil

import pyarrow as pa
import pytest
from tests.storage.crashes.operations import STORE_1, append, silent
from tests.storage.older_encoding import split_integers
from tests.storage.rows import data_files

from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.schema import dataset_schema
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


def test_check_and_stats_of_an_intact_store(rankscope):
    checked, counted = rankscope("store", "check", "--deep"), rankscope("store", "stats", "--format", "json")
    figures = {row["dataset"]: row["rows"] for row in json.loads(counted.stdout)}

    assert (0, "") == (checked.returncode, checked.stderr)
    assert checked.stdout.endswith("; no damage\n")
    assert 240 == figures["scalars"]


def test_check_of_a_damaged_store_exits_with_1_repair_lists_losses(on_store, sample_store, tmp_path):
    broken = shutil.copytree(sample_store, tmp_path / "history")
    next(broken.glob("dataset=events/*/*.parquet")).unlink()
    checked, repaired = on_store("store", "check"), on_store("store", "repair", "--force")

    assert (1, "") == (checked.returncode, checked.stderr)
    assert "damage: missing file: dataset=events" in checked.stdout
    assert repaired.stdout.startswith("removed from the log, data lost: dataset=events")


def test_repair_drops_a_missing_folder_only_with_force(on_store, rows, in_flushes):
    """A mount may be missing, without a folder or with an empty mount point, and come back."""
    folder, message = in_flushes / "dataset=scalars", "no file of scalars is left in {}. A disk or a mount may"
    away = folder.rename(in_flushes.parent / "away")
    refused = [on_store("store", "repair")]
    folder.mkdir()
    refused.append(on_store("store", "repair"))
    folder.rmdir()
    away.rename(folder)
    back = on_store("store", "check")
    shutil.rmtree(folder)
    forced = on_store("store", "repair", "--force")

    assert [1, 1, 0] == [done.returncode for done in (*refused, back)]
    assert all(message.format(folder) in done.stderr for done in refused)
    assert (0, FLUSHES) == (forced.returncode, forced.stdout.count("removed from the log, data lost: dataset=scalars"))
    assert ["0"] == rows("SELECT count(*) FROM scalars")


def test_retain_dry_run_prints_the_plan_and_valid_days_are_required(rankscope):
    done, without_days, beyond = (
        rankscope("store", "retain", *words) for words in (("--days", "36500", "--dry-run"), (), ("--days", "inf"))
    )
    text = "rankscope: a number of days is too large: the resulting date is out of range\n"

    assert (2, text) == (beyond.returncode, beyond.stderr)
    assert (0, "") == (done.returncode, done.stderr)
    assert done.stdout.endswith("would delete: 0 files, 0 rows, 0 bytes\n")
    assert 2 == without_days.returncode
    assert "give --days, --scalars-days, --samples-days or --rollup-days" in without_days.stderr


def test_compact_prints_the_number_of_files_and_rows(on_store, rows, in_flushes):
    done = on_store("store", "compact")
    again = on_store("store", "compact")

    assert (0, "") == (done.returncode, done.stderr)
    assert done.stdout.startswith(f"{FLUSHES} files were merged into 1, {FLUSHES} rows, ")
    assert again.stdout.startswith("0 files were merged into 0, 0 rows, ")
    assert [str(FLUSHES)] == rows("SELECT count(*) FROM scalars")


def test_compact_rewrites_the_files_that_check_counts(on_store, tmp_path):
    with split_integers():
        append(tmp_path / "history", silent, records=4, per_commit=2)
    before, done, after = (on_store("store", *words.split()) for words in ("check", "compact --rewrite", "check"))

    assert [0, 0, 0] == [each.returncode for each in (before, done, after)]
    assert "note: older encoding: dataset=scalars/" in before.stdout
    assert ": 4 files, " in before.stdout
    assert "cannot read: `rankscope store compact --rewrite` rewrites these files" in before.stdout
    assert "4 other files were rewritten with the current encoding" == done.stdout.splitlines()[-1]
    assert "older encoding" not in after.stdout


def test_rewrite_reports_the_files_that_other_processes_prevented(on_store, tmp_path, monkeypatch):
    """Another process commits a rewrite while the command writes each of its first two files."""
    root, genuine, calls = tmp_path / "history", compaction._rewrite, iter(range(2))
    with split_integers():
        append(root, silent, records=4, per_commit=2)

    def rewrite_beside_another(*arguments):
        if next(calls, None) is not None:
            Log.open(root, sync_to_disk).replace_files(Change)
        return genuine(*arguments)

    monkeypatch.setattr(compaction, "_rewrite", rewrite_beside_another)
    done, again = (on_store("store", "compact", "--rewrite") for _ in range(2))

    left = "2 files still have the older encoding: other processes changed the files of 2 merges: run the command again"
    assert (1, f"rankscope: {left}\n") == (done.returncode, done.stderr)
    assert (0, "") == (again.returncode, again.stderr)
    for one in (done, again):
        assert "2 other files were rewritten with the current encoding" == one.stdout.splitlines()[-1]


def test_second_concurrent_compaction_exits_with_1(on_store, rows, in_flushes, monkeypatch):
    """Another real compaction merges the same files while this one writes."""
    rewrite = compaction._rewrite

    def rewrite_beside_another(root, merge, sync, now):
        monkeypatch.setattr(compaction, "_rewrite", rewrite)
        assert FLUSHES == compaction.compact(root, sync).files_removed
        return rewrite(root, merge, sync, now)

    monkeypatch.setattr(compaction, "_rewrite", rewrite_beside_another)
    done = on_store("store", "compact")

    assert 1 == done.returncode
    assert done.stdout.startswith("0 files were merged into 0, 0 rows, ")
    assert FLUSHES + 1 == len(data_files(in_flushes))  # none of the refused compaction
    assert (
        "rankscope: another compaction of this store is running: it will compact the remaining files\n" == done.stderr
    )
    assert [str(FLUSHES)] == rows("SELECT count(*) FROM scalars")


def test_retain_replaces_old_rows_by_rollups(on_store, rows, in_flushes):
    """The dry run prints what the run then does; a second run changes nothing."""
    arguments = ("store", "retain", "--days", "1", "--scalars-days", "1")
    would, done, again = on_store(*arguments, "--dry-run"), on_store(*arguments), on_store(*arguments)

    assert [0, 0, 0] == [each.returncode for each in (would, done, again)]
    assert would.stdout.splitlines()[-1].startswith(f"would delete: {FLUSHES} files, {FLUSHES} rows, ")
    said = done.stdout.splitlines()
    assert said[-2].startswith(f"deleted: {FLUSHES} files, {FLUSHES} rows, ")
    assert said[-1].startswith("added rollups: 1 rows, ")
    assert again.stdout.splitlines()[-1].startswith("deleted: 0 files, 0 rows, 0 bytes")
    assert ["0,1"] == rows("SELECT (SELECT count(*) FROM scalars), (SELECT count(*) FROM scalar_rollups)")


def test_upgrade_converts_a_store_of_an_earlier_release_once(in_process, tmp_path):
    root = shutil.copytree(STORE_1, tmp_path / "history")
    printed = [in_process("store", "upgrade", "--store", root).stdout for _ in range(2)]

    assert ["5 files with 271 rows were converted\n", "the store has the current schema version\n"] == printed
