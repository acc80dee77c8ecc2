"""The grammar of Megatron's rows, the stored names of their keys, and the forms of rows that repeat. No I/O."""

from __future__ import annotations

import functools
import itertools
import re
from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from rankscope_contract.model.scalar_names import SOURCE_NAME, SOURCE_UNIT
from rankscope_contract.model.schema import canonical_labels
from rankscope_ingest.importers.common.forms import LINE_END, LineForm, fixed
from rankscope_ingest.importers.common.log_names import canonical
from rankscope_ingest.importers.common.row_layout import Rows, Series, numbers_of, times_of, whole_numbers
from rankscope_ingest.importers.common.values import is_ambiguous, micros, quantity, seconds

LABEL_PATTERN: Final = r"(?:\[[^\[\]|]+\](?:<std(?:out|err)>)?[ \t]*:?[ \t]*|[\w.-]+:[ \t]+)"
TIME_PATTERN: Final = r"\d{4}[-/]?\d\d[-/]?\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[-+]\d\d:?\d\d)?"

_MAX_PREFIX: Final = 400
"""Number of characters before a row that are searched for prefixes such as time and rank."""

_HEAD: Final = re.compile(r"[Ii]teration[ \t]+(\d{1,18})[ \t]*/[ \t]*(\d{1,18})[ \t]*\|")
_TIME: Final = re.compile(rf"(?<!\d){TIME_PATTERN}")
_BEFORE: Final = re.compile(rf"(?P<labels>(?:{LABEL_PATTERN})*?)(?:\[+(?P<time>{TIME_PATTERN})\]+)?[ \t]*$")
_LABEL: Final = re.compile(LABEL_PATTERN)
_COLOURS: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\n]*\x07|\x08")
_CONTROLS: Final = re.compile(r"[\x08\r\x1b]")
_RANK: Final = re.compile(
    r"\[(?:default|rank[ -]?)(\d{1,9})(?:/\d+)?\][ \t]*:?|\[[\w@.-]+,(\d{1,9})\]<std(?:out|err)>:", re.IGNORECASE
)
_LOCAL: Final = re.compile(r"\[(?P<host>[A-Za-z0-9][\w.-]*(?<!\.py)):(?P<rank>\d{1,9})\][ \t]*:?")
_TASK: Final = re.compile(r"(\d{1,9}):")
_HOST: Final = re.compile(r"([\w.-]+):")
_LARGEST_RANK: Final = 1 << 31
_BARE: Final = re.compile(
    r"((?:[\w-]{1,40} ){0,4}loss|learning rate|loss scale|grad norm|num zeros|params norm|consumed samples"
    r"|global batch size|elapsed time per iteration \(m?s\)|number of (?:skipped|nan) iterations)[ \t]+(\S+)"
)
"""A regular expression for a key and a value without a colon between them.

The first Megatron releases print such parts: `lm loss 9.5E+00`.
"""
_CLOCK: Final = re.compile(r"([^:|]*[^:|\s])\s*:\s*((?:\d{1,6} days?, )?\d{1,6}(?::\d\d){1,2}(?:\.\d+)?)")
_NAN_OF_C: Final = re.compile(r"[-+]?(?:s?nan\(\w*\)|1\.#(?:[qs]?nan|ind)\d*)", re.IGNORECASE)
_INF_OF_C: Final = re.compile(r"1\.#inf\d*", re.IGNORECASE)
_LIKE_A_NUMBER: Final = re.compile(r"[-+.]{0,2}\d")
_SLOT: Final = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?)\b", re.IGNORECASE)
_BLANKS: Final = re.compile(r"(?:\\ ){2,}|\\ $")
"""Blanks whose number may differ between rows: those before numbers, and those that align texts."""
_DIGITS: Final = re.compile(r"\d+")

Printer = tuple[int | None, int | None, str | None]
"""The rank, the srun task and the host of the process that printed a row, as far as the text before the row has them.

The rows of one process are in order.
"""


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

    def scalars(self) -> Iterator[tuple[Series, float, float]]:
        """Yield the series, the factor and the logged value of each number; the stored value is their product."""
        main = main_loss(self.keys)
        for part, text in self.parts:
            for key, is_average, value, unit in values(part, text):
                name = key if unit is None or "(" in key else f"{key} ({unit})"
                yield *meaning(name, is_main=part == main, is_average=is_average), value


def clean(text: str) -> str:
    """Return `text` without colours and other terminal control codes."""
    return _COLOURS.sub("", text) if "\x1b" in text or "\x08" in text else text


def heads(text: str) -> list[re.Match[str]]:
    """Return the beginnings of rows in `text`, such as `iteration 10/ 100 |`."""
    return list(_HEAD.finditer(text)) if "teration" in text else []


def parse_rows(text: str) -> list[Row]:
    """Return the rows on one line of a log, in order.

    If a row is interrupted by the next row on the line, it is not closed and therefore incomplete.
    """
    found = heads(text)
    rows = []
    for position, head in enumerate(found):
        printer, time = origin(text[max(0, head.start() - _MAX_PREFIX) : head.start()], is_first=not position)
        end = len(text)
        if position + 1 < len(found):
            following = found[position + 1].start()
            cut = _BEFORE.search(text[max(head.end(), following - _MAX_PREFIX) : following])
            end = following - (len(cut[0]) if cut else 0)
        rows.append(_row(head, printer, _micros(time), text[head.end() : end]))
    return rows


