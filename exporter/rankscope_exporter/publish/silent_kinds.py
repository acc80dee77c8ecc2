"""Finds kinds of rows that are configured and absent, and publishes one notice for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rankscope_contract.model.kinds import Kind
from rankscope_contract.model.schema import Plan
from rankscope_exporter.records.record import OF_MICRO_BATCHES, ExpectedRows

PATIENCE: Final = 3
"""The number of sampled steps with an update after which a kind without rows is reported."""


_OF_KINDS: Final = ("features", "histograms")
"""Datasets with a column for the kind of each row."""


@dataclass(slots=True)
class _Seen:
    """The rows of one kind so far."""

    steps_with: int = 0
    steps_without: int = 0  # since the last step with rows
    is_lost: bool = False


class SilentKinds:
    """Reports expected kinds that have no rows in the first steps, or that have had rows and have none any more.

    Used on the publisher thread only.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self._seen: dict[str, _Seen] = {}
        self._present: set[str] = set()
        self._plan: Plan | None = None
        self._names: list[str] = []  # of the kinds in the plan
        self._kinds = np.zeros(0, np.int64)  # by entry of the plan: position of its kind in `_names`

    def see(self, plan: Plan, present: npt.NDArray[np.bool_]) -> None:
        """Store the kinds of statistics that a step has. `present` is true for the entries of `plan` with a row."""
        if plan is not self._plan:
            positions: dict[str, int] = {}
            names = (_name(entry.kind, entry.micro_step) for entry in plan.entries)
            self._kinds = np.array([positions.setdefault(name, len(positions)) for name in names], np.int64)
            self._plan, self._names = plan, list(positions)
        self._present = {self._names[kind] for kind in np.unique(self._kinds[present])}

    def judge(self, expected: Iterable[ExpectedRows], rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Publish notices about kinds that the step should have. `rows` has the rows of its other datasets."""
        present, self._present = self._present, set()
        present.update(row["kind"] for dataset in _OF_KINDS for row in rows.get(dataset, ()))
        for item in expected:
            never, lost = [], []
            for kind in sorted(item.kinds):
                seen = self._seen.setdefault(kind, _Seen())
                seen.steps_without = 0 if kind in present else seen.steps_without + 1
                seen.steps_with += kind in present
                if seen.steps_without == PATIENCE and not seen.steps_with and not item.names_unmeasured:
                    never.append(kind)
                elif seen.steps_without == PATIENCE <= seen.steps_with and not seen.is_lost:
                    seen.is_lost = True
                    lost.append(kind)
            why = f" ({item.remark})" if item.remark else ""
            if never:
                self.tell(f"{item.quantity}: {', '.join(never)} had no rows in {PATIENCE} measured updates{why}")
            if lost:
                self.tell(f"{item.quantity}: {', '.join(lost)} had rows, and none in {PATIENCE} measured updates{why}")


def _name(kind: str, micro_step: int | None) -> str:
    return OF_MICRO_BATCHES if kind == Kind.GRAD_UNREDUCED and micro_step is not None else str(kind)
