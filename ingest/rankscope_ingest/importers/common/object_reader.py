"""Convert an object that a training program logged into one record: step, rank, time, scalars and events.

Numbers become scalars under stored names and units; so do numbers in text, such as `"0.8674"`, `"49m 19s"` and
`"0.11%"`. null means an absent value; NaN and Infinity are stored as values. The keys of nested objects, and the places
of objects in a list, are joined with a slash. Other text is stored only with events and with records that contain no
number.

The decision about the log determines which counter of a record is its step.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from rankscope_contract.model.events import EventType, ExitReason, RunState, Severity
from rankscope_contract.model.redaction import redacted, redacted_text
from rankscope_contract.model.scalar_names import SOURCE_NAME
from rankscope_contract.model.schema import canonical_labels
from rankscope_ingest.importers.common.decisions import LOSS, RANK, Choices, Clock, Dates, decide, is_training
from rankscope_ingest.importers.common.failures import ENDS
from rankscope_ingest.importers.common.forms import Form, Match
from rankscope_ingest.importers.common.importer import FROM_LOG, BlockBuilder, Faults, ImportedRun, NameCounts
from rankscope_ingest.importers.common.log_names import (
    EPOCH,
    EVALUATION_SPLITS,
    UNITS,
    Alias,
    Named,
    Names,
    canonical,
    event_type,
    in_unit,
    name_in_set,
    name_in_split,
    own_name,
)
from rankscope_ingest.importers.common.records import Record, record_of
from rankscope_ingest.importers.common.row_layout import Layouts, RowLayout, Rows, layout_of, of_document
from rankscope_ingest.importers.common.steps import StepCounter, StepStreams, TrainingProgress
from rankscope_ingest.importers.common.values import (
    MAX_JSON,
    MULTIPLES,
    is_ambiguous,
    json_text,
    number,
    quantity,
    seconds,
)

MAX_NAMES: Final = 1000
"""Number of different names of scalars that are stored of one log. Values of further names are counted."""

_LIST_LABEL: Final = {"learning_rate": "group", "gpu_util": "gpu"}
_UTILISATION: Final = "gpu_util"
_REPORTED_END: Final = "the log reports the end of training"
_LAST_ENTRY: Final = "train_runtime"
"""A key that occurs only in the last entry that the Hugging Face Trainer logs.

The values of that entry whose keys begin with `train_` are averages over the whole run.
"""

_AVERAGE: Final = re.compile(r"train_(?!speed)[^(]*")
"""A regular expression for the keys of the averages over the whole run in the Trainer's last entry.

