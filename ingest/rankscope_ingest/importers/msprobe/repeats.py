"""Steps that were written twice: a run that went on from a checkpoint appends to the files of the steps it repeats.

The tool writes the tensors of a step always in the same order. So a row that is the first of its step once more begins
another pass over the file; a file in any other order (sorted by name, say) is one pass.
"""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np

from rankscope_ingest.importers.msprobe.cells import Integers

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
