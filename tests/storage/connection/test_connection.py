"""Connections read the newest version, locked ones access only the store; analysed statements return the same rows."""

import copy
import itertools
import math
import pickle
import random
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.properties import few
from tests.storage.rows import ask, put

from rankscope_storage.api.store import Batch
from rankscope_storage.base.datasets import DATASETS, TENSOR_ROW_KEY
from rankscope_storage.base.errors import FilesGoneError, QueryError
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import Connection, connect
from rankscope_storage.connection.view_binding import LATEST
from rankscope_storage.maintenance import compaction
from rankscope_storage.query import file_facts

COUNT = "SELECT count(*) FROM scalars"


def test_every_dataset_has_a_view_with_its_columns(connection, writer):
    for rows in (0, 1):
        for dataset in DATASETS:
            schema, answer = dataset_schema(dataset), connection.query(f"FROM {dataset}")

            assert (schema.names, schema.types) == (answer.column_names, answer.schema.types), dataset
            assert rows == answer.num_rows, dataset
            required = {field.name: ["x"] for field in schema if not field.nullable}
            writer.append(Batch(tables={dataset: pa.table(required)}, watermarks={}))


def test_each_statement_reads_rows_appended_before_it(connection, writer, batch):
    seen = []
    for seq in range(3):
        writer.append(batch([seq]))
        seen += ask(connection, COUNT)
    relation = connection.sql("FROM scalars")
    writer.append(batch(range(6)))

    assert [(1,), (2,), (3,)] == seen
    assert 3 == len(relation.fetchall())  # a relation keeps the rows of its version
    with connection.pinned():
        writer.append(batch(range(9)))
        assert [(6,)] == ask(connection, COUNT)
    assert [(9,)] == ask(connection, COUNT)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
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
        for question in questions:
            with pytest.raises(QueryError, match="open another one with connect"):
                question()

    assert isinstance(copied, Connection)
    assert (connection.path, connection.version) == (copied.path, copied.version)
    assert {name for name in dir(connection) if name[0] != "_"} == {name for name in dir(copied) if name[0] != "_"}
    assert before == connection.query("FROM scalars")


def test_nan_infinity_null_and_zero_are_distinguished_in_sql(connection, writer, scalars):
    table = scalars(range(5)).set_column(8, "value", [[math.nan, math.inf, None, 0.0, -math.inf]])
    writer.append(Batch(tables={"scalars": table}, watermarks={"i0": 4}))
    query = "SELECT value IS NULL, isnan(value), isinf(value), value = 0 FROM scalars ORDER BY seq"
    infinite = (False, False, True, False)
    expected = [(False, True, False, False), infinite, (True, None, None, None), (False, False, False, True), infinite]

    assert expected == ask(connection, query)


def test_nan_among_finite_numbers_is_found(connection, writer, scalars):
    """If a footer had the range of the finite numbers, DuckDB would skip the file."""
    table = scalars(range(4)).set_column(8, "value", [[1.0, -1.0, math.nan, 2.0]])
    writer.append(Batch(tables={"scalars": table}, watermarks={"i0": 3}))

    for asked in ("isnan(value)", "NOT isfinite(value)", "value = 'nan'", "value > 'inf'::DOUBLE"):
        assert [(2,)] == ask(connection, f"SELECT seq FROM scalars WHERE {asked}"), asked
        assert [(3,)] == ask(connection, f"SELECT count(*) FROM scalars WHERE NOT ({asked})"), asked


def test_parameters_and_fetch_methods_work(connection, writer, batch):
    writer.append(batch(range(3)))
    connection.execute("FROM range(1000000)").fetchone()  # an unfetched result does not block the next query
    found = connection.query("SELECT seq FROM scalars WHERE seq > $low ORDER BY 1", {"low": 0})

    assert [(2,)] == connection.sql(f"{COUNT} WHERE seq > ?", [0]).fetchall()
    assert (3,) == connection.execute(COUNT).fetchone()
    assert [1, 2] == found["seq"].to_pylist()
    assert 3 == connection.sql("FROM scalars").to_arrow_table().num_rows


def test_times_are_utc(connection, writer, batch):
    writer.append(batch([86_400]))

    assert [("1970-01-02 00:00:00+00",)] == ask(connection, "SELECT ts::VARCHAR FROM scalars")


