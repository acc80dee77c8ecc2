"""What a connection leaves behind for the next one, and what it does not."""

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


def test_the_next_connection_finds_views_made_and_sees_the_newest_rows(store, writer, batch):
    with connect(store.root) as connection:
        connection.query("FROM loss_curve")
        engine = connection._views.engine
    writer.append(batch(range(3)))
    with connect(store.root) as connection:
        assert engine is connection._views.engine
        assert "loss_curve" in connection._views.engine.defined
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
def test_who_changes_more_than_an_answer_leaves_nothing_behind(store, writer, batch, statement):
    writer.append(batch(range(3)))
    with connect(store.root) as connection:
        connection.execute(statement)

    assert [] == pool._idle


def test_locked_and_open_connections_and_other_stores_share_nothing(store, writer, batch, tmp_path):
    other = Store.open(tmp_path / "other", create=True)
    used = []
    for root, locked in ((store.root, False), (store.root, True), (other.root, False), (other.root, True)):
        with connect(root, locked=locked) as connection:
            used.append(connection._views.engine)
            assert [(0,)] == connection.sql("SELECT count(*) FROM scalars").fetchall()

    assert 4 == len({id(engine) for engine in used})


def test_a_single_threaded_connection_starts_no_thread_and_leaves_free_memory_alone(store, writer, batch):
    """DuckDB's threads give it back for all of the process, each when it had nothing to do for half a second."""
    writer.append(batch(range(3)))
    sentence = "SELECT current_setting('threads'), current_setting('async_threads')"
    with connect(store.root, single_threaded=True) as connection, connection.snapshot() as pinned:
        told = [connection.execute(sentence).fetchall(), pinned.execute(sentence).fetchall()]
        rows = connection.query("FROM scalars").num_rows
    with connect(store.root) as connection:
        shared = connection._views.engine.single_threaded

    assert [[(1, 0)]] * 2 == told
    assert (3, False) == (rows, shared)


def test_a_connection_that_is_closed_answers_nothing_and_harms_nobody(store, writer, batch):
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


def test_two_connections_at_once_have_a_database_each(store, writer, batch):
    with connect(store.root) as one, connect(store.root) as two, one.snapshot() as three:
        assert 3 == len({id(connection._views.engine) for connection in (one, two, three)})


def test_no_more_wait_than_allowed(store, monkeypatch):
    monkeypatch.setattr(pool, "IDLE", 2)
    opened = [connect(store.root) for _ in range(4)]
    for connection in opened:
        connection.close()

    assert 2 == len(pool._idle)


def test_who_remembers_too_many_footers_is_not_used_again(store, writer, batch, monkeypatch):
    monkeypatch.setattr(pool, "FOOTERS", -2)
    writer.append(batch(range(3)))
    with connect(store.root) as connection:
        connection.query("FROM scalars")

    assert [] == pool._idle


def test_a_store_that_was_removed_and_made_again_is_another(store, writer, batch):
    writer.append(batch(range(3)))
    with connect(store.root) as connection:
        assert 3 == connection.query("FROM scalars").num_rows
    writer.close()
    shutil.rmtree(store.root)
    Store.open(store.root, create=True)
    with connect(store.root) as connection:
        assert 0 == connection.query("FROM scalars").num_rows


def test_files_of_a_user_are_read_anew_though_those_of_the_store_are_not(store, writer, batch, tmp_path):
    writer.append(batch(range(3)))
    path = tmp_path / "mine.parquet"
    with connect(store.root) as connection:
        for rows in (2, 5):
            connection.query("SELECT count(*) FROM scalars")
            duckdb.connect().execute(f"COPY (FROM range({rows})) TO '{path}'")
            assert [(rows,)] == connection.sql(f"SELECT count(*) FROM '{path}'").fetchall()


def test_a_forked_child_starts_with_none(store):
    connect(store.root).close()
    child = os.fork()
    if not child:
        os._exit(0 if pool._idle == [] else 1)

    assert 0 == os.waitpid(child, 0)[1]
    assert 1 == len(pool._idle)


def test_a_connection_that_lives_long_begins_anew_before_it_remembers_too_much(store, writer, batch, monkeypatch):
    monkeypatch.setattr(pool, "FOOTERS", -4)
    writer.append(batch([0]))
    with connect(store.root) as connection:
        relation, first = connection.sql("SELECT count(*) FROM scalars"), connection._views.engine
        writer.append(batch(range(2)))

        assert [(1,)] == relation.fetchall()
        assert [(2,)] == connection.sql("SELECT count(*) FROM scalars").fetchall()
        assert first is not connection._views.engine


def test_who_looks_at_a_live_store_remembers_few_files_that_are_gone(store, writer, batch, monkeypatch):
    """Compaction replaces what was looked at: hundreds of files an hour, each with some ten kilobytes of its own."""
    monkeypatch.setattr(pool, "FOOTERS", 6)
    most, used = 0, set()
    with connect(store.root) as connection:
        for seq in range(60):
            writer.append(batch([seq]))
            writer.compact()
            assert [(seq + 1,)] == connection.sql("SELECT count(*) FROM scalars").fetchall()
            engine = connection._views.engine
            used.add(id(engine))
            most = max(most, len(engine.footers))

    assert 2 <= len(used) < 20, "it begins anew, and seldom"
    assert most <= 11 + 6 + 6 // 2 + 3, "the small files that are there, those that may be gone, and what came since"


def test_a_store_made_again_while_somebody_looked_at_the_old_one_is_another(store, writer, batch):
    writer.append(batch(range(3)))
    connect(store.root).close()
    with connect(store.root, version=1):
        writer.close()
        shutil.rmtree(store.root)
        with Store.open(store.root, create=True).claim(owner="next") as successor:
            successor.append(batch(range(7)))
    with connect(store.root) as connection:
        assert 7 == connection.query("FROM scalars").num_rows
