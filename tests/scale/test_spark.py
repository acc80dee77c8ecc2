"""Every SQL text of the product gives the same rows on DuckDB and on Spark, in a store where no result is empty.

DuckDB reads a local folder. Spark is a cluster and reads a copy in a bucket.
Integers, texts, times, null, NaN and infinities are equal; other floats differ by at most 1e-9 of their size.
"""

import itertools
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import _free_port
from tests.scale.spark_store import make_store
from tests.sql_texts import sql_texts

from rankscope_storage.base.errors import QueryError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.location import located
from rankscope_storage.connection import connect
from rankscope_storage.connection.pool import DEFINITIONS
from rankscope_storage.maintenance.copying import copy_store

pytest.importorskip("pyspark", reason="make test-scale runs the tests with Spark")

from tests.scale.spark_cluster import spark_cluster

from rankscope_storage.connection.spark import JARS, S3_JARS, jar_files

CURVE = (
    "WITH curve AS (SELECT run, rank, attempt, position, value FROM scalars WHERE name = 'loss' AND labels IS NULL) "
)
MORE = {
    "curve of another scalar": "SELECT * FROM scalar_curve('my-run', of_name := 'learning_rate', points => 7)",
    "curve of a label": "SELECT * FROM scalar_curve('r', 'gpu_clock_hertz', '{\"clock\":\"sm\"}')",
    "smoothing of one series": CURVE + "SELECT position, value, ema FROM ema(curve, position, value, 1)",
    "average of several series": CURVE
    + "SELECT * FROM moving_average(curve, position, value, 3, (run, rank, attempt))",
    "few points": CURVE.replace(" labels", " attempt = 0 AND rank = 0 AND NOT isinf(value) AND labels")
    + "SELECT * FROM downsample(curve, position, value, 6, series => run)",
    "percentile of everything": "SELECT run, value, p10, is_below_p10 FROM p10(scalars, value)",
    "functions": (
        "SELECT run, isfinite(value) AS a, isinf(value) AS b, coalesce(isnan(value), false) AS c, epoch(ts) AS d, "
        "epoch_us(ts) AS e, intdiv(step, 7) AS f, "
        "json_valid(labels) AS g, json_extract_string(labels, '$.phase') AS h, "
        "perplexity(value) AS i, ts AS time, -7 / 2 AS j, step / 7 AS k FROM scalars"
    ),
    "json": "SELECT details, json_extract(details, '$.samples') AS a, json_extract(details, '$.x') AS b, "
    "json_extract(details, '$.state') AS c, json_extract(details, '$.now') AS d FROM events WHERE json_valid(details)",
    "odd text": r"SELECT run, count(*) AS rows FROM runs WHERE run = 'odd ''run''/ü=%" + '"' + r"\n' GROUP BY run",
}  # fmt: skip


VIEWS = {name: f"SELECT * FROM {name}" for name, one in DEFINITIONS.items() if " VIEW " in one.statement[:30]}
TEXTS = VIEWS | sql_texts() | MORE


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return make_store(tmp_path_factory.mktemp("store") / "a store's ü", int(os.environ.get("RANKSCOPE_SEED", "0")))


@pytest.fixture(scope="session")
def bucket_store(folder, s3_server):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_server.environment().items():
            patch.setenv(name, value)
        s3_server.create_bucket("spark")
        store = located("s3://spark/history")
        copy_store(folder, store, sync_to_disk)
        yield store


@pytest.fixture(scope="session")
def spark(bucket_store, tmp_path_factory):
    with (
        spark_cluster(tmp_path_factory.mktemp("cluster"), _free_port()) as master,
        connect(bucket_store, engine="spark", master=master) as connection,
    ):
        yield connection


@pytest.fixture(scope="session")
def duckdb(folder):
    with connect(folder) as connection:
        yield connection


