"""Query a store with Spark: a session with the settings that our files need, and the views and functions of the store.

Spark reads the Delta table with the connector of Delta Lake. It only reads: only one SELECT is permitted at a time.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from py4j.java_gateway import is_instance_of
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.classic.dataframe import DataFrame

from rankscope_storage.base.errors import QueryError
from rankscope_storage.base.escaping import sql_string
from rankscope_storage.base.location import Location, ObjectPath
from rankscope_storage.base.schema import dataset_schema, table_schema
from rankscope_storage.query.spark_text import common_form
from rankscope_storage.query.statements import Definition, definitions, needed_definitions
from rankscope_storage.sql.macros import expanded
from rankscope_storage.sql.views import MACROS, spark_statements

JARS: Final = ("io.delta:delta-spark_4.2_2.13:4.4.0", "io.delta:delta-storage:4.4.0")
"""Maven coordinates of the jars that every store needs. They fit to pyspark 4.2."""
_SDK: Final = (
    "annotations", "apache-client", "arns", "auth", "aws-core", "aws-query-protocol", "aws-xml-protocol",
    "checksums", "checksums-spi", "crt-core", "endpoints-spi", "http-auth", "http-auth-aws",
    "http-auth-aws-eventstream", "http-auth-spi", "http-client-spi", "identity-spi", "json-utils",
    "metrics-spi", "profiles", "protocol-core", "regions", "retries", "retries-spi", "s3",
    "s3-transfer-manager", "sdk-core", "sts", "third-party-jackson-core", "utils", "utils-lite",
)  # fmt: skip
S3_JARS: Final = (
    "org.apache.hadoop:hadoop-aws:3.5.0",
    *(f"software.amazon.awssdk:{name}:2.35.4" for name in _SDK),
    "software.amazon.eventstream:eventstream:1.0.1",
    "software.amazon.s3.analyticsaccelerator:analyticsaccelerator-s3:1.3.1",
    "org.reactivestreams:reactive-streams:1.0.4",
)
"""Maven coordinates of further jars for a store in a bucket."""
_NOT_NEEDED: Final = (
    "software.amazon.awssdk:bundle",  # all services of Amazon
    "software.amazon.awssdk:netty-nio-client",
    "org.wildfly.openssl:wildfly-openssl",
)
"""Dependencies of S3_JARS that are not fetched."""

JARS_VARIABLE: Final = "RANKSCOPE_SPARK_JARS"
"""Environment variable that names the folder with the jars."""

_STATIC: Final = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.ui.showConsoleProgress": "false",
    "spark.hadoop.fs.s3a.aws.credentials.provider": (
        "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider,org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider,"
        "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"
    ),
}
_SETTINGS: Final = {
    # The vectorised reader of Spark 4.2 cannot decode BYTE_STREAM_SPLIT, the encoding of numbers in our files.
    "spark.sql.parquet.enableVectorizedReader": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.ansi.doubleQuotedIdentifiers": "true",
    "spark.databricks.delta.snapshotPartitions": "2",  # the default of 50 is for logs with millions of files
}
_PLANS: Final = "org.apache.spark.sql.catalyst.plans.logical"
_WRITING: Final = (f"{_PLANS}.Command", f"{_PLANS}.ParsedStatement")
"""Java classes of parsed statements that are no SELECT."""
_RAW: Final = "rankscope_raw_"
_VIEW: Final = re.compile(r"CREATE OR REPLACE TEMPORARY VIEW \w+ AS\s")
DEFINITIONS: Final[Mapping[str, Definition]] = definitions(spark_statements(prefix=_RAW), prefix=_RAW)
_TYPES: Final = {
    pa.string(): "STRING",
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.bool_(): "BOOLEAN",
}


def jar_files(folder: Path, jars: Sequence[str]) -> list[str]:
    """Return the paths of all jars in `folder`. Raises QueryError if it lacks one of `jars`, given by coordinates."""
    if missing := [jar for jar in jars if not (folder / f"{'-'.join(jar.split(':')[1:])}.jar").is_file()]:
        raise QueryError(
            f"{folder} lacks the jar of {', '.join(missing)}: download it from Maven Central into this folder"
        )
    return sorted(map(str, folder.glob("*.jar")))


def _session(master: str | None, folder: Path | None, jars: Sequence[str]) -> SparkSession:
    """Return a session of Spark with our settings. Views and settings of other sessions remain as they are.

    The SparkContext of this process is used if there is one. Raises QueryError if Spark cannot start.
    """
    active = SparkSession.getActiveSession()
    if active is None:
        active = _started(master, folder, jars)
    elif master is not None and active.sparkContext.master != master:
        raise QueryError(f"this process uses Spark at {active.sparkContext.master}: stop it, or name no other master")
    if "DeltaSparkSessionExtension" not in (active.conf.get("spark.sql.extensions", "") or ""):
        raise QueryError(
            "the Spark session of this process has no Delta Lake: stop it, or start it as in docs/spark.md"
        )
    own = active.newSession()
    for name, value in (_SETTINGS | _s3_settings(os.environ)).items():
        own.conf.set(name, value)
    return own


def _s3_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of s3a for the variables AWS_* that other S3 clients read.

    Spark itself reads the keys, and sends them to the workers. Without keys, the usual chain of credentials is used.
    """
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    found = {"fs.s3a.endpoint.region": region} if region else {}
    if endpoint := environment.get("AWS_ENDPOINT_URL"):
        found |= {"fs.s3a.endpoint": endpoint, "fs.s3a.path.style.access": "true"}
    return found


