"""Recognize a new log that repeats the beginning of an earlier imported log and then differs from it.

A training that resumes from a checkpoint writes such a log: its file contains the history up to the checkpoint, and
then values that differ from those of the earlier log. The records of the new log before the first difference are
already stored. The records from the first difference on are those of a later attempt.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_ingest.importers.common.importer import Imported, ImportedBlock, ImportedRun
from rankscope_ingest.importers.common.log_identity import KnownImport, Source, stream_of
from rankscope_ingest.importers.common.numbering import Numbering
from rankscope_storage.connection import Connection

_COLUMNS: Final = ("seq", "step", "name", "value")
_STORED: Final = f"SELECT {', '.join(_COLUMNS)} FROM scalars WHERE run = $run AND incarnation = $incarnation"  # noqa: S608

StoredScalars = Callable[[str], pa.Table]
"""A function that returns the stored scalars of an incarnation: seq, step, name and value."""


def stored_scalars(connection: Connection, run: str) -> StoredScalars:
    """Return a function that reads the scalars of an incarnation of `run` from the store."""
    return lambda incarnation: connection.query(_STORED, {"run": run, "incarnation": incarnation})


def branch_of(
    source: Source, known: Sequence[KnownImport], imported: Iterable[Imported], stored: StoredScalars
) -> Source:
    """Return the identity of a new log that begins like `source.before`, a log that was imported before.

    The candidates are `source.before` and the logs in `known` that are stored as branches of `source.before`. The
    result is the identity of the first candidate of which the stored scalars are equal to those of the new log in all
    records that both have. If there is no such candidate, the result is the identity of a new branch. `imported` has
    the records of the new log. `stored` returns the stored scalars of an incarnation.
    """
    stream, scalars = _scalars(imported)
    by_incarnation = {log.incarnation: log for log in known}
    nearest, agreeing = source.before, 0
    for number in itertools.count():
        incarnation = stream_of(source.incarnation, f"branch {number}") if number else source.incarnation
        log = by_incarnation.get(incarnation)
        if log is None:
            return Source(incarnation=incarnation, begins_at=agreeing, branches_from=nearest)
        difference = _first_difference(scalars, stored(stream_of(incarnation, stream) if stream else incarnation))
        if not difference:  # an earlier release may have stored the first record differently
            return dataclasses.replace(source, incarnation=incarnation, before=log, begins_at=log.begins_at)
        if difference > agreeing:
            nearest, agreeing = log, difference
    raise AssertionError("unreachable: itertools.count() does not end")


def without_beginning(tables: Mapping[str, pa.Table], begins_at: int) -> dict[str, pa.Table]:
    """Return the rows of `tables` that belong to records from the number `begins_at` on, without empty tables."""
    kept = {name: table.filter(pc.field("seq") >= begins_at) for name, table in tables.items()}
    return {name: table for name, table in kept.items() if table.num_rows}


def _scalars(imported: Iterable[Imported]) -> tuple[str, pa.Table]:
    """Return the name of the first source (a file or a rank) of a log, and the scalars of this source."""
    numbering, stream, tables = Numbering(run="", incarnation=""), "", []
    for item in imported:
        if isinstance(item, ImportedRun):
            continue
        stream = stream if numbering.records else item.source
        if item.source == stream:
            rows = numbering.block(item) if isinstance(item, ImportedBlock) else numbering.rows([item])
            tables += [rows["scalars"].select(_COLUMNS)] if "scalars" in rows else []
    names = pa.field("name", pa.string())
    schema = pa.schema([("seq", pa.int64()), ("step", pa.int64()), names, ("value", pa.float64())])
    return stream, pa.concat_tables([schema.empty_table(), *(table.cast(schema) for table in tables)])


def _first_difference(imported: pa.Table, stored: pa.Table) -> int | None:
    """Return the number of the first record in which `imported` and `stored` differ; None without a difference.

    `imported` has the scalars of a new log, and `stored` those of a log that was imported before. Only records up to
    the end of the shorter log are compared, and only names that both logs have. A record of the log that was imported
    before may be absent from `stored`, because its rows have expired.
    """
    last = pc.min(pa.array([pc.max(table["seq"]).as_py() for table in (imported, stored)], pa.int64())).as_py()
    if not imported.num_rows or not stored.num_rows:
        return None
    first, second = (
        table.filter(
            (pc.field("seq") <= last) & pc.field("name").isin(other["name"]) & pc.field("seq").isin(stored["seq"])
        ).sort_by([("seq", "ascending"), ("name", "ascending"), ("value", "ascending")])
        for table, other in ((imported, stored), (stored, imported))
    )
    length = min(first.num_rows, second.num_rows)
    differs = np.zeros(length, bool)
    for name in _COLUMNS:
        one, other = (table[name].slice(0, length).to_numpy() for table in (first, second))
        differs |= one != other if name == "name" else ~np.isclose(one, other, rtol=0, atol=0, equal_nan=True)
    rows = np.flatnonzero(differs)
    place = int(rows[0]) if rows.size else length
    ends = [table["seq"][place].as_py() for table in (first, second) if place < table.num_rows]
    return min(ends, default=None)
