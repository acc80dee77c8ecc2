"""SQL text of the public views and macros, and of the queries for raw rows on which they are based.

This module opens no file: the caller passes the paths of a dataset's files. A macro reads any relation: a view, or a
name that the statement defines with WITH.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Final

from rankscope_contract.model.schema import DATASETS, DIMENSIONS, ROLLUPS
from rankscope_contract.security.escaping import sql_identifier, sql_string
from rankscope_storage.base.schema import UNWRITTEN, dataset_schema, fingerprint, sql_null, sql_type, table_schema
from rankscope_storage.files.partitioning import file_fingerprint
from rankscope_storage.sql import goodput
from rankscope_storage.sql.clock_jumps import TIMED_POSITIONS
from rankscope_storage.sql.collective_calls import COLLECTIVE_CALLS
from rankscope_storage.sql.rollups import TIMELINES, rollup_view
from rankscope_storage.sql.scalar_curve import SCALAR_CURVE
from rankscope_storage.sql.scalar_history import HISTORY_VIEWS, SCALAR_POSITIONS
from rankscope_storage.sql.smoothing import DOWNSAMPLE, SMOOTHING_MACROS
from rankscope_storage.sql.tensor_global import TENSOR_GLOBAL
from rankscope_storage.sql.tensor_macros import DEVIATION_MACROS, NONFINITE, TENSOR_LATEST

DESYNC: Final = """\
CREATE OR REPLACE VIEW desync AS
WITH latest AS (
  SELECT * FROM hashes WHERE rank IS NOT NULL AND replicas IS NOT NULL
  QUALIFY row_number() OVER (
    PARTITION BY run, attempt, step, vpp_stage, kind, tensor, replicas, rank ORDER BY ordinal DESC NULLS LAST) = 1
),
camp AS (
  SELECT run, attempt, step, vpp_stage, kind, tensor, replicas, hash, list(rank ORDER BY rank) AS members,
    count(*) AS size, min(norm) AS least, max(norm) AS most, min(ts) AS ts
  FROM latest GROUP BY run, attempt, step, vpp_stage, kind, tensor, replicas, hash
),
disagreement AS (
  SELECT run, attempt, step, vpp_stage, kind, tensor, replicas, count(*) AS hashes, sum(size)::BIGINT AS ranks,
    list({hash: hash, members: members, size: size} ORDER BY size DESC, members) AS camps,
    min(least) AS norm_min, max(most) AS norm_max, min(ts) AS ts
  FROM camp GROUP BY run, attempt, step, vpp_stage, kind, tensor, replicas
)
SELECT run, attempt, step, vpp_stage, kind, tensor, replicas, hashes, ranks,
  -- A unique largest camp is the majority; without one, for example with two ranks, all ranks are returned.
  CASE WHEN camps[1].size > camps[2].size
    THEN list_sort(flatten(list_transform(camps[2:], lambda camp: camp.members)))
    ELSE list_sort(flatten(list_transform(camps, lambda camp: camp.members))) END AS apart,
  CASE WHEN camps[1].size > camps[2].size THEN camps[1].hash END AS majority,
  norm_min, norm_max, ts
FROM disagreement WHERE hashes > 1
"""
"""View of replicas with different hashes: one row per tensor and step, with the ranks that differ from the majority.

If no hash has a majority, the row has all ranks."""


MACROS: Final = (
    SCALAR_POSITIONS,
    TIMED_POSITIONS,
    *HISTORY_VIEWS,
    TENSOR_LATEST,
    NONFINITE,
    *SMOOTHING_MACROS,
    DOWNSAMPLE,
    SCALAR_CURVE,
    *DEVIATION_MACROS,
)
"""Statements of views and macros that read only the views of datasets and each other.

Each statement follows the statements that create the views and macros it reads."""


VERSION_KEYS: Final = {
    "runs": ("run",),
    "attempts": ("run", "attempt"),
    "tensors": ("run", "kind", "tensor", '"index"'),
}
"""Key columns of each dimension table.

