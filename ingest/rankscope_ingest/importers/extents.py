"""How far a log goes: steps, times and attempts of what has been read, for the run's own rows and for the next log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from rankscope_ingest.importers.sources import End, KnownImport


@dataclass(slots=True)
class Extent:
    """What is known of one attempt. Times are UTC µs."""

    first_ts: int | None = None
    last_ts: int | None = None
    last_step: int | None = None


class Extents:
    """Follows the tables of an import."""

    def __init__(self) -> None:
        self.by_attempt: dict[int, Extent] = {}
        self.ends: dict[int | None, End] = {}

    @property
    def last_step(self) -> int | None:
        """The highest step of all."""
        return max((one.last_step for one in self.by_attempt.values() if one.last_step is not None), default=None)

    def add(self, tables: Mapping[str, pa.Table]) -> None:
        """Take the rows of tables into account."""
        for table in tables.values():
            for row in _summary(table):
                self._add(row["attempt"] or 0, row["rank"], row["step_max"], row["ts_min"], row["ts_max"])

    def _add(self, attempt: int, rank: int | None, step: int | None, first: int | None, last: int | None) -> None:
        extent = self.by_attempt.setdefault(attempt, Extent())
        extent.first_ts = _least(extent.first_ts, first)
        extent.last_ts = _most(extent.last_ts, last)
        extent.last_step = _most(extent.last_step, step)
        end = self.ends.get(rank)
        if end is None or attempt > end.attempt:
            self.ends[rank] = End(attempt, step, last)
        elif attempt == end.attempt:
            self.ends[rank] = End(attempt, _most(end.step, step), _most(end.ts, last))


def first_attempt(tables: Mapping[str, pa.Table], known: Iterable[KnownImport]) -> int:
    """Return where attempt 0 of a new log stands in a run of which other logs are known.

    It goes on with the attempt that a log before it ended in when its steps go on from there, or when it was written at
    the same time, as that of another node. Steps that start again are another attempt.
    """
    ends: dict[int | None, End] = {}
    for one in known:
        for rank, end in one.ends.items():
            if rank not in ends or _order(end) > _order(ends[rank]):
                ends[rank] = end
    found = 0
    for table in tables.values():
        for row in _summary(table):
            before = ends.get(row["rank"])
            if before is not None and not row["attempt"]:
                found = max(found, _following(before, row["step_min"], row["ts_min"]))
    return found


def _following(before: End, step: int | None, ts: int | None) -> int:
    if ts is not None and before.ts is not None and ts <= before.ts:
        return 0  # written at the same time
    if step is None or before.step is None or step > before.step:
        return before.attempt
    return before.attempt + 1


def _order(end: End) -> tuple[int, int]:
    return end.attempt, -1 if end.step is None else end.step


def _summary(table: pa.Table) -> list[dict[str, int | None]]:
    """Return lowest and highest step and time of each (attempt, rank) of a table."""
    count = table.num_rows
    columns = {
        name: table.column(name) if name in table.column_names else pa.nulls(count, pa.int64())
        for name in ("attempt", "rank", "step", "ts")
    }
    columns["ts"] = columns["ts"].cast(pa.int64())
    wanted = [(name, how) for name in ("step", "ts") for how in ("min", "max")]
    found: list[dict[str, int | None]] = (
        pa.table(columns).group_by(["attempt", "rank"], use_threads=False).aggregate(wanted).to_pylist()
    )
    return found


def _least(one: int | None, other: int | None) -> int | None:
    return min((value for value in (one, other) if value is not None), default=None)


def _most(one: int | None, other: int | None) -> int | None:
    return max((value for value in (one, other) if value is not None), default=None)
