"""The log of sampling changes that all ranks share, in the key-value store of the process group.

Each change is the value of a key with the number of the change, and names the step from which it is valid. A rank adds
a change with the next number by compare-and-set. If another rank has used this number, the rank reads that change, and
takes the number after it. All ranks poll the log, and apply each change at the first step with at least the number in
the change. A rank that reads a change later applies it at its next step. No rank waits for another one.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from rankscope_contract.model.identity import Identity
from rankscope_exporter.adapters.process_group import default_group

log = logging.getLogger("rankscope")

LEAST_STEPS: Final = 4
MOST_STEPS: Final = 1_000_000
_POLLS_PER_MARGIN: Final = 6
"""Number of poll intervals from the writing of a change to the step from which it is valid."""

_sessions = itertools.count(1)
"""Counter that numbers the monitors which a process attaches one after the other.

The same monitor has the same number on all ranks.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the sampling: a JSON document with its settings, and the step from which they are valid."""

    document: str
    source: str
    step: int | None = None
    """The change applies at the first step with at least this number; None means the next step."""
    stamp: int | None = None
    """A number that orders the changes of one source, such as the time of an edit of the switch file.

    A change is not added to the log if the log has one of the same source with this stamp or a higher one. Several
    ranks that read the same edit therefore add one change.
    """


class ChangeLog:
    """The log of changes, as one rank reads and writes it. Only one thread uses it at a time.

    The methods of torch's `store` wait for no rank. The function `pace` returns the number of the last step that began
    on this rank, and the seconds per step. A change is valid from `margin_seconds` after it was written, and at least
    `LEAST_STEPS` steps.
    """

    def __init__(
        self, store: Any, name: str, pace: Callable[[], tuple[int, float | None]], *, margin_seconds: float
    ) -> None:
        self.unread: deque[Change] = deque()
        """The changes in the order of the log that were read from the store, and that the caller has not removed."""
        self._store = store
        self._name = name
        self._pace = pace
        self._margin_seconds = margin_seconds
        self._length = 0
        self._step = 0  # of the last change
        self._stamps: dict[str, int] = {}  # by source, the highest stamp in the log

    def begin(self, first: Change) -> Change:
        """Return the change with which all ranks start: `first` of the rank that calls this method first."""
        self._add(first)
        return self.unread.pop()

    def write(self, change: Change, until: int | None = None) -> bool:
        """Add `change` to the log, valid from a later step. Return True.

        If `until` is given, later changes of the same source with stamps of at most `until` are not added.
        """
        while True:
            self.poll()
            if change.stamp is not None and change.stamp <= self._stamps.get(change.source, -1):
                return True
            step = max(self._step, self._next_step())
            added = replace(change, step=step, stamp=change.stamp if until is None else until)
            if self._add(added) == added:
                return True

    def poll(self) -> None:
        """Read the changes that other ranks have added."""
        while self._store.check([self._key]):
            self._append(self._store.get(self._key))

    def count(self, name: str, amount: int) -> int:
        """Add `amount` to the counter `name`, which all ranks share, and return its new value."""
        return int(self._store.add(f"{self._name}/count/{name}", amount))

    @property
    def _key(self) -> str:
        return f"{self._name}/{self._length}"

    def _add(self, change: Change) -> Change:
        """Add `change` if no rank has added one with the next number; return the change that has this number."""
        text = json.dumps(asdict(change), sort_keys=True)
        return self._append(self._store.compare_set(self._key, "", text))  # "": the key does not exist yet

    def _append(self, text: bytes) -> Change:
        change = Change(**json.loads(text))
        self._length += 1
        self._step = max(self._step, change.step or 0)
        if change.stamp is not None:
            self._stamps[change.source] = max(change.stamp, self._stamps.get(change.source, -1))
        self.unread.append(change)
        return change

    def _next_step(self) -> int:
        """Return a step that no rank should have reached when it reads a change that is written now."""
        step, seconds = self._pace()
        steps = 0 if seconds is None else min(MOST_STEPS, math.ceil(self._margin_seconds / max(seconds, 1e-6)))
        return step + max(LEAST_STEPS, steps)


def change_log_of(
    identity: Identity, pace: Callable[[], tuple[int, float | None]], poll_seconds: float
) -> ChangeLog | None:
    """Return the log of changes of the process group; None if there is only one rank, or if the group has no store."""
    group = default_group() if identity.world_size > 1 else None
    if group is None:
        return None
    store = group.store()
    name = f"rankscope/switch/{identity.launch_id}/{next(_sessions)}"
    try:
        store = store.clone()  # a separate connection: callers that wait on the other one do not block it
    except (AttributeError, NotImplementedError, RuntimeError):  # not supported by all stores
        log.debug("the store of the process group does not support a second connection: the existing one is used")
    return ChangeLog(store, name, pace, margin_seconds=_POLLS_PER_MARGIN * poll_seconds)
