"""Whether a rank ever said the loss of a step again, which `loss_curve` else finds out row by row: file by file, once.

A rank says it again when it goes back without a restart. Everything else about the curve is a sum over steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_storage.query.file_facts import Ask, ByFile
from rankscope_storage.sql.scalar_history import LOSSES

SCHEMA: Final = pa.schema(
    {
        "run": pa.string(),
        "labels": pa.string(),
        "attempt": pa.int32(),
        "rank": pa.int32(),
        "first_step": pa.int64(),
        "last_step": pa.int64(),
        "is_said_once": pa.bool_(),
    }
)
_SERIES: Final = ["run", "labels", "attempt", "rank"]


@dataclass(frozen=True, slots=True)
class LossFacts:
    """What is known of some files' losses."""

    are_said_once: bool
    are_of_attempt_0: bool


NOTHING_KNOWN: Final = LossFacts(are_said_once=False, are_of_attempt_0=False)


def find_loss_facts(files: Sequence[str], runs: Collection[str] | None, ask: Ask) -> LossFacts:
    """Return what is known of the losses in `files`, of `runs` or of all; `ask` runs SQL."""
    told = _BY_FILE.of(files, ask)
    if runs is not None:
        told = told.filter(pc.is_in(told.column("run"), pa.array(list(runs), pa.string())))
    return LossFacts(
        are_said_once=bool(pc.all(told.column("is_said_once"), min_count=0).as_py()) and not _overlap(told),
        are_of_attempt_0=bool(pc.all(pc.equal(told.column("attempt"), 0), min_count=0).as_py()),
    )


def _overlap(told: pa.Table) -> bool:
    """Whether two files have steps of one series in the same range, so that both may have the same one.

    The micro-batches of a step come in one record, so none of them lies in another file.
    """
    series = [_numbered(told.column(name)) for name in _SERIES]
    first, last = (told.column(name).to_numpy() for name in ("first_step", "last_step"))
    order = np.lexsort((first, *series))
    is_same = np.logical_and.reduce([numbers[order][1:] == numbers[order][:-1] for numbers in series])
    return bool(np.any(is_same & (first[order][1:] <= last[order][:-1])))


def _numbered(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    numbers: npt.NDArray[Any] = pc.dictionary_encode(column.combine_chunks(), null_encoding="encode").indices.to_numpy()
    return numbers


def _judged(told: pa.Table) -> pa.Table:
    """Put in place of the steps of micro-batches where those of a series begin and end, and if any is there twice."""
    lists = told.column("steps").combine_chunks()
    steps, ends = lists.flatten().to_numpy(), np.cumsum(lists.value_lengths().to_numpy())
    begins = ends - lists.value_lengths().to_numpy()
    rises = np.append(True, steps[1:] > steps[:-1])[: steps.size]
    rises[begins] = True
    is_said_once = np.logical_and.reduceat(rises, begins)
    for place in np.flatnonzero(~is_said_once):  # or are they only out of order, as several threads read them
        of_one = np.sort(steps[begins[place] : ends[place]])
        is_said_once[place] = (of_one[1:] > of_one[:-1]).all()
    facts = {
        "first_step": (np.minimum.reduceat(steps, begins), "min"),
        "last_step": (np.maximum.reduceat(steps, begins), "max"),
        "is_said_once": (is_said_once, "all"),
    }
    for name, (column, _) in facts.items():
        told = told.append_column(name, pa.array(column))
    keys = ["filename", *_SERIES]
    series = told.group_by(keys).aggregate([(name, how) for name, (_, how) in facts.items()])
    return series.rename_columns([*keys, *facts])


_BY_FILE: Final = ByFile(
    "scalars",
    "run, labels, coalesce(attempt, 0) AS attempt, rank, micro_step, list(step) AS steps",
    where=LOSSES,
    schema=SCHEMA,
    refine=_judged,
)
