"""Checkpoints: written in a background thread, durable before they are used, without delay for appends."""

from __future__ import annotations

import logging
import threading

import pytest
from deltalake import DeltaTable
from tests.storage.rows import ask

from rankscope_storage.base.errors import StoreError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.connection import connect
from rankscope_storage.log.checkpoints import Checkpointer, write_checkpoint
from rankscope_storage.log.delta import CHECKPOINT_COMMITS, Change, Log
from rankscope_storage.log.entries import LOG_FOLDER, NO_CHECKPOINT, newest_checkpoint
from rankscope_storage.maintenance.compaction import compact


def test_writer_writes_checkpoints_without_maintenance(store, batch):
    with store.claim(owner="a") as writer:
        for seq in range(2 * CHECKPOINT_COMMITS + 1):
            writer.append(batch([seq]))
            writer._checkpoints.close()  # as if a second passed between two commits

    assert Log.open(store.root, sync_to_disk).version - newest_checkpoint(store.root) < CHECKPOINT_COMMITS
    assert 2 == len(list((store.root / LOG_FOLDER).glob("*.checkpoint.parquet")))


def test_compaction_and_rewrites_write_checkpoints_between_commits(store, writer, batch, monkeypatch):
    """A commit writes none in its own thread."""
    monkeypatch.setattr(writer._checkpoints, "after_commit", lambda version: None)
    monkeypatch.setattr("rankscope_storage.maintenance.compaction.SMALL_FILES", 1)
    for seq in range(3):
        writer.append(batch([seq]))
    for _ in range(2 * CHECKPOINT_COMMITS):
        Log.open(store.root, sync_to_disk).commit(Change())

    assert NO_CHECKPOINT == newest_checkpoint(store.root)
    compact(store.root, sync_to_disk)
    assert CHECKPOINT_COMMITS < newest_checkpoint(store.root)


def test_only_close_waits_for_a_checkpoint(store):
    begun, go_on, written = threading.Event(), threading.Event(), []

    def slow(root, sync):
        begun.set()
        assert go_on.wait(60)
        written.append(root)

    checkpoints = Checkpointer(store.root, sync_to_disk, slow)
    for version in range(1, 3 * CHECKPOINT_COMMITS):
        checkpoints.after_commit(version)
    assert begun.wait(60)
    assert [] == written
    go_on.set()
    checkpoints.close()
    checkpoints.close()

    assert [store.root] == written


@pytest.mark.parametrize("error", [StoreError("No space left on device"), RuntimeError("panic")])
def test_failed_checkpoint_is_logged_and_retried_after_as_many_commits(store, caplog, error):
    tried = []

    def fail(root, sync):
        tried.append(root)
        raise error

    checkpoints = Checkpointer(store.root, sync_to_disk, fail)
    with caplog.at_level(logging.WARNING):
        for version in range(1, 2 * CHECKPOINT_COMMITS + 1):
            checkpoints.after_commit(version)
            checkpoints.close()

    assert 2 == len(tried)
    assert 2 == caplog.text.count("retrying after 10 commits")


def test_checkpoint_of_another_shard_counts(store):
    written = []
    checkpoints = Checkpointer(store.root, sync_to_disk, lambda root, sync: written.append(root))
    for _ in range(2):
        Log.open(store.root, sync_to_disk).commit(Change())
    write_checkpoint(store.root, sync_to_disk)
    checkpoints.after_commit(CHECKPOINT_COMMITS)
    checkpoints.close()

    assert [] == written


def test_checkpoint_is_durable_before_entries_are_deleted(store, writer, batch, monkeypatch):
    for seq in range(3):
        writer.append(batch([seq]))
    order = []
    log = Log.open(store.root, lambda path: order.append(path.name))
    genuine = DeltaTable.cleanup_metadata
    monkeypatch.setattr(DeltaTable, "cleanup_metadata", lambda table: (order.append("clean up"), genuine(table)))
    log.checkpoint()
    log.clean_up()

    assert [f"{log.version:020d}.checkpoint.parquet", "_last_checkpoint", LOG_FOLDER, "clean up"] == order[:4]


def test_maintenance_works_with_a_checkpoint_without_hint_file(store, writer, batch):
    """The state after a writer was killed between the checkpoint and the file that names it."""
    writer.append(batch([0]))
    write_checkpoint(store.root, sync_to_disk)
    (store.root / LOG_FOLDER / "_last_checkpoint").unlink()
    writer.maintain()
    writer.append(batch([1]))
    writer.maintain()

    assert 3 == newest_checkpoint(store.root)


def test_appends_and_reads_continue_during_checkpoints(store, batch):
    with store.claim("0/2", owner="a") as one, store.claim("1/2", owner="b") as other, connect(store.root) as reader:
        for seq in range(CHECKPOINT_COMMITS):
            one.append(batch([seq]))
            other.append(batch([seq], incarnation="i1"))

            assert [(2 * seq + 2,)] == ask(reader, "SELECT count(*) FROM scalars")
