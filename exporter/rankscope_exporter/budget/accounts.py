"""What the monitor costs, as rows of the store: from time to time, with the record of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from rankscope_exporter.drafts import Draft
from rankscope_exporter.moments import Follower
from rankscope_exporter.record import Scalar

EVERY_SECONDS: Final = 10.0


class Accounts(Follower):
    """Adds what each thread has cost, and the stretch, to the first step and the last, and every so often."""

    def __init__(
        self,
        seconds: Callable[[], Mapping[str, float]],
        stretch: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._stretch = stretch
        self._clock = clock
        self._due_at = float("-inf")

    def step_ends(self, draft: Draft) -> None:
        """Have the numbers read on the publisher's thread."""
        now = self._clock()
        if now >= self._due_at:
            self._due_at = now + EVERY_SECONDS
            draft.later.append(self._scalars)

    def training_ends(self) -> None:
        """Have them once more with the last step."""
        self._due_at = float("-inf")

    def _scalars(self) -> list[Scalar]:
        spent = [
            Scalar("overhead_seconds", value, "seconds", {"thread": name}) for name, value in self._seconds().items()
        ]
        return [*spent, Scalar("sampling_stretch", float(self._stretch()))]
