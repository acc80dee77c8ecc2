"""Execute rankscope.sql with the DuckDB of this environment, and print the rows of each query as JSON.

    python read_views.py SCRIPT < queries.json > rows.json

The output has the columns and sorted rows of each query, or the text of its error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import duckdb


def rounded(value: Any) -> Any:
    """Return `value` with floats to nine digits: the order in which DuckDB adds floats is not defined."""
    if isinstance(value, float):
        return f"{value:.9g}"
    if isinstance(value, (list, tuple)):
        return [rounded(one) for one in value]
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return str(value)


def main(script: str) -> None:
    """Print the result of each query in the input."""
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


if __name__ == "__main__":
    main(sys.argv[1])
