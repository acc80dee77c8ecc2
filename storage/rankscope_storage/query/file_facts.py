"""Facts about data files, computed once per file and process: a file never changes.

- The optional keys of tensor series that are null in all rows: comparing these columns is unnecessary.
- The first and last step of each scalar, with which `scalar_curve` begins: a sixth of its time.
- The newest step of each rank and kind, with which `tensor_latest` begins. Neither log nor footer shows that a rank is
  behind or that a kind is seldom sampled, so five columns of each file are read, 30 ms of CPU for a million rows.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.security.escaping import sql_identifier, sql_string
from rankscope_storage.log.snapshot import RowRanges
from rankscope_storage.sql.tensor_macros import OPTIONAL_KEYS
from rankscope_storage.sql.views import empty_select

_KEPT_FILES: Final = 10_000
_BATCH_FILES: Final = 200
_BATCH_BYTES: Final = 64_000_000
"""What is asked of so much together, about 8 million scalars or 5 million statistics of tensors, fits into memory."""

Ask = Callable[[str], pa.Table]
"""Runs SQL."""


class ByFile:
    """What `select`, of the files of `dataset`, tells of each, and `refine` makes of it: rows of `schema`."""

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

    def of(self, files: Sequence[str], ask: Ask) -> pa.Table:
        """Return what is told of all `files`; `ask` is used for those that were not yet looked through."""
        known: dict[str, pa.Table | None] = {path: self._seen.get(path) for path in files}
        unseen = [path for path, rows in known.items() if rows is None]
        for batch in _batches(unseen):
            known |= self._look_through(batch, ask)
        with self._lock:
            self._seen.update(known)
            while len(self._seen) > _KEPT_FILES:
                self._seen.popitem(last=False)
        found = list(known.values())
        return pa.concat_tables(found) if found else self._schema.empty_table()

    def _look_through(self, files: Sequence[str], ask: Ask) -> dict[str, pa.Table]:
        listed = ", ".join(map(sql_string, files))
        # By name, and with all columns there are: files of an older shape may lack some.
        told = ask(
            f"SELECT filename, {self._select} FROM ({empty_select(self._dataset)} UNION ALL BY NAME SELECT * "
            f"FROM read_parquet([{listed}], hive_partitioning = false, union_by_name = true, filename = true)) "
            f"WHERE {self._where} GROUP BY ALL"
        )
        if self._refine is not None:
            told = self._refine(told)
        names, rows = told.column("filename"), told.select(self._schema.names).cast(self._schema)
        return {path: rows.filter(pc.equal(names, path)) for path in files}


def _batches(files: Sequence[str]) -> Iterator[list[str]]:
    """Divide `files` into lists that are neither too long nor, if that can be, too large."""
    batch: list[str] = []
    size = 0
    for path in files:
        of_file = _size(path)
        if batch and (len(batch) == _BATCH_FILES or size + of_file > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(path)
        size += of_file
    if batch:
        yield batch


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0  # whoever reads it will say what is wrong with it


_NULL_KEYS: Final = ByFile(
    "tensor_stats",
    ", ".join(f"count({sql_identifier(name)}) > 0 AS {sql_identifier(name)}" for name in OPTIONAL_KEYS),
    where="true",
    schema=pa.schema({name: pa.bool_() for name in OPTIONAL_KEYS}),
)


def absent_keys(files: Sequence[str], ask: Ask) -> tuple[str, ...]:
    """Return the optional keys that are null in all rows of tensor statistics in `files`; `ask` runs SQL."""
    told = _NULL_KEYS.of(files, ask)
    return tuple(name for name in OPTIONAL_KEYS if not pc.any(told.column(name), min_count=0).as_py())


EXTENTS_TABLE: Final = "rankscope_raw.scalar_extents"
"""Where the macro looks for it: columns of `EXTENTS_SCHEMA`; an attempt that is not known is 0."""

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
_EXTENTS: Final = ByFile(
    "scalars",
    "run, name, labels, coalesce(attempt, 0) AS attempt, min(step) AS first_step, max(step) AS last_step",
    where="step IS NOT NULL AND value IS NOT NULL",
    schema=EXTENTS_SCHEMA,
)


def scalar_extents(files: Sequence[str], runs: Collection[str] | None, ask: Ask) -> pa.Table:
    """Return where the values of each scalar, of `runs` or of all, begin and end in `files`; `ask` runs SQL."""
    told = _EXTENTS.of(files, ask)
    if runs is not None:
        told = told.filter(pc.is_in(told.column("run"), pa.array(list(runs), pa.string())))
    summed = told.group_by(["run", "name", "labels", "attempt"]).aggregate(
        [("first_step", "min"), ("last_step", "max")]
    )
    return summed.rename_columns(EXTENTS_SCHEMA.names)


NEWEST_TABLE: Final = "rankscope_raw.tensor_newest"
"""Where the views look for it: columns of_run, of_attempt, of_rank, of_kind, of_step."""

NEWEST_SCHEMA: Final = pa.schema(
    {"run": pa.string(), "attempt": pa.int32(), "rank": pa.int32(), "kind": pa.string(), "step": pa.int64()}
)
_KEYS: Final = ["run", "attempt", "rank", "kind"]
_NEWEST_STEPS: Final = ByFile(
    "tensor_stats", "run, attempt, rank, kind, max(step) AS step", where="step IS NOT NULL", schema=NEWEST_SCHEMA
)
_FEW_RUNS: Final = 16
_FEW_STEPS: Final = 64


def newest_steps(files: Sequence[str], ask: Ask) -> pa.Table:
    """Return the newest step of each rank and kind in the newest attempt of each run in `files`; `ask` runs SQL."""
    return _last_attempts(_highest(_NEWEST_STEPS.of(files, ask), _KEYS))


def has_single_record_per_rank(newest: pa.Table, files: Sequence[str], ask: Ask) -> bool:
    """Whether all rows of these steps, which lie in `files`, come from one record of their rank each.

    A record has no row twice. Where nobody sent the rows nothing is known of that.
    """
    steps = pc.unique(newest.column("step")).to_pylist()
    if len(steps) > _FEW_STEPS:
        return False
    listed = ", ".join(map(sql_string, files))
    repeated = ask(
        "SELECT 1 FROM ("
        "SELECT min(seq) < max(seq) OR min(incarnation) < max(incarnation) OR count(*) > count(seq)"
        " OR count(*) > count(incarnation) AS again "
        f"FROM read_parquet([{listed}], hive_partitioning = false) WHERE step IN ({', '.join(map(str, steps))}) "
        "GROUP BY run, attempt, rank, kind, step, micro_step, vpp_stage) WHERE again LIMIT 1"
    )
    return not repeated.num_rows


def rows_of(newest: pa.Table) -> list[RowRanges]:
    """Return where in the store the rows of these steps lie; of many runs just that it is these runs."""
    runs = pc.unique(newest.column("run")).to_pylist()
    if len(runs) > _FEW_RUNS:
        return [RowRanges(frozenset(runs))]
    return [_rows_of_run(run, newest.filter(pc.equal(newest.column("run"), run))) for run in runs]


def _rows_of_run(run: str, newest: pa.Table) -> RowRanges:
    low, high = pc.min_max(newest.column("step")).values()
    return RowRanges(frozenset([run]), steps=(low.as_py(), high.as_py()))


def _highest(rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    return rows.group_by(keys).aggregate([("step", "max")]).rename_columns([*keys, "step"]).select(NEWEST_SCHEMA.names)


def _last_attempts(rows: pa.Table) -> pa.Table:
    """Return the rows of the highest attempt of their run; no attempt is the lowest of all."""
    ranked = rows.append_column("place", pc.fill_null(rows.column("attempt"), -1))
    last = ranked.group_by("run").aggregate([("place", "max")])
    return (
        ranked.join(last, "run").filter(pc.equal(pc.field("place"), pc.field("place_max"))).select(NEWEST_SCHEMA.names)
    )
