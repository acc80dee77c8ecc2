"""The newest step of every rank and kind, which `tensor_latest` begins with: file by file, and remembered.

No statistics of a log or footer tell that a rank fell behind or that a kind is measured seldom, so each file is looked
through once in a process: five columns, some 30 ms CPU for a million rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.escaping import sql_string
from rankscope_storage.asking.by_file import Ask, ByFile
from rankscope_storage.log.bounds import Bounds

TABLE: Final = "rankscope_raw.tensor_newest"
"""Where the views look for it: columns of_run, of_attempt, of_rank, of_kind, of_step."""

SCHEMA: Final = pa.schema(
    {"run": pa.string(), "attempt": pa.int32(), "rank": pa.int32(), "kind": pa.string(), "step": pa.int64()}
)
_KEYS: Final = ["run", "attempt", "rank", "kind"]
_BY_FILE: Final = ByFile(
    "tensor_stats", "run, attempt, rank, kind, max(step) AS step", where="step IS NOT NULL", schema=SCHEMA
)
_FEW_RUNS: Final = 16
_FEW_STEPS: Final = 64


def newest_steps(files: Sequence[str], ask: Ask) -> pa.Table:
    """Return the newest step of each rank and kind in the newest attempt of each run in `files`; `ask` runs SQL."""
    return _last_attempts(_highest(_BY_FILE.of(files, ask), _KEYS))


def measured_once(newest: pa.Table, files: Sequence[str], ask: Ask) -> bool:
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


def rows_of(newest: pa.Table) -> list[Bounds]:
    """Return where in the store the rows of these steps lie; of many runs just that it is these runs."""
    runs = pc.unique(newest.column("run")).to_pylist()
    if len(runs) > _FEW_RUNS:
        return [Bounds(frozenset(runs))]
    return [_rows_of_run(run, newest.filter(pc.equal(newest.column("run"), run))) for run in runs]


def _rows_of_run(run: str, newest: pa.Table) -> Bounds:
    low, high = pc.min_max(newest.column("step")).values()
    return Bounds(frozenset([run]), steps=(low.as_py(), high.as_py()))


def _highest(rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    return rows.group_by(keys).aggregate([("step", "max")]).rename_columns([*keys, "step"]).select(SCHEMA.names)


def _last_attempts(rows: pa.Table) -> pa.Table:
    """Return the rows of the highest attempt of their run; no attempt is the lowest of all."""
    ranked = rows.append_column("place", pc.fill_null(rows.column("attempt"), -1))
    last = ranked.group_by("run").aggregate([("place", "max")])
    return ranked.join(last, "run").filter(pc.equal(pc.field("place"), pc.field("place_max"))).select(SCHEMA.names)
