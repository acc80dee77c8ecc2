"""What stays the same from page to page of one exporter, so that only the numbers have to be read. Pure.

A layout is learnt from a page that was read by the rules. It holds everything of that page but its numbers, comments
included; a later page is read by it only if all of that stands there again, byte for byte, with a plain number behind
each series. Anything else (another series, a time, an exemplar) is a surprise, and read by the rules once more.
Spaces and escapes in labels are part of what stays the same, so they cost nothing. Work is in NumPy and Arrow, which
let other threads run meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_ingest.exposition.exact import Sample

_NEWLINE: Final = 10
_PARENTHESIS: Final = b"("  # Arrow reads nan(7) as C does; no exporter's format has it

Positions = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Everything of a page but its numbers.

    `fixed` has the fixed beginning of each line: the series and the space behind it, or a whole comment. `numbers` are
    the lines with a number, `taken` those of their numbers that count: one that repeats a series does not.
    """

    fixed: pa.Array
    fixed_lengths: Positions
    numbers: Positions
    others: Positions
    taken: Positions


def learn(body: bytes, samples: Sequence[Sample], taken: Sequence[int]) -> Layout | None:
    """Return the layout of a page that holds `samples`, of which those at `taken` count, or None if it has none.

    It has none when a line is more than a series, one space and a number.
    """
    if not body.endswith(b"\n") or any(sample.ts is not None for sample in samples):
        return None
    fixed, numbers = [], []
    for place, line in enumerate(body[:-1].split(b"\n")):
        bare = line.decode().strip()
        if bare and not bare.startswith("#"):
            numbers.append(place)
            line = line[: line.rfind(b" ") + 1]  # noqa: PLW2901 - what is fixed of it
        fixed.append(line)
    if len(numbers) != len(samples):
        return None
    lengths = np.array([len(line) for line in fixed], np.int32)
    others = np.setdiff1d(np.arange(len(fixed), dtype=np.int32), numbers)
    places = [np.array(found, np.int32) for found in (numbers, others, taken)]
    layout = Layout(pa.array(fixed, pa.binary()), lengths, *places)
    expected = np.array([samples[place].value for place in taken])
    values = read_numbers(body, layout)
    # The page itself must come out of it as it was read by the rules; an exemplar's number would not.
    return layout if values is not None and np.array_equal(values, expected, equal_nan=True) else None


def join(layouts: Sequence[Layout]) -> Layout:
    """Return the layout of pages that stand behind one another."""
    if len(layouts) == 1:
        return layouts[0]
    lines = np.cumsum([0, *(len(layout.fixed_lengths) for layout in layouts)], dtype=np.int32).tolist()
    numbers = np.cumsum([0, *(len(layout.numbers) for layout in layouts)], dtype=np.int32).tolist()
    return Layout(
        pa.concat_arrays([layout.fixed for layout in layouts]),
        np.concatenate([layout.fixed_lengths for layout in layouts]),
        np.concatenate([layout.numbers + before for layout, before in zip(layouts, lines, strict=False)]),
        np.concatenate([layout.others + before for layout, before in zip(layouts, lines, strict=False)]),
        np.concatenate([layout.taken + before for layout, before in zip(layouts, numbers, strict=False)]),
    )


def read_numbers(body: bytes, layout: Layout) -> npt.NDArray[np.float64] | None:
    """Return the numbers of a page in order, or None when it is not exactly of this layout."""
    ends = np.flatnonzero(np.frombuffer(body, np.uint8) == _NEWLINE).astype(np.int32)
    lines = len(ends)
    if lines != len(layout.fixed_lengths) or not body.endswith(b"\n"):
        return None
    # Each line as three pieces: what is fixed, the number, the line's end.
    cuts = np.zeros(3 * lines + 1, np.int32)
    cuts[3::3] = ends + 1
    cuts[2::3] = ends
    cuts[1::3] = cuts[:-1:3] + layout.fixed_lengths
    spare = ends - cuts[1::3]
    if (spare < 0).any() or spare[layout.others].any():
        return None
    buffers = [None, pa.py_buffer(cuts), pa.py_buffer(body)]
    fixed = pa.Array.from_buffers(pa.binary(), 3 * lines, buffers).take(pa.array(np.arange(lines, dtype=np.int32) * 3))
    if not fixed.equals(layout.fixed):
        return None
    texts = pa.Array.from_buffers(pa.string(), 3 * lines, buffers).take(pa.array(layout.numbers * 3 + 1))
    values = _floats(texts)
    return values if values is None or len(layout.taken) == len(values) else values[layout.taken]


def _floats(texts: pa.Array) -> npt.NDArray[np.float64] | None:
    if not len(texts):
        return np.empty(0)
    if _PARENTHESIS in texts.buffers()[2].to_pybytes():
        return None
    try:
        values: npt.NDArray[np.float64] = pc.cast(texts, pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        return None
    return values
