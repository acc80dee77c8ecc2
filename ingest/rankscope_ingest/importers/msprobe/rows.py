"""Rows of a family's file with their keys read: step, virtual stage, micro step, name. No meaning yet."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.msprobe.csv_layout import plain
from rankscope_ingest.importers.msprobe.csv_cells import Cells, Complain, Floats, Integers, Mask, floats, whole_numbers

MAX_PASSES: Final = 1_000

Row = tuple[str, int, int]
"""Name, virtual stage and micro step: what tells the rows of one step apart."""


class Passes:
    """Tells the passes of one file, batch by batch."""

    def __init__(self) -> None:
        self.current = 0
        self._first: dict[int, Row] = {}

    def of(self, steps: Integers, names: Integers, texts: list[str], vpp: Integers, micro: Integers) -> Integers:
        """Return the pass of each row, from 0 and never falling. `names` are positions in `texts`."""
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


KEYS: Final = ("vpp_stage", "name", "step")
MICRO_STEP: Final = "micro_step"
TEXTS: Final = ("shape", "dtype")

_STEP_LIMIT: Final = 1 << 50
_SMALL_LIMIT: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns of equal length. `codes` are positions in `names`; -1 in `vpp` and `micro` stands for none.

    `records` are the numbers of the rows: those that are left out later keep theirs. `passes` is all 0 at first.
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

    def keep(self, mask: Mask) -> Rows:
        """Return only the rows of `mask`."""
        if mask.all():
            return self
        chosen = pa.array(mask)
        return Rows(
            self.lines[mask],
            self.records[mask],
            self.passes[mask],
            self.steps[mask],
            self.vpp[mask],
            self.micro[mask],
            self.codes[mask],
            self.names,
            {name: column[mask] for name, column in self.numbers.items()},
            {name: column.filter(chosen) for name, column in self.texts.items()},
        )

    def numbered(self) -> Rows:
        """Return the same rows, numbered from 0."""
        return replace(self, records=np.arange(len(self)))

    def told_apart_by(self, passes: Passes) -> Rows:
        """Return the same rows, each of its pass over the file."""
        return replace(self, passes=passes.of(self.steps, self.codes, self.names, self.vpp, self.micro))

    def spread(self, values: Sequence[Any], arrow_type: pa.DataType) -> pa.Array:
        """Return the column that has, for each row, the value that belongs to its name."""
        return pa.array(values, arrow_type).take(pa.array(self.codes))


def read_rows(cells: Cells, complain: Complain) -> Rows:
    """Return the rows of `cells` whose keys and statistics can be read; of the others, say why not."""
    steps, bad_step = whole_numbers(cells.columns["step"], _STEP_LIMIT)
    vpp, bad_vpp = whole_numbers(cells.columns["vpp_stage"], _SMALL_LIMIT)
    micro, bad_micro = np.full(len(cells), -1, np.int64), np.zeros(len(cells), np.bool_)
    if MICRO_STEP in cells.columns:
        micro, bad_micro = whole_numbers(cells.columns[MICRO_STEP], _SMALL_LIMIT)
    reasons = [(bad_vpp, "vpp_stage is no number"), (bad_step | (steps < 0), "step is no number from 0")]
    reasons.append((bad_micro, "micro_step is no number"))
    numbers = {}
    for name in cells.columns:
        if name not in {*KEYS, MICRO_STEP, *TEXTS}:
            numbers[name], bad = floats(cells.columns[name])
            reasons.append((bad, f"{name} is no number"))
    good = np.ones(len(cells), np.bool_)
    for bad, reason in reasons:
        for line in cells.lines[bad & good].tolist():
            complain(line, reason)
        good &= ~bad
    name = pc.dictionary_encode(cells.columns["name"])
    texts = {str(text): cells.columns[text] for text in TEXTS if text in cells.columns}
    codes = name.indices.to_numpy().astype(np.int64)
    names = [plain(cell) for cell in name.dictionary.to_pylist()]
    rows = Rows(cells.lines, steps, np.zeros_like(steps), steps, vpp, micro, codes, names, numbers, texts)
    return rows.keep(good).numbered()
