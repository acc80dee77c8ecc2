"""When samples are shown: every moment of a rank in a millisecond of its own, as Prometheus stores no finer.

A log that tells whole seconds has several steps in one; the later ones are moved on by a millisecond each, so that
none is lost. Most moments stay as they are, hence only the moved ones are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankscope_storage.exports.selection import Selection

_MILLI: Final = 1_000

_MOVED: Final = """\
WITH moment AS (
  SELECT DISTINCT rank, attempt, step, ts FROM ({union})
), numbered AS (
  SELECT *, epoch_us(ts) // 1000 AS ms, row_number() OVER (
    PARTITION BY rank ORDER BY ts, attempt NULLS FIRST, step NULLS FIRST) AS place
  FROM moment
), placed AS (
  SELECT *, place + max(ms - place) OVER (
    PARTITION BY rank ORDER BY place ROWS UNBOUNDED PRECEDING) AS moved
  FROM numbered
)
SELECT rank, attempt, step, epoch_us(ts) AS us, moved FROM placed WHERE moved <> ms
"""


class Timeline:
    """The moments of a selection. Rows before 1970 and without a time have none."""

    def __init__(self, selection: Selection, datasets: Sequence[str]) -> None:
        union = " UNION ".join(
            f"SELECT rank, attempt, step, ts FROM {selection.source(name)} AND {SHOWN}" for name in datasets
        )
        rows = selection.query(_MOVED.format(union=union)).to_pydict()
        keys = zip(rows["rank"], rows["attempt"], rows["step"], rows["us"], strict=True)
        self._moved = {key: ms * _MILLI for key, ms in zip(keys, rows["moved"], strict=True)}

    @property
    def moved(self) -> int:
        """Return how many moments are shown later than they were."""
        return len(self._moved)

    def micros(self, batch: pa.RecordBatch | pa.Table) -> npt.NDArray[np.int64]:
        """Return when the rows of a batch with rank, attempt, step and us are shown."""
        micros = np.asarray(batch.column("us"), np.int64)
        if not self._moved:
            return micros
        names = ("rank", "attempt", "step", "us")
        keys = zip(*(batch.column(name).to_pylist() for name in names), strict=True)
        moved = self._moved
        return np.fromiter((moved.get(key, key[3]) for key in keys), np.int64, len(micros))


SHOWN: Final = "ts >= TIMESTAMPTZ '1970-01-01 00:00:00+00'"
"""Predicate of rows that have a moment."""
