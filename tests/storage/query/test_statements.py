"""Statements create only the views and read only the files and columns that they need; the script for `duckdb`."""

import enum
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.properties import examples, few
from tests.storage.rows import ask, entries, files, table

from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.datasets import DATASETS
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import connect
from rankscope_storage.connection.pool import DEFINITIONS
from rankscope_storage.maintenance import compaction
from rankscope_storage.query.column_scan import row_groups
from rankscope_storage.query.sql_script import FILE_NAME, emit_views


@pytest.mark.parametrize("name", ["run_eta", "tensor_global", "top_deviations", "loss_curve"])
def test_each_view_can_be_created_first_and_after_those_that_it_reads(connection, name):
    connection.query(f"SELECT '{name}'")
    defined = list(connection._views.instance.defined)

    assert name in defined
    assert all({*DEFINITIONS[made].reads} <= {*defined[:place]} for place, made in enumerate(defined))
    assert len(defined) < len(DEFINITIONS)


@pytest.mark.parametrize(
    "question", ["SHOW TABLES", "SELECT view_name FROM duckdb_views()", "FROM information_schema.tables"]
)
def test_statement_that_lists_views_returns_all_views(connection, question):
    listed = {value for row in ask(connection, question) for value in row}

    assert listed >= {*DATASETS, "tensor_global", "loss_curve"}


def test_view_that_is_named_by_a_parameter_or_in_any_case_is_found(store, connection):
    connection.execute("SET VARIABLE table_name = 'scal' || 'ars'")
    with connect(store.root, locked=True) as locked:
        found = locked.query("SELECT count(*) AS rows FROM query_table($name)", {"name": "loss_curve"})

    assert [0] == found["rows"].to_pylist()
    assert [(0,)] == ask(connection, "SELECT count(*) FROM query_table(getvariable('table_name'))")
    assert [(0,)] == ask(connection, 'SELECT count(*) FROM "Loss_Curve"')


def test_unknown_name_is_refused_with_a_similar_one(connection):
    with pytest.raises(duckdb.CatalogException, match="scalars"):
        connection.query("SELECT * FROM scalar")


# Column scans: row groups are skipped by their statistics, constant columns are known, and names are dictionaries.


@pytest.fixture
def paths(tmp_path):
    """Return two files of two row groups each: names a, b and c, d; the last group has NaN counts and no rank."""
    found = []
    for number, names in enumerate((["a", "a", "b", "b"], ["c", "c", "d", "d"])):
        same = {"run": ["r"] * 4, "kind": ["k"] * 4, "step": list(range(4)), "infs": pa.nulls(4, pa.int64())}
        last = {"rank": pa.array([0, 0, 0, None if number else 0], pa.int32()), "nans": [0, 0, 0, 3 if number else 0]}
        table = pa.table({"tensor": names, **same, **last})
        found.append(str(tmp_path / f"{number}.parquet"))
        pq.write_table(table, found[-1], row_group_size=2)
    return found


def test_row_groups_without_the_values_are_skipped(paths):
    found = row_groups(paths, "tensor_stats", {"run": ["r"], "tensor": ["b", "d"]})
    batches = list(found.batches(["tensor", "step"]))

    assert ["b", "b", "d", "d"] == [name for batch in batches for name in batch.column("tensor").to_pylist()]
    assert pa.types.is_dictionary(batches[0].schema.field("tensor").type)
    assert 4 == found.rows
    assert 0 == row_groups(paths, "tensor_stats", {"run": ["other"]}).rows


def test_constant_and_absent_columns_are_known(paths):
    first = row_groups(paths[:1], "tensor_stats", {}, ("rank", "step", "infs", "attempt"))
    (batch, *_) = row_groups(paths, "tensor_stats", {"tensor": ["a"]}).batches(["attempt", "step"])

    assert {"rank": 0, "infs": None, "attempt": None} == first.constants(("rank", "step", "infs", "attempt"))
    assert {} == row_groups(paths, "tensor_stats", {}, ("rank",)).constants(("rank",))  # one rank is null
    assert [None, None] == batch.column("attempt").to_pylist()  # the files lack the column


# Files are omitted only if the text of a statement proves that it does not need them.


class Named(str, enum.Enum):  # noqa: UP042 - not a StrEnum, of which str() is the text
    """A text type of many programs. Its `str()` differs from the text that DuckDB compares."""

    RUN = "b"


