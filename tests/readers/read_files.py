"""Read Parquet files, or the views of DuckDB, with one foreign reader. Runs in the environment of this reader.

    python read_files.py READER < files.json > found.json
    python read_files.py views SCRIPT < queries.json > rows.json
DuckDB executes the script rankscope.sql; the output has the columns and sorted rows of each query, or the text of its
error. For other readers, the input has the paths of the files by dataset, and the path of the store. The output has the
number of rows, and the number of values and their sum of each column. NaN counts as null: pandas does not distinguish.
"""

import datetime as dt
import io
import json
import math
import sys
from pathlib import Path
from typing import Any

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
Columns = dict[str, list[Any]]


def pyarrow(path: str) -> Columns:
    from pyarrow import parquet

    return parquet.ParquetFile(path).read().to_pydict()


def pandas(path: str) -> Columns:
    """Read the file at `path` with pandas, which calls pyarrow."""
    import pandas as pd

    return pd.read_parquet(path, engine="pyarrow").to_dict("list")


def fastparquet(path: str) -> Columns:
    """Read the file at `path` with fastparquet into pandas, without floats: it does not support their encoding."""
    import fastparquet

    file = fastparquet.ParquetFile(path)
    floats = (fastparquet.parquet_thrift.Type.FLOAT, fastparquet.parquet_thrift.Type.DOUBLE)
    columns = [name for name in file.columns if file.schema.schema_element(name).type not in floats]
    return file.to_pandas(columns=columns).to_dict("list")


def polars(path: str) -> Columns:
    import polars as pl

    return pl.read_parquet(path, hive_partitioning=False).to_dict(as_series=False)


def datafusion(path: str) -> Columns:
    import datafusion

    return datafusion.SessionContext().read_parquet(path).to_pydict()


def clickhouse(path: str) -> Columns:
    import chdb
    from pyarrow import ipc

    quoted = path.replace("'", "''")
    strings = "SETTINGS output_format_arrow_string_as_string = 1"
    answer = chdb.query(f"SELECT * FROM file('{quoted}', Parquet) {strings}", "Arrow")
    return ipc.open_file(io.BytesIO(answer.bytes())).read_all().to_pydict()


READERS = {one.__name__: one for one in (pyarrow, pandas, fastparquet, polars, datafusion, clickhouse)}


def delta_rs(root: str, dataset: str) -> Columns:
    """Read the rows of `dataset` with delta-rs, which reads the Delta log too."""
    import deltalake

    table = deltalake.DeltaTable(root).to_pyarrow_table(partitions=[("dataset", "=", dataset)])
    return table.drop(["dataset", "part"]).to_pydict()


def described(columns: Columns) -> dict[str, list[float]]:
    """Return the number of values and the sum of the finite values of each column that has a value."""
    found = {}
    for name, values in columns.items():
        present = [number for number in map(_number, values) if number is not None]
        if present:
            found[name] = [len(present), math.fsum(present)]
    return found


def _number(value: Any) -> float | None:
    """Return a number for `value`, the length of a text or list; None for null, NaN and infinities."""
    if value is None:
        return None
    if isinstance(value, dt.datetime):  # NaT of pandas too, for which the result is NaN
        number = (value.replace(tzinfo=dt.UTC) - _EPOCH) / dt.timedelta(microseconds=1)
    elif hasattr(value, "__len__"):
        number = len(value.decode() if isinstance(value, bytes) else value)
    else:
        number = float(value)
    return number if math.isfinite(number) else None


def rounded(value: Any) -> Any:
    """Return `value` with floats to nine digits: the order in which DuckDB adds floats is not defined."""
    if isinstance(value, float):
        return f"{value:.9g}"
    if isinstance(value, (list, tuple)):
        return [rounded(one) for one in value]
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return str(value)


def views(script: str) -> None:
    """Print the result of each query in the input as JSON."""
    import duckdb

    database = duckdb.connect()
    try:
        database.execute(Path(script).read_text(encoding="utf-8"))
    except duckdb.Error as error:
        raise SystemExit(str(error)) from None
    found = {}
    for query in json.load(sys.stdin):
        try:
            answer = database.execute(query)
            columns = [column[0] for column in answer.description]
            found[query] = [columns, sorted((rounded(row) for row in answer.fetchall()), key=repr)]
        except duckdb.Error as error:
            found[query] = str(error)
    json.dump(found, sys.stdout)


def main(reader: str) -> None:
    """Print the description of all datasets in the input as JSON."""
    asked = json.load(sys.stdin)
    found = {}
    for dataset, files in asked["files"].items():
        if reader == "delta_rs":
            parts = [delta_rs(asked["root"], dataset)]
        else:
            parts = [READERS[reader](path) for path in files]
        names = dict.fromkeys(name for part in parts for name in part)
        found[dataset] = described({name: [one for part in parts for one in part.get(name, ())] for name in names})
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    (views if sys.argv[1] == "views" else main)(sys.argv[-1])
