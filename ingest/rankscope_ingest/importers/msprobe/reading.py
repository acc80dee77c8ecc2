"""The files of one family of one rank, as blocks of rows.

A record is one row of a file. The rows of a family form one stream over its files in the order of their steps, which
grows at its end alone; rows of a further pass over a file (see `repeats`) form a stream of their own, since they come
into the middle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_ingest.importers.base import RECORD_COLUMN, Faults, ImportedBlock
from rankscope_ingest.importers.msprobe.cells import read_cells, read_header
from rankscope_ingest.importers.msprobe.repeats import Passes
from rankscope_ingest.importers.msprobe.rows import KEYS, read_rows
from rankscope_ingest.importers.msprobe.tabling import MISALIGNED, Origin, Tables, tabling
from rankscope_storage.exports.msprobe_layout import OTHER

BLOCK_ROWS: Final = 200_000


class FamilyReader:
    """Reads one family. `deepest` is the greatest pass met, so that what follows can number its attempts behind it."""

    def __init__(self, family: str, *, rank: int | None, attempt: int, source: str) -> None:
        self.deepest = 0
        self._family = family
        self._tabling = tabling(family)
        self._rank = rank
        self._attempt = attempt
        self._source = source

    def blocks(self, files: Sequence[Path], faults: Faults) -> Iterator[ImportedBlock]:
        """Yield the rows of `files`."""
        waiting: list[Tables] = []
        records = 0
        for path in files:
            for depth, rows, tables in self._pieces(path, faults):
                if depth:
                    yield ImportedBlock(records=rows, tables=tables, source=f"{self._source}/{path.name}#{depth}")
                    continue
                waiting.append({name: _moved(table, records) for name, table in tables.items()})
                records += rows
                if records >= BLOCK_ROWS:
                    yield ImportedBlock(records=records, tables=_joined(waiting), source=self._source)
                    waiting, records = [], 0
        if records:
            yield ImportedBlock(records=records, tables=_joined(waiting), source=self._source)

    def _pieces(self, path: Path, faults: Faults) -> Iterator[tuple[int, int, Tables]]:
        """Yield (pass, rows, tables) of pieces of a file that each belong to one pass."""

        def complain(line: int, text: str) -> None:
            faults.add(line, f"{path.parent.name}/{path.name}: {text}")

        def misfit(line: int, text: str) -> None:
            complain(line, f"{text}: {MISALIGNED}" if self._family == OTHER else text)

        header = read_header(path)
        if missing := [name for name in KEYS if name not in header]:
            complain(1, f"no column {', '.join(missing)}: not a file of the tool's monitor")
            return
        if self._tabling is None:
            complain(1, f"the tool has no family {self._family}: the file is left out")
            return
        passes = Passes()
        for cells in read_cells(path, faults, misfit):
            rows = read_rows(cells, misfit)
            depth = passes.of(rows.steps, rows.codes, rows.names, rows.vpp, rows.micro)
            self.deepest = max(self.deepest, passes.current)
            for number in sorted(set(depth.tolist())):
                piece = rows.keep(depth == number).numbered()
                origin = Origin(self._rank, self._attempt + number)
                yield number, len(piece), self._tabling(piece, origin, complain)


def _moved(table: pa.Table, records: int) -> pa.Table:
    position = table.column_names.index(RECORD_COLUMN)
    moved = pc.cast(pc.add(table.column(RECORD_COLUMN), records), pa.int32())
    return table.set_column(position, RECORD_COLUMN, moved)


def _joined(waiting: Sequence[Tables]) -> Tables:
    names = dict.fromkeys(name for tables in waiting for name in tables)
    return {
        name: pa.concat_tables([tables[name] for tables in waiting if name in tables], promote_options="default")
        for name in names
    }
