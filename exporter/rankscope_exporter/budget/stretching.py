"""Sampling at every k-th of the steps that were chosen: a change that all ranks make at the same step."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rankscope_contract.events import Event, EventType, Severity
from rankscope_exporter.budget.share import percent
from rankscope_exporter.sampling.collection import Collection

BUDGET: Final = "budget"
"""The source that such a change names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a rank asks of all: numbers, as they stand in the event of each."""

    stretch: int
    share: float
    max_overhead: float
    rank: int
    changes: int
    """How many changes had taken place where that was measured: behind another one it means nothing any more."""

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Need:
        """Return what a document says."""
        return cls(**document)

    def document(self) -> dict[str, Any]:
        """Return it as ranks tell each other."""
        return {name: getattr(self, name) for name in ("stretch", "share", "max_overhead", "rank", "changes")}


@dataclass(slots=True, kw_only=True)
class Stretching:
    """One change of the stretch. `stretch` takes it over and returns what held before; None where it means nothing."""

    need: Need
    step: int | None
    stretch: Callable[[Need], int | None]

    def is_due(self, step: int) -> bool:
        """Return whether it holds from step number `step` on at the latest."""
        return self.step is None or self.step <= step

    def ready(self, collection: Collection) -> None:
        """Need no hooks."""

    def take(self, collection: Collection, step: int) -> list[Event]:
        """Stretch from this step on, which is measured or not as all later ones are."""
        before = self.stretch(self.need)
        if before is None or before == self.need.stretch:
            return []
        collection.stretch(self.need.stretch)
        return [self._event(before, step)]

    def shown(self) -> dict[str, Any]:
        """Return it as /config shows what is to come."""
        return {"stretch": self.need.stretch, "source": BUDGET}

    def _event(self, before: int, step: int) -> Event:
        need = self.need
        details = {
            "step": step,
            "agreed_step": self.step,
            "was": before,
            "now": need.stretch,
            "share": need.share,
            "max_overhead": need.max_overhead,
            "rank": need.rank,
        }
        severity = Severity.WARNING if need.stretch > before else Severity.INFO
        message = f"from step {step} on {sentence(need, before)}"
        return Event(type=EventType.BUDGET, severity=severity, message=message, details=json.dumps(details))


def sentence(need: Need, before: int) -> str:
    """Return what is measured from now on, and why."""
    what = f"one in {need.stretch} of the chosen steps is measured" if need.stretch > 1 else "every chosen step is"
    allowed = f"max_overhead is {percent(need.max_overhead)}"
    share = f"measuring one in {before} costs {percent(need.share)} of the time of training" if before > 1 else ""
    share = share or f"measuring costs {percent(need.share)} of the time of training"
    return f"{what}: {share} on rank {need.rank}, {allowed}"
