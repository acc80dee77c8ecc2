"""Read tables with lines between their cells: boxes of names and numbers, and tables with a heading, as in Markdown."""

from __future__ import annotations

import re
from typing import Any, Final

from rankscope_ingest.importers.common.keys import EPOCH, Role, role_of
from rankscope_ingest.importers.common.pairs import named_value
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
        is_heading = len(cells) > 1 and all(map(_NAME.fullmatch, cells)) and any(map(_is_counter, cells))
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
                self._box[name if _is_counter(name) else f"{self._section}{name}"] = number
        else:
            return None
        return {}


def _is_counter(name: str) -> bool:
    return role_of(name) is Role.STEP or name.lower() == EPOCH


def _number(cell: str) -> Any:
    """Return the number in a cell, or its text if it has a unit; None if it is no number."""
    number = plain(cell)
    is_text = isinstance(number, str) and not (_FRACTION.fullmatch(cell) or quantity(cell) or seconds(cell) is not None)
    return None if is_text else number
