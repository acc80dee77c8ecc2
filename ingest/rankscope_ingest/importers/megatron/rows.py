"""Parse single rows of a Megatron log: process, time, step, and `key: value` parts with their stored names.

This parser handles the rows that the column parser (`columns`) does not handle: rows with colours, with a progress bar
before the row, with two rows on one line, and incomplete rows. The module performs no I/O.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from rankscope_contract.model.scalar_names import SOURCE_NAME, SOURCE_UNIT
from rankscope_contract.model.schema import canonical_labels
from rankscope_ingest.importers.common.log_names import canonical
from rankscope_ingest.importers.common.values import micros as iso_micros
from rankscope_ingest.importers.common.values import seconds

HEAD_PATTERN: Final = r"[Ii]teration[ \t]+\d{1,18}[ \t]*/[ \t]*\d{1,18}[ \t]*\|"
"""A regular expression for the beginning of each row, such as `iteration 10/ 100 |`.

Prefixes such as time and rank may precede it. Arrow uses the same expression, so it must be valid for both Python and
RE2.
"""

LABEL_PATTERN: Final = r"(?:\[[^\[\]|]+\](?:<std(?:out|err)>)?[ \t]*:?[ \t]*|[\w.-]+:[ \t]+)"
TIME_PATTERN: Final = r"\d{4}[-/]?\d\d[-/]?\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[-+]\d\d:?\d\d)?"

MAX_PREFIX: Final = 400
"""Number of characters before a row that are searched for prefixes such as time and rank."""

_HEAD: Final = re.compile(r"[Ii]teration[ \t]+(\d{1,18})[ \t]*/[ \t]*(\d{1,18})[ \t]*\|")
_TIME: Final = re.compile(rf"(?<!\d){TIME_PATTERN}")
_BEFORE: Final = re.compile(rf"(?P<labels>(?:{LABEL_PATTERN})*?)(?:\[+(?P<time>{TIME_PATTERN})\]+)?[ \t]*$")
_LABEL: Final = re.compile(LABEL_PATTERN)
_COLOURS: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x00\x08]")
_COLOUR_BYTES: Final = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\n]*\x07")
_RANK: Final = re.compile(r"\[(?:default|rank[ -]?)(?P<rank>\d{1,9})(?:/\d+)?\][ \t]*:?", re.IGNORECASE)
_LAUNCHED: Final = re.compile(r"\[[\w@.-]+,(?P<rank>\d{1,9})\]<std(?:out|err)>:")
_LOCAL: Final = re.compile(r"\[(?P<host>[A-Za-z0-9][\w.-]*(?<!\.py)):(?P<rank>\d{1,9})\][ \t]*:?")
_TASK: Final = re.compile(r"(\d{1,9}):")
_HOST: Final = re.compile(r"([\w.-]+):")
_LARGEST_RANK: Final = 1 << 31
_DATE_AND_TIME: Final = re.compile(
    r"(\d{4})[-/]?(\d\d)[-/]?(\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,6})\d*)?(Z|[-+]\d\d:?\d\d)?"
)
_BARE: Final = re.compile(
    r"((?:[\w-]{1,40} ){0,4}loss|learning rate|loss scale|grad norm|num zeros|params norm|consumed samples"
    r"|global batch size|elapsed time per iteration \(m?s\)|number of (?:skipped|nan) iterations)[ \t]+(\S+)"
)
"""A regular expression for a key and a value without a colon between them.

