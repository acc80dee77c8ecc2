"""Select lines of the event log of a run by type, severity and rank."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np

from rankscope_contract.model.events import EventType, Severity
from rankscope_view.data.detail import RunDetail
from rankscope_view.data.events import EVENT_GROUPS, NEWEST, EventLine, EventLog, Group, event_log
from rankscope_view.data.series import EVAL_LOSS, GRAD_NORM, LEARNING_RATE, LOSS

TYPES: Final = tuple(dict.fromkeys(str(name) for name in (*Group, *EventType)))
"""Names that select lines: groups of the event log, and types of events."""

_ORDER: Final[dict[str, int]] = {
    severity: place for place, severity in enumerate((Severity.INFO, Severity.WARNING, Severity.CRITICAL))
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EventQuery:
    """Selection of lines: by any of `types`, at least `severity`, and of `rank`. Without a value, all are selected.

    A line without a severity, such as that of a step, has the severity info. A line without ranks is of no rank.
    """

    types: Collection[str] = ()
    severity: Severity = Severity.INFO
    rank: int | None = None
    newest: int = NEWEST

    def selects(self, line: EventLine) -> bool:
        """Return whether the query selects `line`."""
        if self.types and line.group not in self.types and line.type not in self.types:
            return False
        if _ORDER.get(line.severity or Severity.INFO, 0) < _ORDER[self.severity]:
            return False
        return self.rank is None or self.rank in line.ranks


def select_events(detail: RunDetail, query: EventQuery) -> EventLog:
    """Return the newest lines of the event log of a run that `query` selects, with one line for each step.

    The counts by group are those of all lines.
    """
    loss = detail.history(LOSS)
    if query.severity is not Severity.INFO:  # the only steps with a severity are those without a finite loss
        loss = loss.select(~np.isfinite(loss.value))
    others = [detail.history(name) for name in (GRAD_NORM, LEARNING_RATE)]
    whole = event_log(detail.lines, detail.history(LOSS), others, detail.history(EVAL_LOSS), newest=0)
    has_steps = query.rank is None and (not query.types or Group.STEP in query.types)
    groups = () if has_steps else EVENT_GROUPS
    every = len(detail.lines) + len(detail.history(EVAL_LOSS)) + query.newest
    found = event_log(detail.lines, loss, others, detail.history(EVAL_LOSS), groups=groups, newest=every)
    lines = [line for line in found.lines if query.selects(line)]
    return EventLog(lines=tuple(lines[: query.newest]), counts=whole.counts)
