"""Rows as a person or a program reads them: table, csv, json, parquet.

NaN, Inf, null and 0 stay four different things in each: JSON has no NaN, so it says "NaN", "Infinity" or "-Infinity"
as text; CSV leaves null empty and quotes the empty string.
"""

from __future__ import annotations

import contextlib
import csv
import enum
import io
import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from rankscope.base.errors import USAGE, CommandError

TABLE_ROWS = 40
"""Rows a table shows before it counts the rest; every other format gives all of them."""


class Format(enum.StrEnum):
    """How rows are written."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"


OutputFormat = Annotated[Format, typer.Option("--format", help="How to print rows.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file.", show_default=False)]


def write_rows(rows: pa.Table, form: Format, output: Path | None, *, limit: int = TABLE_ROWS) -> None:
    """Write `rows` to `output`, or to standard output."""
    with _writing(output):
        if form is Format.PARQUET:
            _write_parquet(rows, output)
        elif output is not None:
            output.write_text(as_text(rows, form, limit=limit), encoding="utf-8")
        elif form is Format.TABLE:
            print_table(rows, limit=limit)
        else:
            sys.stdout.write(as_text(rows, form))


def write_text(text: str, output: Path | None) -> None:
    """Write `text` to `output`, or to standard output."""
    with _writing(output):
        if output is None:
            sys.stdout.write(text)
        else:
            output.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _writing(output: Path | None) -> Iterator[None]:
    """End the command in one line when `output` cannot be written; a reader that left is no fault."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(f"cannot write {output or 'the output'}: {error.strerror}") from error


def as_text(rows: pa.Table, form: Format, *, limit: int = TABLE_ROWS) -> str:
    """Return `rows` as text in `form`, which is not parquet."""
    if form is Format.JSON:
        names = distinct_names(rows.column_names)
        documents = (_plain(dict(zip(names, row, strict=True))) for row in _rows(rows))
        lines = ",\n".join(json.dumps(document, ensure_ascii=False) for document in documents)
        return f"[\n{lines}\n]\n" if lines else "[]\n"
    text = io.StringIO()
    if form is Format.CSV:
        _write_csv(rows, text)
    else:
        print_table(rows, limit=limit, file=text)
    return text.getvalue()


def as_json(document: object) -> str:
    """Return one JSON document, with what JSON cannot say as text."""
    return json.dumps(_plain(document), ensure_ascii=False, indent=2) + "\n"


def print_table(rows: pa.Table, *, limit: int = TABLE_ROWS, file: io.StringIO | None = None) -> None:
    """Print `rows` in columns; numbers to the right, and the count of what was left out."""
    console = _console(file)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for field in rows.schema:
        numeric = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        table.add_column(field.name, justify="right" if numeric else "left", no_wrap=not console.is_terminal)
    for row in _rows(rows.slice(0, limit)):
        table.add_row(*map(cell, row))
    console.print(table, markup=False, highlight=False)
    left = rows.num_rows - limit
    note = f"{rows.num_rows} rows" if left <= 0 else f"{rows.num_rows} rows, {left} not shown: --rows {rows.num_rows}"
    console.print(f"({note})" if rows.num_rows != 1 else "(1 row)", markup=False, highlight=False)


def columns(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return aligned lines; the last column is as wide as it likes."""
    table = [list(head), *map(list, rows)]
    widths = [max(len(row[index]) for row in table) for index in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def cell(value: object) -> str:
    """Return one value as a table shows it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S.%f")
    if isinstance(value, list | dict):
        return json.dumps(_plain(value), ensure_ascii=False)
    return printable(str(value))


def printable(text: str) -> str:
    """Return `text` on one line: control characters in a name must not move the cursor of the reader's terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def distinct_names(names: Sequence[str]) -> list[str]:
    """Return `names`, with a number behind those that came before: a join may bring one name twice."""
    found: list[str] = []
    for name in names:
        others = (f"{name}_{number}" for number in itertools.count(1))
        found.append(next(other for other in others if other not in {*found, *names}) if name in found else name)
    return found


def _rows(rows: pa.Table) -> Iterator[tuple[Any, ...]]:
    """Yield the values of each row, column by column: two columns may have one name."""
    yield from zip(*(_values(column) for column in rows.columns), strict=True)


def _values(column: pa.ChunkedArray) -> list[Any]:
    try:
        return list(column.to_pylist())
    except (OverflowError, ValueError):  # a time that Python's calendar lacks: DuckDB's infinity, a broken clock
        return [_value(scalar) for scalar in column]


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except (OverflowError, ValueError):
        number = getattr(scalar, "value", None)
        if number is None:
            return f"{scalar.type} beyond the calendar"
        last = (1 << scalar.type.bit_width - 1) - 1
        unit = getattr(scalar.type, "unit", "days")
        return {last: "Infinity", -last: "-Infinity"}.get(number, f"{number} {unit} after 1970")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return _non_finite(value)
    return f"{value:.6g}"


def _non_finite(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _plain(value: Any) -> Any:
    """Return `value` with what JSON cannot say as text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return _non_finite(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return value.isoformat() if isinstance(value, date) else str(value)


def _write_csv(rows: pa.Table, text: io.StringIO) -> None:
    csv.writer(text, lineterminator="\n").writerow(rows.column_names)
    text.writelines(",".join(map(_csv_cell, row)) + "\n" for row in _rows(rows))


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


def _write_parquet(rows: pa.Table, output: Path | None) -> None:
    rows = rows.rename_columns(distinct_names(rows.column_names))
    if output is None:
        if sys.stdout.isatty():
            raise CommandError("parquet is binary: name a file with --output, or pipe it on", code=USAGE)
        pq.write_table(rows, sys.stdout.buffer)
        return
    pq.write_table(rows, output)


def _console(file: io.StringIO | None) -> Console:
    """Return a console that never cuts columns for a reader that is a program or a file."""
    if file is None and sys.stdout.isatty():
        return Console()
    return Console(file=file or sys.stdout, width=10_000, force_terminal=False, no_color=True)