The first Megatron releases print such parts: `lm loss 9.5E+00`.
"""
_CLOCK: Final = re.compile(r"([^:|]*[^:|\s])\s*:\s*((?:\d{1,6} days?, )?\d{1,6}(?::\d\d){1,2}(?:\.\d+)?)")
_THOUSANDS: Final = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_DECIMAL_COMMA: Final = re.compile(r"[-+]?\d+,\d+(?:[eE][-+]?\d+)?")
_EITHER: Final = re.compile(r"[-+]?\d{1,3},\d{3}")
_SPELLED_NAN: Final = re.compile(r"[-+]?(?:s?nan\(\w*\)|1\.#(?:[qs]?nan|ind)\d*)", re.IGNORECASE)
_SPELLED_INF: Final = re.compile(r"([-+]?)1\.#inf\d*", re.IGNORECASE)
_LIKE_A_NUMBER: Final = re.compile(r"[-+.]{0,2}\d")
_WITH_UNIT: Final = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?nan|[-+]?inf)\s*([A-Za-z%]{1,8})?")


@dataclass(frozen=True, slots=True)
class Printer:
    """The process that printed a row, as far as the text before the row identifies it.

    The rows of one process are in order. Fields that the text does not contain are None.
    """

    rank: int | None = None
    task: int | None = None
    host: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a log with unchanged keys and values.

    `parts` has the pairs of key and value, and `odd_parts` the number of parts that are no such pair. `is_closed` is
    whether the row ends with a bar.
    """

    printer: Printer
    ts: int | None
    step: int
    planned: int
    parts: tuple[tuple[str, str], ...]
    odd_parts: int
    is_closed: bool
    is_whole: bool
    """True if the last part of the row has a key and a value. Some dialects print no bar after the last part."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the `key: value` parts, in the order of the row."""
        return tuple(key for key, _ in self.parts)


def clean(text: str) -> str:
    """Return `text` without colours and other terminal control codes."""
    return _COLOURS.sub("", text) if "\x1b" in text or "\x00" in text or "\x08" in text else text


def clean_bytes(data: bytes) -> bytes:
    """Return `data`, the lines of a log, without colours. A colour may begin or end within a key or a value."""
    return _COLOUR_BYTES.sub(b"", data) if b"\x1b" in data else data


def has_head(text: str) -> bool:
    """Return whether `text` contains the beginning of a row, such as `iteration 10/ 100 |`."""
    return _HEAD.search(text) is not None


def parse_rows(text: str) -> list[Row]:
    """Return the rows on one line of a log, in order.

    If a row is interrupted by the next row on the line, it is not closed and therefore incomplete.
    """
    heads = list(_HEAD.finditer(text))
    rows = []
    for position, head in enumerate(heads):
        prefix = text[max(0, head.start() - MAX_PREFIX) : head.start()]
        before = _BEFORE.search(prefix)
        end = len(text)
        if position + 1 < len(heads):
            following = heads[position + 1].start()
            cut = _BEFORE.search(text[max(head.end(), following - MAX_PREFIX) : following])
            end = following - (len(cut[0]) if cut else 0)
        moment = before["time"] if before and before["time"] else None
        if moment is None and not position:
            moment = last_time(prefix)
        rows.append(_row(head, before, moment, text[head.end() : end]))
    return rows


def last_time(prefix: str) -> str | None:
    """Return the last time in `prefix`, the text before a row; None if `prefix` contains no time."""
    found = _TIME.findall(prefix)
    return found[-1] if found else None


def _row(head: re.Match[str], before: re.Match[str] | None, moment: str | None, rest: str) -> Row:
    pieces = rest.split("|")
    is_closed = not pieces[-1].strip()
    if is_closed:
        pieces.pop()
    split = [split_part(piece) for piece in pieces]
    parts = dict(reversed([part for part in split if part is not None]))
    return Row(
        printer=printer(before["labels"]) if before else Printer(),
        ts=micros(moment) if moment else None,
        step=int(head[1]),
        planned=int(head[2]),
        parts=tuple(reversed(parts.items())),
        odd_parts=sum(part is None or _is_odd(*part) for part in split),
        is_closed=is_closed,
        is_whole=bool(split) and split[-1] is not None,
    )


def split_part(piece: str) -> tuple[str, str] | None:
    """Return key and value of a part such as ` lm loss: 2.1E+00 ` or ` lm loss 2.1E+00 `.

    Return None if the key or the value is missing.
    """
    key, colon, value = piece.rpartition(":")
    key, value = key.strip(), value.strip()
    if colon and ":" in key and (clock := _CLOCK.fullmatch(piece.strip())):
        return clock[1], clock[2]
    if not colon and (bare := _BARE.fullmatch(value)) and number(bare[2]) is not None:
        return bare[1], bare[2]
    return (key, value) if colon and key and value else None


