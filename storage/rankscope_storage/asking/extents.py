"""The first and the last step of every scalar, which `scalar_curve` begins with: file by file, and remembered.

The log tells them of a file, in which each scalar may have others. To look them up took a sixth of a curve's time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_storage.asking.by_file import Ask, ByFile

TABLE: Final = "rankscope_raw.scalar_extents"
"""Where the macro looks for it: columns of `SCHEMA`; an attempt that is not known is 0."""

SCHEMA: Final = pa.schema(
    {
        "run": pa.string(),
        "name": pa.string(),
        "labels": pa.string(),
        "attempt": pa.int32(),
        "first_step": pa.int64(),
        "last_step": pa.int64(),
    }
)
_BY_FILE: Final = ByFile(
    "scalars",
    "run, name, labels, coalesce(attempt, 0) AS attempt, min(step) AS first_step, max(step) AS last_step",
    where="step IS NOT NULL AND value IS NOT NULL",
    schema=SCHEMA,
)


def scalar_extents(files: Sequence[str], runs: Collection[str] | None, ask: Ask) -> pa.Table:
    """Return where the values of each scalar, of `runs` or of all, begin and end in `files`; `ask` runs SQL."""
    told = _BY_FILE.of(files, ask)
    if runs is not None:
        told = told.filter(pc.is_in(told.column("run"), pa.array(list(runs), pa.string())))
    summed = told.group_by(["run", "name", "labels", "attempt"]).aggregate(
        [("first_step", "min"), ("last_step", "max")]
    )
    return summed.rename_columns(SCHEMA.names)