def test_user_can_create_tables_and_files(connection, writer, batch, tmp_path):
    writer.append(batch(range(3)))
    connection.sql("CREATE TABLE mine AS SELECT seq FROM scalars")
    connection.sql(f"COPY mine TO '{tmp_path}/mine.csv'")

    assert [(3,)] == ask(connection, f"SELECT count(*) FROM '{tmp_path}/mine.csv'")


def test_snapshot_keeps_its_version_during_appends_and_compaction(connection, writer, batch, monkeypatch):
    monkeypatch.setattr(compaction, "SMALL_FILES", 2)
    for seq in range(4):
        writer.append(batch([seq]))
    with connection.snapshot() as pinned:
        writer.append(batch(range(9)))
        writer.compact()

        assert [[(4,)], [(9,)]] == [ask(pinned, COUNT), ask(connection, COUNT)]
        assert pinned.version < connection.version


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

    assert [(4, 6)] == ask(connection, "SELECT count(*), sum(seq) FROM scalars")
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
        row = {"run": "r", "ordinal": ordinal, "state": state}
        put(writer, "runs", [row])
        put(writer, "attempts", [row | {"attempt": ordinal % 2}])

    assert [("failed",)] == ask(connection, "SELECT state FROM runs")
    assert [(0, "running"), (1, "failed")] == ask(connection, "SELECT attempt, state FROM attempts ORDER BY 1")
    assert [(3,)] == ask(connection, "SELECT count(*) FROM runs_history")


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
    counts = [ask(connection, f"SELECT count(*) FROM {connection.relation('scalars', run=run)}") for run in "bc"]
    assert [[(10,)], [(0,)]] == counts


ODD_RUNS = ["a/b", "..", "a=b", 'it\'s "q"', "学习", "123", "2026-11-20", "", " ", "%41", "a\nb", "_shared-x"]
ODD_RUNS += ["\U0010ffff"]


def test_runs_with_any_name_are_distinguished(connection, writer, batch, monkeypatch):
    monkeypatch.setattr("rankscope_storage.files.sorting.OWN_PART_ROWS", 5)
    for number, run in enumerate(ODD_RUNS):
        writer.append(batch(range(number % 3 + 4), run=run, incarnation=f"i{number}"))
    expected = sorted((run, number % 3 + 4) for number, run in enumerate(ODD_RUNS))

    assert expected == ask(connection, "SELECT run, count(*)::INT FROM scalars GROUP BY 1 ORDER BY 1")
    for run, count in expected:
        asked = f"SELECT count(*)::INT FROM {connection.relation('scalars', run=run)} WHERE run = ?"
        assert [(count,)] == connection.sql(asked, [run]).fetchall()


def test_row_keys_are_unique_and_need_every_column(connection, writer):
    """One row per combination of key columns, including null; sorting and the watermark filter keep all of them."""
    rows = [
        {"run": "r"} | dict(zip(TENSOR_ROW_KEY, (i, s, v, k, t, x, m, c), strict=True))
        for i in "ab" for s in (0, 1) for v in (None, 0) for k in "pq" for t in "tu"
        for x in (None, 0) for m in (None, 1) for c in (None, 3)
    ]  # fmt: skip
    put(writer, "tensor_stats", rows, {"a": 1, "b": 1})
    key = ", ".join(f'"{name}"' for name in TENSOR_ROW_KEY)

    assert [(256, 256)] == ask(connection, f"SELECT count(*), count(DISTINCT ({key})) FROM tensor_stats")


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
        assert [(6, 0)] == ask(fresh, "SELECT count(*), count(labels) FROM scalars")
        assert dataset_schema("scalars").names == fresh.sql("FROM scalars").columns


# --- locked


@pytest.fixture
def locked(store, writer, batch):
    writer.append(batch(range(3)))
    with connect(store.root, locked=True) as connection:
        yield connection


READING = [
    *("SELECT count(*) FROM scalars", "FROM scalars", "WITH x AS (SELECT 1 AS a) SELECT a FROM x", "VALUES (1)"),
    *("DESCRIBE scalars", "SHOW TABLES", "SUMMARIZE scalars", "EXPLAIN SELECT 1", "SELECT 1;"),
    'WITH "insert" AS (SELECT 1 AS copy) FROM "insert" -- delete',
    "EXPLAIN ANALYZE SELECT count(*) FROM scalars",
]


def test_locked_connection_executes_statements_that_only_read(locked):
    for query in READING:
        assert ask(locked, query), query


