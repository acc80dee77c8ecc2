"""Facts about data files, which permit cheaper views. A fact is computed once per file and process: files never change.

- The optional keys of tensor series that are null in all rows: queries need not compare these keys.
- The first and last step of each scalar, which the macro `scalar_curve` needs. Without this fact, finding these steps
  would take a sixth of the time of the macro.
- The newest step of each rank and kind, which the view `tensor_latest` needs. Neither the Delta log nor the Parquet
  footers show that a rank is behind or that a kind is sampled rarely. Five columns of each file are therefore read,
  which takes 30 ms of CPU time per million rows.
- Whether a rank logged the loss of a step twice, for example after a script went back without a restart. If no rank
  did, `loss_curve` need not search the rows for repetitions. All other parts of the curve are sums over steps.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_storage.base.escaping import sql_identifier, sql_string
from rankscope_storage.base.location import located
from rankscope_storage.files.filesystem import filesystem
from rankscope_storage.log.snapshot import RowRanges, divided
from rankscope_storage.sql.scalar_history import LOSSES
from rankscope_storage.sql.views import OPTIONAL_KEYS, empty_select

_KEPT_FILES: Final = 10_000
_BATCH_FILES: Final = 200
_BATCH_BYTES: Final = 64_000_000
"""Total size, in bytes, of the files that one statement reads together.

In memory, these are 8 million scalars or 5 million rows of tensor statistics."""

RunSql = Callable[[str], pa.Table]
"""Function that executes SQL and returns the result as an Arrow table."""


class FileFact:
    """A fact about each data file of `dataset`, computed by SQL and cached.

    `select` is the SELECT list of an aggregation over the rows that `where` selects, and `refine` converts its result
    to rows of `schema`. Thread-safe. The cache has the facts of the 10,000 files that were read last.
    """

    def __init__(
        self,
        dataset: str,
        select: str,
        *,
        where: str,
        schema: pa.Schema,
        refine: Callable[[pa.Table], pa.Table] | None = None,
    ) -> None:
        self._dataset = dataset
        self._select = select
        self._where = where
        self._schema = schema
        self._refine = refine
        self._seen: OrderedDict[str, pa.Table] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, files: Sequence[str], run_sql: RunSql) -> pa.Table:
        """Return the facts about all `files`; `run_sql` is called only for files whose facts are not cached."""
        known: dict[str, pa.Table | None] = {path: self._seen.get(path) for path in files}
        unseen = [path for path, rows in known.items() if rows is None]
        for batch in divided(unseen, _weight, _BATCH_BYTES):
            known |= self._read(batch, run_sql)
        with self._lock:
            self._seen.update(known)
            while len(self._seen) > _KEPT_FILES:
                self._seen.popitem(last=False)
        found = list(known.values())
        return pa.concat_tables(found) if found else self._schema.empty_table()

    def _read(self, files: Sequence[str], run_sql: RunSql) -> dict[str, pa.Table]:
        listed = ", ".join(map(sql_string, files))
        # Match columns by name, and add the missing ones of older files.
        facts = run_sql(
            f"SELECT filename, {self._select} FROM ({empty_select(self._dataset)} UNION ALL BY NAME SELECT * "
            f"FROM read_parquet([{listed}], hive_partitioning = false, union_by_name = true, filename = true)) "
            f"WHERE {self._where} GROUP BY ALL"
        )
        if self._refine is not None:
            facts = self._refine(facts)
        names, rows = facts.column("filename"), facts.select(self._schema.names).cast(self._schema)
        return {path: rows.filter(pc.equal(names, path)) for path in files}


def _weight(path: str) -> int:
    """Return the size of the file in bytes, but at least a minimum.

    One statement reads files up to a total size. With the minimum, these are at most _BATCH_FILES files.
    """
    location = located(path)
    try:
        size = filesystem(location).size(location)
    except OSError:
        size = 0  # the query reports the error
    return max(size, _BATCH_BYTES // _BATCH_FILES)


_NULL_KEYS: Final = FileFact(
    "tensor_stats",
    ", ".join(f"count({sql_identifier(name)}) > 0 AS {sql_identifier(name)}" for name in OPTIONAL_KEYS),
    where="true",
    schema=pa.schema({name: pa.bool_() for name in OPTIONAL_KEYS}),
)


def absent_keys(files: Sequence[str], run_sql: RunSql) -> tuple[str, ...]:
    """Return those of the columns OPTIONAL_KEYS that are null in all rows of the tensor statistics in `files`.

    These columns distinguish the series of one tensor. `run_sql` executes SQL.
    """
    facts = _NULL_KEYS.of(files, run_sql)
    return tuple(name for name in OPTIONAL_KEYS if not pc.any(facts.column(name), min_count=0).as_py())


EXTENTS_TABLE: Final = "rankscope_raw.scalar_extents"
"""Table with the first and last step of each scalar, which `scalar_curve` reads.

