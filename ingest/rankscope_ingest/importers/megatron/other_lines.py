"""Lines between the rows: validations, checkpoints, timers, memory, arguments, the end, and what went wrong.

Pure: a line in, what it says out. A line that belongs to a step without naming it takes the step of the row before it,
which the caller knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rankscope_contract.model.events import EventType, ExitReason, RunState, Severity
from rankscope_contract.model.schema import canonical_labels
from rankscope_ingest.importers.common.aliases import canonical, printable
from rankscope_ingest.importers.common.event_names import STOPPING, error_class
from rankscope_ingest.importers.common.importer import ImportedRun
from rankscope_ingest.importers.megatron.keys import Meaning
from rankscope_ingest.importers.megatron.rows import TIME_PATTERN, micros, number, printer, split_part

COMPANION_PATTERN: Final = (
    r"validation loss at|test loss at|checkpoint|time \(ms\)|across ranks \(ms\)|\.\. ?: *\(?-?\d|^ +rank +\d+: +\d"
    r"|^ +[\w /-]{1,80}: *\s*$|memory \(MB\)|\] datetime: |world size: \d|\.{3,} \S|exiting program|arguments -{3}"
    r"|Traceback \(most|Error\b|ERROR|NCCL|[Oo]ut of memory|CANCELLED|TIME LIMIT|[Kk]ill|SIG[A-Z]{3,}|[Ss]ignal \d"
    r"|[Ss]egmentation fault|No space left|Permission denied|No such file|[Tt]imed? ?out|core dumped|Connection re"
)
"""What a line needs for `Companions.read` to look at it; the same text is given to Arrow's own regular expressions."""

_MEBIBYTE: Final = float(1 << 20)
_MILLISECOND: Final = 1e-3
_MESSAGE_CHARACTERS: Final = 500
_ARGUMENTS: Final = 2_000
_LARGEST: Final = 1 << 31

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
_PLACE: Final = re.compile(r"(?:\bto|\bfrom) (?!iteration)(?P<path>[^\s,]+)")
_TIMERS: Final = re.compile(r"time \(ms\) \|(?P<rest>.*)")
_ACROSS: Final = re.compile(r"(?P<what>\(min, max\) time|max time|min time|times) across ranks \(ms\):")
_TIMER_LINE: Final = re.compile(
    r"^(?P<name>[\w /-]{1,80}?) ?\.*: *\(?(?P<one>-?[\d.eE+-]+)(?:, *(?P<two>-?[\d.eE+-]+)\))? *$"
)
_TIMER_NAME: Final = re.compile(r"^(?P<name>[\w /-]{1,80}?) ?\.*: *$")
_TIMER_RANK: Final = re.compile(r"^rank +(?P<rank>\d{1,9}): +(?P<one>-?[\d.eE+-]+) *$")
_MEMORY: Final = re.compile(r"\[Rank (?P<rank>\d{1,9})\] (?:\(after (?P<step>\d{1,18}) iterations\) )?memory \(MB\) \|")
_DONE: Final = re.compile(rf"\[(?P<what>[^\[\]]{{1,80}})\] datetime: (?P<time>{TIME_PATTERN})")
_WORLD: Final = re.compile(r"world size: (?P<size>\d{1,9})")
_ARGUMENT: Final = re.compile(r"^(?P<name>[A-Za-z]\w{0,80}) \.{3,} (?P<value>.*)$")
_EXITING: Final = re.compile(r"exiting program (?:at|after) ?(?:iteration +(?P<step>\d{1,18}))?")
_LABELS: Final = re.compile(
    r"^(?:\[[^\[\]|]{1,120}\]:[ \t]*"  # torch itself sets no blank: `[rank3]:[E501 …`
    r"|(?:[\w.-]{1,80}:(?=[ \t]+(?:\(|time|\[|val|sav|succ|load))|\d{1,9}:)[ \t]+)+"
)
_SECRET: Final = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Companion:
    """What one line says. Without a step it belongs to the row before it."""

    scalars: tuple[Mapping[str, Any], ...] = ()
    events: tuple[Mapping[str, Any], ...] = ()
    step: int | None = None
    rank: int | None = None
    ts: int | None = None
    once: tuple[Any, ...] | None = None
    """Of several that agree on this and on the step, the first counts: a thousand ranks print one failure."""


