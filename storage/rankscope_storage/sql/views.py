"""SQL text of the public views and macros, and of the queries for raw rows on which they are based.

This module opens no file: the caller passes the paths of a dataset's files. A macro reads any relation: a view, or a
name that the statement defines with WITH.

`top_deviations` compares a statistic with the baseline of the anomaly rules. `bucket_deviations` compares it with
earlier steps of the same tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Final

from rankscope_storage.base.datasets import DATASETS, DIMENSIONS, ROLLUPS
from rankscope_storage.base.escaping import sql_string
from rankscope_storage.base.schema import UNWRITTEN, dataset_schema, fingerprint, sql_nulls, sql_type, table_schema
from rankscope_storage.files.sorting import file_fingerprint
from rankscope_storage.sql import goodput
from rankscope_storage.sql.collective_calls import COLLECTIVE_CALLS
from rankscope_storage.sql.first_causes import FIRST_CAUSES
from rankscope_storage.sql.functions import SCALAR_MACROS, SPARK_FUNCTIONS
from rankscope_storage.sql.macros import Macro, expanded, for_spark
from rankscope_storage.sql.rollups import TIMELINES, rollup_view
from rankscope_storage.sql.scalar_history import HISTORY_VIEWS, SCALAR_CURVE
from rankscope_storage.sql.smoothing import DOWNSAMPLE, EMA, MOVING_AVERAGE, P10

_NEWEST: Final = """\
  SELECT run AS of_run, attempt AS of_attempt, rank AS of_rank, kind AS of_kind, max(step) AS of_step
  FROM tensor_stats WHERE step IS NOT NULL
  GROUP BY run, attempt, rank, kind
  QUALIFY attempt IS NOT DISTINCT FROM max(attempt) OVER (PARTITION BY run)
"""


_LAST_RECORD: Final = """\
QUALIFY row_number() OVER (
  PARTITION BY run, rank, micro_step, vpp_stage, kind, tensor, "index", call_seq
  ORDER BY ordinal DESC NULLS LAST, seq DESC NULLS LAST) = 1
"""


def tensor_latest(newest: str = _NEWEST, *, measured_once: bool = False) -> str:
    """Return the statement that creates the view `tensor_latest`.

    `newest` is a query for the newest step of each rank and kind. With `measured_once`, the caller guarantees that no
    rank measured such a step twice. The view then omits the search for repeated rows, which would take most of the time
    of the view.
    """
    # The step is found first and then joined: DuckDB then reads only row groups that can contain it.
    return f"""\
CREATE OR REPLACE VIEW tensor_latest AS
WITH newest AS (
{newest})
SELECT tensor_stats.* FROM tensor_stats JOIN newest
  ON run = of_run AND step = of_step AND kind = of_kind
  AND attempt IS NOT DISTINCT FROM of_attempt AND rank IS NOT DISTINCT FROM of_rank
{"" if measured_once else _LAST_RECORD}"""


TENSOR_LATEST: Final = tensor_latest()
"""View of the latest tensor statistics, from the newest attempt of each run.

It has the rows of the last step of each rank and kind, and no earlier rows."""

_OF_A_TENSOR: Final = 'run, attempt, step, micro_step, vpp_stage, kind, tensor, "index", call_seq'
TENSOR_GLOBAL: Final = f"""\
CREATE OR REPLACE VIEW tensor_global AS
WITH part AS (
  -- A rank that measures a step again within an attempt has gone back: only its last row counts.
  SELECT *, placement IS NOT DISTINCT FROM 'shard' AS sharded,
    numel - coalesce(nans, 0) - coalesce(infs, 0) AS finite
  FROM tensor_stats
  QUALIFY row_number() OVER (
    PARTITION BY {_OF_A_TENSOR}, rank ORDER BY coalesce(ordinal, seq) DESC NULLS LAST, ts DESC NULLS LAST) = 1
),
copy AS (
  -- A replica is the whole tensor, and so is a group of shards. Hybrid sharding has several groups.
  SELECT {_OF_A_TENSOR},
    CASE WHEN sharded THEN shard_group END AS of_group, CASE WHEN NOT sharded THEN rank END AS of_rank,
    max(placement) AS placement, count(*) AS parts, min(ts) AS ts,
    sqrt(sum(norm::DOUBLE * norm)) AS norm, min("min") AS "min", max("max") AS "max",
    sum(mean::DOUBLE * finite) FILTER (WHERE finite > 0)
      / sum(finite) FILTER (WHERE finite > 0 AND mean IS NOT NULL) AS mean,
    sum(nans)::BIGINT AS nans, sum(infs)::BIGINT AS infs, sum(zeros)::BIGINT AS zeros, sum(numel)::BIGINT AS numel
  FROM part GROUP BY ALL
)
SELECT {_OF_A_TENSOR}, placement,
  (sum(parts) OVER all_copies)::BIGINT AS parts,
  norm, "min", "max", mean,
  -- A NaN or infinity counts, whichever copy contains it.
  max(nans) OVER all_copies AS nans,
  max(infs) OVER all_copies AS infs,
  zeros, numel,
  min(ts) OVER all_copies AS ts
