"""The values of one logged object, divided by use: step, rank, time, numbers and text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rankscope_contract.model.events import EventType
from rankscope_ingest.importers.common.keys import EPOCH, event_class
from rankscope_ingest.importers.common.values import quantity, seconds, whole


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
        if slash and (total := whole(planned)):
            self.plans[key] = total
        self.counters[key] = step
        return True
