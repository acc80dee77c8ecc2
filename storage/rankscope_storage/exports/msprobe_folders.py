"""Which folder the rows of a rank go to: one of its own for each attempt, or one that lies there already."""

from __future__ import annotations

import datetime as dt
import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankscope_contract.msprobe.folders import Window, continued, window
from rankscope_contract.msprobe.layout import folder_name
from rankscope_storage.errors import ExportError
from rankscope_storage.exports.selection import Selection

_NO_TIME: Final = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
_LATEST: Final = (
    "(step, coalesce(attempt, 0)) IN "
    "(SELECT (step, max(coalesce(attempt, 0))) FROM {relation} WHERE run = $run AND step IS NOT NULL GROUP BY step)"
)


@dataclass(frozen=True, slots=True)
class Stream:
    """The rows that go into one folder: those of a rank, of one attempt or of the latest one of each step."""

    folder: Path
    rank: int
    attempt: int | None

    def only(self, selection: Selection, dataset: str) -> str:
        """Return the predicate for its rows of `dataset`; what has no rank goes with rank 0."""
        rank = f"coalesce(rank, 0) = {self.rank}"
        if self.attempt is not None:
            return f"{rank} AND coalesce(attempt, 0) = {self.attempt}"
        relation = selection.connection.relation(dataset, run=selection.run)
        return f"{rank} AND {_LATEST.format(relation=relation)}"


def streams(selection: Selection, target: Path) -> list[Stream]:
    """Return what is written, and where."""
    found = selection.query(
        f"SELECT DISTINCT coalesce(attempt, 0) AS attempt, coalesce(rank, 0) AS rank FROM "
        f"(SELECT attempt, rank FROM {selection.source('tensor_stats')} "
        f"UNION SELECT attempt, rank FROM {selection.source('features')}) ORDER BY ALL"
    ).to_pylist()
    began = _beginnings(selection, {row["attempt"] for row in found})
    if selection.options.append_output is None:
        return [Stream(target / _own_folder(selection.run, began, **row), **row) for row in found]
    begun = _window(selection.options.append_output)
    latest = {row["rank"]: row["attempt"] for row in found}
    return [
        Stream(
            _continued(target, rank, begun) or target / _own_folder(selection.run, began, attempt=attempt, rank=rank),
            rank,
            selection.options.attempt,
        )
        for rank, attempt in sorted(latest.items())
    ]


def _own_folder(run: str, began: Mapping[int, dt.datetime], *, attempt: int, rank: int) -> str:
    """Return a name that is always the same; where two attempts began at one time, it still sorts them."""
    digest = hashlib.sha256(run.encode("utf-8", "surrogatepass")).hexdigest()
    return folder_name(began[attempt], rank, f"{attempt & 0xFFFF:04x}{digest[:4]}")


def _beginnings(selection: Selection, attempts: set[int]) -> dict[int, dt.datetime]:
    """Return when each attempt began, as far as anybody knows, never before the one that precedes it."""
    rows = selection.query(
        "SELECT coalesce(attempt, 0) AS attempt, min(began) AS began FROM ("
        "SELECT attempt, started_at AS began FROM attempts WHERE run = $run UNION ALL "
        f"SELECT attempt, min(ts) FROM {selection.connection.relation('tensor_stats', run=selection.run)} "
        "WHERE run = $run GROUP BY attempt) WHERE began IS NOT NULL GROUP BY ALL"
    ).to_pylist()
    known = {row["attempt"]: row["began"] for row in rows}
    first = min(known.values(), default=_NO_TIME)
    ordered = sorted(attempts)
    moments = itertools.accumulate((known.get(attempt, first) for attempt in ordered), max)
    return dict(zip(ordered, moments, strict=True))


def _window(given: tuple[str, str]) -> Window:
    try:
        return window(given)
    except ValueError as error:
        raise ExportError(str(error)) from error


def _continued(target: Path, rank: int, begun: Window) -> Path | None:
    """Return the folder of `rank` that is continued, if one lies there."""
    names = [path.name for path in target.iterdir() if path.is_dir()] if target.is_dir() else []
    name = continued(names, rank, begun)
    return None if name is None else target / name
