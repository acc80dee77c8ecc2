"""Convert an object that a training program logged into one record: step, rank, time, scalars and events.

Numbers become scalars under stored names and units; so do numbers in text, such as `"0.8674"`, `"49m 19s"` and
`"0.11%"`. null means an absent value; NaN and Infinity are stored as values. The keys of nested objects, and the places
of objects in a list, are joined with a slash. Other text is stored only with events and with records that contain no
number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rankscope_contract.model.events import EventType, ExitReason, RunState, Severity
from rankscope_contract.model.schema import canonical_labels
from rankscope_ingest.importers.common.aliases import SOURCE_NAME, UNITS, Alias, in_unit
from rankscope_ingest.importers.common.importer import FROM_LOG, BlockBuilder, Faults, ImportedRun
from rankscope_ingest.importers.common.keys import (
    EPOCH,
    STEP_RANK,
    Named,
    Names,
    Role,
    Shape,
    Shapes,
    evaluation_sets,
    event_class,
    is_plain_number,
    name_in_set,
    name_in_split,
    own_name,
    role_of,
)
from rankscope_ingest.importers.common.step_streams import StepStreams
from rankscope_ingest.importers.common.values import (
    MAX_JSON,
    clean_text,
    is_ambiguous,
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
_LAST_ENTRY: Final = "train_runtime"
"""A key that occurs only in the last entry that the Hugging Face Trainer logs.

The values of that entry whose keys begin with `train_` are averages over the whole run.
"""

_AVERAGE: Final = re.compile(r"train_(?!speed)[^(]*")
"""A regular expression for the keys of the averages over the whole run in the Trainer's last entry.