ROWS = [(run, attempt, step) for run in "abc" for attempt in (None, 0, 1) for step in (None, -1, 0, 6)]
FILES = [[0, 1, 2, 3], [4, 5, 13, 14], [6, 7, 8], [9, 10, 11, 12, 30], range(15, 24), [24, 25], range(26, 36)]
"""Row sets: one run, adjacent runs, the first and the last run; one step and many steps."""


@pytest.fixture(scope="module")
def scattered(tmp_path_factory):
    """Return a store with a few small files in every dataset."""
    store = Store.open(tmp_path_factory.mktemp("questions") / "store", create=True, sync=lambda path: None)
    with store.claim(owner="test") as writer:
        for numbers in FILES:
            rows = [
                dict(zip(("run", "attempt", "step"), ROWS[number], strict=True), ordinal=number) for number in numbers
            ]
            rows = [row | {"ts": 1_000_000 * row["ordinal"], "norm": row["ordinal"], "rank": 0} for row in rows]
            writer.append(Batch(tables={name: _table(name, rows) for name in DATASETS}, watermarks={}))
    return store.root


def _table(dataset: str, rows: list[dict]) -> pa.Table:
    texts = {"name": "loss", "kind": "grad_reduced", "tensor": "w", "state": "running", "norm_baseline": 0.5}
    required = {field.name: "x" for field in dataset_schema(dataset) if not field.nullable}
    valued = dataset in {"scalars", "features", "samples"}
    return table(dataset, [row | ({"value": row["ordinal"]} if valued else {}) for row in rows], **required | texts)


CASES = [
    ("FROM scalars WHERE run = 'a'", None, {"scalars": 4}),
    ("FROM Scalars s WHERE 'a' = s.run AND 3 <= step", None, {"scalars": 3}),
    ("FROM scalars WHERE run IN ('a', $b) AND attempt = 2", {"b": "c"}, {"scalars": 2}),
    ("FROM scalars WHERE run = ? AND step BETWEEN ? AND 9", ["a", 4], {"scalars": 3}),
    ("FROM scalars WHERE run = 'a' AND run = 'b'", None, {"scalars": 1}),
    *(("FROM scalars WHERE run = 'a' OR step = 1", None, {}), ("FROM scalars WHERE NOT (run = 'a')", None, {})),
    ("FROM scalars WHERE run = ?", [None], {}),
    ("FROM scalars WHERE run = ? AND attempt = ?", [Named.RUN, True], {}),
    ("FROM scalars WHERE step = 1.5 AND step < '7'", None, {}),
    ("FROM loss_curve WHERE run = 'a' AND step < 5", None, {"scalars": 4, "scalar_rollups": 4}),
    ("FROM runs WHERE run = 'a' AND attempt = 1", None, {"runs": 4}),
    *(("FROM top_deviations('a')", None, {"tensor_stats": 4}), ("FROM top_deviations(of_run := 'a')", None, {})),
    ("WITH c AS (FROM scalars WHERE run = 'a') FROM downsample(c, step, value, 9)", None, {"scalars": 4}),
    ("FROM downsample(scalars, step, value, 9) WHERE x = 1", None, {}),
    ("FROM downsample('scal' || 'ars', step, value, 9) LIMIT 0", None, {}),
    (
        (
            "SELECT DISTINCT x FROM downsample(scalars, step, value, 9) "
            "WHERE x = (SELECT max(step) FROM scalars WHERE run = 'b')"
        ),
        None,
        {},
    ),
    ("SELECT (SELECT max(step) FROM scalars WHERE run = 'b') FROM scalars WHERE run = 'a'", None, {"scalars": 5}),
    (
        "FROM scalars s JOIN events e ON s.step = e.step WHERE s.run = 'a' AND e.run = 'b'",
        None,
        {"scalars": 4, "events": 3},
    ),
    ("FROM scalars s FULL JOIN events e USING (run) WHERE s.run = 'a'", None, {}),
    ("FROM (FROM scalars) WHERE run = 'a'", None, {}),
    ("SELECT step FROM scalars t(step, run) WHERE run = 1", None, {}),
    ("FROM main.scalars WHERE run = 'a'", None, {}),
    ("WITH scalars AS (SELECT 1 AS run) FROM scalars WHERE run = 1", None, {}),
    (
        "WITH step AS (SELECT 1) FROM downsample(x := step, y := value, source := scalars, points := 9) LIMIT 0",
        None,
        {},
    ),
    ("FROM query_table('scalars') WHERE run = 'a'", None, {}),
    ("FROM (PIVOT scalars ON name USING count(*) GROUP BY run) WHERE run = 'a'", None, {}),
    ("FROM scalars WHERE run = 'a'; FROM scalars", None, {}),
]


