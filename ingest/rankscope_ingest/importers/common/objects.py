"""An object that a training printed, whatever tool wrote it, as one record: step, time, numbers and events.

Numbers become scalars under our names and in our units; numbers in text count too (`"0.8674"`, `"49m 19s"`, `"0.11%"`).
null is absent, NaN and Infinity are values. Objects inside objects are opened, their keys joined by a slash. What is
left is text: it is kept with events and with records that hold no number, and otherwise left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rankscope_contract.model.events import EventType, ExitReason, RunState, Severity
from rankscope_contract.model.schema import canonical_labels
from rankscope_ingest.importers.common.aliases import SOURCE_NAME, UNITS, Alias, in_unit
from rankscope_ingest.importers.common.blocks import BlockBuilder
from rankscope_ingest.importers.common.event_names import happening
from rankscope_ingest.importers.common.importer import FROM_LOG, ImportedRun
from rankscope_ingest.importers.common.keys import (
    EPOCH,
    STEP_RANK,
    Named,
    Names,
    Role,
    Shape,
    Shapes,
    evaluation_sets,
    in_split,
    is_plain_number,
    of_set,
    own,
    role_of,
)
from rankscope_ingest.importers.common.restarts import StepStreams
from rankscope_ingest.importers.common.values import (
    MAX_JSON,
    clean_text,
    json_text,
    micros,
    number,
    quantity,
    seconds,
    whole,
)

MAX_DEPTH: Final = 8
MAX_NUMBERS: Final = 4096
MAX_LIST: Final = 256
MAX_KEYS: Final = 1000

_LIST_LABEL: Final = {"learning_rate": "group", "gpu_util": "gpu"}
_UTILISATION: Final = "gpu_util"
_LARGEST_RANK: Final = 1 << 31


@dataclass(slots=True)
class _Record:
    """What one object says, before it is named."""

    numbers: dict[str, float | list[float]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    steps: list[tuple[int, str, int]] = field(default_factory=list)  # place in STEP_KEYS, key, step
    planned: int | None = None
    rank: int | None = None
    ts: int | None = None
    event: str | None = None
    split: str | None = None


class ObjectReader:
    """Reads the objects of one log, in order, and remembers what they say of the run."""

    def __init__(self) -> None:
        self.keys: dict[str, int] = {}
        """How often each key came with null, which is to say: was absent."""
        self.config: Any = None
        self.planned_steps: int | None = None
        self.last_step: int | None = None
        self.finished = False
        self._names = Names()
        self._streams = StepStreams()
        self._shapes = Shapes()

    def add(self, document: Mapping[str, Any], builder: BlockBuilder, *, attempt: int | None = None) -> None:
        """Add the record that `document` is to `builder`; without `attempt` the steps tell it."""
        shape = self._shapes.of(document, self._names.version)
        if shape is not None and all(map(is_plain_number, document.values())):
            self._add_plain(shape, tuple(document.values()), builder, attempt)
        else:
            self._add_any(document, builder, attempt)

    def _add_plain(self, shape: Shape, values: Sequence[float], builder: BlockBuilder, attempt: int | None) -> None:
        step = int(values[shape.step])
        self._note_step(step)
        if attempt is None:
            epoch = None if shape.epoch is None else values[shape.epoch]
            attempt = self._streams.attempt(None, step, epoch)
        builder.record(step=step, origin=FROM_LOG, attempt=attempt)
        for place, (alias, labels) in shape.numbers:
            value = values[place]
            builder.scalar(alias.name, value if alias.factor == 1.0 else alias.converted(value), alias.unit, labels)

    def _add_any(self, document: Mapping[str, Any], builder: BlockBuilder, attempt: int | None) -> None:
        self._note_keys(document)
        record = _Record()
        self._collect(document, "", record, 0)
        step = self._step(record)
        if attempt is None:
            attempt = self._streams.attempt(record.rank, step, _epoch(record))
        builder.record(step=step, rank=record.rank, ts=record.ts, origin=FROM_LOG, attempt=attempt)
        self.finished = self.finished or "train_runtime" in document
        if record.event is not None:
            self._add_event(record, document, builder)
        added = self._add_numbers(record, document, builder)
        if not added and record.event is None:
            builder.event(EventType.NOTE, Severity.INFO, "a record without numbers", json_text(document))
        is_special = _UTILISATION in {named[0].name for _, named in added} or "train_runtime" in document
        if len(record.steps) == 1 and not is_special:
            self._shapes.learn(document, record.steps[0][1], added)

    def run(self, facts: Mapping[str, Any], **sections: Any) -> ImportedRun:
        """Return what the log says of the run; `facts` are about the import itself, `sections` join the config."""
        absent = {key: count for key, count in self.keys.items() if count}
        about = {**facts, "keys": sorted(self.keys), "null_values": absent}
        config = {"import": about, "log": self.config, **sections}
        return ImportedRun(
            state=RunState.COMPLETED if self.finished else None,
            reason="the log says that training came to its end" if self.finished else None,
            planned_steps=self.planned_steps,
            config=json_text(config, limit=4 * MAX_JSON),
        )

    def _note_keys(self, document: Mapping[str, Any]) -> None:
        for key, value in document.items():
            if key in self.keys or len(self.keys) < MAX_KEYS:
                self.keys[key] = self.keys.get(key, 0) + (value is None)

    def _collect(self, document: Mapping[str, Any], path: str, record: _Record, depth: int) -> None:
        for name, value in document.items():
            if value is None or len(record.numbers) >= MAX_NUMBERS:
                continue
            key = f"{path}{name}"
            role = role_of(key)
            if role is Role.VALUE or not self._take_role(role, key, value, record):
                self._collect_value(key, value, record, depth)

    def _collect_value(self, key: str, value: Any, record: _Record, depth: int) -> None:
        found = number(value)
        if found is not None:
            record.numbers[key] = found
        elif isinstance(value, str):
            record.texts[key] = value
        elif isinstance(value, dict) and depth < MAX_DEPTH:
            self._collect(value, f"{key}/", record, depth + 1)
        elif isinstance(value, list | tuple) and 0 < len(value) <= MAX_LIST:
            numbers = [each for item in value if (each := number(item)) is not None]
            if len(numbers) == len(value):
                record.numbers[key] = numbers

    def _take_role(self, role: Role, key: str, value: Any, record: _Record) -> bool:
        """Let `value` play its role; return False where it cannot, and is a quantity like others."""
        match role:
            case Role.STEP:
                return _take_step(key, value, record)
            case Role.STEP_OF_PLAN:
                return isinstance(value, str) and _take_step("step", value, record)
            case Role.PLAN:
                record.planned = whole(value)
                return record.planned is not None
            case Role.RANK:
                rank = whole(value)
                record.rank = rank if rank is not None and 0 <= rank < _LARGEST_RANK else record.rank
                return True
            case Role.TIME:
                moment = micros(value)
                record.ts = moment if record.ts is None else record.ts
                return moment is not None
            case Role.EVENT if isinstance(value, str):
                record.event = value
                return True
            case Role.SPLIT if isinstance(value, str):
                record.split = value.lower()
                return False
            case Role.CONFIG if isinstance(value, dict):
                self.config = value
                return True
            case _:
                return False

    def _step(self, record: _Record) -> int | None:
        """Return the step, give the other candidates back as numbers, and note the plan."""
        record.steps.sort()
        for _, key, value in record.steps[1:]:
            record.numbers[key] = float(value)
        step = record.steps[0][2] if record.steps else None
        if record.planned:
            self.planned_steps = record.planned
        if step is not None:
            self._note_step(step)
        return step

    def _note_step(self, step: int) -> None:
        self.last_step = step if self.last_step is None else max(step, self.last_step)
        if self.planned_steps and step >= self.planned_steps:
            self.finished = True

    def _add_numbers(
        self, record: _Record, document: Mapping[str, Any], builder: BlockBuilder
    ) -> list[tuple[str, Named]]:
        """Add the numbers of `record`, those in text too, and return what they were called."""
        taken: set[str] = set()
        added = []
        sets = evaluation_sets(document)
        ends_training = "train_runtime" in document
        for key, value in record.numbers.items():
            named = self._named(key, record, document, taken, sets, ends_training=ends_training)
            _add_scalars(key, value, named, builder)
            taken.add(named[0].name)
            added.append((key, named))
        for key, text in record.texts.items():
            named = self._named(key, record, document, taken, sets, ends_training=ends_training)
            if (read := _number_in_text(text, named[0])) is not None:
                alias, found = read
                builder.scalar(alias.name, alias.converted(found), alias.unit, alias.labels(key))
                taken.add(alias.name)
                added.append((key, named))
        return added

    def _named(
        self,
        key: str,
        record: _Record,
        document: Mapping[str, Any],
        taken: set[str],
        sets: tuple[str, ...],
        *,
        ends_training: bool,
    ) -> Named:
        if ends_training and key.startswith("train_"):
            # The Trainer's last entry: averages over the whole run, not of its last step.
            return own(key)
        if sets and (named := of_set(key, sets)):
            return named
        if record.split and (named := in_split(key, record.split)):
            return named
        return self._names.name(key, taken, document)

    def _add_event(self, record: _Record, document: Mapping[str, Any], builder: BlockBuilder) -> None:
        assert record.event is not None
        told = happening(record.event)
        self.finished = self.finished or told.ends_well
        details = {key: value for key, value in document.items() if number(value) is None and value is not None}
        if told.type == EventType.EXIT:
            details = {"reason": ExitReason.COMPLETED, "last_step": self.last_step, **details}
        builder.event(told.type, told.severity, clean_text(record.event), json_text(details))


def _epoch(record: _Record) -> float | None:
    """Return the epoch of a record, which may stand in text."""
    given = next((record.numbers[key] for key in record.numbers if key.lower() == EPOCH), None)
    if given is None:
        text = next((record.texts[key] for key in record.texts if key.lower() == EPOCH), "")
        found = quantity(text)
        given = found[0] if found else None
    return given if isinstance(given, float) else None


def _take_step(key: str, value: Any, record: _Record) -> bool:
    """Take `12`, `12.0`, `"12"` or `"12/873"` as the step."""
    step_text, slash, planned = value.partition("/") if isinstance(value, str) else (value, "", None)
    step = whole(step_text)
    if step is None:
        return False
    if slash:
        record.planned = whole(planned) or record.planned
    record.steps.append((STEP_RANK[key.lower()], key, step))
    return True


def _add_scalars(key: str, value: float | list[float], named: Named, builder: BlockBuilder) -> None:
    """Add a number, or the numbers of a list with their places; utilisation of processors also as its mean."""
    alias, labels = named
    if isinstance(value, list):
        place = _LIST_LABEL.get(alias.name, "index")
        for index, each in enumerate(value):
            builder.scalar(alias.name, alias.converted(each), alias.unit, alias.labels(key, {place: str(index)}))
    else:
        builder.scalar(alias.name, alias.converted(value), alias.unit, labels)
    if alias.name == _UTILISATION:
        mean = sum(value) / len(value) if isinstance(value, list) else value
        builder.scalar(f"{_UTILISATION}_mean", mean, alias.unit, canonical_labels({SOURCE_NAME: key}))


def _number_in_text(text: str, alias: Alias) -> tuple[Alias, float] | None:
    if alias.unit == "seconds" and alias.factor == 1.0 and (duration := seconds(text)) is not None:
        return alias, duration
    found = quantity(text)
    if found is None:
        return None
    value, unit = found
    if unit is None:
        return alias, value
    # A unit behind a number of an unknown key may be anything: "7b" is a size of a model.
    known = UNITS.get(unit.lower())
    if known is None or alias.unit is None or known.name != alias.unit:
        return None
    return in_unit(alias, unit), value
