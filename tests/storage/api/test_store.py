"""Opening and claiming: what is wrong with a folder is said in words that name the remedy."""

from __future__ import annotations

import errno
import fcntl
import json
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
from rankscope_storage.log.delta import Log
from rankscope_storage.log.shard_lock import ShardLock, shard_transaction
from rankscope_storage.log.translation import Change
from rankscope_storage.maintenance.check import check
from rankscope_storage.maintenance.file_check import Fault
from rankscope_storage.maintenance.repair import repair

NO_LINKS = Path(__file__).with_name("no_links.py")


def test_a_store_is_created_only_when_asked_for(folder):
    with pytest.raises(NotAStoreError, match="rankscope serve"):
        Store.open(folder)

    assert not folder.exists()
    assert folder == Store.open(folder, create=True).root
    assert folder == Store.open(folder).root
    assert folder == Store.open(folder, create=True).root


def test_a_missing_store_cannot_be_read(folder):
    with pytest.raises(NotAStoreError, match="rankscope serve"):
        connect(folder)


def test_a_file_is_not_a_store(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotAStoreError, match="is a file"):
        Store.open(tmp_path / "file", create=True)


def test_a_strange_delta_table_is_not_a_store(tmp_path):
    DeltaTable.create(str(tmp_path), schema=Schema.from_arrow(pa.schema([("a", pa.int64())])))
    with pytest.raises(NotAStoreError, match="not a Rankscope store"):
        Store.open(tmp_path)


def test_a_folder_below_a_file_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UnwritableError, match="cannot write to"):
        Store.open(tmp_path / "file" / "store", create=True)


def test_a_folder_without_the_right_to_write_says_so(tmp_path):
    """As another user, since the rights of a folder do not bind root."""
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


def run_without_links(program: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, NO_LINKS, program], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("this kernel lets no process install a seccomp filter")
    return done


def test_a_folder_without_hard_links_is_told_at_once(folder):
    done = run_without_links(f"from rankscope_storage.api.store import Store\nStore.open({str(folder)!r}, create=True)")

    assert "UnwritableError" in done.stderr
    assert "file system without hard links" in done.stderr
    assert not (folder / "_delta_log").exists()


def test_delta_rs_needs_hard_links(folder):
    """Pins why we try one: without this, the first commit would fail with a riddle."""
    program = (
        "import pyarrow as pa\nfrom deltalake import write_deltalake\n"
        f"write_deltalake({str(folder)!r}, pa.table({{'a': [1]}}))"
    )
    done = run_without_links(program)

    assert done.returncode != 0
    assert "Operation not permitted" in done.stderr


def test_a_newer_schema_asks_for_an_upgrade(store, monkeypatch):
    table = DeltaTable(str(store.root))
    table.alter.set_table_properties({"rankscope.schema_version": str(SCHEMA_VERSION + 1)}, raise_if_not_exists=False)
    for opening in (lambda: Store.open(store.root), lambda: connect(store.root)):
        with pytest.raises(SchemaVersionError, match="upgrade"):
            opening()


def test_columns_that_a_newer_schema_has_are_added_at_the_claim(store, monkeypatch, batch):
    wider = log_module.table_schema().append(pa.field("brand_new", pa.int64()))
    monkeypatch.setattr(log_module, "table_schema", lambda: wider)
    with store.claim(owner="me") as writer:
        writer.append(batch(range(3)))

    assert "brand_new" in [field.name for field in DeltaTable(str(store.root)).schema().fields]


def newest_entry(root: Path) -> Path:
    return max((root / "_delta_log").glob("*.json"))


@pytest.mark.parametrize("kept", [1, 50, 300])
def test_a_torn_last_entry_is_named_with_the_remedy_and_the_remedy_works(store, batch, kept):
    with store.claim(owner="me") as writer:
        writer.append(batch(range(3)))
        writer.append(batch(range(3, 6)))
    torn = newest_entry(store.root)
    torn.write_bytes(torn.read_bytes()[:kept])
    for opening in (lambda: Store.open(store.root), lambda: connect(store.root)):
        with pytest.raises(TornLogError, match="move that file away"):
            opening()
    torn.rename(store.root / "_staging" / "torn.json")
    with Store.open(store.root).claim(owner="me") as writer, connect(store.root) as connection:
        assert 2 == writer.watermark("i0")

        writer.append(batch(range(6)))

        assert [(6,)] == connection.sql("SELECT count(*) FROM scalars").fetchall()


