"""Changes beside what is measured: it goes on below, at other steps or with more, and nobody switched it."""

from __future__ import annotations

from typing import Any, Protocol

from rankscope_contract.events import Event
from rankscope_exporter.sampling.collection import Collection


class Aside(Protocol):
    """Comes at a step, as a change of what is measured does."""

    step: int | None
    """From the first step at or behind this one on; None from the next one on."""

    def is_due(self, step: int) -> bool:
        """Return whether it holds from step number `step` on at the latest."""
        ...

    def ready(self, collection: Collection) -> None:
        """Register hooks, outside of the forward pass that would miss some of them. May be called again."""
        ...

    def take(self, collection: Collection, step: int) -> list[Event]:
        """Take place as step number `step` begins; return what is to be said."""
        ...

    def shown(self) -> dict[str, Any]:
        """Return it as /config shows what is to come."""
        ...


class Companion(Protocol):
    """Goes along with the steps, on the training thread."""

    def step_begins(self, step: int) -> list[Event]:
        """Note that step number `step` is about to begin; return what is to be said."""
        ...

    def switched(self, step: int) -> list[Event]:
        """Note that something else is measured from step number `step` on, because somebody said so."""
        ...

    def shown(self) -> dict[str, Any]:
        """Return where it stands, as /config shows it."""
        ...
