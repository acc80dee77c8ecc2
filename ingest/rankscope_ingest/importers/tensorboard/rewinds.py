"""Where an event file stands, and restarts told from its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_TAGS: Final = 1_000_000
"""Tags beyond are read, but neither their descriptions nor their restarts are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What the folder of a file says about it."""

    rank: int | None = None
    attempt: int = 0
    family: str | None = None


class Rewinds:
    """Counts restarts over the files of one folder: per tag, since tags may move at different paces."""

    def __init__(self) -> None:
        self.attempt = 0
        self._last: dict[int, tuple[int, int]] = {}
        self._highest: int | None = None

    def attempt_of(self, tag: bytes, step: int) -> int:
        """Return the attempt that `step` of `tag` belongs to."""
        key = hash(tag)
        last = self._last.get(key)
        if last is not None and last[0] == self.attempt and step < last[1]:
            self.attempt += 1
        if last is not None or len(self._last) < MAX_TAGS:
            self._last[key] = (self.attempt, step)
        self._highest = step if self._highest is None else max(self._highest, step)
        return self.attempt

    def restart(self, step: int) -> None:
        """Note a session that starts at `step`: what was written from there on has been abandoned."""
        if self._highest is not None and step <= self._highest:
            self.attempt += 1
            self._highest = None
