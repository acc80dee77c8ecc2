"""Files of earlier releases are read, counted and rewritten: integers that some readers cannot read, absent columns."""

from __future__ import annotations

import datetime as dt
import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.storage.crashes.operations import append, content, silent
from tests.storage.older_encoding import split_integers, wide_differences
from tests.storage.rows import ask, entries, files, put

from rankscope_storage.api.store import Store
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.files.older_integers import has_older_integers
from rankscope_storage.log.delta import Change, Log
from rankscope_storage.maintenance import compaction
from rankscope_storage.maintenance.check import FindingKind, check
from rankscope_storage.maintenance.compaction import compact
from rankscope_storage.maintenance.repair import repair
from rankscope_storage.maintenance.stats import store_stats
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


def test_check_counts_the_files_with_an_older_encoding(older):
    report = check(older, deep=True)
    (finding,) = report.findings

    assert report.is_intact
    assert FindingKind.OLDER_INTEGERS is finding.kind
    assert finding.text.startswith("6 files, ")
    assert finding.text.endswith("`rankscope store compact --rewrite` rewrites these files")


def test_differences_of_any_width_are_an_older_encoding(tmp_path):
    """One of the two files has narrow differences only. Fastparquet returns wrong values for the other."""
    start = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)
    rows = [{"run": "r", "name": "loss", "ts": start + dt.timedelta(seconds=at)} for at in (0, 1, 200)]
    with wide_differences(), Store.open(tmp_path, create=True).claim(owner="test") as writer:
        for some in (rows, rows[:2]):
            put(writer, "scalars", some)
    report = compact(tmp_path, sync_to_disk, rewrite=True)

    assert (1, 0) == (report.rewritten, compact(tmp_path, sync_to_disk, rewrite=True).rewritten)
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


def overtaken(monkeypatch, action, times=1):
    """Call `action` before each of the next `times` merges writes its files: as another process at this moment."""
    genuine, calls = compaction._rewrite, iter(range(times))

    def rewrite(root, merge, sync, now):
        if next(calls, None) is not None:
            action()
        return genuine(root, merge, sync, now)

    monkeypatch.setattr(compaction, "_rewrite", rewrite)


def commit_without_files(root):
    """Commit a rewrite of another process, which changes none of the files."""
    Log.open(root, sync_to_disk).replace_files(Change)


def test_rewrite_counts_files_that_another_compaction_replaced(older, monkeypatch):
    """Another process merges all files while the command writes the first one. No row is lost or doubled."""

    def merge_all():
        monkeypatch.setattr(compaction, "_rewrite", genuine)
        monkeypatch.setattr(compaction, "SMALL_FILES", 1)
        compact(older, sync_to_disk)

    genuine, before = compaction._rewrite, content(older)
    overtaken(monkeypatch, merge_all)
    report = compact(older, sync_to_disk, rewrite=True)

    assert (0, 6, 0) == (report.rewritten, report.refused, report.left)
    assert ([], before) == (older_files(older), content(older))


def test_rewrite_plans_refused_files_again(older, monkeypatch):
    before, progress = content(older), []
    overtaken(monkeypatch, lambda: commit_without_files(older), times=8)
    report = compact(older, sync_to_disk, lambda done, total: progress.append((done, total)), rewrite=True)

    assert (6, 8, 0) == (report.rewritten, report.refused, report.left)
    assert ([], before) == (older_files(older), content(older))
    assert [(done, 6) for done in range(1, 7)] == progress[:6]
    assert (14, 14) == progress[-1]


def test_rewrite_includes_files_that_another_process_adds_meanwhile(older, monkeypatch):
    def append_older():
        with split_integers():
            append(older, silent, records=15, per_commit=3)

    overtaken(monkeypatch, append_older)
    report = compact(older, sync_to_disk, rewrite=True)

    assert (8, 0, 0) == (report.rewritten, report.refused, report.left)
    assert [] == older_files(older)


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
    return Path(shutil.copytree(Path(__file__).parents[1] / "data" / "store_without_labels", tmp_path / "old"))


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