An example is `train_loss`. ms-swift's `train_speed(iter/s)` is the speed of a step and does not match.
"""

_SPELLED: Final = re.compile(r"\d ?[a-z]+[\s,]*\d")
"""A regular expression that occurs in a duration with several units, such as `1m 20s`, which no other value has."""
_TIME: Final = re.compile(r"(?i)(?<!start)(?<!end)[ _]time\b|elapsed|duration")
"""A regular expression for the names of quantities whose text may be a duration with one unit or clock: `12.00m`."""
_ELAPSED: Final = "elapsed_seconds"
_COUNTS: Final = {"tokens", "samples", "tokens/s", "samples/s"}


_Added = tuple[str, Named, float | list[float | None]]
"""Key, stored name and value of a number in an object."""


class ObjectReader:
    """Converts the objects of one log, in order, to records, and collects the facts about the run that they contain."""

    def __init__(self, faults: Faults) -> None:
        """Read the objects of a log for which `faults` has the decision of an earlier import, if there is one."""
        self._faults = faults
        self.choices = faults.choices or Choices()
        """The decision about the log: which counter is the step, and which quantity is the loss."""
        self.clock = Clock(Dates())
        """Converts the times of the log whose date is not complete."""
        self.contradictions: Counter[str] = Counter()
        """For each contradiction of later records with the decision, the number of these records."""
        self.nulls = NameCounts()
        """For each key of the log, the number of null values. A null value is an absent value."""
        self.line = 0
        """The number of the line of the next object, for messages about it."""
        self.config: Any = None
        self.progress = TrainingProgress()
        self._steps = StepCounter(self.choices, self.contradictions)
        self._names = Names()
        self._streams = StepStreams()
        self.layouts = Layouts()
        self._stored: set[str] = set()
        self._has_other_loss = False
        self._rows: dict[int | None, int] = {}  # per rank, the number of records that contain a number
        self._starts: list[Record] = []  # of a launch or a load after a row, which wait for the attempt that they begin

    def add(
        self,
        document: Mapping[str, Any],
        builder: BlockBuilder,
        *,
        attempt: int | None = None,
        record: Record | None = None,
        match: Match | None = None,
    ) -> None:
        """Add the logged object `document` as one record to `builder`.

        `record` has the values of `document`, if the caller knows them, and `match` is the known form of its line. If
        `attempt` is None, the attempt is derived from the steps of the log. If the log has no steps, the step is the
        number of the record among the records of its rank that contain a number.
        """
        kind: Hashable = match[0] if match else (tuple(document), tuple(map(type, document.values())))
        columns = [[value] for value in (match[1] if match else document.values())]
        layout = self.layouts.get(kind)
        if layout is not None and self.add_rows(layout, columns, builder, attempt=attempt, given=document):
            return
        record = record or self.record(document)
        if attempt is None and self.progress.last_steps and _is_start(record.event or ""):
            self._starts.append(record)
            self.progress.has_advanced = False
        else:
            self._add_any(record, builder, attempt, kind)

    def add_starts(self, builder: BlockBuilder, attempt: int | None = None) -> None:
        """Add the launches and loads that wait, by default to the attempt of the last record."""
        starts, self._starts = self._starts, []
        for record in starts:
            self._add_any(record, builder, attempt)

    def add_rows(
        self,
        layout: RowLayout,
        columns: Sequence[Sequence[Any]],
        builder: BlockBuilder,
        *,
        attempt: int | None = None,
        given: Mapping[str, Any] = MappingProxyType({}),
    ) -> bool:
        """Add rows of training. Return False, and add none, if a value has another form than the layout.

        `RowLayout.rows` describes `columns` and `given`.
        """
        if layout.step is None and self.progress.planned_steps:
            return False  # the number of a record is not compared with the planned steps
        try:
            rows = layout.rows(columns, given)
        except (ValueError, OverflowError):
            return False
        if layout.step is None:
            rows = self._numbered(rows)
        attempts = [attempt] * len(rows) if attempt is not None else self._streams.attempts(rows)
        self.add_starts(builder, attempts[0])
        self.progress.rows(rows)
        builder.rows(rows, attempts, layout.series)
        return True

    def _numbered(self, rows: Rows) -> Rows:
        """Return `rows` with the numbers of the records of their rank as steps."""
        steps = []
        for rank in rows.ranks:
            self._rows[rank] = self._rows.get(rank, 0) + 1
            steps.append(self._rows[rank])
        return dataclasses.replace(rows, steps=steps)

    def _add_any(
        self, record: Record, builder: BlockBuilder, attempt: int | None, kind: Hashable | None = None
    ) -> None:
        document = record.document
        if record.undated and record.ts is None:
            self._take_time(record, record.undated)
        for key, value in document.items():
            self.nulls[key] += value is None
        if self.choices.has_adapter_rank and record.rank is not None:
            record.numbers[RANK], record.rank = float(record.rank), None
        step_key = self._steps.key_of(record)
        is_aside = self.choices.has_training and not is_training(record)
        step = self._take_step(record, step_key)
        is_summary = not is_training(record) and (self.choices.has_training or not self.choices.numbers_rows)
        if step is None and is_summary and record.is_row():
            step = self.progress.last_steps.get(record.rank)  # a summary of the steps before it
        if step is None and self.choices.numbers_rows and record.is_row():
            step = self._rows[record.rank] = self._rows.get(record.rank, 0) + 1
            self.progress.last_step = max(step, self.progress.last_step or 0)
        if attempt is None:
            value = next((value for value in record.numbers.values() if isinstance(value, float)), None)
            # A row of an evaluation begins no attempt: its step may be that of a checkpoint, or an epoch.
            counted = None if is_aside else step
            attempt = self._streams.attempt(record.rank, counted, record.epoch(), record.writer, value)
        self.add_starts(builder, attempt)
        ts = builder.last_ts if record.ts is None and record.event is not None else record.ts
        builder.record(step=step, rank=record.rank, ts=ts, origin=FROM_LOG, attempt=attempt)
        self.progress.has_advanced = False
        if not is_aside and record.split not in EVALUATION_SPLITS and _LAST_ENTRY not in document and record.is_row():
            self.progress.row(record.rank, step)
        if _LAST_ENTRY in document:
            self.progress.end = _REPORTED_END
        if record.event is not None:
            self._add_event(record.event, document, builder)
        added = self._add_numbers(record, builder)
        self.layouts.names_changed(self._names.version)
        if not added and record.event is None:
            builder.event(
                EventType.NOTE,
                Severity.INFO,
                "the record contains no number: its content is in details",
                json_text(document),
            )
        is_special = (
            is_aside
            or self.choices.has_adapter_rank
            or record.writer is not None
            or record.undated is not None
            or _UTILISATION in {named[0].name for _, named, _ in added}
            or _LAST_ENTRY in document
            or (self.choices.loss in document and bool(record.sets))
            or (step_key is None and not (self.choices.numbers_rows and is_training(record)))
        )
        if not is_special and record.event is None and record.split is None and len(record.counters) <= 1:
            self._learn(record, step_key, added, kind)

    def _learn(self, record: Record, step_key: str | None, added: list[_Added], kind: Hashable) -> None:
        """Store the layout of rows of training like `record`, so that further rows of this kind are added faster."""
        if record.plans.keys() - {step_key}:
            return
        stored = []
        for key, named, value in added:
            copy = [(key, _as_loss(key, named), value)] if key == self.choices.loss else []
            stored += [(key, named, value), *copy]
        template = kind.document if isinstance(kind, Form) else of_document(record.document)
        layout = layout_of(record.document, template, step_key, stored, has_plan=self._steps.is_plan(step_key))
        self.layouts.learn(kind, layout)

    def _take_time(self, record: Record, text: str) -> None:
        """Store the time that `text` contains, or without a year the time since the first record."""
        record.ts, elapsed = self.clock.moment(text)
        is_told = any(canonical(key).name == _ELAPSED for key in record.quantities())
        if record.ts is None and elapsed is not None and not is_told:
            record.numbers[_ELAPSED] = elapsed

    def record(self, document: Mapping[str, Any]) -> Record:
        """Return the values of the logged object `document`, divided by use."""
        record = record_of(document)
        if record.config is not None:
            self.config = redacted(record.config)
        message = document.get("message", document.get("msg"))
        if record.event is None and isinstance(message, str) and ENDS.search(message):
            record.event = message
        return record

    def choose(self, records: Sequence[Record], *, loss: str | None, dates: Dates | None = None) -> None:
        """Decide about the log, which begins with `records`. What an earlier import has decided remains.

        `decisions.decide` describes `loss`. `dates` is the decision about times without a complete
        date; None if the log has none.
        """
        found = decide([record for record in records if record.is_row()], loss=loss)
        self.choices = dataclasses.replace(found, dates=dates).after(self.choices)
        self.clock = Clock(self.choices.dates or Dates())
        self._steps = StepCounter(self.choices, self.contradictions)

    def revised(self) -> Choices | None:
        """Return the decision that all records of the log suggest; None if they do not contradict the present one."""
        if not self.contradictions:
            return None
        choices = self._steps.revised()
        return dataclasses.replace(choices, loss=None) if self._has_other_loss else choices

    @property
    def are_writers_interleaved(self) -> bool:
        """True if records of several writers alternate in the log."""
        return self._streams.are_interleaved

    def run(self, facts: Mapping[str, Any], **sections: Any) -> ImportedRun:
        """Return the facts about the run that the log contains.

        `facts` are facts about the import, such as the number of lines; `sections` are further values by name. Both are
        stored in the `config` of the run.
        """
        absent = {key: count for key, count in self.nulls.items() if count}
        about = {**facts, "keys": sorted(self.nulls), "null_values": absent}
        if self._rows:
            about["step"] = "number of the record"
        config = {"import": about, "log": self.config, **sections}
        return ImportedRun(
            state=RunState.COMPLETED if self.progress.end else None,
            reason=self.progress.end,
            planned_steps=self.progress.planned_steps,
            config=json_text(config, limit=4 * MAX_JSON),
        )

    def _take_step(self, record: Record, chosen: str | None) -> int | None:
        """Return the value of the counter `chosen`, and add the other counters to the numbers of the record.

        The planned number of steps is stored as a fact about the run.
        """
        for key, value in record.counters.items():
            if key not in {chosen, EPOCH}:
                record.numbers[key] = float(value)
        if record.split in EVALUATION_SPLITS:  # its total is that of the evaluation
            return None if chosen is None else record.counters[chosen]
        own = record.plans.get(chosen or "") if self._steps.is_plan(chosen) else None
        planned = own or next((total for key, total in record.plans.items() if key not in record.counters), None)
        self.progress.planned_steps = planned or self.progress.planned_steps
        if chosen is None:
            return None
        step = record.counters[chosen]
        self.progress.step(step)
        return step

    def _add_numbers(self, record: Record, builder: BlockBuilder) -> list[_Added]:
        """Add all numbers of `record`, including numbers in text, as scalars. Return them."""
        taken: set[str] = set()
        added = []
        self._faults.unkept.update(record.omitted)
        values: dict[str, Any] = {**record.numbers, **record.texts}
        is_evaluation = record.split in EVALUATION_SPLITS or bool(record.sets)
        for key, value in values.items():
            named = self._named(key, record, taken)
            found = self._from_text(key, value, named) if isinstance(value, str) else (named, value)
            if found is None:
                continue
            named, numbers = found
            if self._refuses(named[0].name):
                self._faults.unkept[key] += 1
                continue
            _add_scalars(key, numbers, named, builder)
            if key == self.choices.loss and not isinstance(numbers, list) and not is_evaluation:
                builder.scalar(LOSS, named[0].converted(numbers), None, canonical_labels({SOURCE_NAME: key}))
            taken.add(named[0].name)
            added.append((key, named, numbers))
        return added

    def _from_text(self, key: str, text: str, named: Named) -> tuple[Named, float] | None:
        """Return the stored name of `key` and the number in `text`; None if the text is no number or does not fit."""
        if named[0].unit not in _COUNTS and is_ambiguous(text):
            message = f"{key}: {redacted_text(text)} may have a decimal comma and is not stored"
            self._faults.add(self.line, message)
            return None
        read = _number_in_text(text, named[0])
        if read is None:
            self._faults.unkept.update([key] if quantity(text) or seconds(text) is not None else [])
            return None
        return (read[0], _labels(read[0], key)), read[1]

    def _refuses(self, name: str) -> bool:
        """Return whether a scalar with the stored name `name` is counted and not stored."""
        if name == LOSS and self.choices.loss is not None:
            self._has_other_loss = True
            self.contradictions[f"the loss is {self.choices.loss}, but later records have another loss"] += 1
            return True
        if name not in self._stored:
            if len(self._stored) >= MAX_NAMES:
                return True
            self._stored.add(name)
        return False

    def _named(self, key: str, record: Record, taken: set[str]) -> Named:
        if _LAST_ENTRY in record.document and _AVERAGE.fullmatch(key):
            return own_name(key)
        if record.sets and (named := name_in_set(key, record.sets)):
            return named
        if record.split and (named := name_in_split(key, record.split)):
            return named
        return self._names.name(key, taken, record.document)

    def _add_event(self, name: str, document: Mapping[str, Any], builder: BlockBuilder) -> None:
        found = event_type(name)
        details = {key: value for key, value in document.items() if number(value) is None and value is not None}
        if found == EventType.EXIT:
            self.progress.end = _REPORTED_END
            details = {"reason": ExitReason.COMPLETED, "last_step": self.progress.last_step, **details}
        severity = Severity.CRITICAL if found == EventType.ERROR else Severity.INFO
        builder.event(found, severity, redacted_text(name), json_text(details))


def _is_start(event: str) -> bool:
    """Return whether `event` is a launch, or that a checkpoint is loaded."""
    is_load = re.search("load|restor|resum", event.lower())
    return event_type(event) in {EventType.LAUNCH, EventType.CHECKPOINT if is_load else EventType.LAUNCH}


def _as_loss(key: str, named: Named) -> Named:
    """Return the name of the copy that is stored as the loss for the quantity `key`, whose stored name is `named`."""
    alias = dataclasses.replace(named[0], name=LOSS, unit=None, source_unit=None)
    return alias, canonical_labels({SOURCE_NAME: key})


@functools.lru_cache(maxsize=4096)
def _labels(alias: Alias, key: str) -> str | None:
    return alias.labels(key)


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
    """Return the number in `text` and the quantity `alias` in the unit of the text; None if the text does not fit."""
    if alias.unit == "seconds" and alias.factor == 1.0 and (duration := seconds(text)) is not None:
        return alias, duration
    if (
        alias.unit is None
        and (_SPELLED.search(text) or _TIME.search(alias.name))
        and (duration := seconds(text)) is not None
    ):
        return in_unit(alias, "s"), duration
    found = quantity(text)
    if found is None:
        return None
    value, unit = found
    if unit is None:
        return alias, value
    if unit in MULTIPLES and (unit != "B" or alias.unit in _COUNTS):
        return _multiplied(value, MULTIPLES[unit], alias)
    # A unit after the number of an unknown key may mean anything: "7b" is the size of a model.
    known = UNITS.get(unit.lower())
    if known is None or alias.unit is None or known.name != alias.unit:
        return None
    return in_unit(alias, unit), value


def _multiplied(value: float, power: int, alias: Alias) -> tuple[Alias, float]:
    """Return `value` times a power of 1000, or of 1024 for memory in MiB or GiB, as a value of the quantity `alias`.

    The letter alone is the unit of bytes and of TFLOP/s: `8.86G` is 8.86 GB, and `131.7T` is 131.7 TFLOP/s.
    """
    is_binary = (alias.source_unit or "").endswith("iB")
    factor = 1024.0**power if is_binary else 1000.0**power
    if alias.unit == "bytes":
        return in_unit(Alias(alias.name), "bytes"), value * factor
    return alias, value * (1000.0 ** (power - 4) if alias.unit == "TFLOP/s" else factor)
