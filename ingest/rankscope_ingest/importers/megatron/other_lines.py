"""Parse the companion lines of a Megatron log: the lines with data between its rows.

These lines contain validations, checkpoints, timers, memory, arguments, the end of a run, and errors. The module
performs no I/O. If such a line belongs to a step but does not contain it, the step is that of the row before the line;
the caller adds it.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rankscope_contract.model.events import EventType, ExitReason, RunState, Severity
from rankscope_contract.model.redaction import MAX_NAME, is_secret_name, redacted_name, redacted_text
from rankscope_contract.model.schema import canonical_labels
from rankscope_ingest.importers.common.failures import LABELS, FailureLines, ending_after, failure_event, failure_key
from rankscope_ingest.importers.common.forms import LINE_END, fixed
from rankscope_ingest.importers.common.importer import ImportedRun
from rankscope_ingest.importers.common.log_names import canonical
from rankscope_ingest.importers.common.row_layout import Series
from rankscope_ingest.importers.common.values import micros
from rankscope_ingest.importers.megatron.rows import TIME_PATTERN, RowForm, number, printer_of, split_part

_MEBIBYTE: Final = float(1 << 20)
_MILLISECOND: Final = 1e-3
_ARGUMENTS: Final = 2_000
_LARGEST: Final = 1 << 31

_PARTS: Final = (
    b" loss at ", b"heckpoint", b"(ms) |", b"across ranks (ms)", b"..", b"rank ", b"memory (MB)", b"datetime: ",
    b"world size: ", b"exiting program", b"arguments ---", b"ERROR", b"SIG", b"Permission denied", b"No such file",
    b"imed out", b"ime out", b"imedout", b"imeout", b"Connection re",
)  # fmt: skip
"""Texts of which each companion line that reports no certain failure contains at least one."""
_ZEROS: Final = bytes.maketrans(b"123456789", b"0" * 9)
"""Lines that differ only in digits are searched for these texts once: none of the texts has another digit than 0."""
_LONGEST: Final = 4096
"""Largest number of bytes of a line that is searched for these texts before it is parsed."""
_VALIDATION: Final = re.compile(
    r"(?:validation|test) loss at (?:iteration (?P<step>\d{1,18})|the end of training)"
    r"(?: (?:on|for) (?P<set>[^|]{1,80}?))? *\|(?P<rest>.*)"
)
_CHECKPOINT: Final = re.compile(
    r"(?P<action>saving checkpoint|successfully saved checkpoint|successfully loaded checkpoint"
    r"|loading (?:\w+ )?checkpoint)"
    r"(?P<rest>.*)"
)
_AT_STEP: Final = re.compile(r"(?:at|from) iteration +(?P<step>\d{1,18})")
_PATH: Final = re.compile(r"(?:\bto|\bfrom) (?!iteration)(?P<path>[^\s,]+)")
_TIMERS: Final = re.compile(r"time \(ms\) \|(?P<rest>.*)")
_ACROSS: Final = re.compile(r"(?P<kind>\(min, max\) time|max time|min time|times) across ranks \(ms\):")
_TIMER_LINE: Final = re.compile(
    r"^(?P<name>[\w /-]{1,80}?) ?\.*: *\(?(?P<first>-?[\d.eE+-]+)(?:, *(?P<second>-?[\d.eE+-]+)\))? *$"
)
_TIMER: Final = re.compile(
    r"(?P<name>[\w /-]{1,80}?) ?\.*: *\(?(?P<first>-?[\d.eE+-]+)(?:, *(?P<second>-?[\d.eE+-]+)\))? *(?=\||$)"
)
"""A regular expression for one of the timers on a line."""
_CONTROLS: Final = re.compile(r"[\x08\r\x1b]")
_COUNTS: Final = re.compile(r"(?<!EI)(?<!\d)\d+")
"""The digits that may vary in other output. A code such as EI0002 is a failure."""
_TIMER_NAME: Final = re.compile(r"^(?P<name>[\w /-]{1,80}?) ?\.*: *$")
_TIMER_RANK: Final = re.compile(r"^rank +(?P<rank>\d{1,9}): +(?P<first>-?[\d.eE+-]+) *$")
_MEMORY: Final = re.compile(r"\[Rank (?P<rank>\d{1,9})\] (?:\(after (?P<step>\d{1,18}) iterations\) )?memory \(MB\) \|")
_DONE: Final = re.compile(rf"\[(?P<phase>[^\[\]]{{1,80}})\] datetime: (?P<time>{TIME_PATTERN})")
_WORLD: Final = re.compile(r"world size: (?P<size>\d{1,9})")
_ARGUMENT: Final = re.compile(r"^(?P<name>[A-Za-z]\w{0,80}) \.{3,} (?P<value>.*)$")
_EXITING: Final = re.compile(r"exiting program (?:at|after) ?(?:iteration +(?P<step>\d{1,18}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Companion:
    """The scalars and the event of one companion line.

    If `step` is None, the line belongs to the step of the row before it.
    """

    scalars: tuple[tuple[Series, float], ...] = ()
    event: Mapping[str, Any] | None = None
    step: int | None = None
    rank: int | None = None
    ts: int | None = None
    once: tuple[Any, ...] | None = None
    """A key that identifies repeated lines: only the first line with the same key and step is stored.

    This avoids, for example, a thousand events for a failure that a thousand ranks print. If the key is None, the line
    is always stored. The keys of lines of the start of a process begin with "start".
    """

    @property
    def is_start(self) -> bool:
        """True if the line is printed at the start of a process."""
        return self.once is not None and self.once[0] == "start"


class Companions:
    """Parser of the companion lines of one log.

    Lines must be passed in order, because the meaning of some lines depends on earlier lines.
    """

    def __init__(self) -> None:
        self.ending: tuple[str, str] | None = None
        """State and reason of the end of the run, according to the latest line that reports an end, if there is one."""
        self._arguments: dict[str, str] = {}
        self._world_size: int | None = None
        self.across: str | None = None
        """The kind of the list of timers of which the next lines are a part."""
        self._timer = ""

    def is_possible(self, line: bytes) -> bool:
        """Return whether `line` may be a companion line; false for most other lines."""
        if len(line) > _LONGEST or _has_part(line.translate(_ZEROS)):
            return True
        return self.across == "times" and line.rstrip().endswith(b":")

    def read(self, line: str) -> list[Companion] | None:
        """Return the scalars and events of a line; None if it is not known.

        A line is known if it has the form of a line that Megatron prints, or if it reports an error.
        """
        text = line.strip()
        label = LABELS.match(text)
        bare = text[label.end() :] if label and "[Rank" not in label[0] else text
        if self.across and (found := self._timer_line(bare, line)) is not None:
            return found
        for pattern, parse in (
            (_VALIDATION, self._validation),
            (_CHECKPOINT, self._checkpoint),
            (_ACROSS, self._timer_block),
            (_TIMERS, self._timers),
            (_MEMORY, self._memory),
            (_DONE, self._time),
            (_WORLD, self._size_of_world),
            (_ARGUMENT, self._argument),
            (_EXITING, self._end),
        ):
            if (match := pattern.search(bare)) is not None:
                return parse(match)
        return self._error(bare, printer_of(label[0])[0] if label else None) or None

    def run(self, planned: int | None, last_step: int | None) -> ImportedRun:
        """Return the facts about the run in the lines and in its rows: their planned steps and their last step."""
        train_iters, world = (self._arguments.get(name, "") for name in ("train_iters", "world_size"))
        if not planned and train_iters.isascii() and train_iters.isdigit() and len(train_iters) < 19:
            planned = int(train_iters)
        if self._world_size is None and world.isascii() and world.isdigit() and 0 < int(world) < _LARGEST:
            self._world_size = int(world)
        state, reason = self.ending or (None, None)
        if state is None and planned and last_step is not None and last_step >= planned:
            state, reason = RunState.COMPLETED, f"the last planned iteration, {planned}, was reached"
        config = json.dumps(self._arguments, sort_keys=True, ensure_ascii=False) if self._arguments else None
        return ImportedRun(
            state=state, reason=reason, planned_steps=planned, world_size=self._world_size, config=config
        )

    def row_seen(self) -> None:
        """Discard an end of the run that an earlier line reported.

        Called when another row follows, because training then continued.
        """
        self.ending = self.across = None

    def _validation(self, found: re.Match[str]) -> list[Companion]:
        name_of_set = (found["set"] or "").strip().strip("'\"").removesuffix(" set").removesuffix(" data")
        extra = {} if name_of_set in {"", "validation"} else {"dataset": redacted_name(name_of_set)}
        scalars, loss = [], None
        for key, value in _parts(found["rest"]):
            alias = canonical(key)
            name = alias.name if alias.name.startswith("eval_") else _evaluation_name(key)
            loss = value if name == "eval_loss" and loss is None else loss
            scalars.append(((name, alias.unit, canonical_labels(extra)), value))
        event = _event(EventType.EVALUATION, found.string, value=loss)
        return [Companion(scalars=tuple(scalars), event=event, step=_whole(found["step"]))]

    def _checkpoint(self, found: re.Match[str]) -> list[Companion]:
        step, path = _AT_STEP.search(found["rest"]), _PATH.search(found["rest"])
        action = found["action"].removesuffix(" checkpoint")
        action = {"successfully saved": "saved", "successfully loaded": "loaded"}.get(action, action.split()[0])
        details = {"action": action} | ({"path": redacted_name(path["path"])} if path else {})
        event = _event(EventType.CHECKPOINT, found.string, details=json.dumps(details))
        kind = "start" if action.startswith("load") else "checkpoint"
        return [Companion(event=event, step=_whole(step["step"]) if step else None, once=(kind, action))]

    def _timer_block(self, found: re.Match[str]) -> list[Companion]:
        self.across, self._timer = found["kind"], ""
        return []

    def _timers(self, found: re.Match[str]) -> list[Companion]:
        self.across = None
        rows = tuple(_timer("timer_seconds", key, value) for key, value in _parts(found["rest"]))
        return [Companion(scalars=rows)] if rows else []

    def _timer_line(self, text: str, line: str) -> list[Companion] | None:
        if not line[:1].isspace() and text == line.strip():
            self.across = None  # only the lines of the block are indented
            return None
        if self.across == "times":
            if named := _TIMER_NAME.match(text):
                self._timer = named["name"]
                return []
            found = _TIMER_RANK.match(text)
            value = None if found is None else number(found["first"])
            if found is None or value is None or not self._timer:
                return None
            return [Companion(scalars=(_timer("timer_seconds", self._timer, value),), rank=_rank(found["rank"]))]
        found = _TIMER_LINE.match(text)
        if found is None:
            return None
        names = ["timer_min_seconds", "timer_max_seconds"]
        if found["second"] is None:
            names = names[:1] if self.across == "min time" else names[1:]
        given = [number(value) for value in (found["first"], found["second"]) if value is not None]
        rows = [_timer(n, found["name"], value) for n, value in zip(names, given, strict=True) if value is not None]
        return [Companion(scalars=tuple(rows))]

    def _memory(self, found: re.Match[str]) -> list[Companion]:
        heads = list(_MEMORY.finditer(found.string))
        ends = [*(head.start() for head in heads[1:]), len(found.string)]
        return [
            Companion(
                scalars=tuple(
                    (_memory_series(key), value * _MEBIBYTE) for key, value in _parts(found.string[head.end() : end])
                ),
                step=_whole(head["step"]),
                rank=_rank(head["rank"]),
            )
            for head, end in zip(heads, ends, strict=True)
        ]

    def _time(self, found: re.Match[str]) -> list[Companion]:
        ts = micros(found["time"].replace("/", "-"))
        if "training is done" in found["phase"]:
            self.ending = (RunState.COMPLETED, "training is done")
            details = json.dumps({"reason": ExitReason.COMPLETED})
            return [Companion(event=_event(EventType.EXIT, found.string, details=details), ts=ts)]
        return [Companion(event=_event(EventType.PHASE, found.string), ts=ts, once=("start", found["phase"]))]

    def _size_of_world(self, found: re.Match[str]) -> list[Companion]:
        if 0 < int(found["size"]) < _LARGEST:
            self._world_size = int(found["size"])
        return []

    def _argument(self, found: re.Match[str]) -> list[Companion]:
        if len(self._arguments) < _ARGUMENTS and not is_secret_name(found["name"]):
            self._arguments[found["name"]] = redacted_name(found["value"].strip())
        return []

    def _end(self, found: re.Match[str]) -> list[Companion]:
        self.ending = (RunState.STOPPED, redacted_text(found.string, MAX_NAME))
        details = json.dumps({"reason": ExitReason.COMPLETED, "last_step": _whole(found["step"])})
        event = _event(EventType.EXIT, found.string, details=details)
        return [Companion(event=event, step=_whole(found["step"]), once=("exit",))]

    def _error(self, text: str, rank: int | None) -> list[Companion]:
        found = failure_event(text, is_certain=False)
        if found is None:
            return []
        event, ending = found
        self.ending = ending_after(self.ending, ending)
        return [Companion(event=event, rank=rank, once=("error", *failure_key(event, rank)))] if event else []


def form_with_lines_below(form: RowForm, lines: Sequence[bytes]) -> tuple[re.Pattern[bytes], RowForm] | None:
    """Return the expression for `lines` below rows, and the form of the rows with them; None if they have no form."""
    reader = Companions()
    expressions, series, records, others = [], [*form.series], [*form.records], 0
    for line in lines:
        text, is_companion = line.decode(errors="replace"), reader.is_possible(line)
        slots = _timer_slots(text, reader.read(text) or ()) if is_companion else _other_slots(text)
        if slots is None or not (text.isascii() and (form.is_closed or is_companion)) or _CONTROLS.search(text):
            return None
        expressions.append(slots[0])
        series += slots[1]
        records += [len(slots[1])] if slots[1] else []
        others += not is_companion
    below = r"\r?\n".join(expressions) + LINE_END
    return re.compile(below.encode()), replace(
        form,
        expression=re.compile(form.expression.pattern.removesuffix(LINE_END.encode()) + rf"\r?\n{below}".encode()),
        series=tuple(series),
        factors=form.factors + (_MILLISECOND,) * (len(series) - len(form.series)),
        records=tuple(records),
        is_closed=True,
        others=others,
        across=reader.across,
        longer=[],
    )


def _other_slots(line: str) -> tuple[str, list[Series]] | None:
    may_be_row = "teration" in line or line.rstrip().endswith("|")
    return None if may_be_row else (_COUNTS.sub("[0-9]++", re.escape(line)), [])


def _timer_slots(line: str, found: Sequence[Companion]) -> tuple[str, list[Series]] | None:
    """Return an expression for lines of timers like `line`, with a slot for each number in `found`, and their series.

    Return None for any other line. Digits before the first timer may vary: those of times and labels.
    """
    scalars = [scalar for companion in found for scalar in companion.scalars]
    is_list = (heading := _ACROSS.search(line)) is not None and heading["kind"] != "times"
    is_plain = len(found) < 2 and all(companion == Companion(scalars=companion.scalars) for companion in found)
    if not (is_plain and (scalars or is_list)):
        return None
    timers = [*_TIMER.finditer(line)] if scalars else []
    end = timers[0].start() if timers else len(line)
    expression, values = fixed(line[:end]), []
    for timer in timers:
        for group in [group for group in ("first", "second") if timer[group]]:
            expression += re.escape(line[end : timer.start(group)]) + "([-+.0-9eE]++)"
            end, value = timer.end(group), number(timer[group])
            values += [_timer("", timer["name"].strip(), math.nan if value is None else value)]
    if [(series[1:], value) for series, value in values] != [(series[1:], value) for series, value in scalars]:
        return None
    return expression + re.escape(line[end:]), [series for series, _ in scalars]


@functools.lru_cache(maxsize=4096)
def _has_part(line: bytes) -> bool:
    return any(part in line for part in _PARTS) or FailureLines.is_possible(line)


def _event(type: str, text: str, **columns: Any) -> dict[str, Any]:  # noqa: A002 - column
    return {"type": type, "severity": Severity.INFO, "message": text, **columns}


def _parts(text: str) -> Iterator[tuple[str, float]]:
    """Yield key and number of each part of a line such as `a: 1 | b: 2 |`.

    Incomplete parts and parts without a number are skipped.
    """
    for piece in text.split("|"):
        part = split_part(piece)
        value = None if part is None else number(part[1])
        if part is not None and value is not None:
            yield part[0], value


def _timer(name: str, timer: str, milliseconds: float) -> tuple[Series, float]:
    return _timer_series(name, timer), milliseconds * _MILLISECOND


@functools.lru_cache(maxsize=4096)
def _timer_series(name: str, timer: str) -> Series:
    return name, "seconds", canonical_labels({"timer": redacted_name(timer), "source_unit": "ms"})


def _evaluation_name(key: str) -> str:
    stem = re.sub(r" (?:loss )?value$| PPL$", "", redacted_name(key)).replace(" ", "_")
    return f"eval_{stem}_perplexity" if key.endswith(" PPL") else f"eval_{stem}"


def _memory_series(key: str) -> Series:
    known = {"allocated": "device_memory_allocated_bytes", "reserved": "device_memory_reserved_bytes"}
    folded = redacted_name(key).replace(" ", "_").replace("-", "_").removeprefix("mem_").removesuffix("_bytes")
    labels = canonical_labels({"source_name": redacted_name(key), "source_unit": "MB"})
    return known.get(folded, f"device_memory_{folded}_bytes"), "bytes", labels


def _whole(text: str | None) -> int | None:
    return None if text is None else int(text)


def _rank(text: str) -> int | None:
    return int(text) if int(text) < _LARGEST else None
