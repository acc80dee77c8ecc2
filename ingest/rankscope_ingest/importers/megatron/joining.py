"""Puts rows together again that were wrapped over several lines, by a terminal or in a wiki."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Final

from rankscope_ingest.importers.megatron.keys import fold
from rankscope_ingest.importers.megatron.rows import Row, clean, has_head, number, parse_rows, split_part, values

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


def joined_row(
    text: str, following: Callable[[int], str | None], known: Collection[str] = KNOWN_KEYS
) -> tuple[list[Row], int]:
    """Return the rows of `text` continued by the lines behind it, and how many lines that took; 0 when it is not.

    `following(k)` gives the k-th line behind, None where one stands that cannot be a continuation. The break may have
    fallen behind a bar, so that a row which looks whole goes on: as many lines are taken as make sense.
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
            if not rows or not _makes_sense(rows[-1]):
                break
            found = rows, taken
    return found


def _makes_sense(row: Row) -> bool:
    return bool(row.parts) and not row.odd_parts and all(values(key, text) for key, text in row.parts)


def join(first: str, second: str, known: Collection[str] = KNOWN_KEYS) -> str:
    """Return two lines as one: with a blank where the wrap fell between words, without where it fell inside of one."""
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
