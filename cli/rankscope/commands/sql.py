"""`rankscope sql`: run one SELECT on a store, read-only."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rankscope.access.stores import open_store, readable_store, store_errors
from rankscope.output.rows import TABLE_ROWS, Output, OutputFormat, write_rows, write_text
from rankscope.shell.errors import USAGE, CommandError
from rankscope.shell.options import STANDARD_OUTPUT, Store

if TYPE_CHECKING:
    import pyarrow as pa

    from rankscope_storage.base.location import Location

Engine = Literal["duckdb", "spark"]


def sql(
    query: Annotated[str | None, typer.Argument(help="One SELECT statement. Default: standard input.")] = None,
    store: Store = Path("history"),
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the query from this file.")] = None,
    form: OutputFormat = "table",
    output: Output = STANDARD_OUTPUT,
    rows: Annotated[int, typer.Option(min=0, help="Largest number of rows in a table.")] = TABLE_ROWS,
    engine: Annotated[
        Engine, typer.Option(help="Engine that runs the query. Spark needs the extra spark: see docs/spark.md.")
    ] = "duckdb",
    master: Annotated[
        str | None, typer.Option(help="Cluster of Spark, such as local[2] or spark://host:7077.", show_default=False)
    ] = None,
    jars: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the jars of Delta Lake. Default: Spark fetches them.",
            envvar="RANKSCOPE_SPARK_JARS",
            show_default=False,
        ),
    ] = None,
    emit_views: Annotated[
        bool, typer.Option("--emit-views", help="Print a SQL script that creates the same views in the duckdb program.")
    ] = False,
) -> None:
    """Query a store in SQL (DuckDB dialect). Access is read-only and, with DuckDB, limited to the store.

    Tables: tensor_stats, scalars, events, runs, attempts, tensors, …; docs/store.md lists their columns.

    [bold]Examples[/bold]

    rankscope sql "select step, loss from loss_curve order by cumulative_step"

    rankscope sql --format csv -f query.sql > answer.csv

    rankscope sql "select * from events" --format parquet --output events.parquet

    rankscope sql --engine spark --master 'local[4]' "select * from goodput"

    rankscope sql --emit-views > views.sql && duckdb -init views.sql
    """
    if emit_views:
        _emit_views(store, output)
        return
    statement = _statement(query, file)
    if engine == "spark":
        answer = _ask_spark(statement, store, master, jars)
    elif master is not None:
        raise CommandError("--master is an option of Spark: add --engine spark", code=USAGE)
    else:
        with open_store(store) as connection:
            answer = connection.query(statement)
    write_rows(answer, form, output, limit=rows)


def _ask_spark(statement: str, store: Location, master: str | None, jars: Path | None) -> pa.Table:
    from rankscope_storage.connection import connect

    with (
        store_errors(),
        readable_store(store) as folder,
        connect(folder, engine="spark", master=master, jars=jars) as connection,
    ):
        return connection.sql(statement).table()


def _statement(query: str | None, file: Path | None) -> str:
    if query is not None and file is not None:
        raise CommandError("give a query or --file, not both", code=USAGE)
    if file is not None:
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"cannot read {file}: {error}", code=USAGE) from error
    if query is not None:
        return query
    if sys.stdin.isatty():
        raise CommandError("no query: give a SELECT, --file, or standard input", code=USAGE)
    return sys.stdin.read()


def _emit_views(store: Location, output: Path) -> None:
    from rankscope_storage.query.sql_script import emit_views

    if not isinstance(store, Path):
        raise CommandError(f"--emit-views needs a local store: DuckDB reads {store} only through rankscope", code=USAGE)
    with open_store(store):  # raises CommandError if the folder is not a valid store
        script = emit_views(store)
    write_text(script, output)
