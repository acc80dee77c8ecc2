"""State that the pool keeps for the next connection, and state that it drops."""

import os
import shutil

import duckdb
import pytest
from tests.storage.rows import ask

from rankscope_storage.api.store import Store
from rankscope_storage.connection import connect, pool

COUNT = "SELECT count(*) FROM scalars"


@pytest.fixture(autouse=True)
def nothing_waits(monkeypatch):
    monkeypatch.setattr(pool, "_idle", [])


@pytest.fixture
def three(writer, batch):
    writer.append(batch(range(3)))


MODIFYING = [
    *("CREATE TABLE mine (x INT)", "CREATE OR REPLACE VIEW scalars AS SELECT 1", "SET threads = 1"),
    *("PIVOT scalars ON name", "FROM enable_logging('QueryLog')"),
    "WITH said AS (INSERT INTO rankscope_raw.tensor_newest VALUES ('a', 0, 0, 'grad', 7) RETURNING *) FROM said",
]


def test_instance_modified_by_a_statement_is_not_reused(store, three):
    for statement in MODIFYING:
        with connect(store.root) as connection:
            connection.execute(statement)

        assert [] == pool._idle, statement


def test_locked_and_concurrent_connections_and_stores_share_no_instance(store, tmp_path):
    other = Store.open(tmp_path / "other", create=True)
    used = []
    for root, locked in ((store.root, False), (store.root, True), (other.root, False), (other.root, True)):
        with connect(root, locked=locked) as one, connect(root, locked=locked) as other_one, one.snapshot() as pinned:
            used += [connection._views.instance for connection in (one, other_one, pinned)]
            assert [[(0,)]] * 3 == [ask(connection, COUNT) for connection in (one, other_one, pinned)]

    assert 4 * 3 == len({id(instance) for instance in used})


def test_single_threaded_connection_starts_no_thread(store, three):
    """Threads of DuckDB return free memory of the whole process half a second after their last task."""
    sentence = "SELECT current_setting('threads'), current_setting('async_threads')"
    with connect(store.root, single_threaded=True) as connection, connection.snapshot() as pinned:
        told = [ask(connection, sentence), ask(pinned, sentence), ask(connection, COUNT)]
    with connect(store.root) as connection:
        assert not connection._views.instance.single_threaded

    assert [[(1, 0)], [(1, 0)], [(3,)]] == told


def test_closed_connection_refuses_queries_and_does_not_affect_others(store, three):
    first = connect(store.root)
    relation = first.sql("FROM scalars")
    first.close()
    first.close()
    with connect(store.root) as second:
        with pytest.raises(duckdb.ConnectionException):
            relation.filter("seq > 0").fetchall()
        assert [(3,)] == ask(second, COUNT)
    assert 1 == len(pool._idle)


def test_pool_keeps_few_instances_with_few_footers(store, three, monkeypatch):
    monkeypatch.setattr(pool, "IDLE", 2)
    opened = [connect(store.root) for _ in range(4)]
    for connection in opened:
        connection.close()
    kept = len(pool._idle)
    monkeypatch.setattr(pool, "FOOTERS", -2)
    with connect(store.root) as one, connect(store.root) as other:
        assert [[(3,)]] * 2 == [ask(one, COUNT), ask(other, COUNT)]

    assert (2, []) == (kept, pool._idle)


def test_long_lived_connection_replaces_its_full_instance(store, writer, batch, monkeypatch):
    monkeypatch.setattr(pool, "FOOTERS", -4)
    writer.append(batch([0]))
    with connect(store.root) as connection:
        relation, first = connection.sql(COUNT), connection._views.instance
        writer.append(batch(range(2)))

        assert ([(1,)], [(2,)]) == (relation.fetchall(), ask(connection, COUNT))
        assert first is not connection._views.instance


def test_store_that_was_deleted_and_created_again_is_a_new_store(store, writer, batch, three):
    """A process deletes it while no connection is open, and then during a connection."""
    assert [(3,)] == ask(store.root, COUNT)
    writer.close()
    shutil.rmtree(store.root)
    Store.open(store.root, create=True)
    assert [(0,)] == ask(store.root, COUNT)
    with connect(store.root, version=0):
        shutil.rmtree(store.root)
        with Store.open(store.root, create=True).claim(owner="next") as successor:
            successor.append(batch(range(7)))

    assert [(7,)] == ask(store.root, COUNT)


def test_files_of_a_user_are_validated_at_each_query(store, three, tmp_path):
    path = tmp_path / "mine.parquet"
    with connect(store.root) as connection:
        for rows in (2, 5):
            ask(connection, COUNT)
            duckdb.connect().execute(f"COPY (FROM range({rows})) TO '{path}'")
            assert [(rows,)] == ask(connection, f"SELECT count(*) FROM '{path}'")


def test_forked_child_starts_without_instances(store):
    connect(store.root).close()
    child = os.fork()
    if not child:
        os._exit(0 if pool._idle == [] else 1)

    assert 0 == os.waitpid(child, 0)[1]
    assert 1 == len(pool._idle)
