"""Parse rows of a Megatron log column by column, without a Python object per number.

A row consists of parts `key: value` between bars. Rows with the same keys are parsed together. Lines are grouped by
their number of bars (`|`). The first line of a group provides the keys. Arrow checks that the other lines have the same
keys at the same places, and parses the numbers. Lines that differ are left to the parser of single rows (`rows`). Both
parsers give the same result for the same line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_ingest.importers.megatron.rows import (
    HEAD_PATTERN,
    LABEL_PATTERN,
    MAX_PREFIX,
    TIME_PATTERN,
    Printer,
    has_head,
    last_time,
    micros,
    number,
    printer,
    split_part,
)

Numbers = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

NO_TIME: Final = np.iinfo(np.int64).min
NO_NUMBER: Final = np.iinfo(np.int64).min
"""The value that represents an unknown step or rank in arrays of integers."""

TIMERS_PATTERN: Final = r"time \(ms\) \|"

_TEMPLATES: Final = 3
_VALUES: Final = r"^[^|]*\||:[^:|]*\|"
"""A regular expression for the parts in which lines with the same keys (`key: value |`) may differ.

These parts are the text before the first bar, and the values.
"""
_NO_STOP: Final = 1 << 24
_ENOUGH_LINES: Final = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """The form of one kind of line.

    `head` is a regular expression for the text before the first bar; its groups capture the values in that text.
    """

    head: str
    is_closed: bool
    """True if each line of this form must end with a bar (`|`). If false, the bar at the end is optional."""
    has_pairs: bool
    """True if a value in a line of this form may consist of two numbers, `current/average`."""


_ROW_HEAD: Final = (
    rf"^[ \t]*(?P<labels>(?:{LABEL_PATTERN})*?)(?:\[+(?P<time>{TIME_PATTERN})\]+)?[ \t]*"
    r"[Ii]teration[ \t]+(?P<step>\d+)[ \t]*/[ \t]*(?P<planned>\d+)[ \t]*$"
)
_ROWS: Final = Shape(_ROW_HEAD, is_closed=True, has_pairs=True)
_OPEN_ROWS: Final = replace(_ROWS, is_closed=False)
_TIMERS: Final = Shape(rf"^[ \t]*(?P<labels>(?:{LABEL_PATTERN})*?)time \(ms\) $", is_closed=False, has_pairs=False)


@dataclass(frozen=True, slots=True)
class Column:
    """The numbers that a group of lines has for one key.

    If the values of the key have the form `current/average`, the averages are another column.
    """

    key: str
    is_average: bool
    numbers: Numbers


@dataclass(frozen=True, slots=True)
class Alike:
    """Lines with the same keys in their `key: value` parts, as columns.

    `lines` has their line numbers, `head` the values in the text before the first bar, and `columns` the numbers of
    each key.
    """

    lines: Integers
    head: pa.StructArray
    keys: tuple[str, ...]
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Rows with the same keys in their `key: value` parts, as columns.

    `labels` has the distinct texts before the rows, such as host and rank; `label_codes` has the index in `labels` for
    each row.
    """

    lines: Integers
    steps: Integers
    planned: Integers
    times: Integers  # UTC µs, NO_TIME for a row without a time
    labels: tuple[str, ...]
    label_codes: Integers
    keys: tuple[str, ...]
    columns: tuple[Column, ...]


def _numpy(array: Any) -> Any:
    return array.to_numpy(zero_copy_only=False)