It has the columns of `EXTENTS_SCHEMA`; an unknown attempt is 0."""

EXTENTS_SCHEMA: Final = pa.schema(
    {
        "run": pa.string(),
        "name": pa.string(),
        "labels": pa.string(),
        "attempt": pa.int32(),
        "first_step": pa.int64(),
        "last_step": pa.int64(),
    }
)
_EXTENTS: Final = FileFact(
    "scalars",
    "run, name, labels, coalesce(attempt, 0) AS attempt, min(step) AS first_step, max(step) AS last_step",
    where="step IS NOT NULL AND value IS NOT NULL",
    schema=EXTENTS_SCHEMA,
)


def scalar_extents(files: Sequence[str], runs: Collection[str] | None, run_sql: RunSql) -> pa.Table:
    """Return the first and last step of each scalar of `runs` (None: all runs) in `files`; `run_sql` executes SQL."""
    facts = _EXTENTS.of(files, run_sql)
    if runs is not None:
        facts = facts.filter(pc.is_in(facts.column("run"), pa.array(list(runs), pa.string())))
    summed = facts.group_by(["run", "name", "labels", "attempt"]).aggregate(
        [("first_step", "min"), ("last_step", "max")]
    )
    return summed.rename_columns(EXTENTS_SCHEMA.names)


NEWEST_TABLE: Final = "rankscope_raw.tensor_newest"
"""Table with the newest step of each rank and kind of a run, which views read.

