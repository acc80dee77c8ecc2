"""Vacuum deletes exactly the files that no process needs."""

from __future__ import annotations

import errno
import os
import time

import pytest
from tests.storage.rows import ask, data_files, entries

from rankscope_storage.base.errors import StoreError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.connection import connect
from rankscope_storage.log.delta import CHECKPOINT_COMMITS, REMOVED_FILES_HOURS, Log
from rankscope_storage.maintenance import compaction
from rankscope_storage.maintenance.vacuum import STAGED_SECONDS


def age(path, hours: float) -> None:
    moment = time.time() - hours * 3600
    os.utime(path, (moment, moment))


COUNT = "SELECT count(*) FROM scalars"


@pytest.mark.parametrize("run", ["a/b", "..", 'a=\'s "q"', "123", "", "%41", "_shared-2026-01-01", "x学/" * 99])
def test_vacuum_keeps_used_files_of_any_age_and_name(store, writer, batch, connection, run, monkeypatch):
    monkeypatch.setattr("rankscope_storage.files.sorting.OWN_PART_ROWS", 1)
    writer.append(batch(range(3), run=run))
    for path in store.root.rglob("*.parquet"):
        age(path, 1000)
    report = writer.maintain()

    assert 0 == report.data_files
    assert [(run, 3)] == ask(connection, "SELECT run, count(*) FROM scalars GROUP BY run")


def test_vacuum_deletes_files_of_dead_processes_above_their_age(store, writer, batch, connection):
    writer.append(batch(range(3)))
    part, staging = next(store.root.glob("dataset=*/part=*")), store.root / "_staging"
    for folder, hours in ((part, REMOVED_FILES_HOURS + 1), (staging, STAGED_SECONDS / 3600 + 1)):
        for name, old_hours in (("old.parquet", hours), ("young.parquet", 0.5)):
            (folder / name).write_bytes(b"x")
            age(folder / name, old_hours)
    report = writer.maintain()

    assert (1, 1) == (report.data_files, report.staged_files)
    assert (part / "young.parquet").exists()
    assert ["young.parquet"] == [path.name for path in staging.iterdir()]
    assert [(3,)] == ask(connection, COUNT)


def test_vacuum_keeps_recently_replaced_files_for_readers(store, writer, batch, monkeypatch):
    monkeypatch.setattr(compaction, "SMALL_FILES", 2)
    for seq in range(4):
        writer.append(batch([seq]))
    with connect(store.root) as connection, connection.snapshot() as pinned:
        writer.compact()
        for path in store.root.rglob("*.parquet"):
            age(path, 1000)
        writer.maintain()

        assert [[(4,)]] * 2 == [ask(pinned, COUNT), ask(connection, COUNT)]
    assert 5 == len(data_files(store.root))


def test_vacuum_keeps_unknown_files_in_the_folder(store, writer, batch):
    """delta-rs would delete all files that it does not know. Maintenance works in an empty store."""
    assert (0, 0) == (writer.maintain().data_files, writer.maintain().staged_files)
    writer.append(batch(range(3)))
    for name in ("notes.txt", "rankscope.sql", "strange.parquet"):
        (store.root / name).touch()
        age(store.root / name, 1000)
    writer.maintain()

    assert all((store.root / name).exists() for name in ("notes.txt", "rankscope.sql", "strange.parquet"))


def test_clean_up_deletes_old_entries_and_keeps_watermarks(store, writer, batch, connection):
    for seq in range(CHECKPOINT_COMMITS + 10):
        writer.append(batch([seq]))
    for entry in entries(store.root):
        age(entry, 1000)
    before = len(entries(store.root))
    writer.maintain()

    assert before > len(entries(store.root))
    assert CHECKPOINT_COMMITS + 9 == Log.open(store.root, sync_to_disk).transaction("w:i0")
    assert [(CHECKPOINT_COMMITS + 10,)] == ask(connection, COUNT)

    writer.append(batch([CHECKPOINT_COMMITS + 10]))

    assert [(CHECKPOINT_COMMITS + 11,)] == ask(connection, COUNT)


@pytest.mark.parametrize("method", ["unlink", "write_text"])
def test_full_or_read_only_disk_raises_store_error(store, writer, batch, monkeypatch, method):
    writer.append(batch(range(3)))
    (store.root / "_staging" / "old.parquet").write_bytes(b"x")
    age(store.root / "_staging" / "old.parquet", 10)

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(f"pathlib.Path.{method}", refuse)
    with pytest.raises(StoreError, match="Read-only file system"):
        writer.maintain()