@functools.lru_cache(maxsize=65_536)
def origin(prefix: str, *, is_first: bool = True) -> tuple[Printer, str | None]:
    """Return the process that printed a row, and the time of the row, according to the text before the row.

    The last time in the text before the first row of a line is its time, also if it is not next to the row.
    """
    before = _BEFORE.search(prefix)
    time = before["time"] if before else None
    if time is None and is_first and (times := _TIME.findall(prefix)):
        time = times[-1]
    return printer_of(before["labels"]) if before else (None, None, None), time


def printer_of(labels: str) -> Printer:
    """Return the process that the prefixes of a row name, such as `node-1: [default7]:`, `[node-1:7]:` and `3:`."""
    rank = local = task = host = None
    for label in _LABEL.findall(labels):
        text = label.strip()
        if found := _RANK.fullmatch(text):
            rank = int(found[found.lastindex or 1])
        elif found := _LOCAL.fullmatch(text):
            host, local = found["host"], int(found["rank"])
        elif found := _TASK.fullmatch(text):
            task = int(found[1])
        elif found := _HOST.fullmatch(text):
            host = found[1]
    rank = local if rank is None else rank
    return rank if rank is None or rank < _LARGEST_RANK else None, task, host


def _micros(time: str | None) -> int | None:
    return None if time is None else micros(time.replace("/", "-"))


