"""Read a CSV file of msprobe into columns of text, and the text into numbers.

Unreadable lines are recorded with their numbers. A line with an open quote or with invalid text is rejected first,
because a parser would join it with the next line. Arrow's CSV reader parses the other lines in batches. The meaning of
the rows is left to `tables`.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as pa_csv

from rankscope_ingest.importers.common.importer import Faults
from rankscope_ingest.importers.common.lines import LogLines, shown
from rankscope_ingest.importers.common.values import plain as plain_number
from rankscope_msprobe.files.csv_layout import CSV_KEYS, MICRO_STEP, plain

BATCH_BYTES: Final = 1 << 22
MAX_PASSES: Final = 1_000

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
_TEXTS: Final = ("shape", "dtype", "unit", "labels")
_STEP_LIMIT: Final = 1 << 50
_SMALL_LIMIT: Final = 1 << 31
_WHOLE: Final = r"^-?\d{1,15}(\.0+)?$"
_WORDS: Final = {"": math.nan, "true": 1.0, "false": 0.0}
_PLAIN: Final = rb"[\t !#-~]*+"
_QUOTED: Final = rb'(?<![^,\n])"(?:[\t !#-~]++|"")*+"(?=[,\r\n])'
_ROW: Final = re.compile(rb"(?!\s*\n)(%b(?:%b%b)*+)\r?\n" % (_PLAIN, _QUOTED, _PLAIN))
"""A regular expression for a row of ASCII characters with its line end."""

_DTYPES: Final = frozenset(
    b"float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128".split()
)


_Cells = tuple[dict[str, pa.StringArray], Integers]
"""Rows of one file as columns of text, and the line number of each row, from 1."""


def _read_cells(path: Path, faults: Faults) -> Iterator[_Cells]:
    """Yield the rows of the file at `path` in batches; record unreadable lines in `faults`.

    A last line without line end may be incomplete. Such a line counts as a row only if it ends with a complete data
    type.
    """
    header = read_header(path)
    if missing := [name for name in CSV_KEYS if name not in header]:
        faults.add(1, f"the file has no column {', '.join(missing)}: it is not a file of msprobe's monitor")
        return
    waiting: list[bytes] = []
    numbers: list[int] = []
    held = 0
    lines = LogLines(path, faults)
    for number, line in itertools.islice(lines, 1, None):
        if not line.strip():
            continue
        if (reason := _fault(line)) is not None:
            faults.add(number, f"the line is {reason}: {shown(line)}")
        elif faults.is_torn and not _is_whole(header, line):
            faults.add(number, f"the last line is incomplete: {shown(line)}")
        else:
            rows = [line, *lines.matching(_ROW)[0]]
            waiting += rows
            numbers += range(number, number + len(rows))
            held += sum(map(len, rows))
        if held > BATCH_BYTES:
            yield _parse(header, waiting, numbers, faults)
            waiting, numbers, held = [], [], 0
    if waiting:
        yield _parse(header, waiting, numbers, faults)


def read_header(path: Path) -> list[str]:
    """Return the column names of the file at `path`; an empty list for an empty file."""
    first = next(iter(LogLines(path, Faults())), None)
    return [] if first is None else _fields(first[1])


def _parse(header: Sequence[str], lines: Sequence[bytes], numbers: Sequence[int], faults: Faults) -> _Cells:
    """Return the rows that have as many fields as `header`; record the others in `faults`."""
    misfits: list[int] = []

    def skip(row: pa_csv.InvalidRow) -> str:
        misfits.append(row.number - 1)
        text = f"the line has {row.actual_columns} fields, but the header has {row.expected_columns}"
        faults.add(numbers[row.number - 1], text)
        return "skip"

    text = b"\n".join(lines) + b"\n"
    table = pa_csv.read_csv(
        io.BytesIO(text),
        read_options=pa_csv.ReadOptions(use_threads=False, column_names=list(header), block_size=len(text) + 1),
        parse_options=pa_csv.ParseOptions(invalid_row_handler=skip),
        convert_options=pa_csv.ConvertOptions(
            column_types=dict.fromkeys(header, pa.string()),
            strings_can_be_null=False,
            quoted_strings_can_be_null=False,
        ),
    )
    columns = {name: table[name].combine_chunks() for name in header}
    return columns, np.delete(np.array(numbers, np.int64), misfits)


def _fields(line: bytes) -> list[str]:
    """Return the column names in a header line; an empty list if it is not text or if a name is repeated."""
    try:
        names = [name.strip().strip('"') for name in line.decode().split(",")]
    except UnicodeDecodeError:
        return []
    return names if len(set(names)) == len(names) else []


def _fault(line: bytes) -> str | None:
    """Return the reason why `line` alone is not a row; None if it is one."""
    try:
        text = line.decode().encode("ascii", "replace")
    except UnicodeDecodeError:
        return "incomplete or not valid text"
    if text.count(b'"') % 2:
        return "incomplete or not valid text"
    return None if _ROW.fullmatch(text + b"\n") else "not valid CSV"


def _is_whole(header: Sequence[str], line: bytes) -> bool:
    """Return whether a line without line end is complete.

    The line is complete if it ends with a data type. If it ends with a number, digits may be missing.
    """
    last = line.rpartition(b",")[2]
    return header[-1] == "dtype" and (last == b"nan" or last.removeprefix(b"torch.") in _DTYPES)


class _Passes:
    """Counts the passes of one file: if a file repeats its steps, each repetition is another pass.

    A pass begins where the first row of a step occurs again. Batches of rows must be passed in the order of the file.
    """

    def __init__(self) -> None:
        self.current = 0
        self._first: dict[int, tuple[str, int, int]] = {}  # step: name, virtual stage and micro step of its first row

    def of(self, steps: Integers, names: Integers, texts: list[str], vpp: Integers, micro: Integers) -> Integers:
        """Return for each row how often its step was written again before this row; the numbers never decrease.

        `steps`, `names`, `vpp` and `micro` have one value per row; `names` has indices into `texts`.
        """
        passes = np.full(len(steps), self.current, np.int64)
        code_of = {text: code for code, text in enumerate(texts)}
        starts = [0, *(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)] if len(steps) else []
        for start, end in itertools.pairwise(starts):
            step = int(steps[start])
            begins = start
            if step not in self._first:
                self._first[step] = (texts[names[start]], int(vpp[start]), int(micro[start]))
                begins += 1
            first = self._first[step]
            same = (names[begins:end] == code_of.get(first[0], -1)) & (vpp[begins:end] == first[1])
            for position in (np.flatnonzero(same & (micro[begins:end] == first[2])) + begins).tolist():
                if self.current < MAX_PASSES:
                    self.current += 1
                    self._first = {step: first}
                    passes[position:] = self.current
        return passes


@dataclass(frozen=True, slots=True)
class CsvRows:
    """Rows of an msprobe CSV file as columns of equal length.

    `codes` has the index into `names` for each row; -1 in `vpp` (virtual pipeline stage) and `micro` (micro-batch)
    means no value. `records` has the number of each row; these numbers do not change when other rows are removed.
    """

    lines: Integers
    records: Integers
    passes: Integers
    steps: Integers
    vpp: Integers
    micro: Integers
    codes: Integers
    names: list[str]
    numbers: dict[str, Floats]
    texts: dict[str, pa.StringArray]

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def repeats(self) -> int:
        """The number of times that the file has repeated its steps before the last of these rows."""
        return int(self.passes[-1]) if len(self) else 0

    def keep(self, mask: Mask) -> CsvRows:
        """Return only the rows for which `mask` is true."""
        if mask.all():
            return self
        chosen = pa.array(mask)
        arrays = {item.name: getattr(self, item.name)[mask] for item in fields(self)[:7]}
        return CsvRows(
            **arrays,
            names=self.names,
            numbers={name: column[mask] for name, column in self.numbers.items()},
            texts={name: column.filter(chosen) for name, column in self.texts.items()},
        )

    def spread(self, values: Sequence[Any], arrow_type: pa.DataType) -> pa.Array:
        """Return a column with one value per row: the value in `values` for the name of the row.

        `values` has one value per name.
        """
        return pa.array(values, arrow_type).take(pa.array(self.codes))


def read_rows(path: Path, faults: Faults) -> Iterator[CsvRows]:
    """Yield the rows of the file at `path` with a valid pipeline stage, step, micro-batch and statistics, in batches.

    The other lines are recorded in `faults`.
    """
    passes = _Passes()
    for cells in _read_cells(path, faults):
        yield _numbered(cells, passes, faults)


def _numbered(cells: _Cells, passes: _Passes, faults: Faults) -> CsvRows:
    columns, lines = cells
    count = len(lines)
    steps, bad_step = _whole_numbers(columns["step"], _STEP_LIMIT)
    vpp, bad_vpp = _whole_numbers(columns["vpp_stage"], _SMALL_LIMIT)
    micro, bad_micro = np.full(count, -1, np.int64), np.zeros(count, np.bool_)
    if MICRO_STEP in columns:
        micro, bad_micro = _whole_numbers(columns[MICRO_STEP], _SMALL_LIMIT)
    reasons = [
        (bad_vpp, "vpp_stage is no number"),
        (bad_step | (steps < 0), "step is no number from 0"),
        (bad_micro, "micro_step is no number"),
    ]
    numbers = {}
    for name in columns:
        if name not in {*CSV_KEYS, MICRO_STEP, *_TEXTS}:
            numbers[name], bad = _floats(columns[name])
            reasons.append((bad, f"{name} is no number"))
    good = np.ones(count, np.bool_)
    for bad, reason in reasons:
        for line in lines[bad & good].tolist():
            faults.add(line, reason)
        good &= ~bad
    encoded = pc.dictionary_encode(columns["name"])
    texts = {str(text): columns[text] for text in _TEXTS if text in columns}
    codes = encoded.indices.to_numpy().astype(np.int64)
    names = [plain(cell) for cell in encoded.dictionary.to_pylist()]
    rows = CsvRows(lines, steps, steps, steps, vpp, micro, codes, names, numbers, texts).keep(good)
    found = passes.of(rows.steps, rows.codes, names, rows.vpp, rows.micro)
    return replace(rows, records=np.arange(len(rows)), passes=found)


def _floats(column: pa.StringArray) -> tuple[Floats, Mask]:
    """Return the cells of `column` as numbers, and a boolean array that marks the cells that are not numbers.

    The text "nan" and empty cells are NaN.
    """
    none = np.zeros(len(column), np.bool_)
    try:
        return np.asarray(pc.cast(column, pa.float64()).fill_null(math.nan).to_numpy(zero_copy_only=False)), none
    except pa.ArrowInvalid:
        values = [_float(cell) for cell in column.to_pylist()]
    bad = np.array([value is None for value in values])
    return np.array([math.nan if value is None else value for value in values], np.float64), bad


def _float(cell: str) -> float | None:
    text = cell.strip().lower()
    value = _WORDS.get(text, plain_number(text))
    return None if isinstance(value, str) else float(value)


def _whole_numbers(column: pa.StringArray, limit: int) -> tuple[Integers, Mask]:
    """Return the cells of `column` as integers, and a boolean array that marks invalid cells.

    A cell is invalid if it is not an integer or if its magnitude is `limit` or more.
    """
    matched = pc.match_substring_regex(column, _WHOLE).fill_null(False)
    texts = pc.replace_substring_regex(pc.if_else(matched, column, "0"), r"\.0+$", "")
    values = np.asarray(pc.cast(texts, pa.int64()))
    bad = ~np.asarray(matched.to_numpy(zero_copy_only=False)) | (np.abs(values) >= limit)
    return np.where(bad, 0, values), np.asarray(bad)
