"""Select the counter of a record that is its step, according to the decision about the log."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rankscope_ingest.importers.common.choices import Choices
from rankscope_ingest.importers.common.keys import BATCH, EPOCH, step_rank
from rankscope_ingest.importers.common.records import Record


class StepCounter:
    """Selects the step of each record of one log, and counts the records that contradict the decision `choices`.

    `contradictions` has the number of these records for each contradiction.
    """

    def __init__(self, choices: Choices, contradictions: Counter[str]) -> None:
        self._choices = choices
        self._contradictions = contradictions
        self._last: dict[tuple[Any, ...], dict[str, int]] = {}  # per rank and writer, the last counters

    def key_of(self, record: Record) -> str | None:
        """Return the name of the counter that is the step of `record`, or None if the record has no step.

        The decision about the log gives the order of the counters; a counter that it does not contain is the last.
        """
        choices = self._choices
        if len(record.counters) == 1 and not record.plans and not choices.refused:
            return next(iter(record.counters))
        if EPOCH in choices.steps and (epoch := record.epoch()) is not None and epoch.is_integer():
            record.counters.setdefault(EPOCH, int(epoch))
        for key, value in record.plans.items():
            if key in choices.steps and value is not None:
                record.counters.setdefault(key, value)
        allowed = [key for key in record.counters if key not in choices.refused]
        if not allowed:
            return None
        preferred = [key for key in choices.steps if key in allowed]
        chosen = preferred[0] if preferred else min(allowed, key=step_rank)
        if len(record.counters) > 1:
            self._check(record, chosen)
        return chosen

    def is_plan(self, chosen: str | None) -> bool:
        """Return whether the total of the counter `chosen` is the planned number of steps of the run."""
        return chosen is not None and chosen not in {BATCH, EPOCH} and not self._choices.is_within_epoch

    def _check(self, record: Record, chosen: str) -> None:
        """Count a record that contradicts the choice of the step: the step falls and another counter rises."""
        before = self._last.get(record.stream, {})
        if record.counters[chosen] < before.get(chosen, 0):
            rising = [key for key, value in record.counters.items() if value > before.get(key, value)]
            self._contradictions.update(f"the step is {chosen}, but {key} rises where it falls" for key in rising[:1])
        self._last[record.stream] = record.counters
