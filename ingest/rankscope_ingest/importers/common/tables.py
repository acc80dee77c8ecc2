"""Read the tables within a text log: boxes and rows with bars between their cells, and columns of several blanks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from rankscope_ingest.importers.common.log_names import EPOCH, is_counter
from rankscope_ingest.importers.common.pairs import EVALUATION_MARK, named_value
from rankscope_ingest.importers.common.values import plain, quantity, seconds

_BARS: Final = "|│┃║"
_BAR: Final = re.compile(f"[{_BARS}]")
_RULE: Final = re.compile(r"[-+=|:─━═┄╌│┃║╭╮╰╯├┤┬┴┼┌┐└┘┏┓┗┛┡┩╇┳┻╋╞╡╪╤╧╔╗╚╝╠╣╦╩╬ ]{3,}")
_WITHIN: Final = re.compile(r"[├╞╠┡]")
"""A regular expression for the first character of a rule that does not end a box."""
_COLUMNS: Final = re.compile(r"\s{2,}")
_NAME: Final = re.compile(r"[A-Za-z#](?!.*[ :]\d)[\w ./()@:%+-]{0,80}")
_FRACTION: Final = re.compile(r"\d{1,15}/\d{1,15}")


class Boxes:
    """The tables within one text log with bars between their cells.

    A box of names and numbers is one record, which ends with the box. In another table, each row is one: it has as
    many cells as the heading. A name without a number whose last character is a slash is the section of the names below
    it, as in Stable-Baselines3.
    """

    def __init__(self) -> None:
        self._heading: tuple[str, ...] = ()
        self._section = ""
        self._box: dict[str, Any] = {}

    def context(self) -> tuple[Any, ...]:
        """Return the state on which the meaning of a line depends; the pairs of an open box are not compared."""
        return self._heading, self._section, bool(self._box)

    def read(self, line: str) -> dict[str, Any] | None:
        """Return the record that ends with `line`, empty if none ends; None if `line` is not of a table."""
        text = line.strip()
        if not text or (_BAR.search(text) is None and not self._box and not _RULE.fullmatch(text)):
            return None
        if _RULE.fullmatch(text):
            return self._end() if not _WITHIN.match(text) else {}
        if not (len(text) > 1 and text[0] in _BARS and text[-1] in _BARS):
            return self._end() or self._without_frame([cell.strip() for cell in _BAR.split(text)])
        cells = [cell.strip() for cell in _BAR.split(text[1:-1])]
        return self._row(_COLUMNS.split(cells[0]) if len(cells) == 1 else cells)

    def _without_frame(self, cells: list[str]) -> dict[str, Any] | None:
        """Return a row of a table with bars between its cells only, whose heading has the name of a counter."""
        is_heading = len(cells) > 1 and all(map(_NAME.fullmatch, cells)) and any(map(is_counter, cells))
        if is_heading or len(cells) == len(self._heading):
            return self._row(cells)
        self._heading = ()
        return None

    def _end(self) -> dict[str, Any]:
        box, self._box, self._section = self._box, {}, ""
        return box

    def _row(self, cells: list[str]) -> dict[str, Any] | None:
        numbers = [_number(cell) for cell in cells]
        named = zip(self._heading, cells, numbers, strict=False)
        row = dict(named_value(name, cell) for name, cell, number in named if number is not None)
        if len(cells) == len(self._heading) and len(row) > len(cells) // 2:
            return row
        if len(cells) == len(self._heading) and not cells[0] and numbers.count(None) == len(cells):
            cells = [f"{name} {cell}".rstrip() for name, cell in zip(self._heading, cells, strict=True)]
        if all(cell and number is None and _NAME.fullmatch(cell) for cell, number in zip(cells, numbers, strict=True)):
            self._heading = tuple(cells) if len(cells) > 1 else ()
        elif len(cells) == 2 and not cells[1]:
            self._section = cells[0] if cells[0].endswith("/") else self._section
        elif len(cells) % 2 == 0 and None not in numbers[1::2] and all(map(_NAME.fullmatch, cells[::2])):
            for name, number in zip(cells[::2], numbers[1::2], strict=True):
                self._box[name if is_counter(name) else f"{self._section}{name}"] = number
        else:
            return None
        return {}


def _number(cell: str) -> Any:
    """Return the number in a cell, or its text if it has a unit; None if it is no number."""
    number = plain(cell)
    is_text = isinstance(number, str) and not (_FRACTION.fullmatch(cell) or quantity(cell) or seconds(cell) is not None)
    return None if is_text else number


_HEADING: Final = re.compile(
    r"^\s*#?\s*(?:(?:epoch|step|iter(?:ation)?|class)(?: \([^()]{1,20}\))?\s{2,}[A-Za-z]|E\s{2,}#\s)", re.IGNORECASE
)
_HEADING_CELL: Final = re.compile(r"#|[A-Za-z_][\w./()@:%+ -]{0,80}:?")
_SHORT_NAMES: Final = {"E": EPOCH, "#": "step"}  # of spaCy
_BAR_BEHIND: Final = re.compile(r":\s+(?P<percent>\d{1,3})%.*$")
_IN_BRACKETS: Final = re.compile(r" \([^()]*\)$")
_ASIDE: Final = re.compile(rf"{_IN_BRACKETS.pattern}| (?=[KMGTB]$)|(?<=[dhm]),")
"""A regular expression for the parts of a cell such as `10 (0.5%)`, `12.5 M` or `41 m, 8 s` that are left out."""
_OF_ALL: Final = "all"
_FEWEST_CELLS: Final = 3


class Tables:
    """The tables within one text log, such as those of Ultralytics and fastai.

    The heading of a table begins with `epoch`, `step` or `class`, and its cells are separated by several blanks. A row
    has as many cells as the heading.
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        """The names of the cells of the current table."""

    def row(self, line: str, counters: Mapping[str, Any]) -> str | None:
        """Return a row of the current table with the names of its cells; None if `line` is no row.

        `counters` are those of the record before it, which a row without a counter has.
        """
        if _HEADING.match(line):
            self._begin(_BAR_BEHIND.sub("", line))
            return None
        if not self.names:
            return None
        bar = _BAR_BEHIND.search(line)
        if bar and bar["percent"] != "100":
            return None
        text = _BAR_BEHIND.sub("", line).strip()
        cells = text.split()
        if len(cells) != len(self.names):  # a cell may have blanks
            cells = [_ASIDE.sub("", cell) for cell in _COLUMNS.split(text)]
        if len(cells) != len(self.names):
            return None
        is_summary = self.names[0].lower() == "class"
        values = cells[1:] if is_summary else cells
        if is_summary and cells[0] != _OF_ALL:
            return None
        if any(_number(cell) is None and not cell.startswith("[") for cell in values):
            return None
        if is_summary:
            known = "".join(f"{name} {int(v) if name == EPOCH else v} " for name, v in counters.items())
            return f"{EVALUATION_MARK}{known}| " + _listed(self.names[1:], values)
        return f"{self.names[0]} {values[0]} | " + _listed(self.names[1:], values[1:])

    def _begin(self, heading: str) -> None:
        """Begin the table with this heading. In `Box(P  R  mAP50)`, the cells are named Box/P, Box/R and Box/mAP50."""
        parts = _COLUMNS.split(heading.lstrip("# ").rstrip())
        cells = parts if len(parts) >= _FEWEST_CELLS else heading.lstrip("# ").split()
        self.names = ()
        group = ""
        if len(cells) < _FEWEST_CELLS or not all(map(_HEADING_CELL.fullmatch, cells)):
            return
        for cell in cells:
            before, bracket, name = _IN_BRACKETS.sub("", cell).partition("(")
            group = f"{before}/" if bracket else group
            name = (name if bracket else before).rstrip("):").replace(" / ", "/")
            self.names += (f"{group}{_SHORT_NAMES.get(name, name)}",)


def _listed(names: Iterable[str], values: Iterable[str]) -> str:
    return " | ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
