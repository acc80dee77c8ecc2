"""Find out, per file and once, whether a rank logged the loss of a step again.

If no rank did, `loss_curve` need not search the rows for it. A rank logs a loss again if it goes back without a
restart. All other parts of the curve are sums over steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_storage.query.file_facts import FileFact, RunSql
from rankscope_storage.sql.scalar_history import LOSSES

SCHEMA: Final = pa.schema(
    {
        "run": pa.string(),
        "labels": pa.string(),
        "attempt": pa.int32(),
        "rank": pa.int32(),
        "first_step": pa.int64(),
        "last_step": pa.int64(),
        "is_logged_once": pa.bool_(),
    }
)
_SERIES: Final = ["run", "labels", "attempt", "rank"]


@dataclass(frozen=True, slots=True)
class LossFacts:
    """Facts about the losses in some files, for some runs."""

    are_logged_once: bool
    are_of_attempt_0: bool


NO_LOSS_FACTS: Final = LossFacts(are_logged_once=False, are_of_attempt_0=False)


def find_loss_facts(files: Sequence[str], runs: Collection[str] | None, run_sql: RunSql) -> LossFacts:
    """Return the facts about the losses in `files`, of `runs` or of all runs; `run_sql` executes SQL."""
    facts = _BY_FILE.of(files, run_sql)
    if runs is not None:
        facts = facts.filter(pc.is_in(facts.column("run"), pa.array(list(runs), pa.string())))
    return LossFacts(
        are_logged_once=bool(pc.all(facts.column("is_logged_once"), min_count=0).as_py()) and not _overlap(facts),
        are_of_attempt_0=bool(pc.all(pc.equal(facts.column("attempt"), 0), min_count=0).as_py()),
    )


def _overlap(facts: pa.Table) -> bool:
    """Return whether two files have steps of one series in overlapping ranges, so that both may have the same step.

    All micro-batches of a step are in one record and thus in one file.
    """
    series = [_numbered(facts.column(name)) for name in _SERIES]
    first, last = (facts.column(name).to_numpy() for name in ("first_step", "last_step"))
    order = np.lexsort((first, *series))
    is_same = np.logical_and.reduce([numbers[order][1:] == numbers[order][:-1] for numbers in series])
    return bool(np.any(is_same & (first[order][1:] <= last[order][:-1])))


def _numbered(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    numbers: npt.NDArray[Any] = pc.dictionary_encode(column.combine_chunks(), null_encoding="encode").indices.to_numpy()
    return numbers


def _by_series(facts: pa.Table) -> pa.Table:
    """Replace the steps of each micro-batch by the first and last step per series, and whether any step is repeated."""
    lists = facts.column("steps").combine_chunks()
    steps, ends = lists.flatten().to_numpy(), np.cumsum(lists.value_lengths().to_numpy())
    begins = ends - lists.value_lengths().to_numpy()
    rises = np.append(True, steps[1:] > steps[:-1])[: steps.size]
    rises[begins] = True
    is_logged_once = np.logical_and.reduceat(rises, begins)
    for place in np.flatnonzero(~is_logged_once):  # possibly only unsorted, because several threads read them
        of_one = np.sort(steps[begins[place] : ends[place]])
        is_logged_once[place] = (of_one[1:] > of_one[:-1]).all()
    columns = {
        "first_step": (np.minimum.reduceat(steps, begins), "min"),
        "last_step": (np.maximum.reduceat(steps, begins), "max"),
        "is_logged_once": (is_logged_once, "all"),
    }
    for name, (column, _) in columns.items():
        facts = facts.append_column(name, pa.array(column))
    keys = ["filename", *_SERIES]
    series = facts.group_by(keys).aggregate([(name, function) for name, (_, function) in columns.items()])
    return series.rename_columns([*keys, *columns])


_BY_FILE: Final = FileFact(
    "scalars",
    "run, labels, coalesce(attempt, 0) AS attempt, rank, micro_step, list(step) AS steps",
    where=LOSSES,
    schema=SCHEMA,
    refine=_by_series,
)
