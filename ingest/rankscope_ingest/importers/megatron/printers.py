"""Who printed a row, and which rank that is."""

from __future__ import annotations

import numpy as np

from rankscope_ingest.importers.megatron.columns import Integers
from rankscope_ingest.importers.megatron.groups import NO_NUMBER
from rankscope_ingest.importers.megatron.rows import Printer, printer


class Printers:
    """Numbers the printers of a log as they appear."""

    def __init__(self) -> None:
        self._numbers: dict[Printer, int] = {}
        self._tasks_are_ranks: bool | None = None

    def number(self, one: Printer) -> int:
        """Return the number of a printer."""
        return self._numbers.setdefault(one, len(self._numbers))

    def of_labels(self, labels: tuple[str, ...], codes: Integers) -> Integers:
        """Return the number of the printer of each row; `codes` says which of the prefixes it has."""
        by_code = np.array([self.number(printer(label)) for label in labels], np.int64)
        return by_code[codes]

    def ranks(self, printers: Integers, steps: Integers) -> Integers:
        """Return the rank of each row, NO_NUMBER where the log does not say.

        The number that srun puts in front is that of the task which printed, and the rows of a run may come from
        different ones: it is a rank only where several tasks print the same step.
        """
        known = list(self._numbers)
        tasks = np.array([NO_NUMBER if one.task is None else one.task for one in known] or [NO_NUMBER], np.int64)
        ranks = np.array([NO_NUMBER if one.rank is None else one.rank for one in known] or [NO_NUMBER], np.int64)
        by_task, found = tasks[printers], ranks[printers]
        if self._tasks_are_ranks is None:
            self._tasks_are_ranks = _repeat_steps(by_task, steps)
        return np.where(found == NO_NUMBER, by_task, found) if self._tasks_are_ranks else found


def _repeat_steps(tasks: Integers, steps: Integers) -> bool | None:
    """Return whether several tasks print the same steps, None while only one has printed."""
    known = tasks != NO_NUMBER
    if len(np.unique(tasks[known])) < 2:
        return None
    pairs = np.unique(np.stack([steps[known], tasks[known]]), axis=1)
    return bool(len(np.unique(pairs[0])) < pairs.shape[1])
