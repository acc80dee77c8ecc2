"""Find ranks of running attempts that make the others wait, from the phases of their newest steps.

The module performs no I/O. A slow rank is reported once; it is reported again after it was as fast as the others.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.events import SLOW_RANK, EventType, Severity
from rankscope_contract.model.phases import LABEL, STEP_PHASE_SECONDS, Phase
from rankscope_ingest.detect.symptoms import parse_details
from rankscope_ingest.record_channel.validate import ValidBody
from rankscope_ingest.reporting.rows import Row, Stamp, event_row
from rankscope_ingest.runs.models import AttemptKey
from rankscope_view.data.slow_ranks import find_slow_ranks

LEAST_SHARE: Final = 0.3
"""Share of the time of a step that the others wait, from which on a slow rank is reported.

Ranks that share cores differ by 0.1 to 0.25 over tens of steps without a cause in the training.
"""

_KEPT_STEPS: Final = 200
_JUDGED_STEPS: Final = 40
_EVERY_STEPS: Final = 10
_PHASES: Final = (*map(str, Phase), "announced_phase")


class _Rank(NamedTuple):
    """The newest steps of one rank, and their seconds [steps, phases]. A step is at its number modulo _KEPT_STEPS."""

    steps: Any
    seconds: Any


class StragglerTracker:
    """The newest steps of all running attempts, and the slow ranks that were reported."""

    def __init__(self) -> None:
        self._ranks: dict[AttemptKey, dict[int, _Rank]] = defaultdict(dict)
        self._reported: dict[AttemptKey, set[int]] = defaultdict(set)
        self._checked: dict[AttemptKey, int] = {}

    def add(self, key: AttemptKey, rank: int, body: ValidBody) -> None:
        """Add the phases of the steps in one poll response."""
        scalars = body.nested.get("scalars")
        if scalars is None:
            return
        rows = np.flatnonzero(pc.equal(scalars.columns["name"], STEP_PHASE_SECONDS).to_numpy(zero_copy_only=False))
        steps = body.columns["step"].take(pa.array(scalars.records[rows])).to_pylist()
        labels, values = (scalars.columns[name].take(pa.array(rows)).to_pylist() for name in ("labels", "value"))
        fresh = _Rank(np.full(_KEPT_STEPS, -1), np.zeros((_KEPT_STEPS, len(_PHASES)), np.float32))
        known = self._ranks[key].setdefault(rank, fresh)
        for step, text, value in zip(steps, labels, values, strict=True):
            if step is None or value is None:
                continue
            row = step % _KEPT_STEPS
            if known.steps[row] != step:
                known.steps[row], known.seconds[row] = step, 0.0
            known.seconds[row, _phase(text)] += value

    def check(self, attempts: Iterable[AttemptKey], stamp: Callable[[], Stamp]) -> Iterator[tuple[Row, bool]]:
        """Yield the event of each slow rank with new steps, and whether the rank was not slow before.

        `attempts` contains the keys of all active attempts. The state of all other attempts is discarded.
        """
        active = set(attempts)
        for state in (self._ranks, self._reported, self._checked):
            for key in [key for key in state if key not in active]:
                del state[key]
        for key, known in self._ranks.items():
            numbers = sorted(known)
            newest = min(int(known[rank].steps.max()) for rank in numbers)
            if len(numbers) < 2 or newest - self._checked.get(key, 0) < _EVERY_STEPS:
                continue
            self._checked[key], before = newest, self._reported[key]
            steps = np.arange(max(0, newest - _KEPT_STEPS + 1), newest + 1)
            at = steps % _KEPT_STEPS
            parts = [np.where((one.steps[at] == steps)[:, None], one.seconds[at], np.nan) for one in known.values()]
            seconds = np.array(parts, np.float64)[np.argsort(list(known))]
            slow = {numbers[one.row]: one for one in find_slow_ranks(seconds, _PHASES, steps=_JUDGED_STEPS)}
            found = {n: one for n, one in slow.items() if one.pauses or one.share >= LEAST_SHARE or n in before}
            self._reported[key] = set(found)
            for number, one in found.items():
                columns = {"run": key[0], "attempt": key[1], "rank": number, "step": newest, "rule": SLOW_RANK}
                columns |= {"op": one.phase, "value": one.share}
                text, details = f"rank {number} {one.words}", {"seconds": one.seconds, "pauses": one.pauses}
                row = event_row(stamp(), EventType.ANOMALY, Severity.WARNING, text, details, **columns)
                yield row, number not in before


@functools.lru_cache(maxsize=256)
def _phase(labels: str | None) -> int:
    """Return the place of the phase of a scalar in _PHASES; announced phases share the last one."""
    name = str(parse_details(labels).get(LABEL))
    return _PHASES.index(name) if name in _PHASES else len(_PHASES) - 1