def _started(master: str | None, folder: Path | None, jars: Sequence[str]) -> SparkSession:
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        raise QueryError("Spark needs Java 17 or newer: install it, or set JAVA_HOME to its folder")
    builder = SparkSession.builder.appName("rankscope")
    builder = builder if master is None else builder.master(master)
    files = (
        {"spark.jars.packages": ",".join(jars), "spark.jars.excludes": ",".join(_NOT_NEEDED)}
        if folder is None
        else {"spark.jars": ",".join(jar_files(folder, jars))}
    )
    for name, value in (_STATIC | files).items():
        builder = builder.config(name, value)
    try:
        started = builder.getOrCreate()
    except Exception as error:  # Java's errors have no common class
        remedy = (
            f"without access to Maven Central, name a folder with {', '.join(jars)}" if folder is None else "read above"
        )
        raise QueryError(f"Spark did not start ({_first_line(error)}): {remedy}") from error
    started.sparkContext.setLogLevel("ERROR")
    return started


class SparkFrame(DataFrame):  # type: ignore[misc]  # pyspark is not installed where types are checked
    """The result of a query, a DataFrame of Spark. `df` and `fetchall` return it as DuckDB's relation does."""

    query: str

    def df(self) -> Any:
        """Return the rows as a pandas DataFrame."""
        with _errors(self.query):
            return self.toPandas()

    def fetchall(self) -> list[tuple[Any, ...]]:
        """Return the rows as tuples."""
        table = self.table()
        columns = [column.to_pylist() for column in table.columns]
        return list(zip(*columns, strict=True)) if columns else [()] * table.num_rows

    def table(self) -> pa.Table:
        """Return the rows as an Arrow table."""
        with _errors(self.query):
            return self.toArrow()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(
                f"the result of a query with Spark is a DataFrame of Spark without {name}: use df(), fetchall() or a "
                "method of Spark"
            ) from error


