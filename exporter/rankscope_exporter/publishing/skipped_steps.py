"""Decides which steps with gradients and without an update have skipped their update, and publishes events for them.

A loop may need several backward passes for one update, and delete the gradients between them, as gradient surgery and
SAM do. Each of these passes looks like a step that skips its update. The loop repeats the same number of them before
each update. An event is therefore held back until it is known whether the number is repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rankscope_exporter.records.pending_step import PendingStep, skipped_event
from rankscope_exporter.records.step_record import StepRecord

MOST_PASSES: Final = 8
"""Largest number of backward passes before an update that is considered. More skipped steps in a row are reported."""

_SEVERAL_PASSES: Final = (
    "every step with an update follows the same number of steps whose gradients were deleted without an update: if an "
    'update needs several passes, as with gradient surgery or SAM, set steps="explicit" and call end_step() after it'
)


class SkippedSteps:
    """The skipped steps that are not reported yet. Used on the publisher thread only.

    `publish` stores a record with the event of a skipped step. `tell` is called once, with a notice, if the loop
    repeats a fixed number of skipped steps before each update.
    """

    def __init__(self, publish: Callable[[StepRecord], object], tell: Callable[[str], None]) -> None:
        self._publish = publish
        self._tell: Callable[[str], None] | None = tell
        self._held: list[StepRecord] = []
        self._count = self._before = 0  # skipped steps since the last update, and before it
        self._passes = 0  # repeated number of skipped steps before each update; 0 if none is known
        self._is_irregular = False  # the latest numbers differed, and no event is held back

    def skipped(self, step: PendingStep) -> None:
        """Add `step`, which has ended without an update."""
        record = StepRecord(ts=step.ts, monotonic=step.monotonic, step=step.step, events=(skipped_event(),))
        self._held.append(record)
        self._count += 1
        if self._count > (self._passes or self._before or MOST_PASSES) or self._is_irregular:
            self._report()

    def updated(self) -> None:
        """Add a step with an update."""
        count, before = self._count, self._before
        self._count, self._before = 0, count
        if count and count in (before, self._passes):
            self._passes, self._is_irregular = count, False
            self._held.clear()
            if self._tell is not None:
                self._tell(_SEVERAL_PASSES)
                self._tell = None
        elif self._passes:
            self._passes = 0
        elif before:
            self._report()

    def finish(self) -> None:
        """Report the steps that were held back, because training ends."""
        if not self._passes:
            self._report()

    def _report(self) -> None:
        self._passes, self._is_irregular = 0, True
        for record in self._held:
            self._publish(record)
        self._held.clear()
