"""State that the pool keeps for the next connection, and state that it drops."""

from __future__ import annotations

import os
import shutil

import duckdb
import pytest

from rankscope_storage.api.store import Store
from rankscope_storage.connection import connect, pool


@pytest.fixture(autouse=True)
def nothing_waits(monkeypatch):
    monkeypatch.setattr(pool, "_idle", [])


def test_next_connection_reuses_views_and_reads_the_newest_rows(store, writer, batch):
    with connect(store.root) as connection:
        connection.query("FROM loss_curve")
        instance = connection._views.instance
    writer.append(batch(range(3)))
    with connect(store.root) as connection:
        assert instance is connection._views.instance
        assert "loss_curve" in connection._views.instance.defined
        assert 3 == connection.query("FROM loss_curve").num_rows


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE mine (x INT)",
        "CREATE OR REPLACE VIEW scalars AS SELECT 1",
        "SET threads = 1",
        "PIVOT scalars ON name",
        "WITH said AS (INSERT INTO rankscope_raw.tensor_newest VALUES ('a', 0, 0, 'grad', 7) RETURNING *) FROM said",
        "FROM enable_logging('QueryLog')",
    ],
)
def test_instance_modified_by_a_statement_is_not_reused(store, writer, batch, statement):
    writer.append(batch(range(3)))
    with connect(store.root) as connection:
        connection.execute(statement)

    assert [] == pool._idle


def test_locked_and_unlocked_connections_and_stores_share_no_instance(store, writer, batch, tmp_path):
    other = Store.open(tmp_path / "other", create=True)
    used = []
    for root, locked in ((store.root, False), (store.root, True), (other.root, False), (other.root, True)):
        with connect(root, locked=locked) as connection:
            used.append(connection._views.instance)
            assert [(0,)] == connection.sql("SELECT count(*) FROM scalars").fetchall()

    assert 4 == len({id(instance) for instance in used})


def test_single_threaded_connection_starts_no_thread(store, writer, batch):
    """Threads of DuckDB return free memory of the whole process half a second after their last task."""
    writer.append(batch(range(3)))
    sentence = "SELECT current_setting('threads'), current_setting('async_threads')"
    with connect(store.root, single_threaded=True) as connection, connection.snapshot() as pinned:
        told = [connection.execute(sentence).fetchall(), pinned.execute(sentence).fetchall()]
        rows = connection.query("FROM scalars").num_rows
    with connect(store.root) as connection:
        shared = connection._views.instance.single_threaded

    assert [[(1, 0)]] * 2 == told
    assert (3, False) == (rows, shared)


def test_closed_connection_refuses_queries_and_does_not_affect_others(store, writer, batch):
    writer.append(batch(range(3)))
    first = connect(store.root)
    relation = first.sql("FROM scalars")
    first.close()
    first.close()
    with connect(store.root) as second:
        with pytest.raises(duckdb.ConnectionException):
            relation.filter("seq > 0").fetchall()
        assert [(3,)] == second.sql("SELECT count(*) FROM scalars").fetchall()
    assert 1 == len(pool._idle)


def test_concurrent_connections_have_separate_instances(store, writer, batch):
    with connect(store.root) as one, connect(store.root) as two, one.snapshot() as three:
        assert 3 == len({id(connection._views.instance) for connection in (one, two, three)})


def test_pool_keeps_at_most_the_configured_number_of_instances(store, monkeypatch):
    monkeypatch.setattr(pool, "IDLE", 2)
    opened = [connect(store.root) for _ in range(4)]
    for connection in opened:
        connection.close()

    assert 2 == len(pool._idle)


def test_instance_above_footer_limit_is_not_reused(store, writer, batch, monkeypatch):
    monkeypatch.setattr(pool, "FOOTERS", -2)
    writer.append(batch(range(3)))
    with connect(store.root) as connection:
        connection.query("FROM scalars")

    assert [] == pool._idle


def test_store_that_was_deleted_and_created_again_is_a_new_store(store, writer, batch):
    writer.append(batch(range(3)))
    with connect(store.root) as connection:
        assert 3 == connection.query("FROM scalars").num_rows
    writer.close()
    shutil.rmtree(store.root)
    Store.open(store.root, create=True)
    with connect(store.root) as connection:
        assert 0 == connection.query("FROM scalars").num_rows


def test_files_of_a_user_are_validated_at_each_query(store, writer, batch, tmp_path):
    writer.append(batch(range(3)))
    path = tmp_path / "mine.parquet"
    with connect(store.root) as connection:
        for rows in (2, 5):
            connection.query("SELECT count(*) FROM scalars")
            duckdb.connect().execute(f"COPY (FROM range({rows})) TO '{path}'")
            assert [(rows,)] == connection.sql(f"SELECT count(*) FROM '{path}'").fetchall()


def test_forked_child_starts_without_instances(store):
    connect(store.root).close()
    child = os.fork()
    if not child:
        os._exit(0 if pool._idle == [] else 1)

    assert 0 == os.waitpid(child, 0)[1]
    assert 1 == len(pool._idle)


def test_long_lived_connection_replaces_its_full_instance(store, writer, batch, monkeypatch):
    monkeypatch.setattr(pool, "FOOTERS", -4)
    writer.append(batch([0]))
    with connect(store.root) as connection:
        relation, first = connection.sql("SELECT count(*) FROM scalars"), connection._views.instance
        writer.append(batch(range(2)))

        assert [(1,)] == relation.fetchall()
        assert [(2,)] == connection.sql("SELECT count(*) FROM scalars").fetchall()
        assert first is not connection._views.instance


@pytest.mark.thorough
def test_queries_of_a_live_store_cache_few_footers_of_deleted_files(store, writer, batch, monkeypatch):
    """Compaction replaces hundreds of queried files per hour, each with a footer of about ten kilobytes."""
    monkeypatch.setattr(pool, "FOOTERS", 6)
    most, used = 0, set()
    with connect(store.root) as connection:
        for seq in range(60):
            writer.append(batch([seq]))
            writer.compact()
            assert [(seq + 1,)] == connection.sql("SELECT count(*) FROM scalars").fetchall()
            instance = connection._views.instance
            used.add(id(instance))
            most = max(most, len(instance.footers))

    assert 2 <= len(used) < 20, "it begins anew, and seldom"
    assert most <= 11 + 6 + 6 // 2 + 3, "the small files that are there, those that may be gone, and what came since"


def test_store_created_again_during_a_connection_is_a_new_store(store, writer, batch):
    writer.append(batch(range(3)))
    connect(store.root).close()
    with connect(store.root, version=1):
        writer.close()
        shutil.rmtree(store.root)
        with Store.open(store.root, create=True).claim(owner="next") as successor:
            successor.append(batch(range(7)))
    with connect(store.root) as connection:
        assert 7 == connection.query("FROM scalars").num_rows