class SparkConnection(contextlib.AbstractContextManager["SparkConnection"]):
    """A connection to a store whose queries Spark executes. `sql` returns a DataFrame of Spark.

    Each query reads the newest version of the store, or the version `version`. The session of Spark remains when the
    connection is closed, because other connections and the program may use it.
    """

    def __init__(self, path: Location, version: int | None, master: str | None, jars: Path | None) -> None:
        """Open a session. `jars` is the folder of the jars; by default, the value of RANKSCOPE_SPARK_JARS."""
        self.path = path
        folder = jars or (Path(os.environ[JARS_VARIABLE]) if os.environ.get(JARS_VARIABLE) else None)
        self._session = _session(master, folder, JARS + (S3_JARS if isinstance(path, ObjectPath) else ()))
        self._version = version
        self._defined: set[str] = set()
        self._last: SparkFrame | None = None

    def sql(self, query: str) -> SparkFrame:
        """Return the result of `query`, one SELECT, as a DataFrame of Spark.

        Raises QueryError if Spark refuses the text; the message names the constructs of DuckDB in it and their common
        forms.
        """
        with _errors(query):
            text = expanded(query, MACROS)
            self._check_selects(text)
            for name in needed_definitions(text, DEFINITIONS):
                self._define(name)
            found = self._session.sql(text)
        self._last = SparkFrame(found._jdf, self._session)  # noqa: SLF001 - pyspark has no other way to extend a result
        self._last.query = query
        return self._last

    def df(self) -> Any:
        """Return the rows of the last query as a pandas DataFrame."""
        return self._result().df()

    def fetchall(self) -> list[tuple[Any, ...]]:
        """Return the rows of the last query as tuples."""
        return self._result().fetchall()

    def close(self) -> None:
        """Close the connection. May be called repeatedly."""
        self._last = None

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a connection with Spark has sql(), df(), fetchall() and close(), not {name}(): use DuckDB"
        )

    def _result(self) -> SparkFrame:
        if self._last is None:
            raise QueryError("there is no result: call sql() first")
        return self._last

    def _check_selects(self, text: str) -> None:
        java = self._session._jsparkSession  # noqa: SLF001 - the parser has no other interface
        with _active(self._session):
            unread = [java.sessionState().sqlParser().parsePlan(text)]
        while unread:
            plan = unread.pop()
            if any(is_instance_of(self._session.sparkContext._gateway, plan, kind) for kind in _WRITING):  # noqa: SLF001
                raise QueryError("Spark only reads a store: only one SELECT is permitted here")
            children = plan.children()
            unread += [children.apply(at) for at in range(children.size())]

    def _define(self, name: str) -> None:
        if name in self._defined:
            return
        for dataset in DEFINITIONS[name].datasets:
            if f"{_RAW}{dataset}" not in self._defined:
                self._session.sql(self._raw_rows(dataset)).createOrReplaceTempView(f"{_RAW}{dataset}")
                self._defined.add(f"{_RAW}{dataset}")
        # Spark stores the plan of a view from a DataFrame. It would analyse one from CREATE VIEW again in each query,
        # with all views that it reads.
        statement = DEFINITIONS[name].statement
        if view := _VIEW.match(statement):
            self._session.sql(statement[view.end() :]).createOrReplaceTempView(name)
        else:
            self._session.sql(statement)
        self._defined.add(name)

    def _raw_rows(self, dataset: str) -> str:
        """Return the query for the raw rows of `dataset`, with the types of the dataset.

        The Delta table has the wider type where datasets differ.
        """
        known, table = self._columns, table_schema()
        columns = []
        for field in dataset_schema(dataset):
            name = f'"{field.name}"'
            if field.name not in known:  # in a table of an earlier release
                name = "NULL"
            elif dataset == "scalars" and field.name == "position":
                name = "coalesce(position, step)"
            is_own = field.name in known and table.field(field.name).type == field.type
            columns.append(f'{name if is_own else f"CAST({name} AS {_spark_type(field.type)})"} AS "{field.name}"')
        return f"SELECT {', '.join(columns)} FROM {self._table} WHERE dataset = {sql_string(dataset)}"

    @functools.cached_property
    def _table(self) -> str:
        path = re.sub("^s3:", "s3a:", str(self.path)).replace("`", "``")
        return f"delta.`{path}`" + ("" if self._version is None else f" VERSION AS OF {self._version}")

    @functools.cached_property
    def _columns(self) -> frozenset[str]:
        return frozenset(self._session.sql(f"SELECT * FROM {self._table}").columns)


@contextlib.contextmanager
def _active(session: SparkSession) -> Iterator[None]:
    """Make Spark's parser use the settings of `session`."""
    java = session._jvm.org.apache.spark.sql.classic.SparkSession  # noqa: SLF001 - the parser has no other interface
    before = java.getActiveSession()
    java.setActiveSession(session._jsparkSession)  # noqa: SLF001
    try:
        yield
    finally:
        if before.isDefined():
            java.setActiveSession(before.get())


def _spark_type(type_: pa.DataType) -> str:
    if pa.types.is_list(type_):
        return f"ARRAY<{_spark_type(type_.value_type)}>"
    return "TIMESTAMP" if pa.types.is_timestamp(type_) else _TYPES[type_]


@contextlib.contextmanager
def _errors(query: str) -> Iterator[None]:
    """Raise QueryError for each error of Spark, with the common forms of the constructs in `query`."""
    try:
        yield
    except PySparkException as error:
        message = _first_line(error)
        raise QueryError(
            f"Spark refused the statement: {message}. {common_form(query, message)}".rstrip(". ")
        ) from error


def _first_line(error: BaseException) -> str:
    return re.sub(r" SQLSTATE: .*", "", str(error).strip().partition("\n")[0]).rstrip(".")
