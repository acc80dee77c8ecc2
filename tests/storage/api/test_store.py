"""Open and claim a store: every error names the remedy."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema
from tests.properties import few
from tests.storage.rows import ask, entries

from rankscope_contract import SCHEMA_VERSION
from rankscope_storage.api.store import Store
from rankscope_storage.base.errors import (
    NotAStoreError,
    SchemaVersionError,
    ShardLockError,
    ShardLostError,
    StoreError,
    TornLogError,
    UnwritableError,
)
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.connection import connect
from rankscope_storage.log import delta as log_module
from rankscope_storage.log.delta import Change, Log
from rankscope_storage.log.shard_lock import ShardLock, shard_transaction
from rankscope_storage.maintenance.check import FindingKind, check
from rankscope_storage.maintenance.repair import repair

NO_LINKS = Path(__file__).with_name("no_links.py")
COUNT = "SELECT count(*) FROM scalars"


def test_store_is_created_only_with_create(folder):
    for opening in (Store.open, connect):
        with pytest.raises(NotAStoreError, match="rankscope serve"):
            opening(folder)

    assert not folder.exists()
    (folder / log_module.LOG_FOLDER).mkdir(parents=True)  # an interrupted creation is completed
    assert folder == Store.open(folder, create=True).root
    assert 0 == Log.open(folder, sync_to_disk).version
    assert folder == Store.open(folder).root
    assert folder == Store.open(folder, create=True).root


def test_file_and_unrelated_delta_table_are_no_stores(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotAStoreError, match="is a file"):
        Store.open(tmp_path / "file", create=True)
    with pytest.raises(UnwritableError, match="cannot write to"):
        Store.open(tmp_path / "file" / "store", create=True)
    DeltaTable.create(str(tmp_path), schema=Schema.from_arrow(pa.schema([("a", pa.int64())])))
    with pytest.raises(NotAStoreError, match="not a Rankscope store"):
        Store.open(tmp_path)


def test_folder_without_write_permission_is_reported(tmp_path):
    """Run as another user, because permissions do not restrict root."""
    program = textwrap.dedent(
        f"""
        import os, pathlib
        from rankscope_storage.api.store import Store
        if os.geteuid() == 0:
            os.setuid(65534)
        Store.open({str(tmp_path / "store")!r}, create=True)
        """
    )
    tmp_path.chmod(0o555)
    for parent in tmp_path.parents:
        if os.geteuid() == 0 and str(parent).startswith("/tmp/pytest"):
            parent.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert "UnwritableError: cannot write to" in done.stderr


def test_folder_without_hard_links_is_reported_at_open(folder):
    program = f"from rankscope_storage.api.store import Store\nStore.open({str(folder)!r}, create=True)"
    done = subprocess.run([sys.executable, NO_LINKS, program], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("this kernel lets no process install a seccomp filter")
    assert "UnwritableError" in done.stderr
    assert "file system without hard links" in done.stderr
    assert not (folder / "_delta_log").exists()


def test_newer_schema_version_asks_for_an_upgrade(store, monkeypatch):
    table = DeltaTable(str(store.root))
    table.alter.set_table_properties({"rankscope.schema_version": str(SCHEMA_VERSION + 1)}, raise_if_not_exists=False)
    for opening in (lambda: Store.open(store.root), lambda: connect(store.root)):
        with pytest.raises(SchemaVersionError, match="upgrade"):
            opening()


def test_claim_adds_columns_of_a_newer_schema(store, monkeypatch, batch):
    """A service of the older release, which owns another shard, continues to append."""
    wider = log_module.table_schema().append(pa.field("brand_new", pa.int64()))
    with store.claim("0/2", owner="older") as older:
        monkeypatch.setattr(log_module, "table_schema", lambda: wider)
        with store.claim("1/2", owner="newer") as writer:
            writer.append(batch(range(3)))
        older.append(batch(range(2), incarnation="i1"))

    assert "brand_new" in [field.name for field in DeltaTable(str(store.root)).schema().fields]
    assert [(5,)] == ask(store.root, COUNT)


@pytest.fixture
def six(store, batch):
    """Store two commits of three scalars each."""
    with store.claim(owner="me") as writer:
        writer.append(batch(range(3)))
        writer.append(batch(range(3, 6)))


@pytest.mark.parametrize("kept", [1, 300])
def test_torn_last_entry_is_reported_with_a_remedy_that_works(store, batch, six, kept):
    torn = entries(store.root)[-1]
    torn.write_bytes(torn.read_bytes()[:kept])
    for opening in (lambda: Store.open(store.root), lambda: connect(store.root)):
        with pytest.raises(TornLogError, match="move that file away"):
            opening()
    torn.rename(store.root / "_staging" / "torn.json")
    with Store.open(store.root).claim(owner="me") as writer, connect(store.root) as connection:
        assert 2 == writer.watermark("i0")

        writer.append(batch(range(6)))

        assert [(6,)] == ask(connection, COUNT)


def test_empty_last_entry_is_a_commit_without_actions(store, batch, six):
    """The state if power fails between the creation of the file and its content. It is no damage."""
    entries(store.root)[-1].write_bytes(b"")
    found = [finding.kind for finding in check(store.root).findings if "_delta_log" in finding.path]
    with Store.open(store.root).claim(owner="me") as writer, connect(store.root) as connection:
        writer.append(batch(range(6)))

        assert [(6,)] == ask(connection, COUNT)
    report = check(store.root)

    assert [FindingKind.EMPTY_ENTRY] == found
    assert FindingKind.EMPTY_ENTRY in [finding.kind for finding in report.findings]
    assert report.is_intact
    assert None is repair(store.root, sync_to_disk).torn_entry


def test_unreadable_log_raises_a_message_of_one_line(store):
    (store.root / "_delta_log" / "00000000000000000000.json").write_text('{"protocol":{"minReaderVersion":99}}\n')
    with pytest.raises(StoreError) as raised:
        Store.open(store.root)

    assert "\n" not in str(raised.value)


# --- claims


def test_second_claim_of_a_locked_shard_names_the_running_owner(store, writer):
    with pytest.raises(ShardLockError, match="host-a pid 1, which is running"):
        store.claim(owner="host-b pid 2")


def claim_as_from_another_machine(store: Store, owner: str):
    """Claim without access to the lock file of the owner: only the transaction numbers in the log decide."""
    for lock in (store.root / "_shards").iterdir():
        lock.unlink()
    return store.claim(owner=owner)


def test_owner_on_another_machine_stops_at_its_next_append(store, writer, batch, connection):
    writer.append(batch(range(3)))
    with claim_as_from_another_machine(store, "host-b pid 2") as successor:
        with pytest.raises(ShardLostError, match="host-b pid 2"):
            writer.append(batch(range(3, 6)))
        with pytest.raises(ShardLostError):
            writer.watermark("i0")
        successor.append(batch(range(6)))

    assert [(6, 6)] == ask(connection, "SELECT count(*), count(DISTINCT seq) FROM scalars")


def test_claim_between_refresh_and_commit_refuses_the_commit(store, writer, batch, monkeypatch):
    writer.append(batch(range(3)))
    before = set(store.root.rglob("*.parquet"))
    genuine = writer._write

    def claimed_meanwhile(*arguments):
        files = genuine(*arguments)
        claim_as_from_another_machine(store, "host-b pid 2")
        return files

    monkeypatch.setattr(writer, "_write", claimed_meanwhile)
    with pytest.raises(ShardLostError, match="host-b pid 2"):
        writer.append(batch(range(3, 6)))

    assert before == set(store.root.rglob("*.parquet"))


def test_loser_of_two_concurrent_claims_names_the_winner(store, monkeypatch):
    genuine = Log.commit

    def overtaken(log: Log, change: Change) -> int:
        rival = Log.open(store.root, sync_to_disk)
        name = shard_transaction("0/1")
        genuine(rival, Change(transactions={name: 1}, info={"rankscopeShard": "0/1", "rankscopeOwner": "rival pid 9"}))
        return genuine(log, change)

    monkeypatch.setattr(Log, "commit", overtaken)
    with pytest.raises(ShardLockError, match="rival pid 9"):
        store.claim(owner="me")
    monkeypatch.undo()

    store.claim(owner="me").close()  # the loser released its lock


def test_without_file_locks_the_log_decides(store, monkeypatch, batch):
    def no_locks(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("rankscope_storage.log.shard_lock.fcntl.flock", no_locks)
    first, second = store.claim(owner="a"), store.claim(owner="b")
    with pytest.raises(ShardLostError, match="taken over by b"):
        first.append(batch(range(3)))

    assert 3 == second.append(batch(range(3))).rows["scalars"]


def test_shard_must_be_i_of_n_and_its_lock_must_be_writable(store):
    for shard in ("", "1", "1/1", "a/b", "-1/2", "0/0", "../x"):
        with pytest.raises(ShardLockError, match="i/N"):
            store.claim(shard, owner="me")
    (store.root / "_shards").write_text("in the way")
    with pytest.raises(UnwritableError, match="cannot write"):
        store.claim(owner="me")


def test_path_that_would_be_misread_is_refused_with_the_character(tmp_path):
    """DuckDB would read other stores that match the pattern; delta-rs would write to another folder."""
    for path in (tmp_path / name for name in ("a*b", "a?b", "a[1]", "a%20b", "a\\b", "a\nb")):
        for opening in (lambda path=path: Store.open(path / "store", create=True), lambda path=path: connect(path)):
            with pytest.raises(StoreError, match="choose a path without"):
                opening()


@pytest.mark.parametrize(
    "name", few(2, ["a b", "a'b", "100%", "学习", "a#b", "a=b", 'a"b', "{a}", "~x", "a:b", "a,b", "$HOME"])
)
def test_any_other_path_works_for_every_reader(tmp_path, name, batch):
    root = tmp_path / name / "store"
    with Store.open(root, create=True).claim(owner="test") as writer:
        writer.append(batch(range(3)))
        writer.maintain()
    plain = duckdb.connect()
    plain.execute((root / "rankscope.sql").read_text(encoding="utf-8"))
    with connect(root, locked=True) as connection:
        assert [[(3,)], [(3,)]] == [ask(plain, COUNT), ask(connection, COUNT)]


@pytest.mark.parametrize("before", ["its predecessor", ""])
def test_lock_just_taken_is_reported_with_the_new_owner(store, before):
    """A process writes its name after it took the lock; until then, the file has an older name or none."""
    ShardLock.take(store.root, "0/1", before).release()
    (path,) = (store.root / "_shards").glob("*.lock")
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        naming = threading.Timer(0.03, path.write_text, ["host-b pid 2"])
        naming.start()
        with pytest.raises(ShardLockError, match="host-b pid 2, which is running"):
            store.claim(owner="me")
        naming.join()


def test_lock_without_a_name_on_a_full_disk_is_valid(folder, monkeypatch):
    store = Store.open(folder, create=True)

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.pwrite", refuse)
    with store.claim(owner="first"), pytest.raises(ShardLockError, match="an unnamed process"):
        store.claim(owner="second")


@pytest.mark.parametrize("path", ["s3://bucket/history", Path("s3://bucket/history"), "file:///data/history"])
def test_url_is_not_a_folder(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for opening in (lambda: Store.open(path, create=True), lambda: connect(path)):
        with pytest.raises(NotAStoreError, match="a store is a local folder"):
            opening()

    assert [] == list(tmp_path.iterdir())
