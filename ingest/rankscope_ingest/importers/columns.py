"""Import tables of numbers with one row per step.

Two kinds of tables are accepted. The first kind has a heading that names a step and a typical quantity such as the
loss, like Lightning's `metrics.csv`; an empty cell is an absent value. The second kind has no heading and two columns,
step and loss, as torchtitan writes them; the numbers of the first column must increase.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from rankscope_ingest.importers.common.decisions import is_typical
from rankscope_ingest.importers.common.importer import NOT_MINE, Detection, Faults, Imported
from rankscope_ingest.importers.common.lines import is_binary, sample_lines, shown
from rankscope_ingest.importers.common.log_names import is_counter
from rankscope_ingest.importers.common.log_records import LineParser, read_log
from rankscope_ingest.importers.common.records import NAMES, opened
from rankscope_ingest.importers.common.values import plain, quantity, whole

_TWO_COLUMNS: Final = ("step", "loss")
_METRIC_FILE: Final = re.compile(r"\d{13} [-+.\w]{1,30} \d{1,15}")
"""A regular expression for a row of a metric file of MLflow: time in ms, value and step."""
_VALUE: Final = "value"
_TAG: Final = re.compile(r".*?[-_]tag[-_]")
"""A regular expression for the text before the name of the scalar in the name of a file that TensorBoard has made."""
_FEWEST_ROWS: Final = 3
_DECIMAL_COMMA: Final = re.compile(r"[-+]?\d+,\d+(?:[eE][-+]?\d+)?")
_BLANKS: Final = re.compile(r"\s+")
_HEADING_CELL: Final = re.compile(r"[A-Za-z_][\w ./()@:%+-]{0,80}")


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a table: the names of its columns and their separator. The separator None means white space."""

    names: tuple[str, ...]
    separator: str | None
    has_heading: bool


class Columns:
    """The importer of tables of numbers with one row per step."""

    name = "columns"
    options = ("loss", "year")

    def detect(self, path: Path, head: bytes) -> Detection:
        """Return the confidence that the file is a table of numbers with one row per step.

        The confidence is above 0 if the first line is a heading with a step, or if the rows consist of an increasing
        integer and another number.
        """
        if path.is_dir() or is_binary(head):
            return NOT_MINE
        texts = (line.decode(errors="replace") for line in sample_lines(path, head)[:200])
        lines = [text for text in texts if _is_content(text, path.stem)]
        layout = layout_of(lines[0], path.stem) if lines else None
        if layout is None:
            return NOT_MINE
        rows = [row for line in lines[layout.has_heading :] if (row := row_of(line, layout))]
        share = len(rows) / max(1, len(lines) - layout.has_heading)
        if layout.has_heading:
            because = f"a heading with a step and {len(layout.names) - 1} other columns"
            return Detection(0.4 + 0.4 * share, because) if rows else NOT_MINE
        counts = [whole(row["step"]) or 0 for row in rows]
        if len(layout.names) > len(_TWO_COLUMNS) and rows:
            return Detection(0.8 * share, "the rows consist of a time, a value and a step, as in the files of MLflow")
        if len(rows) < _FEWEST_ROWS or any(later <= earlier for earlier, later in pairwise(counts)):
            return NOT_MINE
        return Detection(0.7 * share, f"{len(rows)} sampled rows consist of an increasing integer and another number")

    def read(self, path: Path, faults: Faults) -> Iterator[Imported]:
        """Yield one record per row of the table, then an object with facts about the run."""
        yield from read_log(path, faults, _Rows(path, faults))


class _Rows(LineParser):
    """The rows of one table, in order."""

    def __init__(self, path: Path, faults: Faults) -> None:
        super().__init__(faults)
        self._name = path.stem
        self._layout: Layout | None = None

    def documents(self, number: int, line: bytes) -> Sequence[Mapping[str, Any]]:
        text = line.decode(errors="replace")
        if not _is_content(text, self._name):
            return ()
        if self._layout is None:
            self._layout = layout_of(text, self._name)
            if self._layout is None or self._layout.has_heading:
                return ()
        row = None if self.faults.is_torn else row_of(text, self._layout)
        if row is None:
            self.faults.add(
                number,
                f"the line does not have {len(self._layout.names)} columns with a step and another number, "
                f"or it has no line end: {shown(line)}",
            )
            return ()
        return (opened(row),)


def layout_of(line: str, file: str) -> Layout | None:
    """Return the layout of a table whose first line is `line`; `file` is the name of its file without the suffix.

    A column `Value`, and the values in a metric file of MLflow, have the name of the file. The result is None if the
    line is neither a heading with a step and a typical quantity nor a row of such a file or of a step and a loss.
    """
    if _METRIC_FILE.fullmatch(line.strip()):
        return Layout(("timestamp", file, "step"), None, has_heading=False)
    for separator in (",", "\t", ";", None):
        cells = cells_of(line.lstrip("# "), separator)
        if len(cells) < len(_TWO_COLUMNS):
            continue
        if len(cells) == len(_TWO_COLUMNS) and whole(cells[0]) is not None and quantity(cells[1]) is not None:
            return Layout(_TWO_COLUMNS, separator, has_heading=False)
        is_long = any(cell in NAMES for cell in cells)  # a name and a value in each row
        names = tuple(
            (cell if is_long else _name_of(cell, file)) or f"column {place}" for place, cell in enumerate(cells, 1)
        )
        is_heading = all(map(_HEADING_CELL.fullmatch, names)) and len(set(names)) == len(names)
        is_named = any(cell.lower() == _VALUE for cell in cells) or any(map(is_typical, names))
        if is_heading and any(map(is_counter, names)) and is_named:
            return Layout(names, separator, has_heading=True)
    return None


def _name_of(cell: str, file: str) -> str:
    """Return the name of a column; that of values of TensorBoard is in the name of the file, and `Wall time` a time."""
    if cell.lower() == _VALUE:
        return _TAG.sub("", file)
    return "wall_time" if cell == "Wall time" else cell


def row_of(line: str, layout: Layout) -> dict[str, Any] | None:
    """Return the non-empty cells of `line` by column name; None if `line` is not a row of the table."""
    cells = cells_of(line, layout.separator)
    if len(cells) != len(layout.names):
        return None
    if layout.separator == ";":  # the separator of programs that write decimal commas
        cells = [cell.replace(",", ".") if _DECIMAL_COMMA.fullmatch(cell) else cell for cell in cells]
    row = {name: plain(cell) for name, cell in zip(layout.names, cells, strict=True) if cell}
    steps = [value for name, value in row.items() if is_counter(name)]
    others = [value for name, value in row.items() if not is_counter(name)]
    is_row = any(whole(step) is not None for step in steps) and any(
        not isinstance(value, str) or quantity(value) for value in others
    )
    return row if is_row else None


def cells_of(line: str, separator: str | None) -> Sequence[str]:
    """Return the cells of `line`, without surrounding quotes and white space. The separator None means white space."""
    if separator is None:
        return _BLANKS.split(line.strip())
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=separator), [])]
    except csv.Error:
        return []


def _is_content(text: str, file: str) -> bool:
    return bool(text.strip()) and (not text.lstrip().startswith("#") or layout_of(text, file) is not None)


IMPORTER = Columns()