FROM copy
WINDOW all_copies AS (PARTITION BY {_OF_A_TENSOR})
-- A group with a missing rank has fewer elements than a complete one.
QUALIFY row_number() OVER (
  PARTITION BY {_OF_A_TENSOR} ORDER BY numel DESC NULLS LAST, of_group NULLS LAST, of_rank NULLS LAST) = 1
"""
"""View of the statistics of whole tensors, combined from the shards of all ranks."""

NONFINITE: Final = """\
CREATE OR REPLACE VIEW nonfinite AS
SELECT * FROM tensor_stats WHERE nans > 0
UNION ALL
SELECT * FROM tensor_stats WHERE infs > 0 AND (nans IS NULL OR nans <= 0)
"""
"""View of the rows of `tensor_stats` that count at least one NaN or infinite element.

It is a union of the rows with a NaN and the other rows with an infinite element, so that DuckDB can skip row groups by
each of the two counts."""


_DEVIATIONS: Final = """\
(SELECT attempt, rank, step, micro_step, vpp_stage, kind, tensor, "index", '{op}' AS op, {op} AS value,
    {op}_baseline AS baseline, CASE WHEN {op}_baseline = 0 THEN abs({op}::DOUBLE) * 'inf'::DOUBLE
      ELSE abs({op}::DOUBLE) / nullif({op}_baseline, 0) END AS ratio
  FROM tensor_stats WHERE run = of_run AND {op}_baseline >= 0 AND abs({op}) > {op}_baseline
  ORDER BY ratio DESC NULLS LAST, {order} LIMIT top)"""
_DEVIATIONS_ORDER: Final = ", ".join(
    f"{name} NULLS LAST" for name in ("attempt", "step", "rank", "kind", "tensor", "micro_step", "vpp_stage", '"index"')
)
_TOP_DEVIATIONS: Final = Macro(
    "top_deviations",
    {"of_run": None, "top": "20"},
    f"""\
WITH deviation AS (
  {_DEVIATIONS.format(op="norm", order=_DEVIATIONS_ORDER)}
  UNION ALL
  {_DEVIATIONS.format(op="mean", order=_DEVIATIONS_ORDER)}
)
SELECT * FROM deviation ORDER BY ratio DESC NULLS LAST, {_DEVIATIONS_ORDER} LIMIT top
""",
)
"""Macro that returns the rows with the largest ratio of a statistic to the baseline of the anomaly rules.

The ratio is infinite if the baseline is 0."""

OPTIONAL_KEYS: Final = ("attempt", "rank", "micro_step", "vpp_stage", "index", "call_seq")
"""Columns that distinguish the series of one tensor. In many runs, some of these columns are null in all rows."""

_RESULT: Final = ("attempt", "rank", "step", "micro_step", "vpp_stage", "kind", "tensor", "index")


def bucket_deviations(absent: Collection[str] = ()) -> Macro:
    """Return the macro `bucket_deviations`.

    `absent` has those of the columns OPTIONAL_KEYS that are null in all rows which the macro will read. The macro does
    not group by these columns: with them, it would take a tenth longer and return the same groups.
    """
    keys = [name for name in OPTIONAL_KEYS if name not in absent]
    grouped = ", ".join([f'"{name}"' for name in (*keys, "kind", "tensor")])
    same = "".join([f' AND measured."{name}" IS NOT DISTINCT FROM best."{name}"' for name in keys])
    ordered = ("attempt", "number", "rank", "kind", "tensor", "micro_step", "vpp_stage", "index", "call_seq")
    order = ", ".join(f'"{name}" NULLS LAST' for name in ordered if name not in absent)
    result = ", ".join([sql_nulls("tensor_stats")[name] if name in absent else f'"{name}"' for name in _RESULT])
    shown = ", ".join(f'"{name}" NULLS LAST' for name in _RESULT)
    # The step of the highest norm is found for the result rows only, which is cheaper than for all groups.
    body = f"""\