def test_locked_connection_works_in_a_removed_folder(store, writer, batch, tmp_path, monkeypatch):
    writer.append(batch(range(3)))
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with connect(store.root, locked=True) as connection:
        assert [(3,)] == ask(connection, COUNT)
        with pytest.raises(duckdb.PermissionException):
            ask(connection, "FROM read_text('/etc/hostname')")


def test_locked_connection_reads_new_rows(locked, writer, batch):
    writer.append(batch(range(7)))

    assert [[(7,)]] * 2 == [ask(locked, COUNT), ask(locked.snapshot(), COUNT)]


OTHERS = [
    "COPY (SELECT 1) TO '{store}/x.csv'",
    "COPY scalars TO '{outside}/x.csv'",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '{store}/x.csv'",
    "EXPLAIN (ANALYZE) COPY (SELECT 1) TO '{store}/x.csv'",
    "EXPLAIN /* */ ANALYZE COPY (SELECT 1) TO '{store}/x.csv'",
    "explain\nanalyze\ncopy (select 1) to '{store}/x.csv'",
    "SELECT 1; COPY (SELECT 1) TO '{store}/x.csv'",
    "SET VARIABLE rankscope_files_scalars = ['{outside}/secret.parquet']",
    "WITH x AS (COPY (SELECT 1) TO '{store}/x.csv') FROM x",
    "EXPLAIN ANALYZE WITH x AS (COPY (SELECT 1) TO '{store}/x.csv') FROM x",
    "WITH x AS (DELETE FROM rankscope_raw.tensor_newest RETURNING *) FROM x",
    "WITH x AS (TRUNCATE rankscope_raw.tensor_newest) SELECT 1",
    "WITH x AS (DELETE FROM rankscope_raw.scalar_extents RETURNING *) FROM x",
    *("ATTACH '{store}/x.db'", "EXPORT DATABASE '{store}/x'", "CREATE TABLE x AS SELECT 1", "DROP VIEW scalars"),
    *("SET enable_external_access = true", "PRAGMA enable_profiling", "INSTALL httpfs", "LOAD httpfs"),
    *("CALL pragma_version()", "", "SELECT"),
]


def test_locked_connection_refuses_all_other_statements(locked, store, tmp_path):
    before = sorted(store.root.rglob("*"))
    for query in OTHERS:
        with pytest.raises(QueryError):
            locked.sql(query.format(store=store.root, outside=tmp_path))

        assert before == sorted(store.root.rglob("*")), query


def test_locked_connection_accesses_only_the_store(locked, store, tmp_path):
    (tmp_path / "secret.csv").write_text("secret\n1\n")
    sources = ["read_text('/etc/passwd')", "'/etc/passwd'", f"read_csv('{tmp_path}/secret.csv')", "glob('/etc/*')"]
    sources += [f"read_text('{store.root}/../secret.csv')", "read_csv('http://127.0.0.1:9/x.csv')"]
    for source in sources:
        for execute in (locked.sql, locked.query, locked.execute):
            with pytest.raises(duckdb.Error, match=r"(?i)disabled by configuration|does not exist"):
                execute(f"FROM {source}")


# Analysed statements are faster and return the same rows.

ASKED = [
    LATEST,
    "(FROM tensor_latest WHERE run IN ('s', 't') AND rank = 1)",
    "scalar_curve('r', points := 7)",
    "scalar_curve('r', of_labels := '{}')",
    "(FROM loss_curve WHERE run = 'r')",
    "bucket_deviations('r', top := 99, width := 10)",
]
TENSOR = {"kind": "grad_reduced", "tensor": "w"}
LOGGED = {"name": "loss", "value": 1.0}
ROLLED = {"run": "r", "name": "loss", "attempt": 0, "step": -100, "first_step": -99, "last_step": -60, "rows": 9}
ROLLED |= {"value_count": 9, "value_avg": 2.0, "value_nans": 0}
SHAPES = [
    *(([0, 1], [None, 1], "again in another file"), ([None, 0], [None], "once"), ([3], [None], "again in a file")),
    *itertools.product([[0], [None, 0], [0, 1], [0, 1, 3]], [[None], [0, 1]], ["once", "again in a file"]),
]


