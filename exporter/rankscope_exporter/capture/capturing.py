"""More is measured at some steps: a change that all ranks make at the same step, and that ends by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from rankscope_contract.events import Event, EventType
from rankscope_exporter.sampling.collection import Collection, Lineup, Part

CAPTURE: Final = "capture"
"""The source that such a change names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """What fired: on which rank, at which of its steps."""

    rank: int
    step: int
    rule: str | None
    kind: str | None
    tensor: str | None
    op: str | None
    value: float | None
    message: str

    @classmethod
    def of(cls, event: Event, step: int, rank: int) -> Reason:
        """Return what an anomaly on this rank says."""
        value = None if event.value is None else float(event.value)
        return cls(
            rank=rank,
            step=step,
            rule=event.rule,
            kind=event.kind,
            tensor=event.tensor,
            op=event.op,
            value=value,
            message=event.message,
        )

    def document(self) -> dict[str, Any]:
        """Return it as ranks tell each other."""
        return asdict(self)

    def event(self, state: str, message: str, **more: Any) -> Event:
        """Return an event that says what became of it."""
        details = {"state": state, "rank": self.rank, "fired_step": self.step, "reason": self.message, **more}
        return Event(
            type=EventType.CAPTURE,
            rule=self.rule,
            kind=self.kind,
            tensor=self.tensor,
            op=self.op,
            value=self.value,
            message=message,
            details=json.dumps(details),
        )


@dataclass(slots=True, kw_only=True)
class Capturing:
    """One capture, to come. `begins` says whether it may, and what is to be said."""

    reason: Reason
    step: int | None
    parts: list[Part]
    begins: Callable[[Reason, int, int | None], list[Event]]
    began: Callable[[], None]
    lineup: Lineup | None = None

    def is_due(self, step: int) -> bool:
        """Return whether it holds from step number `step` on at the latest."""
        return self.step is None or self.step <= step

    def ready(self, collection: Collection) -> None:
        """Register the hooks of what is captured; again where a switch has sent some of it away meanwhile."""
        if self.lineup is None or not collection.stands(self.lineup):
            self.lineup = collection.lineup(self.parts)

    def take(self, collection: Collection, step: int) -> list[Event]:
        """Measure more from this step on, unless enough was captured."""
        events = self.begins(self.reason, step, self.step)
        if events:
            self.ready(collection)
            collection.capture(self.lineup or [])
            self.began()
        else:
            collection.dismiss(self.lineup or [])
        return events

    def shown(self) -> dict[str, Any]:
        """Return it as /config shows what is to come."""
        return {"capture": [quantity.name for quantity, _ in self.parts], "reason": self.reason.message}