@dataclass(slots=True)
class Companions:
    """Reads the lines of one log in their order; some make sense only behind others."""

    run: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    ending: tuple[str, str] | None = None
    """State and reason that the latest line about an end would mean."""
    _across: str | None = None
    _timer: str = ""

    def read(self, line: str) -> tuple[list[Companion], bool]:
        """Return what a line says, and whether it is one of Megatron's at all."""
        text = line.strip()
        label = _LABELS.match(text)
        bare = text[label.end() :] if label and "[Rank" not in label[0] else text
        if self._across and (found := self._timer_line(bare, line)) is not None:
            return found, True
        for reader in (
            self._validation,
            self._checkpoint,
            self._timers,
            self._memory,
            self._moment,
            self._argument,
            self._ended,
        ):
            said = reader(bare)
            if said is not None:
                return said, True
        wrong = self._error(bare, printer(label[0]).rank if label else None)
        return wrong, bool(wrong)

    def facts(self) -> ImportedRun:
        """Return what has been learnt of the run since it began."""
        facts = dict(self.run)
        if self.arguments:
            facts["config"] = json.dumps(self.arguments, sort_keys=True, ensure_ascii=False)
            world = self.arguments.get("world_size", "")
            planned = self.arguments.get("train_iters", "")
            if world.isascii() and world.isdigit() and 0 < int(world) < _LARGEST:
                facts.setdefault("world_size", int(world))
            if planned.isascii() and planned.isdigit() and len(planned) < 19:
                facts.setdefault("planned_steps", int(planned))
        return ImportedRun(**facts)

    def row_seen(self) -> None:
        """Note that training went on: whatever looked like an end was none."""
        self.ending = None
        self._across = None

    def timers_seen(self) -> None:
        """Note a line of timers: a block of timers of all ranks is over."""
        self._across = None

    def _validation(self, text: str) -> list[Companion] | None:
        found = _VALIDATION.search(text)
        if found is None:
            return None
        which = (found["set"] or "").strip().strip("'\"").removesuffix(" set").removesuffix(" data")
        extra = {} if which in {"", "validation"} else {"dataset": printable(which)}
        scalars = []
        for key, value in _parts(found["rest"]):
            alias = canonical(key)
            name = alias.name if alias.name.startswith("eval_") else _evaluation_name(key)
            scalars.append({"name": name, "value": value, "unit": alias.unit, "labels": canonical_labels(extra)})
        loss = next((row["value"] for row in scalars if row["name"] == "eval_loss"), None)
        event = _event(EventType.EVALUATION, text, value=loss)
        return [Companion(scalars=tuple(scalars), events=(event,), step=_whole(found["step"]))]

    def _checkpoint(self, text: str) -> list[Companion] | None:
        found = _CHECKPOINT.search(text)
        if found is None:
            return None
        step, place = _AT_STEP.search(found["rest"]), _PLACE.search(found["rest"])
        action = found["action"].removesuffix(" checkpoint")
        action = {"successfully saved": "saved", "successfully loaded": "loaded"}.get(action, action.split()[0])
        details = {"action": action} | ({"path": printable(place["path"])} if place else {})
        event = _event(EventType.CHECKPOINT, text, details=json.dumps(details))
        return [Companion(events=(event,), step=_whole(step["step"]) if step else None, once=("checkpoint", action))]

    def _timers(self, text: str) -> list[Companion] | None:
        if header := _ACROSS.search(text):
            self._across = header["what"]
            self._timer = ""
            return []
        found = _TIMERS.search(text)
        if found is None:
            return None
        self.timers_seen()
        rows = [_timer("timer_seconds", key, value) for key, value in _parts(found["rest"])]
        return [Companion(scalars=tuple(rows))] if rows else []

    def _timer_line(self, text: str, line: str) -> list[Companion] | None:
        if not line[:1].isspace() and text == line.strip():
            self._across = None  # the block is indented
            return None
        if self._across == "times":
            if named := _TIMER_NAME.match(text):
                self._timer = named["name"]
                return []
            found = _TIMER_RANK.match(text)
            value = None if found is None else number(found["one"])
            if found is None or value is None or not self._timer:
                return None
            return [Companion(scalars=(_timer("timer_seconds", self._timer, value),), rank=_rank(found["rank"]))]
        found = _TIMER_LINE.match(text)
        if found is None:
            return None
        names = ["timer_min_seconds", "timer_max_seconds"]
        if found["two"] is None:
            names = names[:1] if self._across == "min time" else names[1:]
        given = [number(value) for value in (found["one"], found["two"]) if value is not None]
        rows = [_timer(n, found["name"], value) for n, value in zip(names, given, strict=True) if value is not None]
        return [Companion(scalars=tuple(rows))]

    def _memory(self, text: str) -> list[Companion] | None:
        heads = list(_MEMORY.finditer(text))
        if not heads:
            return None
        ends = [*(head.start() for head in heads[1:]), len(text)]
        said = []
        for head, end in zip(heads, ends, strict=True):
            rows = [
                {
                    "name": _memory_name(key),
                    "value": value * _MEBIBYTE,
                    "unit": "bytes",
                    "labels": canonical_labels({"source_name": printable(key), "source_unit": "MB"}),
                }
                for key, value in _parts(text[head.end() : end])
            ]
            said.append(Companion(scalars=tuple(rows), step=_whole(head["step"]), rank=_rank(head["rank"])))
        return said

    def _moment(self, text: str) -> list[Companion] | None:
        found = _DONE.search(text)
        if found is None:
            if "world size: " in text and (world := _WORLD.search(text)):
                if 0 < int(world["size"]) < _LARGEST:
                    self.run["world_size"] = int(world["size"])
                return []
            return None
        ts = micros(found["time"])
        if "training is done" in found["what"]:
            self.ending = (RunState.COMPLETED, "training is done")
            details = json.dumps({"reason": ExitReason.COMPLETED})
            return [Companion(events=(_event(EventType.EXIT, text, details=details),), ts=ts)]
        return [Companion(events=(_event(EventType.PHASE, text),), ts=ts, once=("phase", found["what"]))]

    def _argument(self, text: str) -> list[Companion] | None:
        found = _ARGUMENT.match(text)
        if found is None:
            return None
        if len(self.arguments) < _ARGUMENTS and not _SECRET.search(found["name"]):
            self.arguments[found["name"]] = printable(found["value"].strip())
        return []

    def _ended(self, text: str) -> list[Companion] | None:
        found = _EXITING.search(text)
        if found is None:
            return None
        self.ending = (RunState.STOPPED, printable(text))
        details = json.dumps({"reason": ExitReason.COMPLETED, "last_step": _whole(found["step"])})
        event = _event(EventType.EXIT, text, details=details)
        return [Companion(events=(event,), step=_whole(found["step"]), once=("exit",))]

    def _error(self, text: str, rank: int | None) -> list[Companion]:
        kind = error_class(text)
        if kind is None:
            return []
        stopping = kind in STOPPING
        # A failure makes the scheduler cancel the rest, and the other way round: the first word is the cause.
        if self.ending is None:
            self.ending = (RunState.STOPPED if stopping else RunState.FAILED, f"{kind}: {printable(text)}")
        severity = Severity.WARNING if stopping else Severity.CRITICAL
        event = _event(EventType.ERROR, text, op=kind, severity=severity)
        return [Companion(events=(event,), rank=rank, once=("error", kind, rank))]


