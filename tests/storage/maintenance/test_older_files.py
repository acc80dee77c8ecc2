"""Maintenance of files of an earlier release, which lack columns that datasets have today, including texts."""

from __future__ import annotations

import datetime as dt
import shutil
from pathlib import Path

import pytest

from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.connection import connect
from rankscope_storage.maintenance import compaction
from rankscope_storage.maintenance.check import check
from rankscope_storage.runs import edit

DAY = dt.datetime(2026, 11, 22, 12, tzinfo=dt.UTC)
"""The day of its files, because a few files of past days are not merged."""

ASKED = "SELECT run, state, last_step, tags FROM runs"


@pytest.fixture
def old(tmp_path):
    """Yield a store of the last release without tags."""
    return Path(shutil.copytree(Path(__file__).parents[1] / "data" / "store_without_labels", tmp_path / "old"))


def answer(root, statement=ASKED):
    with connect(root) as connection:
        return connection.sql(statement).fetchall()


def test_older_files_are_merged_into_files_with_all_columns(old, monkeypatch):
    monkeypatch.setattr(compaction, "SMALL_FILES", 1)
    before = answer(old)
    report = compaction.compact(old, sync_to_disk, now=DAY)

    assert (2, 1) == (report.files_removed, report.files_added)
    assert before == answer(old)
    assert check(old, deep=True).is_intact


def test_run_in_older_files_is_renamed(old):
    scalars = answer(old, "SELECT step, name, value FROM scalars ORDER BY ALL")
    edit.rename(old, "before", "after", sync_to_disk)

    assert [("after", "completed", 2, None)] == answer(old)
    assert scalars == answer(old, "SELECT step, name, value FROM scalars WHERE run = 'after' ORDER BY ALL")
    assert check(old, deep=True).is_intact


def test_run_in_older_files_is_removed(old):
    edit.remove(old, "before", sync_to_disk)

    assert [] == answer(old)
