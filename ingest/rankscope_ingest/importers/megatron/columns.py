"""Rows that look alike, read a column at a time: no Python object per number.

Lines are grouped by their number of bars; the first of a group shows the keys, Arrow checks that the others have the
same ones at the same places and reads the numbers. Whatever does not fit is handed back for the careful reader
(`rows`), so that both give the same for the same line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_ingest.importers.megatron.rows import MAX_PREFIX, has_head, number, split_part

Numbers = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_TEMPLATES: Final = 3
_VALUES: Final = r"^[^|]*\||:[^:|]*\|"
"""What tells lines with the same keys apart: all before the first bar, and the values."""
_NO_STOP: Final = 1 << 24
_ENOUGH_LINES: Final = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """What lines of one sort have in common: `head` matches all of the first piece, and names what is wanted of it."""

    head: str
    is_closed: bool
    """Whether a bar stands behind the last part; else one may."""
    has_pairs: bool
    """Whether a value may be `current/average`."""


@dataclass(frozen=True, slots=True)
class Column:
    """The numbers under one key; the second ones of `current/average` form a column of their own."""

    key: str
    is_average: bool
    numbers: Numbers


@dataclass(frozen=True, slots=True)
class Alike:
    """Lines with the same keys, and what their heads say."""

    lines: Integers
    head: pa.StructArray
    keys: tuple[str, ...]
    columns: tuple[Column, ...]


def text_lines(data: bytes) -> tuple[pa.Array, Integers]:
    """Return the lines of `data` with their ends, without copying, and their lengths in bytes."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1
    if not data.endswith(b"\n"):
        ends = np.append(ends, len(data))
    offsets = np.concatenate([[0], ends]).astype(np.int32)
    lines = pa.Array.from_buffers(pa.binary(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    return lines, np.diff(offsets).astype(np.int64)


def matching(lines: pa.Array, pattern: str) -> npt.NDArray[np.bool_]:
    """Return which lines contain the regular expression."""
    found: npt.NDArray[np.bool_] = pc.match_substring_regex(lines, pattern).to_numpy(zero_copy_only=False)
    return found


def read_alike(lines: pa.Array, numbers: Integers, shape: Shape) -> tuple[list[Alike], Integers]:
    """Return lines of one shape, numbered `numbers`, by their keys; and the numbers of those not understood."""
    if len(lines) < _ENOUGH_LINES:
        return [], numbers
    pieces = pc.split_pattern(lines, "|")
    counts = pc.list_value_length(pieces).to_numpy(zero_copy_only=False)
    groups: list[Alike] = []
    left: list[Integers] = []
    for count in np.unique(counts):
        chosen = np.flatnonzero(counts == count)
        table = _Pieces(pieces.take(pa.array(chosen)) if len(chosen) < len(lines) else pieces, int(count))
        rest = _take_alike(table, numbers[chosen], shape, groups)
        if len(rest) >= _ENOUGH_LINES:
            rest = _take_by_look(lines.take(pa.array(np.searchsorted(numbers, rest))), rest, shape, groups)
        left.append(rest)
    return groups, np.sort(np.concatenate(left)) if left else np.empty(0, np.int64)


def _take_alike(table: _Pieces, numbers: Integers, shape: Shape, groups: list[Alike]) -> Integers:
    """Add the lines that have the keys of the first one, or of the next; return the numbers of the others."""
    left: list[Integers] = []
    for _ in range(_TEMPLATES):
        if len(numbers) < _ENOUGH_LINES:
            break
        group, fits = _read_like_first(table, numbers, shape)
        if group is not None:
            groups.append(group)
        if not fits.any():
            fits[0] = True
            left.append(numbers[:1])
        if fits.all():
            return np.concatenate(left) if left else numbers[:0]
        table, numbers = table.without(fits), numbers[~fits]
    return np.sort(np.concatenate([*left, numbers]))


def _take_by_look(lines: pa.Array, numbers: Integers, shape: Shape, groups: list[Alike]) -> Integers:
    """As above for lines of many sorts: those that look alike are put together first."""
    looks = pc.replace_substring_regex(lines, _VALUES, "|").dictionary_encode().indices.to_numpy(zero_copy_only=False)
    order = np.argsort(looks, kind="stable")
    left = []
    for chosen in np.split(order, np.flatnonzero(np.diff(looks[order])) + 1):
        rest = numbers[chosen]
        if len(rest) >= _ENOUGH_LINES:
            pieces = pc.split_pattern(lines.take(pa.array(chosen)), "|")
            rest = _take_alike(_Pieces(pieces, len(pieces[0])), rest, shape, groups)
        left.append(rest)
    return np.sort(np.concatenate(left))


class _Pieces:
    """Lines split at their bars, all into the same number of pieces."""

    def __init__(self, pieces: pa.Array, count: int) -> None:
        self.count = count
        self._pieces = pieces
        self._rows = len(pieces)
        # All first pieces, then all second ones, …: one copy instead of one a column.
        order = np.arange(self._rows * count).reshape(self._rows, count).T.ravel()
        self._by_column = pieces.flatten().take(pa.array(order))

    def column(self, position: int) -> pa.Array:
        return self._by_column.slice(position * self._rows, self._rows)

    def first(self) -> list[str]:
        return [piece.decode(errors="replace") for piece in self._pieces[0].as_py()]

    def without(self, fits: npt.NDArray[np.bool_]) -> _Pieces:
        return _Pieces(self._pieces.filter(pa.array(~fits)), self.count)


def _read_like_first(table: _Pieces, numbers: Integers, shape: Shape) -> tuple[Alike | None, npt.NDArray[np.bool_]]:
    """Return the lines with the keys of the first one, and which they are."""
    nothing = np.zeros(len(numbers), np.bool_)
    first = table.first()
    keys = _keys(first, shape)
    if keys is None:
        return None, nothing
    head = pc.extract_regex(table.column(0), pattern=shape.head)
    fits = head.is_valid().to_numpy(zero_copy_only=False)
    fits &= pc.less_equal(pc.binary_length(table.column(0)), MAX_PREFIX).to_numpy(zero_copy_only=False)
    if len(keys) < table.count - 1:
        fits &= _is_blank(table.column(table.count - 1))
    columns: list[Column] = []
    for position, key in enumerate(keys, 1):
        piece = table.column(position)
        prefix = _before_value(first[position], key)
        fits &= pc.starts_with(piece, pattern=prefix).to_numpy(zero_copy_only=False)
        taken, valid = _numbers(piece, len(prefix), key, first[position])
        columns += taken
        fits &= valid
    if not fits.any():
        return None, nothing
    alike = Alike(
        lines=numbers[fits],
        head=head if fits.all() else head.filter(pa.array(fits)),
        keys=keys,
        columns=tuple(Column(column.key, column.is_average, column.numbers[fits]) for column in columns),
    )
    return alike, fits


def _before_value(piece: str, key: str) -> bytes:
    """Return what stands before the value of a part, which may have no colon."""
    end = piece.rindex(":") if ":" in piece else piece.index(key) + len(key)
    return piece[: end + 1].encode()


def _keys(first: list[str], shape: Shape) -> tuple[str, ...] | None:
    """Return the keys of a line, None where it is one for the careful reader."""
    is_closed = not first[-1].strip()
    parts = [split_part(piece) for piece in (first[1:-1] if is_closed else first[1:])]
    if not parts or None in parts or has_head("|".join(first[1:])) or not "".join(first).isascii():
        return None
    keys = tuple(part[0] for part in parts if part is not None)
    numeric = all(_is_plain(part[1], shape) for part in parts if part is not None)
    return keys if numeric and len(set(keys)) == len(keys) and is_closed >= shape.is_closed else None


def _is_plain(text: str, shape: Shape) -> bool:
    values = text.split("/")
    return len(values) <= 1 + shape.has_pairs and all(number(value) is not None for value in values)


def _numbers(piece: pa.Array, start: int, key: str, sample: str) -> tuple[list[Column], npt.NDArray[np.bool_]]:
    """Return the numbers behind a prefix of `start` bytes as one column or, for `current/average`, two."""
    # Without a stop, binary_slice of pyarrow 26 miscounts its buffer.
    text = pc.ascii_trim_whitespace(pc.binary_slice(piece, start, _NO_STOP).view(pa.string()))
    if "/" not in sample.rpartition(":")[2]:
        numbers, valid = _floats(text)
        return [Column(key, is_average=False, numbers=numbers)], valid
    both = pc.split_pattern(text, "/")
    paired = pc.equal(pc.list_value_length(both), 2)
    whole = pc.if_else(paired, both, pa.scalar(["", ""], both.type))
    valid = paired.to_numpy(zero_copy_only=False)
    columns = []
    for position in range(2):
        numbers, readable = _floats(pc.list_element(whole, position))
        valid = valid & readable
        columns.append(Column(key, is_average=position == 1, numbers=numbers))
    return columns, valid


def _floats(text: pa.Array) -> tuple[Numbers, npt.NDArray[np.bool_]]:
    try:
        found = pc.cast(text, pa.float64())
    except pa.ArrowInvalid:
        return _some_floats(text)
    return found.to_numpy(zero_copy_only=False), np.ones(len(text), np.bool_)


def _some_floats(text: pa.Array) -> tuple[Numbers, npt.NDArray[np.bool_]]:
    """Return the numbers among texts of which some are none."""
    valid = pc.match_substring_regex(text, r"^[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?$")
    named = pc.match_substring_regex(text, r"^[-+]?(?:nan|inf|infinity)$", ignore_case=True)
    valid = pc.or_(valid, named)
    found = pc.cast(pc.if_else(valid, text, "0"), pa.float64())
    return found.to_numpy(zero_copy_only=False), valid.to_numpy(zero_copy_only=False)


def _is_blank(piece: pa.Array) -> npt.NDArray[np.bool_]:
    trimmed = pc.ascii_trim_whitespace(piece.view(pa.string()))
    blank: npt.NDArray[np.bool_] = pc.equal(pc.binary_length(trimmed), 0).to_numpy(zero_copy_only=False)
    return blank