def _event(type: str, text: str, *, severity: str = Severity.INFO, **columns: Any) -> dict[str, Any]:  # noqa: A002 - column
    return {"type": type, "severity": severity, "message": text[:_MESSAGE_CHARACTERS], **columns}


def _parts(text: str) -> Iterator[tuple[str, float]]:
    """Yield key and number of `a: 1 | b: 2 |`; a part that is cut or no number is left out."""
    for piece in text.split("|"):
        part = split_part(piece)
        value = None if part is None else number(part[1])
        if part is not None and value is not None:
            yield part[0], value


def timer_meaning(timer: str, name: str = "timer_seconds") -> Meaning:
    """Return what the milliseconds of a timer are in the store."""
    labels = canonical_labels({"timer": printable(timer), "source_unit": "ms"})
    return Meaning(name, "seconds", _MILLISECOND, labels)


def _timer(name: str, timer: str, milliseconds: float) -> dict[str, Any]:
    what = timer_meaning(timer, name)
    return {"name": what.name, "value": milliseconds * what.factor, "unit": what.unit, "labels": what.labels}


def _evaluation_name(key: str) -> str:
    stem = re.sub(r" (?:loss )?value$| PPL$", "", printable(key)).replace(" ", "_")
    return f"eval_{stem}_perplexity" if key.endswith(" PPL") else f"eval_{stem}"


def _memory_name(key: str) -> str:
    known = {"allocated": "device_memory_allocated_bytes", "reserved": "device_memory_reserved_bytes"}
    folded = printable(key).replace(" ", "_").replace("-", "_").removeprefix("mem_").removesuffix("_bytes")
    return known.get(folded, f"device_memory_{folded}_bytes")


def _whole(text: str | None) -> int | None:
    return None if text is None else int(text)


def _rank(text: str) -> int | None:
    return int(text) if int(text) < _LARGEST else None
