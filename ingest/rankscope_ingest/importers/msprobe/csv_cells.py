"""Lines of a CSV file into columns of text, and text into numbers. What cannot be read is told by its line.

The lines are checked one by one for what would make a parser run on into the next (an open quote, bytes that are no
text); the rest is Arrow's own CSV reader, in batches.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as pa_csv

from rankscope_ingest.importers.common.importer import Faults
from rankscope_ingest.importers.common.lines import read_lines, shown

BATCH_LINES: Final = 50_000
BATCH_BYTES: Final = 1 << 24

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_WHOLE: Final = r"^-?\d{1,15}(\.0+)?$"
_TRUTH: Final = {"true": 1.0, "false": 0.0}
_QUOTE: Final = b'"'
_CELL: Final = rb'(?:[^",\r]*+|"(?:[^"\r]|"")*+")'
_LINE: Final = re.compile(_CELL + b"(?:," + _CELL + b")*+")


@dataclass(frozen=True, slots=True)
class Cells:
    """Rows of one file as columns of text; `lines` says where each row stands."""

    columns: dict[str, pa.StringArray]
    lines: Integers

    def __len__(self) -> int:
        return len(self.lines)

    def keep(self, mask: Mask) -> Cells:
        """Return only the rows of `mask`."""
        if mask.all():
            return self
        chosen = pa.array(mask)
        return Cells({name: column.filter(chosen) for name, column in self.columns.items()}, self.lines[mask])


Complain = Callable[[int, str], None]


def read_cells(path: Path, faults: Faults, complain: Complain) -> Iterator[Cells]:
    """Yield the rows of the file at `path`. A last line without its end is a row only when it is whole."""
    header: list[str] = []
    waiting: list[bytes] = []
    numbers: list[int] = []
    held = 0
    torn = _last_line_is_torn(path)
    for number, line in _lines(path, faults, complain):
        if not header:
            header = next(iter(_fields(line)), [])
            continue
        if not line.strip():
            continue
        if line.count(_QUOTE) % 2 or not _is_text(line):
            complain(number, f"cut or no text: {shown(line)}")
            continue
        waiting.append(line)
        numbers.append(number)
        held += len(line)
        if len(waiting) > BATCH_LINES or held > BATCH_BYTES:
            # One line is held back: only the very last of the file can be torn.
            yield _parse(header, waiting[:-1], numbers[:-1], complain)
            waiting, numbers, held = waiting[-1:], numbers[-1:], len(line)
    if torn and waiting and not _is_whole(header, waiting[-1]):
        complain(numbers.pop(), f"cut: {shown(waiting.pop())}")
    if waiting:
        yield _parse(header, waiting, numbers, complain)


def _lines(path: Path, faults: Faults, complain: Complain) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of the file; of those that are passed over, `complain`, which names the file."""
    own = Faults(read_bytes=faults.read_bytes)
    for numbered in read_lines(path, own):
        faults.read_bytes = own.read_bytes
        _hand_on(own, complain)
        yield numbered
    _hand_on(own, complain)


def _hand_on(faults: Faults, complain: Complain) -> None:
    for fault in faults.first:
        complain(fault.line, fault.text)
    faults.first.clear()


def read_header(path: Path) -> list[str]:
    """Return the column names of the file at `path`, none for an empty one."""
    for _, line in read_lines(path, Faults()):
        return next(iter(_fields(line)), [])
    return []


def floats(column: pa.StringArray) -> tuple[Floats, Mask]:
    """Return the numbers of `column`, NaN for the text nan and for nothing, and a mask of cells that are no number."""
    none = np.zeros(len(column), np.bool_)
    try:
        return np.asarray(pc.cast(column, pa.float64()).fill_null(math.nan).to_numpy(zero_copy_only=False)), none
    except pa.ArrowInvalid:
        values = [_float(cell) for cell in column.to_pylist()]
    bad = np.array([value is None for value in values])
    return np.array([math.nan if value is None else value for value in values], np.float64), bad


