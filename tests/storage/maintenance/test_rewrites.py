"""Files of earlier releases have integers that are split into bytes: they are read, counted and rewritten."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
from tests.storage.crashes.operations import append, content, silent
from tests.storage.older_encoding import split_integers

from rankscope_storage.api.store import Store
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.connection import connect
from rankscope_storage.files.encoding import has_split_integers
from rankscope_storage.log.delta import Log
from rankscope_storage.maintenance import compaction, compaction_plan
from rankscope_storage.maintenance.check import check
from rankscope_storage.maintenance.compaction import compact
from rankscope_storage.maintenance.file_check import FindingKind
from rankscope_storage.maintenance.repair import repair

SUMS = "SELECT count(*), sum(seq), sum(step), sum(numel), min(ts), max(ts) FROM tensor_stats"


@pytest.fixture
def older(tmp_path):
    """Return a store with six files of an earlier release and two of this one, of two datasets."""
    root = tmp_path / "store"
    with split_integers():
        append(root, silent, records=9, per_commit=3)
    append(root, silent, records=12, per_commit=3)
    return root


def split_files(root):
    files = Log.open(root, sync_to_disk).snapshot().files["path"].to_pylist()
    return [path for path in files if has_split_integers(pq.read_metadata(root / path))]


def asked(root):
    with connect(root) as connection:
        return connection.sql(SUMS).fetchall()


def test_check_counts_the_files_with_an_older_encoding(older):
    report = check(older, deep=True)
    (finding,) = report.findings

    assert report.is_intact
    assert FindingKind.SPLIT_INTEGERS is finding.kind
    assert finding.text.startswith("6 files, ")
    assert finding.text.endswith("`rankscope store compact --rewrite` rewrites these files")


def test_repair_leaves_files_with_an_older_encoding(older):
    assert () == repair(older, sync_to_disk).lost
    assert 6 == len(split_files(older))


def test_rewrite_replaces_each_older_file_by_one_with_equal_rows(older):
    before, sums, progress = content(older), asked(older), []
    report = compact(older, sync_to_disk, lambda done, total: progress.append((done, total)), rewrite=True)

    assert (0, 0, 6, 0) == (report.files_removed, report.files_added, report.rewritten, report.refused)
    assert [(done, 6) for done in range(1, 7)] == progress
    assert ([], before, sums) == (split_files(older), content(older), asked(older))
    assert () == tuple(one for one in check(older, deep=True).findings if one.kind is not FindingKind.UNUSED)
    assert 0 == compact(older, sync_to_disk, rewrite=True).rewritten


def test_compaction_without_rewrite_leaves_older_files(older):
    assert 0 == compact(older, sync_to_disk).rewritten
    assert 6 == len(split_files(older))


def test_rewrite_merges_small_files_first(older, monkeypatch):
    monkeypatch.setattr(compaction_plan, "SMALL_FILES", 1)
    before = content(older)
    report = compact(older, sync_to_disk, rewrite=True)

    assert (8, 2, 0) == (report.files_removed, report.files_added, report.rewritten)
    assert ([], before) == (split_files(older), content(older))


def test_rewrite_counts_files_that_another_compaction_replaced(older, monkeypatch):
    """Another process merges all files while the command writes the first one. No row is lost or doubled."""
    rewrite = compaction._rewrite

    def first(root, merge, sync, now):
        monkeypatch.setattr(compaction, "_rewrite", rewrite)
        monkeypatch.setattr(compaction_plan, "SMALL_FILES", 1)
        compact(root, sync)
        return rewrite(root, merge, sync, now)

    before = content(older)
    monkeypatch.setattr(compaction, "_rewrite", first)
    report = compact(older, sync_to_disk, rewrite=True)

    assert (0, 6) == (report.rewritten, report.refused)
    assert ([], before) == (split_files(older), content(older))


def test_older_files_are_read_together_with_current_ones(older):
    assert 2 * 2 * 12 == asked(older)[0][0]
    with Store.open(older).claim(owner="next") as writer:
        assert 11 == writer.watermark("i0")
