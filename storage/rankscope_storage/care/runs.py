"""Removing a run, giving it another name, joining it to another. Never while a service writes it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.events import RunState
from rankscope_contract.records import DATASETS
from rankscope_storage.care.rewriting import Rewrite, RewriteReport, RowChange, carry_out
from rankscope_storage.connection import connect
from rankscope_storage.durable import Sync
from rankscope_storage.errors import ClaimError, StoreError
from rankscope_storage.files.layout import own_part
from rankscope_storage.writing.claim import all_shards

LONGEST_NAME: Final = 1000
"""As the service takes it of a rank."""

_LIVE: Final = (RunState.PENDING, RunState.RUNNING, RunState.STALLED)
_IMPORTED: Final = "SELECT source_kind FROM runs WHERE run = $run AND source_kind <> 'live'"


def remove(root: Path, run: str, sync: Sync) -> RewriteReport:
    """Remove all rows of `run`. What was imported may be imported again; what a rank still holds may not come back."""
    with _quiet(root, run):
        with connect(root) as connection:
            was_imported = connection.query(_IMPORTED, {"run": run}).num_rows > 0
        return carry_out(root, Rewrite(run=run, rows=lambda _: lambda _: None, forgets=was_imported), sync)


def rename(root: Path, run: str, name: str, sync: Sync) -> RewriteReport:
    """Give `run` the name `name`, which no other run has."""
    if not name.strip():
        raise StoreError("a run needs a name: rows without one are those of exporters beside the ranks")
    if len(name) > LONGEST_NAME or not name.isprintable():
        raise StoreError(f"a name of a run has at most {LONGEST_NAME} characters, all of them printable")

    def renamed(version: int) -> RowChange:
        if _last(root, version, name) is not None:
            raise StoreError(f"a run is called {name!r} already: `rankscope runs merge` joins two")
        return lambda rows: _named(rows, name)

    with _quiet(root, run):
        return carry_out(root, Rewrite(run=run, rows=renamed, part=own_part(name)), sync)


def merge(root: Path, run: str, into: str, sync: Sync) -> RewriteReport:
    """Join `run` to `into`: its attempts come behind those that `into` has."""
    if run == into:
        raise StoreError(f"{run!r} cannot be joined to itself")

    def joined(version: int) -> RowChange:
        last = _last(root, version, into)
        if last is None:
            raise StoreError(f"no run is called {into!r}: `rankscope runs rename` gives {run!r} that name")
        return lambda rows: _named(_shifted(rows, last), into)

    with _quiet(root, run, into):
        return carry_out(root, Rewrite(run=run, rows=joined, part=own_part(into)), sync)


@contextlib.contextmanager
def _quiet(root: Path, *runs: str) -> Iterator[None]:
    """Keep services from the store meanwhile if any of `runs` still goes on, as far as the store knows.

    Raises ClaimError while one lives: what it appends would keep its old name.
    """
    with connect(root) as connection:
        states = connection.query("SELECT run, state FROM runs WHERE list_contains($runs, run)", {"runs": list(runs)})
    live = [row for row in states.to_pylist() if row["state"] in _LIVE]
    with contextlib.ExitStack() as held:
        try:
            if live:  # or its service is gone
                held.enter_context(all_shards(root, "rankscope runs"))
        except ClaimError as error:
            raise ClaimError(
                f"run {live[0]['run']!r} is {live[0]['state']}: wait until it has ended, or stop the service. {error}"
            ) from error
        yield


def _last(root: Path, version: int, run: str) -> dict[str, int] | None:
    """Return the highest attempt and ordinal of `run`, -1 where it has none; None when it has no row at all."""
    with connect(root, locked=True, version=version) as connection:
        sources = (connection.relation(name, run=run) for name in DATASETS)
        rows = " UNION ALL ".join(f"SELECT attempt, ordinal FROM {source} WHERE run = $run" for source in sources)
        highest = "coalesce(max(attempt), -1) AS attempt, coalesce(max(ordinal), -1) AS ordinal"
        found: list[dict[str, int]] = connection.query(
            f"SELECT {highest} FROM ({rows}) HAVING count(*) > 0", {"run": run}
        ).to_pylist()
    return found[0] if found else None


def _named(rows: pa.Table, name: str) -> pa.Table:
    texts = pa.array([name] * rows.num_rows, pa.string())
    return rows.set_column(rows.schema.get_field_index("run"), "run", texts)


def _shifted(rows: pa.Table, last: Mapping[str, int]) -> pa.Table:
    """Return `rows` with the columns of `last` counted on from there."""
    for column, value in last.items():
        position = rows.schema.get_field_index(column)
        moved = pc.add(rows.column(column), pa.scalar(value + 1, rows.schema.field(column).type))
        rows = rows.set_column(position, column, moved)
    return rows
