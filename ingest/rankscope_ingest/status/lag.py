"""For how long records that ranks published have not been durable. Pure: the caller looks in, and says when.

A rank tells how far it is, not when it got there; so each look that finds it further is remembered until the store has
caught up with it. The lag is that of the oldest such look, and never more wrong than the time between two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from rankscope_ingest.target import Target

MOST_LOOKS: Final = 256
"""Of one rank; where a store takes nothing for hours, every other one is forgotten: the oldest is what counts."""

_Looks = deque[tuple[int, float]]


class LagClock:
    """What was seen of each rank that is not durable yet."""

    def __init__(self) -> None:
        self._looks: dict[str, _Looks] = {}

    def look(self, targets: Iterable[Target], now: float) -> None:
        """Note how far each rank is; what is no longer among `targets` is forgotten."""
        self._looks = {target.incarnation: self._seen(target, now) for target in targets}

    def seconds(self, target: Target, now: float) -> float:
        """Return the age of what has waited longest; 0 when everything that is known of is durable."""
        waiting = [at for head, at in self._looks.get(target.incarnation, ()) if head > target.committed]
        return max(0.0, now - waiting[0]) if waiting else 0.0

    def _seen(self, target: Target, now: float) -> _Looks:
        looks = self._looks.get(target.incarnation) or deque()
        while looks and looks[0][0] <= target.committed:
            looks.popleft()
        if target.head > target.committed and (not looks or target.head > looks[-1][0]):
            looks.append((target.head, now))
        return looks if len(looks) <= MOST_LOOKS else deque(list(looks)[::2])
