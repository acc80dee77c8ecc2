"""Connections always read the newest version; locked ones access only the store."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankscope_contract.model.schema import DATASETS, TENSOR_ROW_KEY
from rankscope_storage.api.store import Batch
from rankscope_storage.base.errors import FilesGoneError, QueryError
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import Connection, connect
from rankscope_storage.maintenance import compaction


@pytest.mark.usual(10)
@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("filled", [False, True])
def test_every_dataset_has_a_view_with_its_columns(connection, writer, dataset, filled):
    schema = dataset_schema(dataset)
    if filled:
        required = {field.name: ["x"] for field in schema if not field.nullable}
        writer.append(Batch(tables={dataset: pa.table(required)}, watermarks={}))
    answer = connection.query(f"FROM {dataset}")

    assert schema.names == answer.column_names
    assert schema.types == answer.schema.types
    assert int(filled) == answer.num_rows


def test_each_statement_reads_rows_appended_before_it(connection, writer, batch):
    seen = []
    for seq in range(3):
        writer.append(batch([seq]))
        seen.extend(connection.sql("SELECT count(*) FROM scalars").fetchall())

    assert [(1,), (2,), (3,)] == seen


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_copy_of_a_connection_is_closed_and_the_original_works(connection, writer, batch, way):
    writer.append(batch([1]))
    before = connection.query("FROM scalars")
    with way(connection) as copied:
        copied.close()
        questions = [
            *(lambda name=name: getattr(copied, name)("FROM scalars") for name in ("sql", "execute", "query")),
            *(lambda name=name: getattr(copied, name)("scalars") for name in ("files", "files_table", "relation")),
            lambda: list(copied.stream("FROM scalars")),
            copied.snapshot,
        ]
        for ask in questions:
            with pytest.raises(QueryError, match="open another one with connect"):
                ask()

    assert isinstance(copied, Connection)
    assert (connection.path, connection.version) == (copied.path, copied.version)
    assert {name for name in dir(connection) if name[0] != "_"} == {name for name in dir(copied) if name[0] != "_"}
    assert before == connection.query("FROM scalars")


def test_nan_infinity_null_and_zero_are_distinguished_in_sql(connection, writer, scalars):
    table = scalars(range(5)).set_column(8, "value", [[math.nan, math.inf, None, 0.0, -math.inf]])
    writer.append(Batch(tables={"scalars": table}, watermarks={"i0": 4}))
    query = "SELECT value IS NULL, isnan(value), isinf(value), value = 0 FROM scalars ORDER BY seq"

    assert [
        (False, True, False, False),
        (False, False, True, False),
        (True, None, None, None),
        (False, False, False, True),
        (False, False, True, False),
    ] == connection.sql(query).fetchall()


@pytest.mark.parametrize("asked", ["isnan(value)", "NOT isfinite(value)", "value = 'nan'", "value > 'inf'::DOUBLE"])
def test_nan_among_finite_numbers_is_found(connection, writer, scalars, asked):
    """If a footer had the range of the finite numbers, DuckDB would skip the file."""
    table = scalars(range(4)).set_column(8, "value", [[1.0, -1.0, math.nan, 2.0]])
    writer.append(Batch(tables={"scalars": table}, watermarks={"i0": 3}))

    assert [(2,)] == connection.sql(f"SELECT seq FROM scalars WHERE {asked}").fetchall()
    assert [(3,)] == connection.sql(f"SELECT count(*) FROM scalars WHERE NOT ({asked})").fetchall()


def test_parameters_and_fetch_methods_work(connection, writer, batch):
    writer.append(batch(range(3)))

    assert [(2,)] == connection.sql("SELECT count(*) FROM scalars WHERE seq > ?", [0]).fetchall()
    assert (3,) == connection.execute("SELECT count(*) FROM scalars").fetchone()
    assert [1, 2] == connection.query("SELECT seq FROM scalars WHERE seq > $low ORDER BY 1", {"low": 0})[
        "seq"
    ].to_pylist()
    assert 3 == connection.sql("FROM scalars").to_arrow_table().num_rows


def test_unfetched_result_does_not_block_the_next_query(connection, writer, batch):
    writer.append(batch(range(3)))
    connection.execute("FROM range(1000000)").fetchone()

    assert [(3,)] == connection.sql("SELECT count(*) FROM scalars").fetchall()


def test_relation_keeps_the_rows_of_its_version(connection, writer, batch):
    writer.append(batch(range(3)))
    relation = connection.sql("FROM scalars")
    writer.append(batch(range(6)))

    assert 3 == len(relation.fetchall())


def test_times_are_utc(connection, writer, batch):
    writer.append(batch([86_400]))

    assert [("1970-01-02 00:00:00+00",)] == connection.sql("SELECT ts::VARCHAR FROM scalars").fetchall()


def test_user_can_create_tables_and_files(connection, writer, batch, tmp_path):
    writer.append(batch(range(3)))
    connection.sql("CREATE TABLE mine AS SELECT seq FROM scalars")
    connection.sql(f"COPY mine TO '{tmp_path}/mine.csv'")

    assert [(3,)] == connection.sql(f"SELECT count(*) FROM '{tmp_path}/mine.csv'").fetchall()


def test_snapshot_keeps_its_version_during_appends_and_compaction(connection, writer, batch, monkeypatch):
    monkeypatch.setattr(compaction, "SMALL_FILES", 2)
    for seq in range(4):
        writer.append(batch([seq]))
    with connection.snapshot() as pinned:
        writer.append(batch(range(9)))
        writer.compact()

        assert [(4,)] == pinned.sql("SELECT count(*) FROM scalars").fetchall()
        assert [(9,)] == connection.sql("SELECT count(*) FROM scalars").fetchall()
        assert pinned.version < connection.version


def test_queries_in_pinned_read_one_version_and_later_ones_the_newest(connection, writer, batch):
    writer.append(batch(range(3)))
    with connection.pinned():
        writer.append(batch(range(5)))

        assert [(3,)] == connection.sql("SELECT count(*) FROM scalars").fetchall()
    assert [(5,)] == connection.sql("SELECT count(*) FROM scalars").fetchall()


def test_query_is_repeated_if_a_file_is_deleted_before_its_read(connection, writer, batch, monkeypatch):
    """The case that vacuum deletes a file which a slow reader still has in its list."""
    monkeypatch.setattr(compaction, "SMALL_FILES", 2)
    for seq in range(4):
        writer.append(batch([seq]))
    old = connection.files("scalars")
    genuine, calls = connection._refresh, []

    def vacuumed_after_the_first_refresh():
        genuine()
        calls.append(1)
        if len(calls) == 1:
            writer.compact()
            for path in old:
                Path(path).unlink()

    monkeypatch.setattr(connection, "_refresh", vacuumed_after_the_first_refresh)

    assert [(4, 6)] == connection.sql("SELECT count(*), sum(seq) FROM scalars").fetchall()
    assert 2 == len(calls)


def test_snapshot_with_deleted_files_raises_files_gone_error(connection, writer, batch):
    writer.append(batch(range(3)))
    with connection.snapshot() as pinned:
        for path in connection.files("scalars"):
            Path(path).unlink()
        with pytest.raises(FilesGoneError, match="query a newer version"):
            pinned.sql("SELECT sum(value) FROM scalars")


def test_dimensions_show_the_latest_version_and_history_all(connection, writer):
    for ordinal, state in ((1, "pending"), (3, "failed"), (2, "running")):
        row = {"run": ["r"], "ordinal": [ordinal], "state": [state]}
        writer.append(
            Batch(
                tables={"runs": pa.table(row), "attempts": pa.table({**row, "attempt": [ordinal % 2]})}, watermarks={}
            )
        )

    assert [("failed",)] == connection.sql("SELECT state FROM runs").fetchall()
    assert [(0, "running"), (1, "failed")] == connection.sql(
        "SELECT attempt, state FROM attempts ORDER BY 1"
    ).fetchall()
    assert [(3,)] == connection.sql("SELECT count(*) FROM runs_history").fetchall()


def test_files_are_pruned_by_run_and_step_from_the_log(connection, writer, batch):
    writer.append(batch(range(10), run="a", incarnation="a"))
    writer.append(batch(range(10, 20), run="b", incarnation="b"))
    every = connection.files("scalars")

    assert 2 == len(every)
    assert 1 == len(connection.files("scalars", run="a"))
    assert [] == connection.files("scalars", run="c")
    assert [] == connection.files("scalars", run="a", steps=(10, 30))
    assert connection.files("scalars", run="b") == connection.files("scalars", steps=(15, 99))
    assert 10 == connection.files_table("scalars", run="b")["rows"].to_pylist()[0]
    assert [(10,)] == connection.sql(f"SELECT count(*) FROM {connection.relation('scalars', run='b')}").fetchall()
    assert [(0,)] == connection.sql(f"SELECT count(*) FROM {connection.relation('scalars', run='c')}").fetchall()


ODD_RUNS = [
    "a/b",
    "..",
    "a=b",
    'it\'s "q"',
    "学习",
    "123",
    "2026-11-20",
    "",
    " ",
    "%41",
    "a\nb",
    "_shared-x",
    "\U0010ffff",
]


def test_runs_with_any_name_are_distinguished(connection, writer, batch, monkeypatch):
    monkeypatch.setattr("rankscope_storage.files.sorting.OWN_PART_ROWS", 5)
    for number, run in enumerate(ODD_RUNS):
        writer.append(batch(range(number % 3 + 4), run=run, incarnation=f"i{number}"))
    expected = sorted((run, number % 3 + 4) for number, run in enumerate(ODD_RUNS))

    assert expected == connection.sql("SELECT run, count(*)::INT FROM scalars GROUP BY 1 ORDER BY 1").fetchall()
    for run, count in expected:
        assert [(count,)] == connection.sql(
            f"SELECT count(*)::INT FROM {connection.relation('scalars', run=run)} WHERE run = ?", [run]
        ).fetchall()


@pytest.mark.thorough
def test_query_over_a_thousand_small_runs_reads_few_files(connection, writer, scalars):
    """Their rows share a part, so that a run needs no separate file."""
    for first in range(0, 1000, 50):
        tables = [
            scalars(range(3), run=f"run-{number}", incarnation=f"i{number}") for number in range(first, first + 50)
        ]
        marks = {f"i{number}": 2 for number in range(first, first + 50)}
        writer.append(Batch(tables={"scalars": pa.concat_tables(tables)}, watermarks=marks))
    query = "SELECT count(DISTINCT run), count(*), count(*) FILTER (run = 'run-617') FROM scalars"

    assert [(1000, 3000, 3)] == connection.sql(query).fetchall()
    assert 20 == len(connection.files("scalars"))
    assert 4 > len(connection.files("scalars", run="run-617"))

    writer.compact()

    assert [(1000, 3000, 3)] == connection.sql(query).fetchall()
    assert 1 == len(connection.files("scalars"))


def test_row_keys_are_unique_and_need_every_column(connection, writer):
    """One row per combination of key columns, including null; sorting and the watermark filter keep all of them."""
    rows = [
        {"run": "r"} | dict(zip(TENSOR_ROW_KEY, (i, s, v, k, t, x, m, c), strict=True))
        for i in "ab" for s in (0, 1) for v in (None, 0) for k in "pq" for t in "tu"
        for x in (None, 0) for m in (None, 1) for c in (None, 3)
    ]  # fmt: skip
    writer.append(Batch(tables={"tensor_stats": pa.Table.from_pylist(rows)}, watermarks={"a": 1, "b": 1}))
    key = ", ".join(f'"{name}"' for name in TENSOR_ROW_KEY)
    query = f"SELECT count(*), count(DISTINCT ({key})) FROM tensor_stats"

    assert [(256, 256)] == connection.sql(query).fetchall()


def test_files_with_older_columns_are_read_together_with_new_ones(connection, writer, batch, monkeypatch):
    """The state after an upgrade that added a column: it is null for older files."""
    writer.append(batch(range(3)))
    (path,) = map(Path, connection.files("scalars"))
    pq.write_table(pq.ParquetFile(path).read().drop_columns("labels"), path)
    monkeypatch.setattr("rankscope_storage.files.sorting.fingerprint", lambda dataset, *, whole: "0ld5hape")
    writer.append(batch(range(5)))
    monkeypatch.undo()
    writer.append(batch(range(6)))

    with connect(writer._log.root) as fresh:
        assert [(6, 0)] == fresh.sql("SELECT count(*), count(labels) FROM scalars").fetchall()
        assert dataset_schema("scalars").names == fresh.sql("FROM scalars").columns


# --- locked


@pytest.fixture
def locked(store, writer, batch):
    writer.append(batch(range(3)))
    with connect(store.root, locked=True) as connection:
        yield connection


@pytest.mark.usual(5)
@pytest.mark.parametrize(
    "query",
    [
        "SELECT count(*) FROM scalars",
        "FROM scalars",
        "WITH x AS (SELECT 1 AS a) SELECT a FROM x",
        'WITH "insert" AS (SELECT 1 AS copy) FROM "insert" -- delete',
        "DESCRIBE scalars",
        "SHOW TABLES",
        "SUMMARIZE scalars",
        "EXPLAIN SELECT 1",
        "EXPLAIN ANALYZE SELECT count(*) FROM scalars",
        "VALUES (1)",
        "SELECT 1;",
    ],
)
def test_locked_connection_executes_statements_that_only_read(locked, query):
    assert locked.sql(query).fetchall()


def test_locked_connection_works_in_a_removed_folder(store, writer, batch, tmp_path, monkeypatch):
    writer.append(batch(range(3)))
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with connect(store.root, locked=True) as connection:
        assert [(3,)] == connection.sql("SELECT count(*) FROM scalars").fetchall()
        with pytest.raises(duckdb.PermissionException):
            connection.sql("FROM read_text('/etc/hostname')").fetchall()


def test_locked_connection_reads_new_rows(locked, writer, batch):
    writer.append(batch(range(7)))

    assert [(7,)] == locked.sql("SELECT count(*) FROM scalars").fetchall()
    assert [(7,)] == locked.snapshot().sql("SELECT count(*) FROM scalars").fetchall()


@pytest.mark.usual(8)
@pytest.mark.parametrize(
    "query",
    [
        "COPY (SELECT 1) TO '{store}/x.csv'",
        "COPY scalars TO '{outside}/x.csv'",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{store}/x.csv'",
        "EXPLAIN (ANALYZE) COPY (SELECT 1) TO '{store}/x.csv'",
        "EXPLAIN /* */ ANALYZE COPY (SELECT 1) TO '{store}/x.csv'",
        "explain\nanalyze\ncopy (select 1) to '{store}/x.csv'",
        "SELECT 1; COPY (SELECT 1) TO '{store}/x.csv'",
        "ATTACH '{store}/x.db'",
        "EXPORT DATABASE '{store}/x'",
        "CREATE TABLE x AS SELECT 1",
        "SET VARIABLE rankscope_files_scalars = ['{outside}/secret.parquet']",
        "SET enable_external_access = true",
        "PRAGMA enable_profiling",
        "INSTALL httpfs",
        "LOAD httpfs",
        "CALL pragma_version()",
        "WITH x AS (COPY (SELECT 1) TO '{store}/x.csv') FROM x",
        "EXPLAIN ANALYZE WITH x AS (COPY (SELECT 1) TO '{store}/x.csv') FROM x",
        "WITH x AS (DELETE FROM rankscope_raw.tensor_newest RETURNING *) FROM x",
        "WITH x AS (TRUNCATE rankscope_raw.tensor_newest) SELECT 1",
        "WITH x AS (DELETE FROM rankscope_raw.scalar_extents RETURNING *) FROM x",
        "DROP VIEW scalars",
        "",
        "SELECT",
    ],
)
def test_locked_connection_refuses_all_other_statements(locked, store, tmp_path, query):
    before = sorted(store.root.rglob("*"))
    with pytest.raises(QueryError):
        locked.sql(query.format(store=store.root, outside=tmp_path))

    assert before == sorted(store.root.rglob("*"))


@pytest.mark.parametrize(
    "query",
    [
        "FROM read_text('/etc/passwd')",
        "FROM '/etc/passwd'",
        "FROM read_csv('{outside}/secret.csv')",
        "FROM glob('/etc/*')",
        "FROM read_text('{store}/../secret.csv')",
        "FROM read_csv('http://127.0.0.1:9/x.csv')",
    ],
)
def test_locked_connection_accesses_only_the_store(locked, store, tmp_path, query):
    (tmp_path / "secret.csv").write_text("secret\n1\n")
    for ask in (locked.sql, locked.query, locked.execute):
        with pytest.raises(duckdb.Error, match=r"(?i)disabled by configuration|does not exist"):
            ask(query.format(store=store.root, outside=tmp_path))