def same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        if math.isfinite(one) and math.isfinite(other):
            return abs(one - other) <= 1e-9 * max(abs(one), abs(other))
        return str(one) == str(other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def order(row: Sequence[Any]) -> tuple[Any, ...]:
    """Return a sort key in which floats that `same` accepts are almost always equal, and compared last."""
    exact = tuple((value is None, type(value).__name__, str(value)) for value in row if not isinstance(value, float))
    return exact, tuple(f"{value:.7g}" for value in row if isinstance(value, float))


def ordered_columns(text: str, names: Sequence[str]) -> list[int]:
    """Return the places of the first columns in the last ORDER BY of the text that the result has."""
    keys = (
        re.split(r"\s*,\s*", re.split(r"(?i)\border by\s", text)[-1])
        if re.search(r"(?i)\border by[^)]*$", text)
        else []
    )
    known = itertools.takewhile(names.__contains__, (key.split()[0].strip('"') for key in keys))
    return [names.index(name) for name in known]


@pytest.mark.parametrize("name", TEXTS)
def test_text_gives_the_same_rows_on_both_engines(duckdb, spark, name):
    text = TEXTS[name]
    expected = duckdb.query(text)
    found = spark.sql(text)
    rows = list(zip(*(column.to_pylist() for column in expected.columns), strict=True))
    others = found.fetchall()
    places = ordered_columns(text, expected.column_names)

    assert expected.column_names == found.columns
    assert rows or "having count(*) > 1" in text
    assert len(rows) == len(others)
    for one, other in zip(sorted(rows, key=order), sorted(others, key=order), strict=True):
        assert all(map(same, one, other)), (one, other)
    for one, other in zip(rows, others, strict=True):
        assert all(same(one[place], other[place]) for place in places), (one, other)


def test_result_has_the_methods_of_spark_and_refuses_those_of_duckdb(spark):
    found = spark.sql("SELECT run, step FROM scalars WHERE run = 'my-run' ORDER BY step NULLS LAST LIMIT 1")

    assert [("my-run", 0)] == found.fetchall() == spark.fetchall() == [tuple(row) for row in found.collect()]
    assert [["my-run", 0]] == found.df().to_numpy().tolist()
    for refused in (lambda: found.fetchone, lambda: found.fetchnumpy, lambda: spark.execute, lambda: spark.query):
        with pytest.raises(AttributeError, match="with Spark"):
            refused()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SELECT arg_max(step, value) FROM scalars", "max_by"),
        ("SELECT step FROM nothing", "TABLE_OR_VIEW_NOT_FOUND"),
        ("SELECT 1 / (rank - rank) FROM scalars WHERE rank = 0", "nullif"),
        ("DROP VIEW runs", "only one SELECT"),
        ("WITH a AS (SELECT 1) INSERT INTO runs SELECT * FROM a", "only one SELECT"),
        ("VACUUM runs", "only one SELECT"),
        ("SET a = b", "only one SELECT"),
        ("SELECT 1; SELECT 2", "refused"),
    ],
)
def test_refused_text_is_reported_in_one_sentence(spark, text, message):
    with pytest.raises(QueryError, match=message) as caught:
        spark.sql(text).fetchall()

    assert "\n" not in str(caught.value)


def test_version_is_that_of_the_connection(folder, spark, duckdb):
    with connect(folder, engine="spark", version=1) as old, connect(folder, version=1) as same_version:
        statement = "SELECT count(*) AS rows FROM scalars"

        assert old.sql(statement).fetchall() == same_version.sql(statement).fetchall()
        assert old.sql(statement).fetchall() != spark.sql(statement).fetchall()


def test_missing_jar_is_named_with_its_coordinates(tmp_path):
    (tmp_path / "delta-storage-4.4.0.jar").touch()

    with pytest.raises(
        QueryError, match=r"lacks the jar of io\.delta:delta-spark_4\.2_2\.13:4\.4\.0, org.*sts:2\.35\.4"
    ):
        jar_files(tmp_path, JARS + S3_JARS)


def test_command_runs_on_this_machine(folder):
    statement = "SELECT run, count(*) AS rows FROM scalars WHERE run = 'r' GROUP BY run"
    command = [sys.executable, "-m", "rankscope", "sql", "--engine", "spark", "--master", "local[1]", "--format", "csv"]

    done = subprocess.run([*command, "--store", folder, statement], capture_output=True, text=True, check=False)

    assert (0, "run,rows\nr,2609\n") == (done.returncode, done.stdout), done.stderr