WITH bucket AS (
  SELECT {grouped}, intdiv(step, width) AS number, avg(norm) FILTER (WHERE isfinite(norm)) AS mean_norm,
    max(norm) AS highest
  FROM tensor_stats WHERE run = of_run AND step IS NOT NULL
  GROUP BY {grouped}, number
),
compared AS (
  SELECT *, lag(mean_norm) OVER (PARTITION BY {grouped} ORDER BY number) AS before FROM bucket
),
best AS MATERIALIZED (
  SELECT *, highest::DOUBLE / before AS ratio FROM compared WHERE before > 0 AND highest > before
  ORDER BY ratio DESC NULLS LAST, {order} LIMIT top
),
dated AS (
  SELECT best.*, min(step) AS step
  FROM best JOIN tensor_stats AS measured ON measured.tensor = best.tensor AND measured.kind = best.kind
    AND intdiv(measured.step, width) = best.number AND measured.norm = best.highest{same}
  WHERE measured.run = of_run AND measured.step IS NOT NULL
  GROUP BY ALL
)
SELECT {result}, highest AS norm, before AS norm_before, ratio
FROM dated ORDER BY ratio DESC NULLS LAST, {shown}
"""
    return Macro("bucket_deviations", {"of_run": None, "top": "20", "width": "50"}, body)


DEVIATION_MACROS: Final = (_TOP_DEVIATIONS, bucket_deviations())
"""The macros `top_deviations` and `bucket_deviations`; the second needs no baseline.

`bucket_deviations` divides steps into buckets of `width` steps. It compares the highest norm of a bucket with the mean
norm of the previous bucket, and returns the first step that has the highest norm."""


DESYNC: Final = """\
CREATE OR REPLACE VIEW desync AS
WITH latest AS (
  SELECT * FROM hashes WHERE rank IS NOT NULL AND replicas IS NOT NULL
  QUALIFY row_number() OVER (
    PARTITION BY run, attempt, step, vpp_stage, kind, tensor, replicas, rank
    ORDER BY ordinal DESC NULLS LAST, seq DESC NULLS LAST, hash NULLS LAST) = 1
),
camp AS (
  SELECT run, attempt, step, vpp_stage, kind, tensor, replicas, hash, array_agg(rank) AS members,
    count(*) AS size, min(norm) AS least, max(norm) AS most, min(ts) AS ts
  FROM latest GROUP BY run, attempt, step, vpp_stage, kind, tensor, replicas, hash
),
sized AS (
  SELECT *, max(size) OVER replica AS largest, count(*) OVER replica AS hashes FROM camp
  WINDOW replica AS (PARTITION BY run, attempt, step, vpp_stage, kind, tensor, replicas) QUALIFY hashes > 1
),
disagreement AS (
  SELECT run, attempt, step, vpp_stage, kind, tensor, replicas, max(hashes) AS hashes, sum(size)::BIGINT AS ranks,
    count(CASE WHEN size = largest THEN 1 END) = 1 AS has_majority, max(CASE WHEN size = largest THEN hash END) AS hash,
    array_agg(members) FILTER (WHERE size < largest) AS minority, array_agg(members) AS camps,
    min(least) AS norm_min, max(most) AS norm_max, min(ts) AS ts
  FROM sized GROUP BY run, attempt, step, vpp_stage, kind, tensor, replicas
)
SELECT run, attempt, step, vpp_stage, kind, tensor, replicas, hashes, ranks,
  -- A unique largest camp is the majority; without one, for example with two ranks, all ranks are returned.
  sorted_list(flatten(CASE WHEN has_majority THEN minority ELSE camps END)) AS apart,
  CASE WHEN has_majority THEN hash END AS majority,
  norm_min, norm_max, ts
FROM disagreement
"""
"""View of replicas with different hashes: one row per tensor and step, with the ranks that differ from the majority.

