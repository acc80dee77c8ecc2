"""The lines of one stretch of a log, told apart by what they are: rows, lines that accompany them, and the rest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankscope_ingest.importers.megatron.columns import Integers, matching
from rankscope_ingest.importers.megatron.companions import COMPANION_PATTERN
from rankscope_ingest.importers.megatron.joining import MOST_LINES


class Lines:
    """The lines of a stretch by what they are."""

    def __init__(
        self, lines: pa.Array, is_row: npt.NDArray[np.bool_], too_long: npt.NDArray[np.bool_], *, is_cut: bool
    ) -> None:
        self._lines = lines
        self.is_row = is_row
        self.too_long = too_long
        self.cut = len(lines) - 1 if is_cut else -1
        """The last line of a log that may still be written, -1 when it has an end."""
        self.is_companion = np.zeros(len(lines), np.bool_)
        others = np.flatnonzero(~is_row & ~too_long)
        self.is_companion[others] = matching(lines.take(pa.array(others)), COMPANION_PATTERN)

    def rows(self, numbers: Integers) -> pa.Array:
        """Return the lines with these numbers."""
        return self._lines if len(numbers) == len(self._lines) else self._lines.take(pa.array(numbers))

    def others(self) -> int:
        """Return how many lines are nothing that the importer looks for."""
        return int((~(self.is_row | self.is_companion | self.too_long)).sum())

    def raw(self, line: int) -> bytes:
        """Return a line as it stands in the log, with its end."""
        found: bytes = self._lines[line].as_py()
        return found

    def text(self, line: int) -> str:
        """Return a line as text."""
        return self.raw(line).decode(errors="replace")

    def continuation(self, line: int) -> str | None:
        """Return a line if it may be the rest of the row before it."""
        if line >= len(self._lines) or self.is_row[line] or self.is_companion[line] or self.too_long[line]:
            return None
        return self.text(line)


def whole_lines(lines: pa.Array, is_row: npt.NDArray[np.bool_]) -> int:
    """Return how many lines there are before a row at the end that may go on in the next stretch."""
    for line in range(max(0, len(lines) - MOST_LINES), len(lines)):
        if is_row[line] and not lines[line].as_py().rstrip().endswith(b"|"):
            return line
    return len(lines)
