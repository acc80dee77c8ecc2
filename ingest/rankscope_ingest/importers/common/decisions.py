"""Decide over the first records of a log which counter is the step, which quantity the loss, and how times are read.

The decision is stored with the import and is kept when the log grows. Times whose year, or whose order of day and
month, is not in the text are `I0811 21:54:44`, `10/17/2025 16:31:56`, `26/01/31 10:00:00` and `[11/01 19:16:15`. The
decision about them is made over the first records and a sample of the lines of the file.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Final

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers.common.log_names import (
    BATCH,
    EPOCH,
    EVALUATION_SPLITS,
    Role,
    canonical,
    role_of,
    step_rank,
)
from rankscope_ingest.importers.common.records import Record
from rankscope_ingest.importers.common.values import FORM, whole

MAX_RECORDS: Final = 2_000
MAX_BYTES: Final = 1 << 20

LOSS: Final = "loss"
AVERAGE: Final = "_average"
"""The end of the name of an average that a line shows behind a value, as in `2.04 (2.24)`."""
_SHOWN_NAMES: Final = 20
_FEWEST: Final = 3  # a counter that has the same value in so many records does not count steps
TRAINING_NAMES: Final = {
    LOSS, "learning_rate", "grad_norm", "loss_scale", "step_seconds", "samples_per_second", "tokens_per_second",
    "tokens_per_second_per_gpu", "tflops_per_gpu",
}  # fmt: skip
"""Stored names of quantities that a row of training has. A row without any of them is an evaluation or a summary."""

_TYPICAL: Final = TRAINING_NAMES | {"eval_loss", "accuracy", "eval_accuracy"}
"""Stored names of quantities by which a log of a training, or of its evaluations, is recognized."""

_LOSS_WORDS: Final = {
    "batch", "mini", "iter", "step", "total", "tot", "sum", "overall", "avr", "avg", "average", "mean", "running",
    "smooth", "smoothed", "train", "training", "reduced", "main", "samples", "cross", "entropy", "ce", "xent", "nll",
    "lm", "language", "model", "mlm", "clm", "sft",
}  # fmt: skip
"""The words that may occur with `loss` in the name of the training loss.

Examples: `Mini-batch Loss` (MATLAB), `train_loss_step` (Lightning), `step_loss` (diffusers), `total_loss` (detectron2),
`tot_loss` (icefall), `avr_loss` (sd-scripts), `loss/train/total` (torchrec), `reduced_train_loss` (NeMo), `main/loss`
(Chainer), `Train/Samples/train_loss` (DeepSpeed), `train/CrossEntropyLoss` (OLMo).