If no hash has a majority, the row has all ranks."""


_TABLE_MACROS: Final = (EMA, MOVING_AVERAGE, P10, DOWNSAMPLE, SCALAR_CURVE, *DEVIATION_MACROS)
MACROS: Final = {macro.name: macro for macro in (*SCALAR_MACROS, *_TABLE_MACROS)}
"""All macros by name."""


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
_NEWEST_LABEL: Final = "max_by({0}, ts) FILTER (WHERE {0} IS NOT NULL) OVER (PARTITION BY run)"
_LABELS: Final = {  # DuckDB 1.4.0 permits no nullif() of a window
    name: f"CASE WHEN {newest} <> '{nothing}' THEN {newest} END AS {name}"
    for name, nothing, newest in (
        ("tags", "{}", _NEWEST_LABEL.format("tags")),
        ("note", "", _NEWEST_LABEL.format("note")),
    )
}

_ROLLED_UP: Final = {rollups: dataset for dataset, rollups in ROLLUPS.items()}


SAME_ROWS: Final = {
    "scalar_positions": "scalars",
    "scalars_without_jumps": "scalars",
    "events_without_jumps": "events",
    "scalar_positions_without_jumps": "scalars",
}
"""Views with the rows of a dataset, from when the store had neither positions nor corrected times."""


def view_statements(*, prefix: str = "") -> list[str]:
    """Return the statements that create the public views in DuckDB, and the functions and macros.

    The raw rows of a dataset are read from the relation `<prefix><dataset>`. Each statement follows the statements that
    create the views and functions it reads.
    """
    scalar, table = ([macro.statement() for macro in macros] for macros in (SCALAR_MACROS, _TABLE_MACROS))
    return [*scalar, *_views(prefix), *table]


def spark_statements(*, prefix: str) -> list[str]:
    """Return the statements that create the views in Spark, and the functions of DuckDB that they use.

    Spark has no macros: `expanded` replaces their calls.
    """
    return [expanded(for_spark(statement), MACROS) for statement in (*SPARK_FUNCTIONS, *_views(prefix))]


def _views(prefix: str) -> list[str]:
    statements = []
    for dataset in DATASETS:
        raw = f"{prefix}{dataset}"
        statement = f"CREATE OR REPLACE VIEW {dataset} AS SELECT * FROM {raw}"
        if dataset in DIMENSIONS:
            statements.append(f"CREATE OR REPLACE VIEW {dataset}{HISTORY_SUFFIX} AS SELECT * FROM {raw}")
            own = _LABELS if dataset == "runs" else {}
            columns = ", ".join(own.get(name, f'"{name}"') for name in dataset_schema(dataset).names)
            keys = ", ".join(VERSION_KEYS[dataset])
            order = "ORDER BY ordinal DESC NULLS LAST, ts DESC NULLS LAST"
            statement = (
                f"CREATE OR REPLACE VIEW {dataset} AS SELECT {columns} FROM {raw}\n"
                f"QUALIFY row_number() OVER (PARTITION BY {keys} {order}) = 1"
            )
        elif dataset in _ROLLED_UP:
            statement = rollup_view(_ROLLED_UP[dataset], raw)
        statements.append(statement)
    statements += [f"CREATE OR REPLACE VIEW {name} AS SELECT * FROM {dataset}" for name, dataset in SAME_ROWS.items()]
    statements += [
        TENSOR_GLOBAL,
        *TIMELINES,
        DESYNC,
        COLLECTIVE_CALLS,
        *goodput.STATEMENTS,
        *HISTORY_VIEWS,
        FIRST_CAUSES,
    ]
    return [*statements, TENSOR_LATEST, NONFINITE]


@functools.cache
def empty_select(dataset: str) -> str:
    """Return a query that returns no rows, with the columns and types of `dataset` in order."""
    return f"SELECT {', '.join(sql_nulls(dataset).values())} WHERE false"


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
    columns = {
        field.name: f'"{field.name}"'
        if table.field(field.name).type == field.type
        else f'"{field.name}"::{sql_type(field.type)} AS "{field.name}"'
        for field in dataset_schema(dataset)
    }
    if dataset == "scalars":
        columns["position"] = "coalesce(position, step) AS position"
    return ", ".join(columns.values())


@functools.cache
def _usual_columns(dataset: str) -> str:
    """Return the select list for files of `dataset` without the UNWRITTEN columns, which it adds as null columns.

    UNWRITTEN names the columns of a dataset that are null in most files. A null position of a scalar is its step.
    """
    unwritten = UNWRITTEN.get(dataset, ())
    if not unwritten:
        return "*"
    if dataset == "scalars":
        return "*, step AS position"
    columns = [null if name in unwritten else f'"{name}"' for name, null in sql_nulls(dataset).items()]
    return ", ".join(columns)


def files_select(dataset: str, files: Sequence[str]) -> str:
    """Return a query for the rows of `dataset` in `files`, a list of paths."""
    listed = f"[{', '.join(map(sql_string, files))}]::VARCHAR[]"
    return raw_select(dataset, listed, empty=not files, columns=common_columns(dataset, files))


def has_positions(files: Sequence[str]) -> bool:
    """Return whether any of `files`, which have scalars, may have a row whose position is not its step."""
    return not {file_fingerprint(file) for file in files} <= {fingerprint("scalars")}


def common_columns(dataset: str, files: Sequence[str]) -> str | None:
    """Return the select list for all columns of `dataset` in `files`; None if the files have different columns."""
    shapes = {file_fingerprint(file) for file in files}
    if shapes <= {fingerprint(dataset)}:
        return _usual_columns(dataset)
    return "*" if shapes == {fingerprint(dataset, whole=True)} else None
