"""The files of one family of one rank, as blocks of rows.

A record is one row of a file, and each file is a source of its own: files may come and go in any order (a copy under
way, old ones moved away), and a file only grows at its end. Rows of a further pass over a file (see `repeats`) are of
another attempt.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rankscope_contract.msprobe.layout import OTHER
from rankscope_ingest.importers.base import Faults, ImportedBlock
from rankscope_ingest.importers.msprobe.cells import read_cells, read_header
from rankscope_ingest.importers.msprobe.repeats import Passes
from rankscope_ingest.importers.msprobe.rows import KEYS, read_rows
from rankscope_ingest.importers.msprobe.tabling import MISALIGNED, Origin, tabling


class FamilyReader:
    """Reads the files of one family, to be given in the order of their steps.

    `deepest` is the greatest pass met, so that what follows can number its attempts behind it.
    """

    def __init__(self, family: str, *, rank: int | None, attempt: int, source: str) -> None:
        self.deepest = 0
        self._family = family
        self._tabling = tabling(family)
        self._rank = rank
        self._attempt = attempt
        self._last = 0  # pass at the end of the file before
        self._source = source

    def blocks(self, path: Path, faults: Faults) -> Iterator[ImportedBlock]:
        """Yield the rows of the file at `path`."""

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
        # A run that went on after steps it repeated is still that attempt in the files behind them.
        first = max(0, self._last - _repeats(path)) if self._last else 0
        origin = Origin(self._rank, self._attempt + first)
        passes = Passes()
        for cells in read_cells(path, faults, misfit):
            rows = read_rows(cells, misfit).told_apart_by(passes)
            yield ImportedBlock(
                records=len(rows),
                tables=self._tabling(rows, origin, complain),
                source=f"{self._source}/{path.name}",
            )
        self._last = first + passes.current
        self.deepest = max(self.deepest, self._last)


def _repeats(path: Path) -> int:
    """Return how often the file was begun again."""
    passes = Passes()
    for cells in read_cells(path, Faults(), _ignore):
        read_rows(cells, _ignore).told_apart_by(passes)
    return passes.current


def _ignore(_line: int, _text: str) -> None:
    """Take a complaint that is made when the rows are read."""