def test_a_last_entry_of_no_bytes_is_a_commit_of_nothing(store, batch):
    """What is left when power fails between the making of a name and its content."""
    with store.claim(owner="me") as writer:
        writer.append(batch(range(3)))
        writer.append(batch(range(3, 6)))
    newest_entry(store.root).write_bytes(b"")
    assert [Fault.EMPTY_ENTRY] == [
        finding.fault for finding in check(store.root).findings if "_delta_log" in finding.path
    ]
    with Store.open(store.root).claim(owner="me") as writer, connect(store.root) as connection:
        writer.append(batch(range(6)))

        assert [(6,)] == connection.sql("SELECT count(*) FROM scalars").fetchall()
    # Commits build on it by now, and it is still no damage that somebody would have to repair.
    report = check(store.root)

    assert Fault.EMPTY_ENTRY in [finding.fault for finding in report.findings]
    assert report.is_intact
    assert None is repair(store.root, sync_to_disk).torn_entry


def test_an_unreadable_log_tells_one_line_and_no_trace_of_rust(store):
    (store.root / "_delta_log" / "00000000000000000000.json").write_text('{"protocol":{"minReaderVersion":99}}\n')
    with pytest.raises(StoreError) as raised:
        Store.open(store.root)

    assert "\n" not in str(raised.value)


# --- claims


def test_two_live_writers_on_one_shard_one_wins_and_the_other_says_who(store, writer):
    with pytest.raises(ShardLockError, match="host-a pid 1, which is alive"):
        store.claim(owner="host-b pid 2")


def test_shards_do_not_disturb_each_other(store, batch, connection):
    with store.claim("0/2", owner="a") as one, store.claim("1/2", owner="b") as other:
        for number in range(4):
            one.append(batch([number], incarnation="i0"))
            other.append(batch([number], incarnation="i1", rank=1))

    assert [(8, 8)] == connection.sql("SELECT count(*), count(DISTINCT (incarnation, seq)) FROM scalars").fetchall()


def test_a_closed_writer_leaves_the_shard_to_the_next(store, batch):
    with store.claim(owner="a") as first:
        first.append(batch(range(3)))
    with store.claim(owner="b") as second:
        assert 2 == second.watermark("i0")


def claim_as_from_another_machine(store: Store, owner: str):
    """Claim where the lock file of the owner is not seen: the numbers in the log alone decide."""
    for lock in (store.root / "_shards").iterdir():
        lock.unlink()
    return store.claim(owner=owner)


def test_an_owner_on_another_machine_stops_at_its_next_append_and_says_why(store, writer, batch, connection):
    writer.append(batch(range(3)))
    with claim_as_from_another_machine(store, "host-b pid 2") as successor:
        with pytest.raises(ShardLostError, match="host-b pid 2"):
            writer.append(batch(range(3, 6)))
        with pytest.raises(ShardLostError):
            writer.watermark("i0")
        successor.append(batch(range(6)))

    assert [(6, 6)] == connection.sql("SELECT count(*), count(DISTINCT seq) FROM scalars").fetchall()


def test_a_claim_between_look_and_commit_refuses_the_commit_and_leaves_no_file(store, writer, batch, monkeypatch):
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


def test_of_two_claims_in_one_moment_the_loser_names_the_winner(store, monkeypatch):
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

    store.claim(owner="me").close()  # the loser holds no lock


