"""Copies of a store while it is written, of damaged files, and to a place where another store is created."""

import pytest
from tests.storage.crashes.operations import rows

from rankscope_storage.api.store import Store, Writer
from rankscope_storage.base.errors import StoreError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.connection import connect
from rankscope_storage.log.delta import Log
from rankscope_storage.maintenance.copying import copy_store

STORED = 6


@pytest.fixture
def writer(store: Store) -> Writer:
    writer = store.claim(owner="a")
    for seq in range(0, STORED, 2):
        writer.append(rows(seq, 2))
    return writer


def at_first_file(action):
    """Return a function for the progress of a copy, which calls `action` after the first file."""
    return lambda done, _: action() if done == 1 else None


@pytest.mark.parametrize("commits", [0, 4, 30])
def test_copy_has_one_version_of_a_store_that_is_written_meanwhile(commits, store, writer, tmp_path):
    """With 4 commits, the copied version is that of a checkpoint; after 30, its checkpoint is an older one."""

    def write() -> None:
        for seq in range(STORED, STORED + commits):
            writer.append(rows(seq, 1))
        writer.maintain()

    if commits == 4:
        write()
    expected = (STORED + (4 if commits == 4 else 0)) * 2
    copied = copy_store(store.root, tmp_path / "copy", sync_to_disk, at_first_file(write))
    with connect(tmp_path / "copy") as connection:
        found = connection.query("SELECT count(*) AS rows FROM scalars").to_pylist()

    assert [{"rows": expected}] == found
    assert copied.version == Log.open(tmp_path / "copy", sync_to_disk).version
    Store.open(tmp_path / "copy").claim(owner="b").append(rows(STORED + commits, 1))


@pytest.mark.parametrize("place", ["source", "target"])
def test_copy_repairs_a_damaged_file_of_the_target_and_refuses_a_source(place, store, writer, tmp_path):
    target = tmp_path / "copy"
    copied = copy_store(store.root, target, sync_to_disk)
    newest = max((target / "_delta_log").glob("*.json"))
    newest.unlink()  # as after an interruption
    with pytest.raises(StoreError, match="incomplete copy of a store: run `rankscope store copy` to this place again"):
        Store.open(target, create=True)
    root = store.root if place == "source" else target
    path = root / Log.open(store.root, sync_to_disk).snapshot().files["path"][0].as_py()
    content = bytearray(path.read_bytes())
    content[4:400] = bytes(396)
    path.write_bytes(content)

    if place == "source":
        with pytest.raises(StoreError, match="cannot be decoded"):
            copy_store(store.root, target, sync_to_disk)
    else:
        assert copied.files - 1 == copy_store(store.root, target, sync_to_disk).resumed
        with connect(target) as connection:
            assert STORED * 2 == connection.query("SELECT sum(value), count(*) AS n FROM scalars")["n"][0].as_py()


def test_copy_never_writes_into_a_store_that_is_created_meanwhile(store, writer, tmp_path):
    target = tmp_path / "copy"
    with pytest.raises(StoreError, match="is a store already"):
        copy_store(store.root, target, sync_to_disk, at_first_file(lambda: Store.open(target, create=True)))

    assert 0 == Log.open(target, sync_to_disk).version