def number(text: str) -> float | None:
    """Return the number in `text`, which may be NaN or Inf; None for any other text.

    Numbers such as `1,234.5` and `0,5`, and the texts with which various C libraries print NaN, are accepted. `1,234`
    may mean 1234 or 1.234 and is rejected: a wrong number is worse than a part that is reported as unreadable.
    """
    if "_" in text:
        return None
    try:
        return float(text)
    except ValueError:
        text = text.strip()
    if _SPELLED_NAN.fullmatch(text):
        return math.nan
    if infinite := _SPELLED_INF.fullmatch(text):
        return -math.inf if infinite[1] == "-" else math.inf
    if _EITHER.fullmatch(text):
        return None
    if _THOUSANDS.fullmatch(text):
        return float(text.replace(",", ""))
    return float(text.replace(",", ".")) if _DECIMAL_COMMA.fullmatch(text) else None


def _is_odd(key: str, text: str) -> bool:
    """Return whether a value begins like a number but cannot be parsed as one."""
    return number(text) is None and _LIKE_A_NUMBER.match(text) is not None and not values(key, text)


def values(key: str, text: str) -> list[tuple[str, bool, float, str | None]]:
    """Return (key, whether it is an average, number, unit) for each number in `text`, the value of `key`.

    `text` contains a single number, two numbers `current/average`, or one number per name in the key. An example of the
    last form is `hip mem usage/free/total: 144.89GB/47.10GB/191.98GB`.
    """
    single = number(text)
    if single is not None:
        return [(key, False, single, None)]
    if ":" in text and (duration := seconds(text)) is not None:
        return [(key, False, duration, "s")]
    read = [_with_unit(part) for part in text.split("/")]
    given = [part for part in read if part is not None]
    if not given or len(given) < len(read):
        return []
    names = key.split("/")
    if len(given) == 1:
        return [(key, False, *given[0])]
    if len(names) == len(given):
        stem = names[0].rpartition(" ")[0]
        full = [names[0], *(f"{stem} {name}".strip() for name in names[1:])]
        return [(name, False, *part) for name, part in zip(full, given, strict=True)]
    if len(given) == 2:
        return [(key, False, *given[0]), (key, True, *given[1])]
    return []


def _with_unit(text: str) -> tuple[float, str | None] | None:
    found = _WITH_UNIT.fullmatch(text.strip())
    if found is None:
        alone = number(text.strip())
        return None if alone is None else (alone, None)
    return float(found[1]), found[2]


@functools.lru_cache(maxsize=65_536)
def printer(labels: str) -> Printer:
    """Return the process that printed a row, as the prefixes before the row identify it.

    Examples of prefixes are `node-1: [default7]:`, `[node-1:7]:` and `3:`.
    """
    rank = local = task = host = None
    for label in _LABEL.findall(labels):
        text = label.strip()
        if found := _RANK.fullmatch(text) or _LAUNCHED.fullmatch(text):
            rank = int(found["rank"])
        elif found := _LOCAL.fullmatch(text):
            host, local = found["host"], int(found["rank"])
        elif found := _TASK.fullmatch(text):
            task = int(found[1])
        elif found := _HOST.fullmatch(text):
            host = found[1]
    rank = local if rank is None else rank
    return Printer(rank if rank is None or rank < _LARGEST_RANK else None, task, host)


@functools.lru_cache(maxsize=1024)
def micros(text: str) -> int | None:
    """Return a time as UTC µs, or None for any other text. A time without a zone is taken as UTC."""
    found = _DATE_AND_TIME.fullmatch(text)
    if found is None:
        return None
    year, month, day, clock, fraction, zone = found.groups()
    return iso_micros(f"{year}-{month}-{day} {clock}.{(fraction or '0').ljust(6, '0')}{zone or 'Z'}")


LOSS: Final = "loss"

