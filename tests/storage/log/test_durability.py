"""Committed data survives a power failure; checkpoints are durable before they are used."""

import logging
import shutil
import threading
from pathlib import Path

import pytest
from deltalake import DeltaTable

from rankscope_storage.api.store import Store
from rankscope_storage.base.errors import StoreError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.log.delta import CHECKPOINT_COMMITS, Change, Log
from rankscope_storage.log.entries import LOG_FOLDER, checkpoint_files, entry, newest_checkpoint
from rankscope_storage.writer.writer import Checkpointer, write_checkpoint


class Power:
    """A sync function that only records its calls. At `fails_at` it raises, as if the process were killed there."""

    def __init__(self, fails_at: str = "") -> None:
        self.synced: list[Path] = []
        self._fails_at = fails_at

    def __call__(self, path: Path) -> None:
        if self._fails_at and self._fails_at in path.as_posix():
            raise OSError(5, "killed here")
        self.synced.append(path)


def killed_in_a_commit(root: Path) -> int:
    """Leave an entry that readers see and that no process has fsynced; return its version."""
    log = Log.open(root, Power(fails_at=".json"))
    with pytest.raises(StoreError, match="killed here"):
        log.commit(Change(transactions={"w:predecessor": 7}))
    return log.version + 1


def test_claim_fsyncs_entries_of_a_killed_predecessor(store):
    """The new owner returns watermarks from that entry to its ranks, which delete the records below them."""
    left = killed_in_a_commit(store.root)
    power = Power()
    with Store(store.root, power).claim(owner="b") as writer:
        assert entry(store.root, left) in power.synced
        assert 7 == writer.watermark("predecessor")


def test_commit_fsyncs_entries_of_other_writers_since_its_last_commit(store, batch):
    """If an earlier entry were lost, the log would have a gap and later rows would be lost too."""
    power = Power()
    with Store(store.root, power).claim(owner="a") as writer:
        writer.append(batch(range(3)))
        left = killed_in_a_commit(store.root)
        power.synced.clear()
        writer.append(batch(range(6)))

        assert [entry(store.root, left), entry(store.root, left + 1)] == [
            path for path in power.synced if path.suffix == ".json"
        ]


def test_watermark_of_another_shard_is_durable_before_it_is_returned(store):
    power = Power()
    with Store(store.root, power).claim(owner="a") as writer:
        left = killed_in_a_commit(store.root)
        power.synced.clear()

        assert 7 == writer.watermark("predecessor")
        assert [entry(store.root, left), store.root / "_delta_log"] == power.synced

        writer.watermark("predecessor")

        assert 2 == len(power.synced)


def test_durable_checkpoint_replaces_fsync_of_its_entries(store, writer, batch):
    writer._checkpoints.after_commit = lambda version: None
    for seq in range(CHECKPOINT_COMMITS):
        writer.append(batch([seq]))
    write_checkpoint(store.root, lambda path: None)
    writer.append(batch([CHECKPOINT_COMMITS]))
    newest = newest_checkpoint(store.root)
    power = Power()
    version = Log.open(store.root, power).commit(Change())

    assert version == newest + 2
    assert [*checkpoint_files(store.root, newest), *(entry(store.root, newest + n) for n in (1, 2))] == power.synced[:4]


def test_failed_fsync_is_retried_by_the_next_commit(store, writer, batch):
    writer.append(batch([0]))
    write_checkpoint(store.root, sync_to_disk)
    log = Log.open(store.root, sync_to_disk)
    refusing = Power(fails_at="/_delta_log")
    log._sync = lambda path: refusing(path) if path.name == "_delta_log" else None
    for _ in range(2):
        with pytest.raises(StoreError, match="killed here"):
            log.fsync_to_version()


def test_commit_works_in_a_log_without_hint_file_and_first_entries(store, writer, batch):
    writer._checkpoints.after_commit = lambda version: None
    for seq in range(3):
        writer.append(batch([seq]))
    write_checkpoint(store.root, sync_to_disk)
    newest = newest_checkpoint(store.root)
    checkpoint_files(store.root, newest)[1].unlink()
    for version in range(newest):
        entry(store.root, version).unlink()
    power = Power()

    assert newest + 1 == Log.open(store.root, power).commit(Change())
    assert entry(store.root, newest + 1) in power.synced


def test_writer_fsyncs_the_name_of_a_folder_of_a_killed_process(tmp_path, batch):
    """The folder exists, so that no process creates it, but its name was never fsynced."""
    root = tmp_path / "store"
    with Store.open(root, create=True).claim(owner="a") as writer:
        writer.append(batch([0]))
    (part,) = root.glob("dataset=scalars/part=*")
    elsewhere = tmp_path / "same store, not known to this process"
    shutil.copytree(root, elsewhere)
    power = Power()
    with Store.open(elsewhere, sync=power).claim(owner="b") as writer:
        writer.append(batch(range(2)))
        first = list(power.synced)
        power.synced.clear()
        writer.append(batch(range(3)))

    assert {elsewhere, elsewhere / "dataset=scalars"} <= {*first}
    assert elsewhere / "dataset=scalars" not in power.synced
    assert elsewhere / part.relative_to(root) in power.synced


# Checkpoints: written in a background thread, without delay for appends.


def test_writer_writes_checkpoints_without_maintenance(store, batch):
    with store.claim(owner="a") as writer:
        for seq in range(2 * CHECKPOINT_COMMITS + 1):
            writer.append(batch([seq]))
            writer._checkpoints.close()  # as if a second passed between two commits

    assert Log.open(store.root, sync_to_disk).version - newest_checkpoint(store.root) < CHECKPOINT_COMMITS
    assert 2 == len(list((store.root / LOG_FOLDER).glob("*.checkpoint.parquet")))


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