The table has several versions of a row; the view of the table has only the newest version for each key."""

HISTORY_SUFFIX: Final = "_history"

# Versions of the service have null tags and note, and versions with tags have no ordinal: neither hides the other,
# whichever is written last. Tags that a user removed are empty, not null.
_NEWEST_LABEL: Final = "max_by({0}, ts) FILTER ({0} IS NOT NULL) OVER (PARTITION BY run)"
_LABELS: Final = ", ".join(  # DuckDB 1.4.0 permits no nullif() of a window
    f"CASE WHEN {newest} <> '{nothing}' THEN {newest} END AS {name}"
    for name, nothing, newest in (
        ("tags", "{}", _NEWEST_LABEL.format("tags")),
        ("note", "", _NEWEST_LABEL.format("note")),
    )
)

_ROLLED_UP: Final = {rollups: dataset for dataset, rollups in ROLLUPS.items()}


def view_statements(*, prefix: str = "") -> Iterator[str]:
    """Yield the statements that create the public views and macros.

    The raw rows of a dataset are read from the relation `<prefix><dataset>`.
    """
    for dataset in DATASETS:
        raw = f"{prefix}{dataset}"
        if dataset in DIMENSIONS:
            yield f"CREATE OR REPLACE VIEW {dataset}{HISTORY_SUFFIX} AS SELECT * FROM {raw}"
            columns = f"* REPLACE ({_LABELS})" if dataset == "runs" else "*"
            keys = ", ".join(VERSION_KEYS[dataset])
            order = "ORDER BY ordinal DESC NULLS LAST, ts DESC NULLS LAST"
            yield (
                f"CREATE OR REPLACE VIEW {dataset} AS SELECT {columns} FROM {raw}\n"
                f"QUALIFY row_number() OVER (PARTITION BY {keys} {order}) = 1"
            )
        elif dataset in _ROLLED_UP:
            yield rollup_view(_ROLLED_UP[dataset], raw)
        else:
            yield f"CREATE OR REPLACE VIEW {dataset} AS SELECT * FROM {raw}"
    yield from (TENSOR_GLOBAL, *TIMELINES, DESYNC, COLLECTIVE_CALLS, *goodput.STATEMENTS, *MACROS)


@functools.cache
def empty_select(dataset: str) -> str:
    """Return a query that returns no rows, with the columns and types of `dataset` in order."""
    return f"SELECT {', '.join(map(sql_null, dataset_schema(dataset)))} WHERE false"


def empty_view(dataset: str) -> str:
    """Return the statement that creates the view of `dataset` as an empty view."""
    return f"CREATE OR REPLACE VIEW {dataset} AS {empty_select(dataset)}"


def raw_select(dataset: str, files: str, *, empty: bool, columns: str | None) -> str:
    """Return a query for the rows of `dataset` in `files`, an SQL expression for a list of paths.

    `columns` is the select list if all files have the same columns. If they have different columns, it is None, and
    DuckDB opens all files first to match their columns by name. Columns of other datasets, which files have that
    another tool rewrote, are left out. With `empty`, the query returns no rows.
    """
    if empty:
        return empty_select(dataset)
    if columns is not None:
        return f"SELECT {columns} FROM read_parquet({files}, hive_partitioning = false)"
    return (
        f"SELECT {_own_columns(dataset)} FROM ({empty_select(dataset)} UNION ALL BY NAME "
        f"SELECT * FROM read_parquet({files}, hive_partitioning = false, union_by_name = true))"
    )


@functools.cache
def _own_columns(dataset: str) -> str:
    """Return the select list for the columns of `dataset`, with their types, from files with more or other columns.

    Files that another tool rewrote have all columns of the Delta table, and its type where that type is wider.
    """
    table = table_schema()
    return ", ".join(
        sql_identifier(field.name)
        if table.field(field.name).type == field.type
        else f"{sql_identifier(field.name)}::{sql_type(field.type)} AS {sql_identifier(field.name)}"
        for field in dataset_schema(dataset)
    )


@functools.cache
def _usual_columns(dataset: str) -> str:
    """Return the select list for files of `dataset` without the UNWRITTEN columns, which it adds as null columns.

    UNWRITTEN names the columns of a dataset that are null in most files.
    """
    unwritten = UNWRITTEN.get(dataset, ())
    if not unwritten:
        return "*"
    return ", ".join(
        sql_null(field) if field.name in unwritten else sql_identifier(field.name) for field in dataset_schema(dataset)
    )


def files_select(dataset: str, files: Sequence[str]) -> str:
    """Return a query for the rows of `dataset` in `files`, a list of paths."""
    listed = f"[{', '.join(map(sql_string, files))}]::VARCHAR[]"
    return raw_select(dataset, listed, empty=not files, columns=common_columns(dataset, files))


def common_columns(dataset: str, files: Sequence[str]) -> str | None:
    """Return the select list for all columns of `dataset` in `files`; None if the files have different columns."""
    shapes = {file_fingerprint(file) for file in files}
    if shapes <= {fingerprint(dataset)}:
        return _usual_columns(dataset)
    return "*" if shapes == {fingerprint(dataset, whole=True)} else None