@pytest.mark.parametrize(("query", "parameters", "files"), CASES)
def test_only_files_that_a_statement_can_need_are_read(scattered, query, parameters, files):
    """`files` has the numbers of files of those datasets of which not all seven are read."""
    with connect(scattered) as few, connect(scattered) as every:
        every._reads_only = False  # as after a statement that may have modified anything: no file is omitted

        rows = [repr(one.sql(query, parameters).order("ALL").fetchall()) for one in (every, few)]

        assert rows[0] == rows[1]
        assert files == {name: len(read) for name, read in few._views.files.items() if len(read) < len(FILES)}


COMPARED = st.one_of(
    st.sampled_from("abcd").map(lambda run: f"run = '{run}'"),
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=2).map(
        lambda runs: "run IN (" + ", ".join(f"'{run}'" for run in runs) + ")"
    ),
    st.tuples(st.sampled_from(["<", "<=", "=", ">=", ">", "!="]), st.integers(-2, 7)).map(
        lambda pair: f"step {pair[0]} {pair[1]}"
    ),
    st.tuples(st.integers(-2, 7), st.integers(-2, 7)).map(lambda pair: f"step BETWEEN {pair[0]} AND {pair[1]}"),
    st.integers(0, 2).map(lambda attempt: f"{attempt} = attempt"),
    st.sampled_from(["step IS NULL", "attempt IS NULL", "run > 'a'", "ordinal = 0"]),
)
WHERE = st.recursive(
    COMPARED,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["AND", "AND", "OR"]), inner).map(lambda said: f"({' '.join(said)})"),
        inner.map(lambda said: f"NOT ({said})"),
    ),
    max_leaves=5,
)
SHAPES = (
    "SELECT count(*), sum(ordinal) FROM scalars WHERE {0}",
    "SELECT count(*) FROM (SELECT * FROM scalars WHERE {0}) WHERE {1}",
    "WITH c AS (FROM scalars WHERE {0}) SELECT count(*), sum(c.step) FROM c JOIN events e USING (run)",
    "SELECT count(*) FROM scalars s LEFT JOIN events e ON s.run = e.run AND s.step = e.step WHERE e.run = 'b'",
    "SELECT (SELECT count(*) FROM events WHERE {1}), count(*) FROM scalars WHERE {0}",
    "SELECT count(*) FROM scalars WHERE {0} UNION ALL SELECT count(*) FROM scalars WHERE {1}",
)


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(SHAPES), WHERE, WHERE)
def test_result_from_selected_files_equals_result_from_all(scattered, shape, first, second):
    query = shape.format(first, second)
    with connect(scattered) as few, connect(scattered) as every:
        every._reads_only = False

        assert ask(every, query) == ask(few, query)


@pytest.mark.thorough
def test_statement_deeper_than_the_recursion_limit_is_executed(scattered):
    with connect(scattered) as store:
        for terms in (300, 900):
            assert [(6 * terms,)] == ask(store, f"SELECT max({'+'.join(['step'] * terms)}) FROM scalars")


@pytest.mark.usual(12)
@pytest.mark.parametrize("name", [name for name in DEFINITIONS if "VIEW" in DEFINITIONS[name].statement[:30]])
def test_rows_of_a_run_in_a_view_do_not_depend_on_files_of_others(scattered, name):
    with connect(scattered) as few, connect(scattered) as every:
        every._reads_only = False
        query = f"SELECT * FROM {name} WHERE run = 'b' ORDER BY ALL"

        assert repr(ask(every, query)) == repr(ask(few, query))
        assert few._views.files
        assert all(len(files) < len(few.files(dataset)) for dataset, files in few._views.files.items())


# The script for the `duckdb` program, executed by DuckDB; its list of files is compared with that of delta-rs.


def plain(script: str) -> duckdb.DuckDBPyConnection:
    database = duckdb.connect()
    database.execute(script)
    return database


COUNT = "SELECT count(*) FROM scalars"


