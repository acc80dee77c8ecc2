"""The values of one logged object, divided by use: step, rank, time, numbers and text.

Objects may contain a line of text, or the numbers of a record, inside of other fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rankscope_contract.model.events import EventType
from rankscope_ingest.importers.common.log_names import EPOCH, Role, evaluation_sets, event_type, role_of
from rankscope_ingest.importers.common.values import FORM, micros, number, quantity, seconds, whole

MAX_DEPTH: Final = 8
MAX_NUMBERS: Final = 4096
MAX_LIST: Final = 256

_LARGEST_RANK: Final = 1 << 31
_HISTORY: Final = "log_history"


@dataclass(slots=True)
class Record:
    """The values of one logged object, divided by use (step, rank, time, numbers, text).

    The numbers do not have stored names yet.
    """

    document: Mapping[str, Any]
    sets: tuple[str, ...]
    numbers: dict[str, float | list[float | None]] = field(default_factory=dict)
    omitted: list[str] = field(default_factory=list)  # keys of lists and objects whose numbers are not stored
    texts: dict[str, str] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)  # the values of counters; one of them may be the step
    plans: dict[str, int | None] = field(default_factory=dict)  # planned value of a counter, or planned steps
    rank: int | None = None
    ts: int | None = None
    undated: str | None = None  # a time without a complete date
    event: str | None = None
    split: str | None = None
    writer: str | None = None  # id of the process or host
    config: Any = None  # the settings of the training

    def epoch(self) -> float | None:
        """Return the epoch in the object as a number, or None if the object has no epoch.

        The value in the log may be a text.
        """
        for key, value in self.numbers.items():
            if key.lower() == EPOCH:
                return value if isinstance(value, float) else None
        found = quantity(next((text for key, text in self.texts.items() if key.lower() == EPOCH), ""))
        return found[0] if found else None

    def candidates(self) -> Mapping[str, int]:
        """Return the values of the counters, and of plans that may be counters, by name."""
        return {key: value for key, value in self.plans.items() if value is not None} | self.counters

    @property
    def stream(self) -> tuple[Any, ...]:
        """The rank and the writer of the record."""
        return self.rank, self.writer

    def quantities(self) -> Iterable[str]:
        """Return the keys of the numbers and texts in the object, without the epoch."""
        return (key for key in (*self.numbers, *self.texts) if key.lower() != EPOCH)

    def is_row(self) -> bool:
        """Return whether the object contains a number, as such or in a text, and reports no event other than a note.

        Examples of other events are the start, the end and a failure of training.
        """
        if self.event is not None and event_type(self.event) != EventType.NOTE:
            return False
        return bool(self.numbers) or any(quantity(text) or seconds(text) for text in self.texts.values())

    def take_step(self, key: str, value: Any) -> bool:
        """Store the step that `value` contains: `12`, `12.0`, `"12"`, `"12/873"` (step and planned steps), `[3, 12]`.

        Of a list, the first number is the epoch and the last one the step. Return False if `value` has another form.
        """
        if isinstance(value, list):
            counts = [count for each in value if (count := whole(each)) is not None]
            if len(counts) < len(value):
                return False
            if counts:
                self.numbers[EPOCH] = float(counts[0])
            if len(counts) > 1:
                self.counters[key] = counts[-1]
            return True
        step_text, slash, planned = value.partition("/") if isinstance(value, str) else (value, "", None)
        step = whole(step_text)
        if step is None:
            return False
        if slash and (total := whole(planned)):
            self.plans[key] = total
        self.counters[key] = step
        return True


def record_of(document: Mapping[str, Any]) -> Record:
    """Return the values of the logged object `document`, divided by use."""
    record = Record(document, evaluation_sets(document))
    _collect(document, "", record, 0)
    return record


def _collect(document: Mapping[str, Any], path: str, record: Record, depth: int) -> None:
    for name, value in document.items():
        key = f"{path}{name}"
        if value is None or len(record.numbers) >= MAX_NUMBERS:
            record.omitted += [] if value is None else [key]
            continue
        role = role_of(key)
        if role is Role.VALUE or not _take_role(role, key, value, record):
            _collect_value(key, value, record, depth)


def _collect_value(key: str, value: Any, record: Record, depth: int) -> None:
    found = number(value)
    if found is not None:
        record.numbers[key] = found
    elif isinstance(value, str):
        record.texts[key] = value
    elif isinstance(value, dict | list | tuple) and value:
        if depth >= MAX_DEPTH or key == _HISTORY or (not isinstance(value, dict) and len(value) > MAX_LIST):
            record.omitted.append(key)  # ms-swift's last row repeats the history
        elif isinstance(value, dict):
            _collect(value, f"{key}/", record, depth + 1)
        else:
            _collect_list(key, value, record, depth)


def _collect_list(key: str, items: Sequence[Any], record: Record, depth: int) -> None:
    """Add the numbers of the list `items` to `record`.

    A list of numbers is added under `key`. If `items` contains objects or lists, the key of each number in them begins
    with `key`, a slash and the index of the object or list.
    """
    numbers = [number(item) for item in items]
    if any(isinstance(item, dict | list | tuple) for item in items):
        places = {str(place): item for place, item in enumerate(items) if not isinstance(item, str)}
        _collect(places, f"{key}/", record, depth + 1)
    elif all(item is None or found is not None for item, found in zip(items, numbers, strict=True)) and any(
        found is not None for found in numbers
    ):
        record.numbers[key] = numbers
    elif any(found is not None for found in numbers):
        record.omitted.append(key)


def _take_role(role: Role, key: str, value: Any, record: Record) -> bool:
    """Store `value` as the step, rank, time or other property that `role` selects.

    Return False if the value is not valid for that property. The caller then treats the value as an ordinary one.
    """
    match role:
        case Role.STEP:
            return record.take_step(key, value)
        case Role.STEP_OF_PLAN:
            return isinstance(value, str) and record.take_step("step", value)
        case Role.PLAN:
            record.plans[key] = whole(value)
            return record.plans[key] is not None
        case Role.RANK:
            rank = whole(value)
            record.rank = rank if rank is not None and 0 <= rank < _LARGEST_RANK else record.rank
            return True
        case Role.WRITER if isinstance(value, str | int):
            record.writer = record.writer or str(value)
        case Role.TIME:
            moment = micros(value)
            record.ts = moment if record.ts is None else record.ts
            if moment is None and isinstance(value, str) and FORM.search(value):
                record.undated = record.undated or value
                return True
            return moment is not None
        case Role.SOURCE:
            return True
        case Role.EVENT if isinstance(value, str):
            record.event = value
            return True
        case Role.SPLIT if isinstance(value, str):
            record.split = value.lower()
        case Role.CONFIG if isinstance(value, dict):
            record.config = value
            return True
    return False


_LINES: Final = ("log", "MESSAGE", "textPayload")
"""Keys under which log drivers (Docker, Fluentd, journald, Google Cloud) write each line of a program."""
_MESSAGES: Final = ("message", "msg", "text", "event", "body", "@message", "line")
"""Keys under which logging libraries write a message, which may be a line of a log."""
_TEXTS: Final = frozenset((*_LINES, *_MESSAGES))
_PARTS: Final = ("data", "metadata", "log", "fields", "jsonPayload")
"""Keys of objects whose fields are those of the record."""
NAMES: Final = ("key", "name", "metric", "tag", "metric_name")
"""Keys whose value is the name of the number under the key `value`."""
_VALUE: Final = "value"
_OPENED: Final = frozenset((*_PARTS, _VALUE))
_ABOUT_EVENTS: Final = ("event_type", "namespace")


def text_in(document: Mapping[str, Any]) -> tuple[str, bool] | None:
    """Return the line of text in an object that only carries it, and whether the object is one of a log driver.

    Return None for an object with a counter or without text.
    """
    if _TEXTS.isdisjoint(document) or any(role_of(key) is Role.STEP for key in document):
        return None
    for keys in (_LINES, _MESSAGES):
        for key in keys:
            if isinstance(text := document.get(key), str):
                return text, keys is _LINES
    return None


def place_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the time and the rank in an object that carries a line of text."""
    kept = {key: value for key, value in document.items() if role_of(key) is Role.RANK}
    times = (micros(value) for key, value in document.items() if role_of(key) is Role.TIME)
    found = next((time for time in times if time is not None), None)
    return kept if found is None else {"timestamp": found, **kept}


def opened(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an object with the fields of its parts, and with a number under the name that another field contains.

    Examples: `{"data": {"loss": 2.5}}`, and `{"key": "loss", "value": 2.5}`. A value of null makes the name an event.
    """
    if _OPENED.isdisjoint(document):
        return document
    found: dict[str, Any] = {}
    for key, value in document.items():
        if key in _PARTS and isinstance(value, Mapping):
            found |= {name: each for name, each in value.items() if name not in document}
        else:
            found[key] = value
    named = next((key for key in NAMES if isinstance(found.get(key), str)), None)
    if named is None or _VALUE not in found:
        return found
    name, value = found.pop(named), found.pop(_VALUE)
    for key in _ABOUT_EVENTS:
        found.pop(key, None)
    return {**found, "event": name} if value is None else {**found, name: value}
