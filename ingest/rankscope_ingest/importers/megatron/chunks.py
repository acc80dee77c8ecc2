"""Classify the lines of one chunk of a Megatron log, and join rows that were wrapped into several lines.

A line is a row, a companion line (a line with data between the rows), or other output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from rankscope_ingest.importers.common.lines import MAX_LINE_BYTES
from rankscope_ingest.importers.megatron.columns import (
    TIMERS_PATTERN,
    Flags,
    Integers,
    matching,
    row_lines,
    text_lines,
)
from rankscope_ingest.importers.megatron.other_lines import COMPANION_PATTERN
from rankscope_ingest.importers.megatron.rows import (
    HEAD_PATTERN,
    Row,
    clean,
    fold,
    has_head,
    number,
    parse_rows,
    split_part,
    values,
)

MOST_LINES: Final = 8

KNOWN_KEYS: Final = frozenset({
    "consumed_samples", "consumed_tokens", "elapsed_time_per_iteration", "learning_rate", "global_batch_size",
    "lm_loss", "loss", "loss_scale", "grad_norm", "num_zeros", "params_norm", "number_of_skipped_iterations",
    "number_of_nan_iterations", "samples_per_second", "tflops", "throughput_per_gpu", "actual_seqlen",
    "curriculum_seqlen", "load_balancing_loss", "world_size", "decoupled_learning_rate", "tokens_per_gpu",
    "tokens_per_gpu_per_second", "mtp_1_loss", "z_loss",
})  # fmt: skip

_SPLIT_NUMBER: Final = re.compile(r"[\d.eE+-]$")
_REST_OF_NUMBER: Final = re.compile(r"^[\d.eE+-]")
_MAY_CLOSE: Final = rf"\|\s*$|{HEAD_PATTERN}.*{HEAD_PATTERN}|\r[^\n]|[\x00\x08\x1b]"
"""A regular expression for lines whose rows end with a bar (`|`), or that only the parser of single rows can parse.