def text_lines(data: bytes) -> tuple[pa.Array, Integers]:
    """Return the lines of `data` with their line ends, and the lengths of the lines in bytes.

    The lines are an Arrow array that shares the memory of `data`.
    """
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1
    if not data.endswith(b"\n"):
        ends = np.append(ends, len(data))
    offsets = np.concatenate([[0], ends]).astype(np.int32)
    lines = pa.Array.from_buffers(pa.binary(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    return lines, np.diff(offsets).astype(np.int64)


def matching(lines: pa.Array, pattern: str) -> Flags:
    """Return a boolean array that marks the lines in which the regular expression `pattern` matches."""
    return np.asarray(_numpy(pc.match_substring_regex(lines, pattern)))


def row_lines(lines: pa.Array) -> Flags:
    """Return a boolean array that marks the lines with the beginning of a row, such as `iteration 10/ 100 |`."""
    return matching(lines, HEAD_PATTERN)


def read_groups(lines: pa.Array, numbers: Integers, *, are_open: bool = False) -> tuple[list[Group], Integers]:
    """Return the rows in `lines`, and the line numbers of the lines that could not be parsed.

    The rows of one group have the same keys in their `key: value` parts. `numbers` has the line number of each line.
    `are_open` is whether the rows have no bar at the end.
    """
    found, left = _read_alike(lines, numbers, _OPEN_ROWS if are_open else _ROWS)
    return [_group(alike) for alike in found], left


def read_timers(lines: pa.Array, numbers: Integers) -> tuple[list[Alike], Integers]:
    """Return the timer lines, grouped by the names of their timers, and the line numbers of all other lines.

    A timer line is, for example, `time (ms) | forward-compute: 265.42 | optimizer: 52.20`.
    """
    return _read_alike(lines, numbers, _TIMERS)


def _read_alike(lines: pa.Array, numbers: Integers, shape: Shape) -> tuple[list[Alike], Integers]:
    """Return lines of the form `shape`, grouped by the keys of their values, and the line numbers of all others."""
    if len(lines) < _ENOUGH_LINES:
        return [], numbers
    pieces = pc.split_pattern(lines, "|")
    counts = _numpy(pc.list_value_length(pieces))
    groups: list[Alike] = []
    left: list[Integers] = []
    for count in np.unique(counts):
        chosen = np.flatnonzero(counts == count)
        table = _Pieces(pieces.take(pa.array(chosen)) if len(chosen) < len(lines) else pieces, int(count))
        rest = _take_alike(table, numbers[chosen], shape, groups)
        if len(rest) >= _ENOUGH_LINES:
            rest = _take_by_form(lines.take(pa.array(np.searchsorted(numbers, rest))), rest, shape, groups)
        left.append(rest)
    return groups, np.sort(np.concatenate(left)) if left else np.empty(0, np.int64)


def _take_alike(table: _Pieces, numbers: Integers, shape: Shape, groups: list[Alike]) -> Integers:
    """Add up to three groups of lines of `table` to `groups`; the lines of a group have the same keys.

    Return the line numbers of the lines that are in none of these groups. The keys of a group are those of the first
    line that is in no earlier group.
    """
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


def _take_by_form(lines: pa.Array, numbers: Integers, shape: Shape, groups: list[Alike]) -> Integers:
    """Group lines by their text without the values, and add the groups to `groups`.

    Return the line numbers of the lines that could not be grouped.
    """
    forms = _numpy(pc.replace_substring_regex(lines, _VALUES, "|").dictionary_encode().indices)
    order = np.argsort(forms, kind="stable")
    left = []
    for chosen in np.split(order, np.flatnonzero(np.diff(forms[order])) + 1):
        rest = numbers[chosen]
        if len(rest) >= _ENOUGH_LINES:
            pieces = pc.split_pattern(lines.take(pa.array(chosen)), "|")
            rest = _take_alike(_Pieces(pieces, len(pieces[0])), rest, shape, groups)
        left.append(rest)
    return np.sort(np.concatenate(left))


class _Pieces:
    """Lines that were split at their bars (`|`), all into the same number of pieces."""

    def __init__(self, pieces: pa.Array, count: int) -> None:
        self.count = count
        self._pieces = pieces
        self._rows = len(pieces)
        # All first pieces, then all second pieces, and so on: one copy instead of one per column.
        order = np.arange(self._rows * count).reshape(self._rows, count).T.ravel()
        self._by_column = pieces.flatten().take(pa.array(order))

    def column(self, position: int) -> pa.Array:
        return self._by_column.slice(position * self._rows, self._rows)

    def first(self) -> list[str]:
        return [piece.decode(errors="replace") for piece in self._pieces[0].as_py()]

    def without(self, fits: Flags) -> _Pieces:
        return _Pieces(self._pieces.filter(pa.array(~fits)), self.count)


def _read_like_first(table: _Pieces, numbers: Integers, shape: Shape) -> tuple[Alike | None, Flags]:
    """Return the lines of `table` with the same keys as its first line, and a boolean array that marks these lines.

    Return None instead of the lines if the first line cannot be parsed as columns, or if no line fits.
    """
    nothing = np.zeros(len(numbers), np.bool_)
    first = table.first()
    keys = _keys(first, shape)
    if keys is None:
        return None, nothing
    head = pc.extract_regex(table.column(0), pattern=shape.head)
    fits = _numpy(head.is_valid())
    fits &= _numpy(pc.less_equal(pc.binary_length(table.column(0)), MAX_PREFIX))
    if len(keys) < table.count - 1:
        trimmed = pc.ascii_trim_whitespace(table.column(table.count - 1).view(pa.string()))
        fits &= _numpy(pc.equal(pc.binary_length(trimmed), 0))
    columns: list[Column] = []
    for position, key in enumerate(keys, 1):
        piece, sample = table.column(position), first[position]
        # A part may have no colon; its value then follows the key.
        end = sample.rindex(":") if ":" in sample else sample.index(key) + len(key)
        prefix = sample[: end + 1].encode()
        fits &= _numpy(pc.starts_with(piece, pattern=prefix))
        taken, valid = _numbers(piece, len(prefix), key, sample)
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


def _keys(first: list[str], shape: Shape) -> tuple[str, ...] | None:
    """Return the keys in the first line of a group; None if only the parser of single rows can parse that line."""
    is_closed = not first[-1].strip()
    split = [split_part(piece) for piece in (first[1:-1] if is_closed else first[1:])]
    parts = [part for part in split if part is not None]
    if not parts or len(parts) < len(split) or has_head("|".join(first[1:])) or not "".join(first).isascii():
        return None
    keys = tuple(key for key, _ in parts)
    is_plain = all(
        len(values := text.split("/")) <= 1 + shape.has_pairs and all(number(value) is not None for value in values)
        for _, text in parts
    )
    return keys if is_plain and len(set(keys)) == len(keys) and is_closed >= shape.is_closed else None


def _numbers(piece: pa.Array, start: int, key: str, sample: str) -> tuple[list[Column], Flags]:
    """Return the numbers of one key as columns, and a boolean array that marks the lines with valid numbers.

    `piece` has the text of the key and the value for each line; the value begins after `start` bytes. Values of the
    form `current/average` give two columns.
    """
    # Without a stop, binary_slice of pyarrow 26 computes a wrong buffer size.
    text = pc.ascii_trim_whitespace(pc.binary_slice(piece, start, _NO_STOP).view(pa.string()))
    if "/" not in sample.rpartition(":")[2]:
        numbers, valid = _floats(text)
        return [Column(key, is_average=False, numbers=numbers)], valid
    both = pc.split_pattern(text, "/")
    paired = pc.equal(pc.list_value_length(both), 2)
    whole = pc.if_else(paired, both, pa.scalar(["", ""], both.type))
    valid = _numpy(paired)
    columns = []
    for position in range(2):
        numbers, readable = _floats(pc.list_element(whole, position))
        valid = valid & readable
        columns.append(Column(key, is_average=position == 1, numbers=numbers))
    return columns, valid


def _floats(text: pa.Array) -> tuple[Numbers, Flags]:
    """Return the numbers in the array `text`, and a boolean array that marks the elements that are numbers."""
    try:
        return _numpy(pc.cast(text, pa.float64())), np.ones(len(text), np.bool_)
    except pa.ArrowInvalid:
        pass  # some texts are no numbers
    valid = pc.match_substring_regex(text, r"^[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?$")
    valid = pc.or_(valid, pc.match_substring_regex(text, r"^[-+]?(?:nan|inf|infinity)$", ignore_case=True))
    return _numpy(pc.cast(pc.if_else(valid, text, "0"), pa.float64())), _numpy(valid)


def _group(alike: Alike) -> Group:
    labels = alike.head.field("labels").dictionary_encode()
    texts = tuple(text.decode(errors="replace") for text in labels.dictionary.to_pylist())
    codes = _numpy(labels.indices).astype(np.int64)
    time = alike.head.field("time")
    label_times = np.array([_time_or_missing(last_time(text)) for text in texts], np.int64)[codes]
    steps, planned = (
        _numpy(pc.cast(alike.head.field(name).view(pa.string()), pa.int64())) for name in ("step", "planned")
    )
    times = np.where(_numpy(_present(time)), _times(time), label_times)
    return Group(alike.lines, steps, planned, times, texts, codes, alike.keys, alike.columns)


def _times(text: pa.Array) -> Integers:
    """Return times as UTC µs; NO_TIME for an absent or invalid time."""
    try:
        moments = pc.cast(pc.if_else(_present(text), text.view(pa.string()), None), pa.timestamp("us"))
    except pa.ArrowInvalid:
        coded = text.dictionary_encode()
        known = [_time_or_missing(value.decode(errors="replace")) for value in coded.dictionary.to_pylist()]
        times = np.array([*known, NO_TIME], np.int64)
        return np.asarray(times[_numpy(pc.fill_null(coded.indices, len(known)))])
    return np.asarray(_numpy(pc.fill_null(moments.view(pa.int64()), int(NO_TIME))))


def _present(text: pa.Array) -> pa.BooleanArray:
    return pc.greater(pc.binary_length(pc.fill_null(text, b"")), 0)


def _time_or_missing(text: str | None) -> int:
    found = micros(text) if text else None
    return NO_TIME if found is None else found


class Printers:
    """The processes that printed the rows of a log, numbered from 0 in order of appearance."""

    def __init__(self) -> None:
        self._numbers: dict[Printer, int] = {}
        self._tasks_are_ranks: bool | None = None

    def number(self, found: Printer) -> int:
        """Return the number that identifies the process `found` in this object.

        A process without a number gets the next free number, from 0.
        """
        return self._numbers.setdefault(found, len(self._numbers))

    def of_labels(self, labels: tuple[str, ...], codes: Integers) -> Integers:
        """Return, for each row, the number that identifies in this object the process that printed the row.

        `labels` has the distinct texts before the rows, `codes` the index in `labels` for each row.
        """
        by_code = np.array([self.number(printer(label)) for label in labels], np.int64)
        return by_code[codes]

    def ranks(self, printers: Integers, steps: Integers) -> Integers:
        """Return the rank of each row; NO_NUMBER if the log does not contain the rank.

        srun prints the number of the task before a line. Different tasks may print the rows of one run, so the task
        number is used as the rank only if several tasks print the same step.
        """
        known = list(self._numbers) or [Printer()]
        tasks = np.array([NO_NUMBER if found.task is None else found.task for found in known], np.int64)
        ranks = np.array([NO_NUMBER if found.rank is None else found.rank for found in known], np.int64)
        by_task, found = tasks[printers], ranks[printers]
        if self._tasks_are_ranks is None:
            self._tasks_are_ranks = _repeat_steps(by_task, steps)
        return np.where(found == NO_NUMBER, by_task, found) if self._tasks_are_ranks else found


def _repeat_steps(tasks: Integers, steps: Integers) -> bool | None:
    """Return whether several srun tasks print the same step; None if fewer than two tasks have printed rows.

    `tasks` and `steps` have one value per row.
    """
    known = tasks != NO_NUMBER
    if len(np.unique(tasks[known])) < 2:
        return None
    pairs = np.unique(np.stack([steps[known], tasks[known]]), axis=1)
    return bool(len(np.unique(pairs[0])) < pairs.shape[1])