def _row(head: re.Match[str], printer: Printer, ts: int | None, rest: str) -> Row:
    pieces = rest.split("|")
    is_closed = not pieces[-1].strip()
    if is_closed:
        pieces.pop()
    split = [split_part(piece) for piece in pieces]
    parts = dict(reversed([part for part in split if part is not None]))
    return Row(
        printer=printer,
        ts=ts,
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

    The texts with which various C libraries print NaN are accepted. `1,234` may mean 1234 or 1.234 and is rejected: a
    wrong number is worse than a part that is reported as unreadable.
    """
    found = _with_unit(text)
    return found[0] if found and found[1] is None else None


def _with_unit(text: str) -> tuple[float, str | None] | None:
    if "_" in text or is_ambiguous(text):
        return None
    try:
        return float(text), None
    except ValueError:
        return quantity(_INF_OF_C.sub("inf", _NAN_OF_C.sub("nan", text)))


def _is_odd(key: str, text: str) -> bool:
    """Return whether a value begins like a number but cannot be parsed as one."""
    return number(text) is None and _LIKE_A_NUMBER.match(text) is not None and not values(key, text)


def values(key: str, text: str) -> list[tuple[str, bool, float, str | None]]:
    """Return (key, whether it is an average, number, unit) for each number in `text`, the value of `key`.

    `text` contains a single number, two numbers `current/average`, or one number per name in the key. An example of the
    last form is `hip mem usage/free/total: 144.89GB/47.10GB/191.98GB`.
    """
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


@functools.lru_cache(maxsize=256)
def main_loss(keys: tuple[str, ...]) -> str | None:
    """Return the key of the training loss among `keys`, which is stored as `loss`; None if the row has no loss."""
    folded = {fold(key): key for key in reversed(keys)}
    for name in _MAIN_LOSSES:
        if name in folded:
            return folded[name]
    return next((key for key in keys if _SOME_LOSS.fullmatch(fold(key)) and not _SIDE_LOSS.search(fold(key))), None)


def is_cut(keys: tuple[str, ...], known: Iterable[tuple[str, ...]]) -> bool:
    """Return whether a row was truncated at a bar (`|`) before the loss.

    It was truncated if a list of keys in `known` begins with the keys of the row and contains the loss after them. A
    complete row without a loss still has the keys that Megatron prints after the loss.
    """
    if main_loss(keys) is not None or not _AFTER_LOSS.isdisjoint(map(fold, keys)):
        return False
    longer = [other for other in known if len(other) > len(keys) + 1 and other[: len(keys)] == keys]
    return any(main_loss(other) not in {None, other[-1]} for other in longer)


@functools.lru_cache(maxsize=4096)
def meaning(key: str, *, is_main: bool = False, is_average: bool = False) -> tuple[Series, float]:
    """Return the stored series of one key, and the factor of its values.

    For example, `elapsed time per iteration (ms)` becomes `step_seconds` with the factor 0.001. The name of the
    average in a value `current/average` ends with `_average`.
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
    labels = {SOURCE_NAME: key} if fold(key) != name.lower() else {}
    labels |= {} if alias.source_unit is None else {SOURCE_UNIT: alias.source_unit}
    return (f"{name}_average" if is_average else name, unit, canonical_labels(labels)), alias.factor


def fold(key: str) -> str:
    """Return `key` in lower case, without its unit in parentheses, and with underscores between words."""
    return re.sub(r"[\s_-]+", "_", key.split("(", 1)[0].strip().lower())


@dataclass(slots=True, eq=False, kw_only=True)
class RowForm(LineForm):
    """The form of rows with a loss and equal keys: an expression with a slot for each number, and the stored series.

    A row is closed if it ends with a bar (`|`), or lines of timers follow it.
    The first slots are the text before the row, its time (`has_time`), the step and the planned steps. Lines below the
    row may be a part of the form: lines of timers, each with its record, and lines of other output.
    """

    has_time: bool
    is_closed: bool
    series: tuple[Series, ...]
    factors: tuple[float, ...]
    records: tuple[int, ...]  # number of series of the row, and of each line of timers
    others: int = 0  # number of lines of other output
    across: str | None = None  # the kind of the list of timers that may continue behind the lines
    longer: list[tuple[re.Pattern[bytes], RowForm]] = field(default_factory=list)
    """Expressions for lines below the row, each with the form of the row and the lines."""

    @property
    def layout(self) -> Hashable:
        """All on which the meaning of the texts in the slots depends."""
        return self.has_time, self.is_closed, self.series, self.factors, self.records

    def rows(self, texts: Sequence[bytes], *, tasks_are_ranks: bool | None) -> tuple[Rows, list[Printer]]:
        """Return the rows with `texts` in their slots, row after row, and the processes that printed them.

        Raises ValueError or OverflowError if a text is no number or no time.
        """
        prefixes, *columns = (texts[slot :: self.expression.groups] for slot in range(self.expression.groups))
        origins = {prefix: origin(prefix.decode()) for prefix in {*prefixes}}
        ranks = {prefix: rank_of(printer, tasks_are_ranks=tasks_are_ranks) for prefix, (printer, _) in origins.items()}
        times = times_of(columns.pop(0)) if self.has_time else [_micros(origins[prefix][1]) for prefix in prefixes]
        steps, planned, *columns = columns
        logged = numbers_of([*itertools.chain.from_iterable(columns)])
        count = len(prefixes)
        loss = [name for name, _, _ in self.series].index(LOSS) * count
        rows = Rows(
            steps=whole_numbers(steps),
            planned=whole_numbers(planned),
            ranks=[ranks[prefix] for prefix in prefixes],
            times=times,
            epochs=(),
            firsts=logged[loss : loss + count],
            numbers=array("d", (np.frombuffer(logged) * np.repeat(self.factors, count)).tobytes()),
        )
        return rows, [origins[prefix][0] for prefix in prefixes]


def rank_of(printer: Printer, *, tasks_are_ranks: bool | None) -> int | None:
    """Return the rank of a process; the number of its task in srun only if `tasks_are_ranks`."""
    return printer[1] if tasks_are_ranks and printer[0] is None else printer[0]


def form_of(text: str, row: Row) -> RowForm | None:
    """Return the form of the line `text`, which is the complete row `row`; None if its texts have no form."""
    if not text.isascii() or _CONTROLS.search(text):
        return None
    if row.odd_parts or main_loss(row.keys) is None:
        return None
    [head, *others] = heads(text)
    pieces = text[head.end() :].split("|")
    if others or head.start() > _MAX_PREFIX or len(pieces) != len(row.parts) + row.is_closed:
        return None
    before = _BEFORE.search(text[: head.start()])
    time = before["time"] if before else None
    prefix = text[: before.end("labels") if before and time else head.start()]
    expression = f"({_DIGITS.sub('[0-9]++', re.escape(prefix))})"
    if before and time:
        between = text[len(prefix) : before.start("time")], text[before.end("time") : head.start()]
        expression += f"{re.escape(between[0])}({fixed(time)}){re.escape(between[1])}"
    expression += _literal(text[head.start() : head.start(1)]) + "([0-9]++)"
    expression += _literal(text[head.end(1) : head.start(2)]) + "([0-9]++)" + _literal(text[head.end(2) : head.end()])
    logged: list[float] = []
    for piece, (_, value) in zip(pieces, row.parts, strict=False):
        at = end = piece.rindex(value)
        literal = piece[:at]
        for found in _SLOT.finditer(value):
            expression += _literal(literal + value[end - at : found.start()]) + _slot(value[found.end() :])
            logged.append(float(found[0]))
            literal, end = "", at + found.end()
        expression += _literal(literal + piece[end:]) + r"\|"
    scalars = list(row.scalars())
    if not np.array_equal(logged, [value for _, _, value in scalars], equal_nan=True):
        return None
    expression = expression + _literal(pieces[-1]) if row.is_closed else expression.removesuffix(r"\|")
    return RowForm(
        expression=re.compile((expression + LINE_END).encode()),
        has_time=time is not None,
        is_closed=row.is_closed,
        series=tuple(series for series, _, _ in scalars),
        factors=tuple(factor for _, factor, _ in scalars),
        records=(len(scalars),),
    )


def _slot(behind: str) -> str:
    return "([-+.0-9]++)" if behind[:1].isalpha() else "([-+.0-9a-zA-Z]++)"  # a unit is no part of the number


def _literal(text: str) -> str:
    return _BLANKS.sub(" ++", re.escape(text))