Any other word, such as `bbox`, `balance` or `val`, names a part of a sum or an evaluation.
"""

RANK: Final = "rank"
_WORLD_SIZE: Final = "world_size"
_ADAPTER: Final = re.compile(r"lora|adapter|peft|^alpha$")
_WORDS: Final = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the user for a log of lines."""

    loss: str | None = None
    """The name of the quantity that is stored as the loss, too."""
    year: int | None = None
    """The year of times without a year, if the log contains no complete date."""
    pattern: tuple[str, ...] = ()
    """Regular expressions for lines of a text log; `pairs.line_of` describes the names of their groups."""

    def given(self) -> list[str]:
        """Return the names of the options that the user has given."""
        return [name for name in self.__dataclass_fields__ if getattr(self, name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The decision about one log."""

    steps: tuple[str, ...] = ()
    """The counters that may be the step, in descending priority."""
    refused: tuple[str, ...] = ()
    """The counters that are not the step, because they begin again while another counter rises."""
    is_within_epoch: bool = False
    """True if the step begins again with each epoch."""
    numbers_rows: bool = False
    """True if the number of a record is its step."""
    has_adapter_rank: bool = False
    """True if the key `rank` is that of an adapter (LoRA), and not the rank of a process."""
    has_training: bool = False
    """True if the log has rows of training. Rows of an evaluation then begin no attempt."""
    loss: str | None = None
    """Name of the quantity that is stored as the loss, too. None if the log has a loss or no suitable quantity."""
    dates: Dates | None = None
    """The decision about times without a complete date. None if the log has no such times."""
    losses: tuple[str, ...] = ()
    """The quantities among which no loss could be chosen."""

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Choices:
        """Return the decision with the fields in `document`. Fields of a later release are ignored."""
        known: dict[str, Any] = {name: document[name] for name in Choices.__dataclass_fields__ if name in document}
        for name in known.keys() & {"steps", "refused", "losses"}:
            known[name] = tuple(known[name])
        if known.get("dates") is not None:
            known["dates"] = Dates.from_json(known["dates"])
        return Choices(**known)

    def after(self, before: Choices) -> Choices:
        """Return the decision `before` of an earlier import of the log, and its missing parts from this decision.

        The number of a record is no longer its step if the log has grown and its first records now have a counter.
        """
        kept = before if before.steps or (before.numbers_rows and self.numbers_rows) else self
        loss = before.loss or self.loss
        has_training = before.has_training or self.has_training
        return dataclasses.replace(
            kept,
            has_training=has_training,
            loss=loss,
            losses=() if loss else self.losses,
            dates=before.dates or self.dates,
        )

    def check(self, options: Options) -> None:
        """Raise IngestError if the user has chosen a loss or a year, and this stored decision has another one."""
        dates, year, loss = self.dates, options.year, options.loss
        if dates and year and "Y" not in (dates.order or "") and dates.year not in {year, year - 1}:
            current = "without a year" if dates.year is None else f"with the year {dates.year}"
            raise IngestError(f"the log was imported before, {current}: `--reimport --year {year}` imports it again")
        is_decided = self.has_training or self.loss is not None or bool(self.losses)
        if loss is not None and is_decided and self.loss != (None if _is_stored_as_loss(loss) else loss):
            current = f"its loss is {self.loss}" if self.loss else f"without {loss} as its loss"
            raise IngestError(f"the log was imported before, {current}: `--reimport --loss {loss}` imports it again")

    def notes(self) -> list[str]:
        """Return messages to the user about the choice of the loss and the dates, if there was something to choose."""
        names = ", ".join(self.losses)
        open_loss = f"no loss was chosen among {names}: name one with --reimport --loss NAME" if names else ""
        loss = open_loss if self.loss is None else f"{LOSS} is {self.loss}"
        return [note for note in (loss, self.dates.why if self.dates else "") if note]


def decide(records: Sequence[Record], *, loss: str | None = None) -> Choices:
    """Return the decision for a log that begins with `records`.

    The number of a record is its step if the records have no counter. `loss` is the name that the user has chosen as
    the loss. Raises IngestError if the records have no quantity with this name.
    """
    if loss is not None:
        _check_name(loss, records)
    training = [record for record in records if is_training(record)]
    rows = training or [record for record in records if record.split not in EVALUATION_SPLITS] or records
    steps, refused, is_within_epoch = _steps(rows)
    found = {name for record in rows for name in record.quantities()}
    losses = (name for name in found if is_loss_name(name))
    candidates = tuple(sorted(name for name in losses if name.removesuffix(AVERAGE) not in found - {name}))
    has_loss = any(canonical(name).name == LOSS for name in found) if loss is None else _is_stored_as_loss(loss)
    chosen = None if has_loss or not records else loss or (candidates[0] if len(candidates) == 1 else None)
    return Choices(
        steps=steps,
        refused=refused,
        is_within_epoch=is_within_epoch,
        has_adapter_rank=_has_adapter_rank(records),
        numbers_rows=not steps and not any(record.candidates() for record in records),
        has_training=bool(training),
        loss=chosen,
        losses=() if has_loss or chosen else candidates,
    )


def _has_adapter_rank(records: Sequence[Record]) -> bool:
    """Return whether the only rank in `records` is above 0 and next to a key of an adapter, or above the others."""
    ranks = {record.rank for record in records if record.rank is not None}
    keys = {key.lower() for record in records for key in record.document}
    sizes = [size for record in records if (size := whole(record.document.get(_WORLD_SIZE))) is not None]
    if len(ranks) != 1 or ranks == {0} or RANK not in keys:
        return False
    return min(ranks) >= max(sizes) if sizes else any(_ADAPTER.search(key) for key in keys)


def _is_stored_as_loss(name: str) -> bool:
    return canonical(name).name == LOSS


def _check_name(loss: str, records: Sequence[Record]) -> None:
    names = {name for record in records for name in record.quantities()}
    if records and loss not in names:
        shown = ", ".join(sorted(names)[:_SHOWN_NAMES]) or "none"
        more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
        raise IngestError(f"no quantity in the first {len(records):,} records is named {loss}; names: {shown}{more}")


def is_training(record: Record) -> bool:
    """Return whether `record` is a row of training, and not of an evaluation."""
    return record.split not in EVALUATION_SPLITS and any(map(is_of_training, record.quantities()))


@functools.lru_cache(maxsize=4096)
def is_of_training(name: str) -> bool:
    """Return whether `name` is the name of a quantity that a row of training has."""
    return canonical(name).name in TRAINING_NAMES or is_loss_name(name)


@functools.lru_cache(maxsize=4096)
def is_typical(name: str) -> bool:
    """Return whether `name` is the name of a quantity by which a log of a training is recognized."""
    return canonical(name).name in _TYPICAL or LOSS in name.lower()


@functools.lru_cache(maxsize=4096)
def is_loss_name(name: str) -> bool:
    """Return whether `name`, which is not stored as `loss`, is a name of the training loss: `total_loss` and others."""
    words = [word.lower() for word in _WORDS.findall(name)]
    is_loss = LOSS in words and all(word in _LOSS_WORDS for word in words if word != LOSS)
    return is_loss and canonical(name).name != LOSS and len(name) <= 64


def _steps(records: Sequence[Record]) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Return the counters that may be the step, those that are not, and whether the steps begin again with each epoch.

    A counter that falls while another one rises is not the step, and neither is one that begins again with each epoch
    if another one does not. If all counters fall together, it is a restart.
    """
    values: dict[str, list[int]] = defaultdict(list)
    falls: dict[str, list[int]] = defaultdict(lambda: [0, 0])  # while another counter rises; in a later epoch
    last: dict[tuple[Any, ...], tuple[Mapping[str, int], float | None]] = {}
    for record in records:
        counters, epoch = record.candidates(), record.epoch()
        for key, value in counters.items():
            before, epoch_before = last.get((*record.stream, key), ({}, None))
            values[key].append(value)
            if value < before.get(key, value):
                rises = any(other > before.get(name, other) for name, other in counters.items())
                is_later = epoch is not None and epoch_before is not None and epoch > epoch_before
                falls[key][0 if rises else 1] += rises or is_later
            last[(*record.stream, key)] = (counters, epoch)
    told = {key for key in values if role_of(key) is Role.STEP}
    moving = {key for key, found in values.items() if len(set(found)) > 1 or (key in told and len(found) < _FEWEST)}
    moving = moving or told - {BATCH}
    if not moving:
        return ((EPOCH,) if _are_epochs_steps(records) else ()), (), False
    best = min(tuple(falls[key]) for key in moving)
    ordered = sorted(moving, key=lambda key: (step_rank(key), key))
    steps = tuple(key for key in ordered if tuple(falls[key]) == best)
    return steps, tuple(sorted(set(values) - set(steps))), best != (0, 0)


def _are_epochs_steps(records: Sequence[Record]) -> bool:
    """Return whether most values of a quantity have another epoch than the value before: the epoch counts them."""
    epochs: dict[str, list[float]] = defaultdict(list)
    for record in records:
        if (epoch := record.epoch()) is not None:
            for name in record.quantities():
                epochs[name].append(epoch)
    pairs = [pair for found in epochs.values() for pair in pairwise(found)]
    changes = sum(later != earlier for earlier, later in pairs)
    return bool(epochs) and all(map(float.is_integer, chain(*epochs.values()))) and 2 * changes >= len(pairs)


MONTH_FIRST_TOOLS: Final = (
    r"\[(?:INFO|WARNING|ERROR)\|DP=",  # nanotron
    r"\b(?:d2|detectron2|fvcore)\.",
    r"- (?:mm[a-z]+|root) -",  # MMEngine and mmcv
    r"\d{2}/\d{2}/\d{4} \d{2}:\d{2}:\d{2} - (?:INFO|WARNING|ERROR) -",  # examples of Hugging Face Transformers
    r"\[\d{2}/\d{2}/\d{2} \d{2}:\d{2}:\d{2}\] ",  # the handler of rich, which ColossalAI uses
)
"""Regular expressions for lines of tools that print the month before the day."""

_MONTH_FIRST: Final = re.compile("|".join(MONTH_FIRST_TOOLS))
_FULL_DATE: Final = re.compile(r"(?<![\w./-])(20\d{2})[-/](\d{2})[-/](\d{2})(?:[ T]\d{2}:\d{2}|(?![\w/-]))")
_SEPARATOR: Final = re.compile(r"[/.-]")
_YEARS: Final = range(15, 60)  # of two digits
_MONTHS: Final = 12
_NEAR: Final = dt.timedelta(days=2)
_EASTERN: Final = dt.timedelta(hours=14)  # local times of the east are later than UTC
_HALF_YEAR: Final = dt.timedelta(days=180)
_LEAP_YEAR: Final = 2000
_EPOCH: Final = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - times of a log without a time zone count as UTC
_MICROSECOND: Final = dt.timedelta(microseconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dates:
    """The decision about the times of one log."""

    order: str | None = None
    """Order of the parts of a date, such as `MD`, `MDY`, `DMY` or `YMD`; None if it is unknown."""
    year: int | None = None
    """The year of the first time, if the times have no year. None if it is unknown, or if the times have one."""
    why: str = ""
    """The reason for the decision, as a message to the user."""

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Dates:
        """Return the decision with the fields in `document`. Fields of a later release are ignored."""
        return Dates(**{name: document[name] for name in Dates.__dataclass_fields__ if name in document})


class Clock:
    """Converts the times of one log, in its order, according to a decision."""

    def __init__(self, dates: Dates) -> None:
        self.dates = dates
        self._first: dt.datetime | None = None
        self._last: dt.datetime | None = None

    def moment(self, text: str) -> tuple[int | None, float | None]:
        """Return a time as UTC µs and as seconds since the first time of the log; each is None if it is unknown.

        The year increases when the month decreases.
        """
        year = self.dates.year if self._last is None else self._last.year
        found = _moment(text, self.dates.order, _LEAP_YEAR if year is None else year)
        if found is None:
            return None, None
        last = self._last
        if last is not None and "Y" not in (self.dates.order or ""):
            if found.month < last.month and last - found > _NEAR:
                found = _in_year(found, found.year + 1)
            elif (
                found.month > last.month
                and found - last > _HALF_YEAR
                and last - _in_year(found, last.year - 1) <= _NEAR
            ):
                found = _in_year(found, last.year - 1)
        self._first = self._first or found
        self._last = found
        is_known = self.dates.year is not None or "Y" in (self.dates.order or "")
        return (found - _EPOCH) // _MICROSECOND if is_known else None, (found - self._first).total_seconds()


def decide_dates(times: Sequence[str], lines: Iterable[str], *, changed: float, year: int | None = None) -> Dates:
    """Return the decision for a log whose times without a complete date are `times`, in the order of the log.

    `lines` is a sample of its lines. `changed` is the modification time of the file in seconds since 1970. `year` is
    the year that the user has given.
    """
    listed = list(lines)
    order, why = _order([date for text in times if (date := _date(text))], listed)
    shown = f"times such as {times[0]!r}"
    if order is None:
        return Dates(why=f"{shown} are not stored: no value above 12 distinguishes day and month")
    why = f"{shown} are {_IN_WORDS[order]}{why}"
    if "Y" in order:
        return Dates(order=order, why=why)
    latest = next((line for line in reversed(listed) if _has_form_of(line, times[0])), times[-1])
    first, last = (_moment(text, order, _LEAP_YEAR) for text in (times[0], latest))
    if first is None or last is None:
        return Dates(order=order, why=why)
    spans = first.month > last.month  # the log begins in the year before the last time
    if (full := _full_date(listed)) is not None:
        return Dates(
            order=order, year=_nearest(first, full), why=f"{why}; the year is that of {full:%Y-%m-%d} in the log"
        )
    if year is not None:
        return Dates(order=order, year=year - spans, why=f"{why}; the year is that of --year")
    written = _EPOCH + dt.timedelta(seconds=changed)
    for candidate in (written.year + 1, written.year, written.year - 1):
        if -_EASTERN <= written - _in_year(last, candidate) <= _NEAR:
            return Dates(
                order=order,
                year=candidate - spans,
                why=f"{why}; the year {candidate} is that of the file's last change",
            )
    return Dates(
        order=order,
        why=f"{why} without a year: only their differences are stored, as elapsed_seconds; --year YEAR adds the year",
    )


_IN_WORDS: Final = {
    "MD": "month and day", "DM": "day and month", "MDY": "month, day and year", "DMY": "day, month and year",
    "YMD": "year, month and day",
}  # fmt: skip


def _date(text: str) -> str | None:
    found = FORM.search(text)
    return found["date"] if found else None


def _has_form_of(line: str, text: str) -> bool:
    one, other = _date(line), _date(text)
    return FORM.search(line) is not None and len(_SEPARATOR.findall(one or "")) == len(_SEPARATOR.findall(other or ""))


def _order(dates: Sequence[str], lines: Sequence[str]) -> tuple[str | None, str]:
    """Return the order of the parts of a date, and the reason if it was not obvious; None if it is unknown."""
    rows = [_parts(date) for date in dates]
    if not rows:
        return "MD", ""  # the compact form
    sampled = [date for line in lines if (date := _date(line))]
    rows += [parts for date in sampled if len(parts := _parts(date)) == len(rows[0])]
    rows = [row for row in rows if len(row) == len(rows[0])]
    columns = list(zip(*rows, strict=True))
    years = [place for place in (0, 2) if place < len(columns) > 2 and _are_years(columns[place])]
    if len(columns) > 2:
        if years == [0] or (years and years[0] == 0 and "-" in dates[0]):
            return "YMD", ""
        if years != [2]:
            return None, ""
    suffix = "Y" if years else ""
    if max(columns[1]) > _MONTHS >= max(columns[0]):
        return f"MD{suffix}", ", because a value is above 12"
    if max(columns[0]) > _MONTHS >= max(columns[1]):
        return f"DM{suffix}", ", because a value is above 12"
    if max(columns[0]) <= _MONTHS and any(map(_MONTH_FIRST.search, lines)):
        return f"MD{suffix}", ", as the tool prints them"
    return None, ""


def _parts(date: str) -> tuple[int, ...]:
    return tuple(map(int, _SEPARATOR.split(date)))


def _are_years(column: Sequence[int]) -> bool:
    return max(column) - min(column) <= 1 and (min(column) in _YEARS or min(column) > 1000)


def _moment(text: str, order: str | None, year: int) -> dt.datetime | None:
    found = FORM.search(text)
    if found is None or order is None:
        return None
    if found["compact"]:
        parts = {"M": int(found["compact"][:-2]), "D": int(found["compact"][-2:])}
    else:
        parts = dict(zip(order, _parts(found["date"]), strict=False))
    own = parts.get("Y", year)
    microseconds = int((found["fraction"] or "0")[:6].ljust(6, "0"))
    try:
        hour, minute, second = map(int, found["clock"].split(":"))
        clock = dt.time(hour, minute, second, microseconds)
        return dt.datetime.combine(dt.date(own + 2000 * (own < 100), parts["M"], parts["D"]), clock)
    except (KeyError, ValueError):
        return None


def _in_year(moment: dt.datetime, year: int) -> dt.datetime:
    try:
        return moment.replace(year=year)
    except ValueError:  # the 29th of February
        return moment.replace(year=year, day=28)


def _full_date(lines: Iterable[str]) -> dt.datetime | None:
    """Return the first complete date in `lines`, or None."""
    for line in lines:
        for found in _FULL_DATE.finditer(line):
            try:
                return dt.datetime(*map(int, found.groups()))  # type: ignore[arg-type]  # noqa: DTZ001 - as above
            except ValueError:
                continue
    return None


def _nearest(moment: dt.datetime, date: dt.datetime) -> int:
    years = (date.year, date.year + 1, date.year - 1)
    return min(years, key=lambda year: abs(_in_year(moment, year) - date))