def test_a_file_system_without_locks_leaves_the_decision_to_the_log(store, monkeypatch, batch):
    def no_locks(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("rankscope_storage.log.shard_lock.fcntl.flock", no_locks)
    first, second = store.claim(owner="a"), store.claim(owner="b")
    with pytest.raises(ShardLostError, match="taken over by b"):
        first.append(batch(range(3)))

    assert 3 == second.append(batch(range(3))).rows["scalars"]


@pytest.mark.parametrize("shard", ["", "1", "1/1", "a/b", "-1/2", "0/0", "../x"])
def test_a_shard_must_be_one_of_n(store, shard):
    with pytest.raises(ShardLockError, match="i/N"):
        store.claim(shard, owner="me")


def test_a_lock_that_cannot_be_made_is_told(store):
    (store.root / "_shards").write_text("in the way")
    with pytest.raises(UnwritableError, match="cannot write"):
        store.claim(owner="me")


def test_a_lock_is_released_once_and_for_all(store):
    lock = ShardLock.take(store.root, "0/1", "me")
    lock.release()
    lock.release()

    ShardLock.take(store.root, "0/1", "you").release()


def test_every_commit_says_who_made_it(store, writer, batch):
    writer.append(batch(range(3)))
    entry = newest_entry(store.root).read_text().splitlines()
    info = next(json.loads(line)["commitInfo"] for line in entry if line.startswith('{"commitInfo"'))

    assert ("0/1", "host-a pid 1") == (info["rankscopeShard"], info["rankscopeOwner"])


@pytest.mark.parametrize("name", ["a*b", "a?b", "a[1]", "a%20b", "a\\b", "a\nb"])
def test_a_path_that_would_be_misread_is_refused_and_the_character_named(tmp_path, name):
    """DuckDB would read other stores that match the pattern, delta-rs write into another folder."""
    for opening in (lambda: Store.open(tmp_path / name / "store", create=True), lambda: connect(tmp_path / name)):
        with pytest.raises(StoreError, match="choose a folder without"):
            opening()


@pytest.mark.parametrize(
    "name", ["a b", "a#b", "100%", "a=b", "a'b", 'a"b', "学习", "{a}", "~x", "a:b", "a,b", "$HOME"]
)
def test_any_other_path_holds_a_store_for_every_reader(tmp_path, name, batch):
    root = tmp_path / name / "store"
    with Store.open(root, create=True).claim(owner="test") as writer:
        writer.append(batch(range(3)))
        writer.maintain()
    plain = duckdb.connect()
    plain.execute((root / "rankscope.sql").read_text(encoding="utf-8"))
    with connect(root, locked=True) as connection:
        counts = [reader.sql("SELECT count(*) FROM scalars").fetchall() for reader in (plain, connection)]

    assert [[(3,)], [(3,)]] == counts


def test_a_creation_that_a_full_disk_cut_short_is_finished_the_next_time(folder):
    (folder / log_module.LOG_FOLDER).mkdir(parents=True)

    assert folder == Store.open(folder, create=True).root
    assert 0 == Log.open(folder, sync_to_disk).version


@pytest.mark.parametrize("before", ["its predecessor", ""])
def test_a_shard_that_was_taken_a_moment_ago_is_told_by_the_name_of_who_has_it(store, before):
    """The lock comes first and the name after it: between them stands the name of a dead process, or none."""
    ShardLock.take(store.root, "0/1", before).release()
    (path,) = (store.root / "_shards").glob("*.lock")
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        naming = threading.Timer(0.03, path.write_text, ["host-b pid 2"])
        naming.start()
        with pytest.raises(ShardLockError, match="host-b pid 2, which is alive"):
            store.claim(owner="me")
        naming.join()


def test_a_full_disk_takes_no_name_but_the_lock_holds(folder, monkeypatch):
    store = Store.open(folder, create=True)

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.pwrite", refuse)
    with store.claim(owner="first"), pytest.raises(ShardLockError, match="an unnamed process"):
        store.claim(owner="second")


@pytest.mark.parametrize("path", ["s3://bucket/history", Path("s3://bucket/history"), "file:///data/history"])
def test_a_url_is_not_taken_for_a_folder(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotAStoreError, match="a store is a local folder"):
        Store.open(path, create=True)
    with pytest.raises(NotAStoreError, match="a store is a local folder"):
        connect(path)

    assert [] == list(tmp_path.iterdir())
