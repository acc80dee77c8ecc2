"""Write rows as a table, CSV, JSON or Parquet. Each format distinguishes NaN, Inf, null and 0.

JSON has no NaN, so NaN and Inf are written as the strings "NaN", "Infinity" and "-Infinity". CSV writes null as an
empty field, and the empty string as two quotation marks.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from rankscope.shell.options import STANDARD_OUTPUT, output_file

TABLE_ROWS = 40
"""Number of rows that a table shows by default. All other formats write every row."""


Format = Literal["table", "csv", "json", "parquet"]
"""Formats in which a command can write rows."""

OutputFormat = Annotated[Format, typer.Option("--format", help="Output format of the rows.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="File for the rows; - is standard output.")]


def write_rows(rows: pa.Table, form: Format, output: Path, *, limit: int = TABLE_ROWS) -> None:
    """Write `rows` in the selected format to the file `output`, or to standard output if `output` is `-`."""
    if form == "table" and output == STANDARD_OUTPUT:
        print_table(rows, limit=limit)
    elif form == "parquet":
        columns = [_as_duckdb_writes(one) if _has_intervals(one.type) else one for one in rows.columns]
        with output_file(output) as file:
            pq.write_table(pa.table(columns, distinct_names(rows.column_names)), file)
    else:
        write_text(as_text(rows, form, limit=limit), output)


def write_text(text: str, output: Path) -> None:
    """Write `text` to the file `output`, or to standard output if `output` is `-`."""
    with output_file(output) as file:
        file.write_text(text, encoding="utf-8")


def as_text(rows: pa.Table, form: Format, *, limit: int = TABLE_ROWS) -> str:
    """Return `rows` as text in the format `form`, which must not be parquet."""
    if form == "json":
        names = distinct_names(rows.column_names)
        documents = (_plain(dict(zip(names, row, strict=True))) for row in _rows(rows))
        lines = ",\n".join(json.dumps(document, ensure_ascii=False) for document in documents)
        return f"[\n{lines}\n]\n" if lines else "[]\n"
    text = io.StringIO()
    if form == "csv":
        csv.writer(text, lineterminator="\n").writerow(rows.column_names)
        text.writelines(",".join(map(_csv_cell, row)) + "\n" for row in _rows(rows))
    else:
        print_table(rows, limit=limit, file=text)
    return text.getvalue()


def as_json(document: object) -> str:
    """Return `document` as JSON text. Values that JSON cannot represent (NaN, Inf, times) are written as strings."""
    return json.dumps(_plain(document), ensure_ascii=False, indent=2) + "\n"


def print_table(rows: pa.Table, *, limit: int = TABLE_ROWS, file: io.StringIO | None = None) -> None:
    """Print the first `limit` rows as a table with right-aligned numbers, then a note about the number of rows.

    The note has the number of all rows and the number of rows that are not shown. If the table is wider than a
    terminal, each row is printed as a block with a line for each column.
    """
    console = _console(file)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for field in rows.schema:
        numeric = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        table.add_column(field.name, justify="right" if numeric else "left", no_wrap=not console.is_terminal)
    shown = [tuple(map(cell, row)) for row in _rows(rows.slice(0, limit))]
    for row in shown:
        table.add_row(*row)
    if (
        console.is_terminal
        and console.measure(table, options=console.options.update(width=10_000)).maximum > console.width
    ):
        indent = max(map(len, rows.column_names))
        for number, row in enumerate(shown, 1):
            block = [f"{name.ljust(indent)}  {text}" for name, text in zip(rows.column_names, row, strict=True)]
            print("\n".join([f"row {number}".ljust(indent, "─"), *block]))
    else:
        console.print(table, markup=False, highlight=False)
    left = rows.num_rows - limit
    note = f"{rows.num_rows} rows" if left <= 0 else f"{rows.num_rows} rows, {left} not shown: --rows {rows.num_rows}"
    console.print(f"({note})" if rows.num_rows != 1 else "(1 row)", markup=False, highlight=False)


def columns(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int | None = None) -> list[str]:
    """Return the headings `head` and the `rows` as lines with aligned columns, of which the first `left` are texts.

    The other columns are numbers, which are right-justified. By default, all columns are texts.
    """
    table = [list(head), *map(list, rows)]
    widths = [max(len(row[index]) for row in table) for index in range(len(head))]
    forms = ["<" if left is None or index < left else ">" for index in range(len(head))]
    return ["  ".join(map("{:{}{}}".format, row, forms, widths)).rstrip() for row in table]


def cell(value: object) -> str:
    """Return the text of one value for a cell of a table."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else _non_finite(value)
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S.%f")
    if isinstance(value, list | dict):
        return json.dumps(_plain(value), ensure_ascii=False)
    return printable(str(_plain(value)))


def printable(text: str) -> str:
    """Return `text` with control characters escaped, so that a name cannot move the cursor of a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def distinct_names(names: Sequence[str]) -> list[str]:
    """Return `names` with a number appended to each repeated name.

    An SQL join can result in two columns of one name.
    """
    found: list[str] = []
    for name in names:
        others = (f"{name}_{number}" for number in itertools.count(1))
        found.append(next(other for other in others if other not in {*found, *names}) if name in found else name)
    return found


def _rows(rows: pa.Table) -> Iterator[tuple[Any, ...]]:
    """Return the values of each row in column order, as a tuple.

    A dict per row would lose values, because two columns can have the same name.
    """
    return zip(*map(_values, rows.columns), strict=True)


def _values(column: pa.ChunkedArray) -> list[Any]:
    """Return the values of a column; as text if it has intervals, or times outside the range of datetime."""
    if not _has_intervals(column.type):
        with contextlib.suppress(OverflowError, ValueError):  # DuckDB's infinity, a wrong clock
            return list(column.to_pylist())
    return list(_as_duckdb_writes(column).to_pylist())


def _has_intervals(type_: pa.DataType) -> bool:
    """Return whether values of a type are intervals, or lists or structs of intervals."""
    elements = [type_.field(place).type for place in range(type_.num_fields)]
    return pa.types.is_interval(type_) or any(map(_has_intervals, elements))


def _as_duckdb_writes(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the texts that DuckDB makes of the values of a column."""
    import duckdb

    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        texts = connection.from_arrow(pa.table({"value": column})).project("CAST(value AS VARCHAR)")
        return texts.to_arrow_table().column(0)


def _non_finite(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _plain(value: Any) -> Any:
    """Return `value` with all values that JSON cannot represent replaced by strings."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return _non_finite(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return value.isoformat() if isinstance(value, date) else str(value)


def _csv_cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, list | dict):
        return _quoted(json.dumps(_plain(value), ensure_ascii=False))
    plain = _plain(value)
    if isinstance(plain, str):
        return _quoted(plain) if plain == "" or any(char in plain for char in ',"\r\n') else plain
    return str(plain).lower() if isinstance(plain, bool) else str(plain)


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def _console(file: io.StringIO | None) -> Console:
    """Return a rich console. For a file or a pipe, it is so wide that no column is truncated."""
    if file is None and sys.stdout.isatty():
        return Console()
    return Console(file=file or sys.stdout, width=10_000, force_terminal=False, no_color=True)