_STORED_NAMES: Final = {
    "number_of_skipped_iterations": ("skipped_iterations", "iterations"),
    "number_of_nan_iterations": ("nan_iterations", "iterations"),
    "global_batch_size": ("global_batch_size", "samples"),
    "actual_seqlen": ("sequence_length", "tokens"),
    "train_step_timing_in_s": ("step_seconds", "seconds"),
    "curriculum_seqlen": ("curriculum_sequence_length", "tokens"),
}
_MAIN_LOSSES: Final = ("lm_loss", "loss", "total_loss", "train_loss", "reduced_train_loss", "sft_loss")
_AFTER_LOSS: Final = frozenset({
    "loss_scale", "grad_norm", "num_zeros", "params_norm", "number_of_skipped_iterations", "number_of_nan_iterations",
})  # fmt: skip
_SOME_LOSS: Final = re.compile(r"(?:.*[_/])?loss")
_SIDE_LOSS: Final = re.compile(r"mtp|balanc|aux|(?:^|_)z_loss|router|indexer|moe|(?:^|_)kd_|seq_")


@dataclass(frozen=True, slots=True)
class Meaning:
    """The stored name, unit and labels of a key in the log.

    The stored value, in `unit`, is the logged value times `factor`.
    """

    name: str
    unit: str | None
    factor: float
    labels: str | None

    def average(self) -> Meaning:
        """Return the stored name, unit and labels for the average in a value `current/average`.

        Its stored name ends with `_average`.
        """
        return replace(self, name=f"{self.name}_average")


@functools.lru_cache(maxsize=256)
def meanings(keys: tuple[str, ...]) -> tuple[Meaning, ...]:
    """Return stored name, unit, factor and labels for each key of one row.

    At most one loss gets the name `loss`; other losses keep their names.
    """
    main = main_loss(keys)
    return tuple(meaning(key, is_main=key == main) for key in keys)


@functools.lru_cache(maxsize=256)
def main_loss(keys: tuple[str, ...]) -> str | None:
    """Return the key of the training loss among `keys`; None if the row has no loss."""
    folded = {fold(key): key for key in reversed(keys)}
    for name in _MAIN_LOSSES:
        if name in folded:
            return folded[name]
    return next((key for key in keys if _SOME_LOSS.fullmatch(fold(key)) and not _SIDE_LOSS.search(fold(key))), None)


@functools.lru_cache(maxsize=256)
def may_be_cut(keys: tuple[str, ...]) -> bool:
    """Return whether a row with the keys `keys` may be truncated.

    This is possible if the row has neither a loss nor a key that Megatron prints after the loss.
    """
    return main_loss(keys) is None and _AFTER_LOSS.isdisjoint(map(fold, keys))


def is_cut(keys: tuple[str, ...], known: Iterable[tuple[str, ...]]) -> bool:
    """Return whether a row was truncated at a bar (`|`) before the loss.

    It was truncated if a list of keys in `known` begins with the keys of the row and contains the loss after them. A
    complete row without a loss still has the keys that Megatron prints after the loss.
    """
    if not may_be_cut(keys):
        return False
    longer = [other for other in known if len(other) > len(keys) + 1 and other[: len(keys)] == keys]
    return any(main_loss(other) not in {None, other[-1]} for other in longer)


@functools.lru_cache(maxsize=4096)
def meaning(key: str, *, is_main: bool = False) -> Meaning:
    """Return stored name, unit, factor and labels of one key.

    For example, `elapsed time per iteration (ms)` becomes `step_seconds` with the factor 0.001.
    """
    alias = canonical(key)
    name, unit = alias.name, alias.unit
    if is_main:
        name = LOSS
    elif name == LOSS:
        name = fold(key)
    else:
        name, own_unit = _STORED_NAMES.get(fold(name), (name.replace(" ", "_"), None))
        unit = unit or own_unit
    labels = {}
    if fold(key) != name.lower():
        labels[SOURCE_NAME] = key
    if alias.source_unit is not None:
        labels[SOURCE_UNIT] = alias.source_unit
    return Meaning(name, unit, alias.factor, canonical_labels(labels))


def fold(key: str) -> str:
    """Return `key` in lower case, without its unit in parentheses, and with underscores between words."""
    return re.sub(r"[\s_-]+", "_", key.split("(", 1)[0].strip().lower())