def assert_same_files(root: Path) -> None:
    found = ask(plain(emit_views(root)), "SELECT dataset, file FROM rankscope_files ORDER BY ALL")

    assert sorted((file["dataset"], f"{root}/{file['path']}") for file in files(root).to_pylist()) == found


def test_script_of_an_empty_store_has_all_views_without_rows(store):
    database = plain((store.root / FILE_NAME).read_text())
    with connect(store.root) as connection:
        for dataset in (*DATASETS, "tensor_global"):
            own, other = connection.sql(f"FROM {dataset}"), database.sql(f"FROM {dataset}")
            assert (own.columns, own.types, []) == (other.columns, other.types, other.fetchall())


@pytest.mark.parametrize(
    "run", few(2, ['it\'s "q"', "a\nb", "", "%41", "..", "r", "a/b", "a=b", "学习", "123", "2026-11-20"])
)
def test_script_finds_files_with_any_run_name(store, writer, batch, run, monkeypatch):
    monkeypatch.setattr("rankscope_storage.files.sorting.OWN_PART_ROWS", 1)
    writer.append(batch(range(3), run=run))

    assert_same_files(store.root)
    assert [(run, 3)] == ask(plain(emit_views(store.root)), "SELECT run, count(*) FROM scalars GROUP BY run")


def test_script_refuses_an_older_duckdb_with_one_sentence(store):
    """`make test-readers` executes the script in such versions, and in 1.4."""
    for version in ("v1.3.2", "v0.10.3"):
        script = (store.root / FILE_NAME).read_text().replace("version()", f"'{version}'")
        with pytest.raises(duckdb.Error, match=f"rankscope.sql needs DuckDB 1.4 or newer, and this is {version}$"):
            plain(script)


def test_script_in_the_store_has_macros_and_finds_files_appended_later(store, writer, batch):
    script = (store.root / FILE_NAME).read_text()
    database = plain(script)
    writer.append(batch(range(10)))
    database.execute(script)
    question = "WITH c AS (SELECT step, loss FROM loss_curve WHERE run = 'r') SELECT count(*) FROM {}"

    assert [(10,)] == ask(database, COUNT)
    assert [(2,)] == ask(database, question.format("downsample(c, step, step, 5)"))  # only the ends are extremes
    assert [(10,)] == ask(database, question.format("ema(c, step, loss, 0.1)"))


@pytest.mark.usual(2)
@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("appends", few(2, [1, 20, 19, 45]))
def test_script_lists_the_same_files_as_delta_rs(store, writer, batch: Callable, appends, clean, monkeypatch):
    """Before, at and after a checkpoint, also with compaction, with and without the entries after the checkpoint."""
    monkeypatch.setattr(compaction, "SMALL_FILES", 6)
    for seq in range(appends):
        writer.append(batch([seq]))
        if seq % 8 == 7:
            writer.compact()
    if clean:
        for entry in entries(store.root):
            os.utime(entry, (1, 1))
        writer.maintain()

    assert_same_files(store.root)
    assert [(appends,)] == ask(plain(emit_views(store.root)), COUNT)


def test_claim_of_a_moved_store_writes_its_script_again(store, writer, batch, tmp_path):
    writer.append(batch(range(3)))
    writer.close()
    moved = store.root.rename(tmp_path / "it's 学")
    Store.open(moved).claim(owner="me").close()

    assert [(3,)] == ask(plain((moved / FILE_NAME).read_text()), COUNT)


READ = """
import duckdb, sys
database = duckdb.connect()
database.execute(open(sys.argv[1]).read())
print(database.sql("SELECT count(*) FROM scalars").fetchall()[0][0])
"""


@pytest.mark.parametrize(("where", "script"), [("", "the copy/rankscope.sql"), ("the copy", "rankscope.sql")])
def test_script_of_a_copied_store_reads_the_copy(store, writer, batch, tmp_path, where, script):
    writer.append(batch(range(3)))
    shutil.copytree(store.root, tmp_path / "the copy")
    writer.append(batch(range(3, 7)))
    command = [sys.executable, "-c", READ, script]
    done = subprocess.run(command, cwd=tmp_path / where, capture_output=True, text=True, check=False)

    assert "3\n" == done.stdout, done.stderr
    assert [(7,)] == ask(plain((store.root / FILE_NAME).read_text()), COUNT)
