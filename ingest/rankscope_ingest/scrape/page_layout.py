"""Parse a page with the layout of an earlier page of the same exporter, so that only the numbers must be parsed.

The module performs no I/O. A layout is derived from a page that was parsed exactly. The layout contains all bytes of
the page except the numbers, including comments. The layout is used for a later page only if all these bytes are equal
and each series has a plain number. Any difference, such as another series, a time or an exemplar, requires exact
parsing. Spaces and escapes in labels are part of the compared bytes and need no parsing. NumPy and Arrow do the work
and release the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_ingest.scrape.exposition_parser import Sample

_NEWLINE: Final = 10
_LONGEST_NAN: Final = 4  # "-NaN"; Arrow also accepts nan(7), as C does, which no exposition format allows
_EVERY_OTHER: Final = 0b0101_0101
_OF_A_BYTE: Final = 4  # that many bits are set in it
_WORD: Final = 8  # bytes
_VIEW: Final = np.dtype([("length", "<i4"), ("prefix", "<u4"), ("buffer", "<i4"), ("offset", "<i4")])
_VIEW_BYTES: Final = 12
"""Maximum size in bytes of a text that Arrow stores inside an element (a view of 16 bytes) of a string view array.

The view of a longer text contains only the first four bytes and a reference to the text.
"""

Positions = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The layout of a page: all bytes of the page except its numbers, and the line numbers of these numbers.

    The fixed part of a line is the series with the space after it, or a whole comment. `long` has the fixed parts of
    more than 12 bytes, which Arrow views refer to without a copy; `short` has the others. `numbers` are the lines with
    a number, and `others` are the lines without one. `taken` has the positions of the samples to store; samples that
    repeat a series are dropped.
    """

    fixed_lengths: Positions
    long: pa.Array
    long_lines: Positions
    short: pa.Array
    short_lines: Positions
    numbers: Positions
    others: Positions
    taken: Positions


def learn(body: bytes, samples: Sequence[Sample], taken: Sequence[int]) -> Layout | None:
    """Return the layout of the page `body`: all its bytes except the numbers of its samples.

    `samples` are the samples of the page; those at the positions `taken` are stored. Return None if a line with a
    sample has more than a series, one space and a number, or if the page does not end with a newline.
    """
    if not body.endswith(b"\n") or any(sample.ts is not None for sample in samples):
        return None
    fixed, numbers = [], []
    for place, line in enumerate(body[:-1].split(b"\n")):
        bare = line.decode().strip()
        if bare and not bare.startswith("#"):
            numbers.append(place)
            line = line[: line.rfind(b" ") + 1]  # noqa: PLW2901 - only the fixed part
        fixed.append(line)
    if len(numbers) != len(samples):
        return None
    lengths = np.array([len(line) for line in fixed], np.int32)
    others = np.setdiff1d(np.arange(len(fixed), dtype=np.int32), numbers)
    long_lines, short_lines = np.flatnonzero(lengths > _VIEW_BYTES), np.flatnonzero(lengths <= _VIEW_BYTES)
    layout = Layout(
        fixed_lengths=lengths,
        long=pa.array([fixed[place] for place in long_lines], pa.binary_view()),
        long_lines=long_lines.astype(np.int32),
        short=pa.array([fixed[place] for place in short_lines], pa.binary()),
        short_lines=short_lines.astype(np.int32),
        numbers=np.array(numbers, np.int32),
        others=others,
        taken=np.array(taken, np.int32),
    )
    expected = np.array([samples[place].value for place in taken])
    values = read_numbers(body, layout)
    # The layout must return the numbers of the exact parser, which it does not for a page with exemplars.
    return layout if values is not None and np.array_equal(values, expected, equal_nan=True) else None


def join(layouts: Sequence[Layout]) -> Layout:
    """Return the layout of one long page that consists of pages with `layouts`, in the same order.

    A layout is all bytes of a page except the numbers.
    """
    if len(layouts) == 1:
        return layouts[0]
    lines = np.cumsum([0, *(len(layout.fixed_lengths) for layout in layouts)], dtype=np.int32).tolist()
    numbers = np.cumsum([0, *(len(layout.numbers) for layout in layouts)], dtype=np.int32).tolist()
    return Layout(
        fixed_lengths=np.concatenate([layout.fixed_lengths for layout in layouts]),
        long=pa.concat_arrays([layout.long for layout in layouts]),
        long_lines=_shifted([layout.long_lines for layout in layouts], lines),
        short=pa.concat_arrays([layout.short for layout in layouts]),
        short_lines=_shifted([layout.short_lines for layout in layouts], lines),
        numbers=_shifted([layout.numbers for layout in layouts], lines),
        others=_shifted([layout.others for layout in layouts], lines),
        taken=_shifted([layout.taken for layout in layouts], numbers),
    )


