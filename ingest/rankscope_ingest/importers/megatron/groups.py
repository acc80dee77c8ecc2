"""Rows, and lines of timers, that were read a column at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_ingest.importers.megatron.columns import Alike, Column, Integers, Shape, matching, read_alike
from rankscope_ingest.importers.megatron.rows import (
    HEAD_PATTERN,
    LABEL_PATTERN,
    TIME_PATTERN,
    Printer,
    last_time,
    micros,
    printer,
)

NO_TIME: Final = np.iinfo(np.int64).min
NO_NUMBER: Final = np.iinfo(np.int64).min
"""Stands for a step or rank that is not known."""

TIMERS_PATTERN: Final = r"time \(ms\) \|"

_ROW_HEAD: Final = (
    rf"^[ \t]*(?P<labels>(?:{LABEL_PATTERN})*?)(?:\[+(?P<time>{TIME_PATTERN})\]+)?[ \t]*"
    r"[Ii]teration[ \t]+(?P<step>\d+)[ \t]*/[ \t]*(?P<planned>\d+)[ \t]*$"
)
_ROWS: Final = Shape(_ROW_HEAD, is_closed=True, has_pairs=True)
_OPEN_ROWS: Final = Shape(_ROW_HEAD, is_closed=False, has_pairs=True)
_TIMERS: Final = Shape(rf"^[ \t]*(?P<labels>(?:{LABEL_PATTERN})*?)time \(ms\) $", is_closed=False, has_pairs=False)


@dataclass(frozen=True, slots=True)
class Group:
    """Rows with the same keys. `labels` holds the distinct prefixes, `label_codes` which of them each row has."""

    lines: Integers
    steps: Integers
    planned: Integers
    times: Integers  # UTC µs, NO_TIME where there is none
    labels: tuple[str, ...]
    label_codes: Integers
    keys: tuple[str, ...]
    columns: tuple[Column, ...]


def row_lines(lines: pa.Array) -> npt.NDArray[np.bool_]:
    """Return which lines hold the beginning of a row."""
    return matching(lines, HEAD_PATTERN)


def read_groups(lines: pa.Array, numbers: Integers, *, are_open: bool = False) -> tuple[list[Group], Integers]:
    """Return the rows among `lines`, numbered `numbers`, by group, and the numbers of those not understood.

    Rows that `are_open` have no bar at their end.
    """
    found, left = read_alike(lines, numbers, _OPEN_ROWS if are_open else _ROWS)
    return [_group(alike) for alike in found], left


def read_timers(lines: pa.Array, numbers: Integers) -> tuple[list[Alike], Integers]:
    """Return lines such as `time (ms) | forward-compute: 265.42 | optimizer: 52.20`, and those not understood."""
    return read_alike(lines, numbers, _TIMERS)


def _group(alike: Alike) -> Group:
    labels = alike.head.field("labels").dictionary_encode()
    texts = tuple(text.decode(errors="replace") for text in labels.dictionary.to_pylist())
    codes = labels.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    times = _times(alike.head.field("time"))
    of_label = np.array([_label_time(text) for text in texts], np.int64)[codes]
    return Group(
        lines=alike.lines,
        steps=_integers(alike.head.field("step")),
        planned=_integers(alike.head.field("planned")),
        times=np.where(_present(alike.head.field("time")).to_numpy(zero_copy_only=False), times, of_label),
        labels=texts,
        label_codes=codes,
        keys=alike.keys,
        columns=alike.columns,
    )


def _times(text: pa.Array) -> Integers:
    """Return times as UTC µs, NO_TIME where there is none or one that does not exist."""
    try:
        moments = pc.cast(pc.if_else(_present(text), text.view(pa.string()), None), pa.timestamp("us"))
    except pa.ArrowInvalid:
        return _odd_times(text)
    found: Integers = pc.fill_null(moments.view(pa.int64()), int(NO_TIME)).to_numpy(zero_copy_only=False)
    return found


def _present(text: pa.Array) -> pa.BooleanArray:
    return pc.greater(pc.binary_length(pc.fill_null(text, b"")), 0)


def _label_time(label: str) -> int:
    moment = last_time(label)
    found = micros(moment) if moment else None
    return NO_TIME if found is None else found


def _odd_times(text: pa.Array) -> Integers:
    coded = text.dictionary_encode()
    known = [micros(one.decode(errors="replace")) if one else None for one in coded.dictionary.to_pylist()]
    by_code = np.array([NO_TIME if one is None else one for one in [*known, None]], np.int64)
    codes = pc.fill_null(coded.indices, len(known)).to_numpy(zero_copy_only=False)
    found: Integers = by_code[codes]
    return found


def _integers(text: pa.Array) -> Integers:
    found: Integers = pc.cast(text.view(pa.string()), pa.int64()).to_numpy(zero_copy_only=False)
    return found


class Printers:
    """Numbers the printers of a log as they appear."""

    def __init__(self) -> None:
        self._numbers: dict[Printer, int] = {}
        self._tasks_are_ranks: bool | None = None

    def number(self, one: Printer) -> int:
        """Return the number of a printer."""
        return self._numbers.setdefault(one, len(self._numbers))

    def of_labels(self, labels: tuple[str, ...], codes: Integers) -> Integers:
        """Return the number of the printer of each row; `codes` says which of the prefixes it has."""
        by_code = np.array([self.number(printer(label)) for label in labels], np.int64)
        return by_code[codes]

    def ranks(self, printers: Integers, steps: Integers) -> Integers:
        """Return the rank of each row, NO_NUMBER where the log does not say.

        The number that srun puts in front is that of the task which printed, and the rows of a run may come from
        different ones: it is a rank only where several tasks print the same step.
        """
        known = list(self._numbers)
        tasks = np.array([NO_NUMBER if one.task is None else one.task for one in known] or [NO_NUMBER], np.int64)
        ranks = np.array([NO_NUMBER if one.rank is None else one.rank for one in known] or [NO_NUMBER], np.int64)
        by_task, found = tasks[printers], ranks[printers]
        if self._tasks_are_ranks is None:
            self._tasks_are_ranks = _repeat_steps(by_task, steps)
        return np.where(found == NO_NUMBER, by_task, found) if self._tasks_are_ranks else found


def _repeat_steps(tasks: Integers, steps: Integers) -> bool | None:
    """Return whether several tasks print the same steps, None while only one has printed."""
    known = tasks != NO_NUMBER
    if len(np.unique(tasks[known])) < 2:
        return None
    pairs = np.unique(np.stack([steps[known], tasks[known]]), axis=1)
    return bool(len(np.unique(pairs[0])) < pairs.shape[1])