def whole_numbers(column: pa.StringArray, limit: int) -> tuple[Integers, Mask]:
    """Return the integers of `column` and a mask of cells that are none of magnitude below `limit`."""
    matched = pc.match_substring_regex(column, _WHOLE).fill_null(False)
    texts = pc.replace_substring_regex(pc.if_else(matched, column, "0"), r"\.0+$", "")
    values = np.asarray(pc.cast(texts, pa.int64()))
    bad = ~np.asarray(matched.to_numpy(zero_copy_only=False)) | (np.abs(values) >= limit)
    return np.where(bad, 0, values), np.asarray(bad)


def _parse(header: Sequence[str], lines: Sequence[bytes], numbers: Sequence[int], complain: Complain) -> Cells:
    parsed = _parsed(header, lines)
    if parsed is None:
        good = [_LINE.fullmatch(line) is not None for line in lines]
        for number, line, is_good in zip(numbers, lines, good, strict=True):
            if not is_good:
                complain(number, f"no line of a CSV file: {shown(line)}")
        lines, numbers = list(itertools.compress(lines, good)), list(itertools.compress(numbers, good))
        parsed = _parsed(header, lines)
    if parsed is None:
        for number in numbers:
            complain(number, "it stands among lines that cannot be told apart")
        return Cells({name: pa.array([], pa.string()) for name in header}, np.array([], np.int64))
    table, misfits = parsed
    for row in misfits:
        complain(numbers[row.number - 1], f"{row.actual_columns} fields under a header of {row.expected_columns}")
    columns = {name: _one_array(table.column(name)) for name in table.column_names}
    return Cells(columns, np.delete(np.array(numbers, np.int64), [row.number - 1 for row in misfits]))


def _parsed(header: Sequence[str], lines: Sequence[bytes]) -> tuple[pa.Table, list[pa_csv.InvalidRow]] | None:
    """Return the rows that fit under `header`, and those that do not; None when rows are not lines."""
    misfits: list[pa_csv.InvalidRow] = []

    def skip(row: pa_csv.InvalidRow) -> str:
        misfits.append(row)
        return "skip"

    text = b"\n".join(lines) + b"\n"
    if not lines or b"\r" in text:
        return None
    try:
        table = pa_csv.read_csv(
            io.BytesIO(text),
            read_options=pa_csv.ReadOptions(use_threads=False, column_names=list(header), block_size=len(text) + 1),
            parse_options=pa_csv.ParseOptions(invalid_row_handler=skip),
            convert_options=pa_csv.ConvertOptions(
                column_types=dict.fromkeys(header, pa.string()),
                strings_can_be_null=False,
                quoted_strings_can_be_null=False,
            ),
        ).combine_chunks()
    except pa.ArrowInvalid:
        return None
    # Quotes in the middle of cells may join lines, though their number is even.
    return (table, misfits) if len(table) + len(misfits) == len(lines) else None


def _one_array(column: pa.ChunkedArray) -> pa.StringArray:
    return column.chunk(0) if column.num_chunks == 1 else pa.array([], pa.string())


def _fields(line: bytes) -> Iterator[list[str]]:
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return
    names = [name.strip().strip('"') for name in text.split(",")]
    if len(set(names)) == len(names):
        yield names


def _is_text(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in line


def _last_line_is_torn(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, io.SEEK_END):
            return False
        file.seek(-1, io.SEEK_END)
        return file.read() != b"\n"


def _is_whole(header: Sequence[str], line: bytes) -> bool:
    """Return whether a line without its end ends in a dtype: a number there may be the beginning of a longer one."""
    last = line.rpartition(b",")[2]
    return header[-1] == "dtype" and (last == b"nan" or last.removeprefix(b"torch.") in _DTYPES)


_DTYPES: Final = frozenset(
    b"float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128".split()
)


def _float(cell: str | None) -> float | None:
    text = (cell or "").strip()
    if not text:
        return math.nan
    if text.lower() in _TRUTH:
        return _TRUTH[text.lower()]
    try:
        return float(text) if "_" not in text else None
    except ValueError:
        return None