Lines of the second kind contain two rows, a progress bar or colours.
"""


def joined_row(
    text: str, following: Callable[[int], str | None], known: Collection[str] = KNOWN_KEYS
) -> tuple[list[Row], int]:
    """Return the rows of the line `text` joined with its continuation lines, and the number of continuation lines.

    If `text` has no continuation, the result is an empty list of rows and 0. `following(k)` returns the k-th line after
    `text`, or None if that line cannot be a continuation. A line may be wrapped after a bar, so a row that looks
    complete may continue. The largest number of lines that together form a valid row is joined.
    """
    whole = text
    found: tuple[list[Row], int] = [], 0
    for taken in range(1, MOST_LINES + 1):
        line = following(taken)
        if line is None or not line.strip() or has_head(line):
            break
        whole = join(whole, clean(line), known)
        if whole.rstrip().endswith("|"):
            rows = parse_rows(whole)
            if not rows or not _is_valid(rows[-1]):
                break
            found = rows, taken
    return found


def _is_valid(row: Row) -> bool:
    return bool(row.parts) and not row.odd_parts and all(values(key, text) for key, text in row.parts)


def join(first: str, second: str, known: Collection[str] = KNOWN_KEYS) -> str:
    """Return two lines joined to one, with a space between them only if the line was wrapped between two words."""
    first, second = first.rstrip("\r\n"), second.rstrip("\r\n")
    if not first or not second or first[-1] in " \t|" or second[0] in " \t|":
        return first + second
    left, right = first.rpartition("|")[2], second.partition("|")[0]
    tight, spaced = split_part(left + right), split_part(f"{left} {right}")
    if tight is not None and fold(tight[0]) in known and number(tight[1]) is not None:
        return first + second
    if spaced is not None and fold(spaced[0]) in known:
        return f"{first} {second}"
    if ":" in left and _SPLIT_NUMBER.search(left) and _REST_OF_NUMBER.match(right):
        return first + second
    return f"{first} {second}"


@dataclass(slots=True, kw_only=True)
class ChunkLines:
    """The lines of a chunk of a Megatron log, with a boolean array for each kind of line."""

    lines: pa.Array
    lengths: Integers
    is_row: Flags
    too_long: Flags
    is_companion: Flags
    has_timers: Flags
    has_bar: Flags
    cut: int = -1
    """The index of the last line of a log if it has no line end and may therefore be incomplete; otherwise -1."""

    @classmethod
    def of(cls, data: bytes, *, is_end: bool) -> ChunkLines:
        """Return the lines of `data`.

        `is_end` is whether `data` is the end of the log; its last line may then be incomplete.
        """
        lines, lengths = text_lines(data)
        too_long = lengths > MAX_LINE_BYTES
        is_row = row_lines(lines) & ~too_long
        others = np.flatnonzero(~is_row & ~too_long)
        texts = lines.take(pa.array(others))

        def among_others(pattern: str) -> Flags:
            flags = np.zeros(len(lines), np.bool_)
            flags[others] = matching(texts, pattern)
            return flags

        return cls(
            lines=lines,
            lengths=lengths,
            is_row=is_row,
            too_long=too_long,
            is_companion=among_others(COMPANION_PATTERN),
            has_timers=among_others(TIMERS_PATTERN),
            has_bar=among_others(r"\|"),
            cut=len(lines) - 1 if is_end and not data.endswith(b"\n") else -1,
        )

    def __len__(self) -> int:
        return len(self.lines)

    def first(self, count: int) -> ChunkLines:
        """Return a copy of this object that has only the first `count` lines."""
        names = ("lines", "lengths", "is_row", "too_long", "is_companion", "has_timers", "has_bar")
        return ChunkLines(**{name: getattr(self, name)[:count] for name in names})

    def settled(self) -> int:
        """Return the number of lines that can be parsed now.

        The last row of a chunk and the lines after it are left out if the row may continue in the next chunk.
        """
        last = len(self) - 1
        for line in range(last, max(-1, last - MOST_LINES), -1):
            if self.is_row[line]:
                return line
            if self.is_companion[line] or self.too_long[line]:
                break
        return len(self)

    def may_continue(self) -> Flags:
        """Return a boolean array that marks the rows whose next line may be their continuation."""
        continuation = np.append((self.has_bar & ~self.is_companion)[1:], values=False)
        return np.asarray(self.is_row & continuation)

    def are_open(self) -> bool:
        """Return whether the log is of a dialect whose rows do not end with a bar (`|`).

        The log is of such a dialect if no row of the chunk ends with a bar, and no row can continue in the next line.
        """
        rows = np.flatnonzero(self.is_row)
        after = rows[rows + 1 < len(self)] + 1
        blank = ~matching(self.chosen(after), r"\S")
        ends = self.is_row[after] | self.is_companion[after] | self.too_long[after] | blank
        return bool(ends.all()) and not matching(self.chosen(rows), _MAY_CLOSE).any()

    def chosen(self, numbers: Integers) -> pa.Array:
        """Return the lines with the numbers `numbers`, counted from 0 in the chunk."""
        return self.lines if len(numbers) == len(self) else self.lines.take(pa.array(numbers))

    def others(self) -> int:
        """Return the number of lines of other output: those that are neither rows nor companion lines nor too long."""
        return int((~(self.is_row | self.is_companion | self.too_long)).sum())

    def raw(self, line: int) -> bytes:
        """Return the line with the line number `line`, from 0 in the chunk, as bytes, including its line end."""
        found: bytes = self.lines[line].as_py()
        return found

    def text(self, line: int) -> str:
        """Return the line with the line number `line`, from 0 in the chunk, as text."""
        return self.raw(line).decode(errors="replace")

    def continuation(self, line: int) -> str | None:
        """Return the line with the line number `line`, from 0 in the chunk, as text.

        Return None if the line cannot continue the row before the line.
        """
        if line >= len(self) or self.is_row[line] or self.is_companion[line] or self.too_long[line]:
            return None
        return self.text(line)