An example is `train_loss`. ms-swift's `train_speed(iter/s)` is the speed of a step and does not match.
"""

_HISTORY: Final = "log_history"
_COUNTS: Final = {"tokens", "samples", "tokens/s", "samples/s"}


@dataclass(slots=True)
class _Record:
    """The values of one logged object, divided by use (step, rank, time, numbers, text).

    The numbers do not have stored names yet.
    """

    document: Mapping[str, Any]
    sets: tuple[str, ...]
    numbers: dict[str, float | list[float | None]] = field(default_factory=dict)
    omitted: list[str] = field(default_factory=list)  # keys of lists and objects whose numbers are not stored
    texts: dict[str, str] = field(default_factory=dict)
    steps: list[tuple[int, str, int]] = field(default_factory=list)  # place in STEP_KEYS, key, step
    planned: int | None = None
    rank: int | None = None
    ts: int | None = None
    event: str | None = None
    split: str | None = None
    writer: str | None = None  # id of the process or host

    def epoch(self) -> float | None:
        """Return the epoch in the object as a number, or None if the object has no epoch.

        The value in the log may be a text.
        """
        for key, value in self.numbers.items():
            if key.lower() == EPOCH:
                return value if isinstance(value, float) else None
        found = quantity(next((text for key, text in self.texts.items() if key.lower() == EPOCH), ""))
        return found[0] if found else None

    def is_row(self) -> bool:
        """Return whether the object contains a number, as such or in a text, and reports no event other than a note.

        Examples of other events are the start, the end and a failure of training.
        """
        if self.event is not None and event_class(self.event).type != EventType.NOTE:
            return False
        return bool(self.numbers) or any(quantity(text) or seconds(text) for text in self.texts.values())

    def take_step(self, key: str, value: Any) -> bool:
        """Store the step that `value` contains: `12`, `12.0`, `"12"` or `"12/873"` (step and planned steps).

        Return False if `value` has none of these forms.
        """
        step_text, slash, planned = value.partition("/") if isinstance(value, str) else (value, "", None)
        step = whole(step_text)
        if step is None:
            return False
        if slash:
            self.planned = whole(planned) or self.planned
        self.steps.append((STEP_RANK[key.lower()], key, step))
        return True


class ObjectReader:
    """Converts the objects of one log, in order, to records, and collects the facts about the run that they contain."""

    def __init__(self, *, numbers_rows: bool = False) -> None:
        self.keys: dict[str, int] = {}
        """For each key of the log, the number of null values. A null value is an absent value."""
        self.omitted: dict[str, int] = {}
        """For each key of a list or an object that was too long or too deep to be stored, the number of its values."""
        self.ambiguous: list[str] = []
        """Messages to the user about numbers such as `1,234`, which are ambiguous and therefore not stored.

        A message is removed when `report_ambiguous` has reported it.
        """
        self.config: Any = None
        self.planned_steps: int | None = None
        self.last_step: int | None = None
        self.finished = False
        self._names = Names()
        self._streams = StepStreams()
        self._shapes = Shapes()
        self._numbers_rows = numbers_rows
        self._rows: dict[int | None, int] = {}  # per rank, the number of records that contain a number

    def add(self, document: Mapping[str, Any], builder: BlockBuilder, *, attempt: int | None = None) -> None:
        """Add the logged object `document` as one record to `builder`.

        If `attempt` is None, the attempt is derived from the steps of the log. If the log has no steps, the step is the
        number of the record among the records of its rank that contain a number.
        """
        shape = self._shapes.of(document, self._names.version)
        if shape is not None and all(map(is_plain_number, document.values())):
            self._add_plain(shape, tuple(document.values()), builder, attempt)
        else:
            self._add_any(document, builder, attempt)

    def _add_plain(self, shape: Shape, values: Sequence[float], builder: BlockBuilder, attempt: int | None) -> None:
        step = int(values[shape.step])
        self._update_last_step(step)
        if attempt is None:
            epoch = None if shape.epoch is None else values[shape.epoch]
            value = values[shape.numbers[0][0]] if shape.numbers else None
            attempt = self._streams.attempt(None, step, epoch, value=value)
        builder.record(step=step, origin=FROM_LOG, attempt=attempt)
        for place, (alias, labels) in shape.numbers:
            value = values[place]
            builder.scalar(alias.name, value if alias.factor == 1.0 else alias.converted(value), alias.unit, labels)

    def _add_any(self, document: Mapping[str, Any], builder: BlockBuilder, attempt: int | None) -> None:
        for key, value in document.items():
            if key in self.keys or len(self.keys) < MAX_KEYS:
                self.keys[key] = self.keys.get(key, 0) + (value is None)
        record = _Record(document, evaluation_sets(document))
        self._collect(document, "", record, 0)
        step = self._step(record)
        if step is None and self._numbers_rows and record.is_row():
            self.last_step = step = self._rows[record.rank] = self._rows.get(record.rank, 0) + 1
        if attempt is None:
            value = next((value for value in record.numbers.values() if isinstance(value, float)), None)
            attempt = self._streams.attempt(record.rank, step, record.epoch(), record.writer, value)
        builder.record(step=step, rank=record.rank, ts=record.ts, origin=FROM_LOG, attempt=attempt)
        self.finished = self.finished or _LAST_ENTRY in document
        if record.event is not None:
            self._add_event(record.event, document, builder)
        added = self._add_numbers(record, builder)
        for key in record.omitted:
            if key in self.omitted or len(self.omitted) < MAX_KEYS:
                self.omitted[key] = self.omitted.get(key, 0) + 1
        if not added and record.event is None:
            builder.event(
                EventType.NOTE,
                Severity.INFO,
                "the record contains no number: its content is in details",
                json_text(document),
            )
        is_special = (
            record.writer is not None
            or _UTILISATION in {named[0].name for _, named in added}
            or _LAST_ENTRY in document
        )
        if len(record.steps) == 1 and not is_special:
            self._shapes.learn(document, record.steps[0][1], added)

    @property
    def are_writers_interleaved(self) -> bool:
        """True if records of several writers alternate in the log."""
        return self._streams.are_interleaved

    def run(self, facts: Mapping[str, Any], **sections: Any) -> ImportedRun:
        """Return the facts about the run that the log contains.

        `facts` are facts about the import, such as the number of lines; `sections` are further values by name. Both are
        stored in the `config` of the run.
        """
        absent = {key: count for key, count in self.keys.items() if count}
        about = {**facts, "keys": sorted(self.keys), "null_values": absent, "omitted_values": self.omitted}
        if self._rows:
            about["step"] = "number of the record"
        config = {"import": about, "log": self.config, **sections}
        return ImportedRun(
            state=RunState.COMPLETED if self.finished else None,
            reason="the log reports the end of training" if self.finished else None,
            planned_steps=self.planned_steps,
            config=json_text(config, limit=4 * MAX_JSON),
        )

    def report_ambiguous(self, faults: Faults, line: int) -> None:
        """Add the collected messages about ambiguous numbers such as `1,234` to `faults`, and forget them.

        `line` is the line number of the record that contains these numbers.
        """
        for text in self.ambiguous:
            faults.add(line, text)
        self.ambiguous.clear()

    def _collect(self, document: Mapping[str, Any], path: str, record: _Record, depth: int) -> None:
        for name, value in document.items():
            key = f"{path}{name}"
            if value is None or len(record.numbers) >= MAX_NUMBERS:
                record.omitted += [] if value is None else [key]
                continue
            role = role_of(key)
            if role is Role.VALUE or not self._take_role(role, key, value, record):
                self._collect_value(key, value, record, depth)

    def _collect_value(self, key: str, value: Any, record: _Record, depth: int) -> None:
        found = number(value)
        if found is not None:
            record.numbers[key] = found
        elif isinstance(value, str):
            record.texts[key] = value
        elif isinstance(value, dict | list | tuple) and value:
            if depth >= MAX_DEPTH or key == _HISTORY or (not isinstance(value, dict) and len(value) > MAX_LIST):
                record.omitted.append(key)  # ms-swift's last row repeats the history
            elif isinstance(value, dict):
                self._collect(value, f"{key}/", record, depth + 1)
            else:
                self._collect_list(key, value, record, depth)

    def _collect_list(self, key: str, items: Sequence[Any], record: _Record, depth: int) -> None:
        """Add the numbers of the list `items` to `record`.

        A list of numbers is added under `key`. If `items` contains objects or lists, the key of each number in
        them begins with `key`, a slash and the index of the object or list.
        """
        numbers = [number(item) for item in items]
        if any(isinstance(item, dict | list | tuple) for item in items):
            places = {str(place): item for place, item in enumerate(items) if not isinstance(item, str)}
            self._collect(places, f"{key}/", record, depth + 1)
        elif all(item is None or found is not None for item, found in zip(items, numbers, strict=True)) and any(
            found is not None for found in numbers
        ):
            record.numbers[key] = numbers
        elif any(found is not None for found in numbers):
            record.omitted.append(key)

    def _take_role(self, role: Role, key: str, value: Any, record: _Record) -> bool:
        """Store `value` as the step, rank, time or other property that `role` selects.

        Return False if the value is not valid for that property. The caller then treats the value as an ordinary one.
        """
        match role:
            case Role.STEP:
                return record.take_step(key, value)
            case Role.STEP_OF_PLAN:
                return isinstance(value, str) and record.take_step("step", value)
            case Role.PLAN:
                record.planned = whole(value)
                return record.planned is not None
            case Role.RANK:
                rank = whole(value)
                record.rank = rank if rank is not None and 0 <= rank < _LARGEST_RANK else record.rank
                return True
            case Role.WRITER if isinstance(value, str | int):
                record.writer = record.writer or str(value)
            case Role.TIME:
                moment = micros(value)
                record.ts = moment if record.ts is None else record.ts
                return moment is not None
            case Role.EVENT if isinstance(value, str):
                record.event = value
                return True
            case Role.SPLIT if isinstance(value, str):
                record.split = value.lower()
            case Role.CONFIG if isinstance(value, dict):
                self.config = value
                return True
        return False

    def _step(self, record: _Record) -> int | None:
        """Return the step of `record`, or None if it has no step.

        If several keys contain a step, only the first of them in the order of STEP_KEYS is used; the values of the
        others are added to the numbers of the record. The planned number of steps is stored as a fact about the run.
        """
        record.steps.sort()
        for _, key, value in record.steps[1:]:
            record.numbers[key] = float(value)
        if record.planned:
            self.planned_steps = record.planned
        if not record.steps:
            return None
        step = record.steps[0][2]
        self._update_last_step(step)
        return step

    def _update_last_step(self, step: int) -> None:
        self.last_step = step if self.last_step is None else max(step, self.last_step)
        if self.planned_steps and step >= self.planned_steps:
            self.finished = True

    def _add_numbers(self, record: _Record, builder: BlockBuilder) -> list[tuple[str, Named]]:
        """Add all numbers of `record`, including numbers in text, as scalars. Return their keys and stored names."""
        taken: set[str] = set()
        added = []
        for key, value in record.numbers.items():
            named = self._named(key, record, taken)
            _add_scalars(key, value, named, builder)
            taken.add(named[0].name)
            added.append((key, named))
        for key, text in record.texts.items():
            named = self._named(key, record, taken)
            if named[0].unit not in _COUNTS and is_ambiguous(text):
                self.ambiguous.append(f"{key}: {clean_text(text)} may have a decimal comma and is not stored")
            elif (read := _number_in_text(text, named[0])) is not None:
                alias, found = read
                builder.scalar(alias.name, alias.converted(found), alias.unit, alias.labels(key))
                taken.add(alias.name)
                added.append((key, named))
        return added

    def _named(self, key: str, record: _Record, taken: set[str]) -> Named:
        if _LAST_ENTRY in record.document and _AVERAGE.fullmatch(key):
            return own_name(key)
        if record.sets and (named := name_in_set(key, record.sets)):
            return named
        if record.split and (named := name_in_split(key, record.split)):
            return named
        return self._names.name(key, taken, record.document)

    def _add_event(self, name: str, document: Mapping[str, Any], builder: BlockBuilder) -> None:
        found = event_class(name)
        self.finished = self.finished or found.ends_training
        details = {key: value for key, value in document.items() if number(value) is None and value is not None}
        if found.type == EventType.EXIT:
            details = {"reason": ExitReason.COMPLETED, "last_step": self.last_step, **details}
        builder.event(found.type, found.severity, clean_text(name), json_text(details))


def has_step(document: Mapping[str, Any]) -> bool:
    """Return whether the logged object `document` contains a step."""
    record = _Record(document, ())
    ObjectReader()._collect(document, "", record, 0)  # noqa: SLF001 - a function of this module
    return bool(record.steps)


def _add_scalars(key: str, value: float | list[float | None], named: Named, builder: BlockBuilder) -> None:
    """Add a number as a scalar, or a list of numbers as scalars with the index as a label.

    For GPU utilization, the mean is added too.
    """
    alias, labels = named
    if isinstance(value, list):
        place = _LIST_LABEL.get(alias.name, "index")
        for index, each in enumerate(value):
            if each is None:
                continue
            builder.scalar(alias.name, alias.converted(each), alias.unit, alias.labels(key, {place: str(index)}))
    else:
        builder.scalar(alias.name, alias.converted(value), alias.unit, labels)
    if alias.name == _UTILISATION:
        known = [each for each in value if each is not None] if isinstance(value, list) else [value]
        mean = sum(known) / len(known)
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
    # A unit after the number of an unknown key may mean anything: "7b" is the size of a model.
    known = UNITS.get(unit.lower())
    if known is None or alias.unit is None or known.name != alias.unit:
        return None
    return in_unit(alias, unit), value