def _shifted(places: Sequence[Positions], starts: Sequence[int]) -> Positions:
    return np.concatenate([one + start for one, start in zip(places, starts, strict=False)])


def read_numbers(body: bytes, layout: Layout) -> npt.NDArray[np.float64] | None:
    """Return the numbers of the samples to store from a page as float64, in the order of the page.

    Return None if the page differs in more than the numbers from the earlier page with this layout.
    """
    ends = _line_ends(body)
    if len(ends) != len(layout.fixed_lengths) or not body.endswith(b"\n"):
        return None
    starts = np.empty_like(ends)
    starts[:1], starts[1:] = 0, ends[:-1] + 1
    behind = starts + layout.fixed_lengths
    spare = ends - behind
    if (spare < 0).any() or spare[layout.others].any():
        return None
    long, short = layout.long_lines, layout.short_lines
    if not _views(body, _of(starts, long), _of(layout.fixed_lengths, long)).equals(layout.long):
        return None
    if len(short) and not _cut(body, starts[short], behind[short]).equals(layout.short):
        return None
    values = _floats(body, _of(behind, layout.numbers), _of(ends, layout.numbers))
    return values if values is None or len(layout.taken) == len(values) else values[layout.taken]


def _of(positions: Positions, lines: Positions) -> Positions:
    return positions if len(lines) == len(positions) else positions[lines]


def _line_ends(body: bytes) -> Positions:
    """Return the positions of all newlines in `body`.

    For speed, the search is by words of eight bytes; only words that contain a newline are examined by byte.
    """
    marks = np.empty(-(-len(body) // _WORD) * _WORD, np.bool_)
    np.equal(np.frombuffer(body, np.uint8), _NEWLINE, out=marks[: len(body)])
    marks[len(body) :] = False
    words = marks.view("<u8")
    found = np.flatnonzero(words != 0)
    marked = words[found]
    if (marked & (marked - np.uint64(1))).any():  # two ends in one word
        return np.flatnonzero(marks).astype(np.int32)
    # Such a word is a power of two. Its exponent is the number of bits before the marked byte, plus one.
    return (found * _WORD).astype(np.int32) + (np.frexp(marked.astype(np.float64))[1] >> 3)  # eight bits per byte


def _views(body: bytes, starts: Positions, lengths: Positions) -> pa.Array:
    """Return the parts of `body` that begin at `starts` and have these `lengths` as Arrow views, without copies.

    All parts must be longer than 12 bytes.
    """
    views = np.zeros(len(starts), _VIEW)
    if len(starts):
        fours = np.ndarray(len(body) - 3, "<u4", body, strides=(1,))
        views["length"], views["prefix"], views["offset"] = lengths, fours[starts], starts
    return pa.Array.from_buffers(pa.binary_view(), len(starts), [None, pa.py_buffer(views), pa.py_buffer(body)])


def _cut(body: bytes, starts: Positions, ends: Positions) -> pa.Array:
    """Return copies of the parts of `body` from `starts` to `ends`."""
    pieces = pa.Array.from_buffers(pa.binary(), *_divided(body, starts, ends, None))
    return pieces.take(pa.array(np.arange(0, len(pieces), 2, dtype=np.int32)))


def _floats(body: bytes, starts: Positions, ends: Positions) -> npt.NDArray[np.float64] | None:
    """Return the numbers in `body` between each of `starts` and `ends`; None if any of them is not a number.

    The numbers are parsed in place: in the Arrow array, the parts of `body` between the numbers are null.
    """
    if not len(starts):
        return np.empty(0)
    others_are_null = pa.py_buffer(np.full(-(-len(starts) // _OF_A_BYTE), _EVERY_OTHER, np.uint8))
    try:
        read = pc.cast(pa.Array.from_buffers(pa.string(), *_divided(body, starts, ends, others_are_null)), pa.float64())
    except pa.ArrowInvalid:
        return None
    values: npt.NDArray[np.float64] = np.frombuffer(read.buffers()[1], np.float64, len(read))[::2].copy()
    nans = np.flatnonzero(np.isnan(values))
    return values if (ends[nans] - starts[nans] <= _LONGEST_NAN).all() else None


def _divided(
    body: bytes, starts: Positions, ends: Positions, is_valid: pa.Buffer | None
) -> tuple[int, list[pa.Buffer | None]]:
    """Return length and buffers of an Arrow array whose elements are the parts of `body` from `starts` to `ends`.

    The parts between them are elements too, so every second element is a wanted part.
    """
    offsets = np.empty(2 * len(starts), np.int32)
    offsets[::2], offsets[1::2] = starts, ends
    return max(len(offsets) - 1, 0), [is_valid, pa.py_buffer(offsets), pa.py_buffer(body)]