Its columns are of_run, of_attempt, of_rank, of_kind and of_step."""

NEWEST_SCHEMA: Final = pa.schema(
    {"run": pa.string(), "attempt": pa.int32(), "rank": pa.int32(), "kind": pa.string(), "step": pa.int64()}
)
_KEYS: Final = ["run", "attempt", "rank", "kind"]
_NEWEST_STEPS: Final = FileFact(
    "tensor_stats", "run, attempt, rank, kind, max(step) AS step", where="step IS NOT NULL", schema=NEWEST_SCHEMA
)
_FEW_RUNS: Final = 16
_FEW_STEPS: Final = 64


def newest_steps(files: Sequence[str], run_sql: RunSql) -> pa.Table:
    """Return the newest step of each rank and kind in `files`, for the newest attempt of each run."""
    steps = _NEWEST_STEPS.of(files, run_sql).group_by(_KEYS).aggregate([("step", "max")])
    return _last_attempts(steps.rename_columns([*_KEYS, "step"]).select(NEWEST_SCHEMA.names))


def has_single_record_per_rank(newest: pa.Table, files: Sequence[str], run_sql: RunSql) -> bool:
    """Return whether each rank sent the rows of its newest step, which is in `newest`, in only one record.

    If so, no row exists twice, because a record never contains a row twice. `files` contain the rows. Returns False for
    rows without incarnation or seq, which no rank sent, and for more than _FEW_STEPS different steps.
    """
    steps = pc.unique(newest.column("step")).to_pylist()
    if len(steps) > _FEW_STEPS:
        return False
    listed = ", ".join(map(sql_string, files))
    repeated = run_sql(
        "SELECT 1 FROM ("
        "SELECT min(seq) < max(seq) OR min(incarnation) < max(incarnation) OR count(*) > count(seq)"
        " OR count(*) > count(incarnation) AS is_repeated "
        f"FROM read_parquet([{listed}], hive_partitioning = false) WHERE step IN ({', '.join(map(str, steps))}) "
        "GROUP BY run, attempt, rank, kind, step, micro_step, vpp_stage) WHERE is_repeated LIMIT 1"
    )
    return not repeated.num_rows


def rows_at(newest: pa.Table) -> list[RowRanges]:
    """Return the ranges of run and step that contain the rows in `newest`.

    For many runs, the result has only the names of the runs, without steps.
    """
    runs = pc.unique(newest.column("run")).to_pylist()
    if len(runs) > _FEW_RUNS:
        return [RowRanges(frozenset(runs))]
    by_run = newest.group_by("run").aggregate([("step", "min"), ("step", "max")]).to_pylist()
    return [RowRanges(frozenset([row["run"]]), steps=(row["step_min"], row["step_max"])) for row in by_run]


def _last_attempts(rows: pa.Table) -> pa.Table:
    """Return the rows of the newest attempt of each run. A null attempt is older than all others."""
    ranked = rows.append_column("place", pc.fill_null(rows.column("attempt"), -1))
    last = ranked.group_by("run").aggregate([("place", "max")])
    return (
        ranked.join(last, "run").filter(pc.equal(pc.field("place"), pc.field("place_max"))).select(NEWEST_SCHEMA.names)
    )


_LOSS_SCHEMA: Final = pa.schema(
    {
        "run": pa.string(),
        "labels": pa.string(),
        "attempt": pa.int32(),
        "rank": pa.int32(),
        "micro_step": pa.int32(),
        "first_step": pa.int64(),
        "last_step": pa.int64(),
        "is_logged_once": pa.bool_(),
    }
)


def _without_repetitions(facts: pa.Table) -> pa.Table:
    """Replace the list of the logged steps of each series by whether no step is repeated."""
    lists = (steps.values.to_numpy() for steps in facts.column("steps"))
    is_logged_once = [bool((np.diff(np.sort(steps)) > 0).all()) for steps in lists]  # SQL would take twice as long
    return facts.append_column("is_logged_once", pa.array(is_logged_once, pa.bool_()))


_LOSSES: Final = FileFact(
    "scalars",
    "run, coalesce(labels, '') AS labels, coalesce(attempt, 0) AS attempt, coalesce(rank, -1) AS rank, "
    "coalesce(micro_step, -1) AS micro_step, min(step) AS first_step, max(step) AS last_step, "
    "list(step) AS steps",
    where=LOSSES,
    schema=_LOSS_SCHEMA,
    refine=_without_repetitions,
)


def are_logged_once(files: Sequence[str], runs: Collection[str] | None, run_sql: RunSql) -> bool:
    """Return whether no rank logged the loss of a step of `runs` (None: all runs) in `files` twice.

    Step ranges of one series that overlap in two files may contain the same step. `run_sql` executes SQL.
    """
    facts = _LOSSES.of(files, run_sql)
    if runs is not None:
        facts = facts.filter(pc.is_in(facts.column("run"), pa.array(list(runs), pa.string())))
    ordered = facts.sort_by([(name, "ascending") for name in _LOSS_SCHEMA.names])
    before, after = ordered.slice(0, max(0, ordered.num_rows - 1)), ordered.slice(1)
    is_repeated = pc.less_equal(after["first_step"], before["last_step"])
    for name in ("run", "labels", "attempt", "rank", "micro_step"):
        is_repeated = pc.and_(is_repeated, pc.equal(after[name], before[name]))
    return bool(pc.all(facts["is_logged_once"], min_count=0).as_py() and not pc.any(is_repeated, min_count=0).as_py())