@pytest.mark.parametrize(("attempts", "micro_steps", "said"), few(2, SHAPES))
def test_analysed_and_general_views_return_equal_rows(writer, connection, attempts, micro_steps, said):
    """Files with rewinds, ranks, micro-batches, nulls, NaN, labels, steps that are logged again, and then rollups."""
    draw, ordinals = random.Random(f"{attempts}{said}"), itertools.count()
    numbers = [None, math.nan, math.inf, *map(float, range(6))]
    for first in (40, 0, 41 if said == "again in another file" else -40, None):
        if first is None:
            put(writer, "scalar_rollups", [ROLLED])
        else:
            keys = itertools.product("rs", attempts, [None, 0, 1], micro_steps, range(first, first + 9), [None, "{}"])
            rows = [
                {"run": run, "attempt": attempt, "rank": rank if attempt == attempts[0] else 2, "labels": labels,
                 "micro_step": micro_step, "step": step + 5 * (attempt or 0), "ordinal": next(ordinals)}
                for run, attempt, rank, micro_step, step, labels in keys
                if draw.random() < 0.6 and (attempt == attempts[0] or rank == 0)
            ]  # fmt: skip
            again = [row | {"ordinal": next(ordinals)} for row in rows[::97]] if said == "again in a file" else []
            others = [{"step": 1, "name": "lr"}, {"step": None}, {"attempt": 7, "step": 99, "value": None}]
            put(writer, "scalars", [row | {"value": draw.choice(numbers)} for row in rows + again], run="r", **LOGGED)
            put(writer, "scalars", others, run="r", **LOGGED)
            kinds = [{"kind": draw.choice(["k", "exp_avg"]), "tensor": draw.choice("wx")} for _ in rows + again]
            tensors = [row | own | {"norm": draw.choice(numbers)} for row, own in zip(rows + again, kinds, strict=True)]
            put(writer, "tensor_stats", tensors + [row | {"step": None} for row in tensors[:3]])
        for asked in ASKED if first != 0 else ():
            in_a_text = asked.replace("'", "''")
            plain = connection.sql(f"FROM query('FROM {in_a_text}') ORDER BY ALL")
            sooner = connection.sql(f"FROM {asked} ORDER BY ALL")

            assert repr(plain.fetchall()) == repr(sooner.fetchall()), (asked, first)
            assert (plain.columns, plain.types) == (sooner.columns, sooner.types)


def losses(*steps: int | None, **columns) -> list[dict]:
    return [{"run": "r", "attempt": 0, "rank": 0, **LOGGED, "step": step, **columns} for step in steps]


AGAIN = {
    "one file": [losses(1, 2)],
    "null attempts count as 0": [losses(1), losses(2, attempt=None)],
    "two attempts": [losses(1, 2), losses(2, attempt=1)],
    "a later attempt": [losses(1, attempt=3)],
    "again in a file": [losses(1, 2, 1)],
    "again as a null attempt": [losses(1) + losses(1, attempt=None)],
    "again in another file": [losses(1, 2), losses(2, 3), losses(9)],
    "within the range of another file": [losses(0, 100), losses(10, 20), losses(200, 300)],
    "beside the ranges of other files": [losses(0, 100), losses(200, 300), losses(101, 199)],
    "in any order of files": [losses(9), losses(5), losses(1), losses(5)],
    "other series": [losses(1) + losses(1, rank=1) + losses(1, labels="{}") + losses(1, micro_step=0)],
    "rows that are no losses": [losses(1, None, None) + losses(1, name="lr") + losses(1, value=None)],
    "another run": [losses(1), losses(1, 1, run="s", attempt=1)],
}


@pytest.mark.parametrize("case", AGAIN)
def test_loss_curve_with_steps_that_are_logged_again_is_that_of_all_rows(writer, connection, monkeypatch, case):
    """The facts of many files are found in several queries."""
    monkeypatch.setattr(file_facts, "_BATCH_FILES", 2)
    for number, some in enumerate(AGAIN[case]):
        values = [None if row["value"] is None else 10.0 * number + place for place, row in enumerate(some)]
        rows = [row | {"value": value} for row, value in zip(some, values, strict=True)]
        put(writer, "scalars", [row | {"ordinal": 10 * number + place} for place, row in enumerate(rows)])
    sooner = ask(connection, "FROM loss_curve WHERE run = 'r' ORDER BY ALL")

    assert sooner
    assert sooner == ask(connection, "FROM query('FROM loss_curve WHERE run = ''r''') ORDER BY ALL")
